"""Deletes what no trainer reads again, CHUNK rows in a transaction. Each function returns the
number of deleted rows, and the place after which to continue, or None at the end."""

from __future__ import annotations

from typing import Any

from agentevo.store.calls import LOST_S
from agentevo.store.clock import CLOCK_TOLERANCE_S
from agentevo.store.database_rows import CHUNK, Condition, DatabaseRows, Row
from agentevo.store.image_rows import forget_uses


async def delete_orphans(rows: DatabaseRows, after: Any) -> tuple[int, Any]:
    """Deletes tokens without a trajectory, of the next CHUNK by key. In SQL, a foreign key forbids
    such tokens, so only another program can have left them."""
    key = rows.tokens_key
    where: list[Condition] = [] if after is None else [(key, ">", after)]
    page = [row[key] for row in await rows.find("tokens", [key], where, order=key, limit=CHUNK)]
    owners = await rows.by_key("trajectories", rows.trajectory_key, page)
    deleted = await rows.delete_tokens([owner for owner in page if owner not in owners])
    return deleted, page[-1] if len(page) == CHUNK else None


async def delete_dropped_tokens(rows: DatabaseRows, after: int | None) -> tuple[int, int | None]:
    """Deletes the tokens that no trainer will read again of the next CHUNK of dropped
    trajectories, by seq.

    Two kinds are kept. `rewind` makes trajectories ready again that were sampled for a step
    after the last committed one. A dropped greedy attempt is read again with a group that
    another step has reserved or may use.
    """
    newest = await rows.find("steps", ["step"], order="step", descending=True, limit=1)
    last = newest[0]["step"] if newest else 0
    page = await rows.find(
        "trajectories",
        ["seq", "id", "step", "split", "task_id", rows.trajectory_key],
        [("state", "=", "dropped"), ("seq", ">", after or 0)],
        order="seq",
        limit=CHUNK,
    )
    past = [row for row in page if row["step"] <= last]
    using: list[Condition] = [
        ("task_id", "in", list({row["task_id"] for row in past})),
        ("state", "in", ["ready", "reserved"]),
    ]
    users = await rows.find("trajectories", ["task_id", "split"], using)
    in_use = {(row["task_id"], row["split"]) for row in users}
    spent = [row for row in past if (row["task_id"], row["split"]) not in in_use]
    deleted = await rows.delete_tokens([row[rows.trajectory_key] for row in spent])
    await forget_uses(rows, "trajectory", [row["id"] for row in spent])
    return deleted, page[-1]["seq"] if len(page) == CHUNK else None


async def delete_calls(
    rows: DatabaseRows, after: int | None, *, grace_s: float, dropped: bool
) -> tuple[int, int | None]:
    """Deletes calls that are not running, of attempts that started longer ago than the grace
    period and never became a trajectory. With `dropped`, also those of dropped trajectories
    whose turns are deleted."""
    page = await rows.find(
        "calls",
        ["seq", "trajectory_id", "started_at", "seen_at"],
        [("seq", ">", after or 0)],
        order="seq",
        limit=CHUNK,
    )
    names = {row["trajectory_id"] for row in page}
    owners = await rows.by_key("trajectories", "id", names, "state", rows.trajectory_key)
    keys = [owner[rows.trajectory_key] for owner in owners.values()]
    with_tokens = await rows.by_key("tokens", rows.tokens_key, keys)
    now = await rows.now()

    def is_needless(row: Row) -> bool:
        owner = owners.get(row["trajectory_id"])
        if owner is not None:
            has_tokens = owner[rows.trajectory_key] in with_tokens
            return dropped and owner["state"] == "dropped" and not has_tokens

        is_running = (
            row["seen_at"] is not None
            and -CLOCK_TOLERANCE_S <= now.steady - row["seen_at"] <= LOST_S
        )
        return bool(row["started_at"] < now.wall - grace_s) and not is_running

    needless = [row["seq"] for row in page if is_needless(row)]
    deleted = await rows.delete("calls", [("seq", "in", needless)]) if needless else 0
    return deleted, page[-1]["seq"] if len(page) == CHUNK else None
