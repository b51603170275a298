"""Exports better and worse attempts at the same task as pairs for `agentevo sft --reward-model` and
`data.pairs`: the best attempt of a group with the worst, the second best with the second worst, and
so on.

A pair consists of messages, from the point where the two conversations differ. It has no tokens,
because a reward model has its own tokenizer. (`data.pairs_from` compares a run's own tokens
instead.)
"""

from __future__ import annotations

import json
from pathlib import Path

from agentevo.data import RowError, RowReport
from agentevo.errors import ConfigError
from agentevo.runs.folder.annotation_export import LeftOutError, conversation, pair_of
from agentevo.runs.folder.sft_export import ReadAnswer
from agentevo.store.export import atomic_file
from agentevo.store.records import TrajectorySummary
from agentevo.store.store import Store


async def export_pairs(
    store: Store, path: Path, read: ReadAnswer, *, margin: float = 0.0, per_group: int = 1
) -> RowReport:
    """Writes the pairs of a run's training attempts whose rewards differ by more than `margin`, at
    most `per_group` of a group, to `path` (.jsonl or .jsonl.gz). Returns the account of all pairs.
    Raises ConfigError if there is no pair. Then nothing is written."""
    report = RowReport("export")
    groups: dict[str, list[TrajectorySummary]] = {}
    for summary in await store.summaries(split="train"):
        if summary.status == "completed":
            groups.setdefault(summary.group_id, []).append(summary)

    with atomic_file(path) as file:
        for name, members in groups.items():
            members.sort(key=lambda member: (-member.reward, member.id))
            for index in range(min(per_group, len(members) // 2)):
                better = members[index]
                worse = members[-1 - index]
                report.rows += 1
                try:
                    row = await _row(store, better, worse, margin, read)
                except RowError as error:
                    report.add(f"{name}, pair {index + 1}", error)
                    continue

                file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")

        if not report.used:
            what = report.lines() or ["no group has two training attempts"]
            raise ConfigError("\n".join(["no pair was written:", *what]))

    return report


async def _row(
    store: Store,
    better: TrajectorySummary,
    worse: TrajectorySummary,
    margin: float,
    read: ReadAnswer,
) -> dict[str, object]:
    """Raises RowError."""
    difference = better.reward - worse.reward
    if not difference > margin:
        raise RowError("alike", f"the rewards differ by {difference:g}, not more than {margin:g}")

    try:
        sides = [
            conversation(await store.trajectory(summary.id), read) for summary in (better, worse)
        ]
        pair = pair_of(*sides)
    except LeftOutError as error:
        raise RowError("alike", str(error)) from error

    about = {"task_id": better.task_id, "better": better.id, "worse": worse.id}
    return {**pair, **about, "rewards": [better.reward, worse.reward]}
