"""Attempts as files: `OUT/step_N/trajectory_ID.html`, and `OUT/index.html` with links to them.

Each page is self-contained (observability/pages/static_page.py) and has relative links to its
neighbours. So a folder works from a disk and from any web server. A page appears whole or not at
all, and the index is written last. A folder with other files is refused, and a folder of an earlier
call is replaced.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from agentevo.errors import ConfigError
from agentevo.observability.attempt_view import MAX_CALLS
from agentevo.observability.pages.static_page import render_still
from agentevo.observability.static_attempt import read_images, read_task, still_attempt
from agentevo.observability.trajectory_view import Decode
from agentevo.runtime.files import must_write, write_atomic
from agentevo.store import Store, TrajectorySummary

INDEX = "index.html"
_STEP = re.compile(r"step_-?\d+")
_PAGE = re.compile(r"trajectory_.*\.html")
_PLAIN = re.compile(r"[a-z0-9._-]{1,80}")
ROOM = "make room there, or give another --out"
LAST_WRITTEN = 200
"""The number of newest attempts among which the last step is searched."""


class Chosen(NamedTuple):
    """The attempts of a step that get a page, and the names of their files."""

    step: int
    attempts: list[tuple[TrajectorySummary, str]]


def page_name(trajectory_id: str) -> str:
    """The name of the attempt's file. An id that is safe on every file system stays unchanged. Any
    other id keeps its safe characters, and gets a digest."""
    if _PLAIN.fullmatch(trajectory_id):
        return f"trajectory_{trajectory_id}.html"
    digest = hashlib.sha256(trajectory_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9._-]+", "_", trajectory_id[:400].lower())[:60]
    return f"trajectory_{readable}-{digest}.html"


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Raises ConfigError if pages must not be written there."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise ConfigError(f"--out {out}: is not a folder: give another one")

    entries = list(out.iterdir())
    links = [entry for entry in entries if entry.is_symlink() and _STEP.fullmatch(entry.name)]
    if links:
        raise ConfigError(f"--out {out}: {links[0].name} is a link: give another folder")

    strange = [
        entry
        for entry in entries
        if not (entry.name == INDEX or (_STEP.fullmatch(entry.name) and entry.is_dir()))
    ]
    if strange and not overwrite:
        raise ConfigError(
            f"--out {out}: contains other files, such as {strange[0].name[:100]}: give another "
            "folder, or --overwrite to write among them"
        )


async def choose(store: Store, *, step: int | None, every: int, per_step: int) -> list[Chosen]:
    """The attempts of a single step, or of every `every`-th step and the last one. Each step has at
    most `per_step`, half of them held-out ones if it has both kinds. Empty if there are none."""
    steps = [step] if step is not None else await _steps(store, every)
    chosen = []
    for number in steps:
        train = await store.summaries(step=number, split="train", limit=per_step)
        held_out = await store.summaries(step=number, split="eval", limit=per_step)
        if train:
            held_out = held_out[: max(per_step // 2, per_step - len(train))]
        summaries = [*train[: per_step - len(held_out)], *held_out]
        if summaries:
            chosen.append(
                Chosen(number, [(summary, page_name(summary.id)) for summary in summaries])
            )

    return chosen


async def _steps(store: Store, every: int) -> list[int]:
    first = await store.summaries(limit=1)
    if not first:
        return []
    newest = await store.summaries(newest_first=True, limit=LAST_WRITTEN)
    last = max(summary.step for summary in newest)
    return sorted({*range(first[0].step, last + 1, every), last})


async def write_pages(
    store: Store,
    chosen: list[Chosen],
    out: Path,
    *,
    run: str,
    decode: Decode | None,
    advance: Callable[[], None],
) -> int:
    """Writes the pages, then the index, and removes pages of an earlier call. Returns the number of
    pages. `advance` is called after each. If it fails, a folder without an index has no pages."""
    with _all_or_none(out):
        written: set[Path] = set()
        for step, attempts in chosen:
            folder = out / f"step_{step}"
            with must_write(folder, ROOM):
                folder.mkdir(parents=True, exist_ok=True)

            names = [name for _, name in attempts]
            for place, (summary, name) in enumerate(attempts):
                calls = [
                    call async for call in store.calls(trajectory_id=summary.id, limit=MAX_CALLS)
                ]
                trajectory = await store.trajectory(summary.id)
                images = await read_images(store, trajectory)
                shown = still_attempt(
                    trajectory,
                    calls,
                    decode,
                    images=images,
                    task=await read_task(store, trajectory),
                )
                page = render_still(
                    "trajectory.html",
                    a=shown,
                    of=summary,
                    run=run,
                    step=step,
                    before=names[place - 1] if place else None,
                    after=names[place + 1] if place + 1 < len(names) else None,
                )
                with must_write(folder / name, ROOM):
                    write_atomic(folder / name, page)

                written.add(folder / name)
                advance()

        index = render_still(
            "trajectories.html",
            run=run,
            num=len(written),
            steps=[(chosen_step.step, chosen_step.attempts) for chosen_step in chosen],
        )
        with must_write(out / INDEX, ROOM):
            write_atomic(out / INDEX, index)
            _remove_older(out, written)

        return len(written)


@contextmanager
def _all_or_none(out: Path) -> Iterator[None]:
    """Removes the pages if the block fails and no index links to them."""
    try:
        yield
    except BaseException:
        if out.is_dir() and not (out / INDEX).exists():
            _remove_older(out, set())
            if not any(out.iterdir()):
                out.rmdir()
        raise


def _remove_older(out: Path, written: set[Path]) -> None:
    for folder in out.iterdir():
        if not _STEP.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        for page in folder.iterdir():
            if _PAGE.fullmatch(page.name) and page not in written:
                page.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
