"""Runs a sweep: every member in a separate process, several at once, and a table at the end.

    runs/NAME/sweep.yaml  table.md  table.json
    runs/NAME/recipes/VARIANT-SEED.yaml  logs/VARIANT-SEED.log  VARIANT-SEED/ (the run)

Lifecycle of a member: waiting -> under way -> finished | failed | stopped. One that fails does not
stop the others. `resume` continues an interrupted sweep: finished members stay as they are, one
with a checkpoint continues from it, any other starts again. No member's folder is ever used under
another configuration than the one it was run with.

This process holds a lock on the sweep's folder, and so does every run that it starts, which
inherits its file descriptor: a sweep whose runs outlived it (a killed parent) can't be started next
to them.

The first Ctrl-C (or SIGTERM, SIGHUP) starts nothing more and asks the runs under way to stop
cleanly after their step; a second kills them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentevo.config import to_yaml
from agentevo.config.parallel import check_alone
from agentevo.config.sweep import Member, Sweep
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.sweep_view import SweepView
from agentevo.runs.folder.result_table import check_page, write_sweep_table, write_table
from agentevo.runs.folder.resume_rules import changes
from agentevo.runs.folder.run_folder import (
    SWEEP_FILE,
    finished_summary,
    is_run_folder,
    is_sweep_folder,
)
from agentevo.runs.processes.run_group import held_lock, last_lines, why_failed
from agentevo.runtime.files import write_atomic
from agentevo.runtime.parsing import dump_yaml
from agentevo.runtime.paths import check_new_folder, short
from agentevo.runtime.signals import collect_signals

POLL_S = 0.1
REASON_LINES = 5
"""Lines of a failed run's log that are shown."""
LOCK = ".lock"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = 130
"""Exit code of a run that Ctrl-C stopped."""

Start = Literal["started", "resumed", "finished"]
"""How a member starts: from nothing, from its last checkpoint, or not at all because it has
finished."""


@dataclass
class _SweepRunUnderWay:
    member: Member
    process: subprocess.Popen[bytes]
    log: Path
    since: float


def run_sweep(sweep: Sweep, *, resume: bool = False, view: SweepView | None = None) -> str:
    """Runs every member that is not finished; returns the table. Blocks.

    Raises ConfigError before anything is created, AgentEvoError at the end if a member failed
    (after the table is written), and KeyboardInterrupt after a clean stop.
    """
    view = view if view is not None else SweepView(sweep.name)
    starts = check_sweep(sweep, resume)
    _prepare(sweep)

    lock_context = held_lock(sweep.dir, LOCK, "sweep")
    with view, collect_signals(*STOP_SIGNALS) as received, lock_context as lock:
        failures = _run_members(sweep, starts, view, received, lock)
        table = write_sweep_table(sweep.dir)

    if table is not None:
        view.note(f"\n{table}\ntable: {sweep.dir / 'table.md'}")
    if received:
        raise KeyboardInterrupt

    if failures:
        what = [
            f"{len(failures)} of {len(sweep.members)} runs failed; --resume tries them again",
            *failures,
        ]
        raise AgentEvoError("\n".join(what))

    assert table is not None
    if sweep.section.table is not None:
        write_table(sweep.section.table, table)
        view.note(f"written to {sweep.section.table}")

    return table


def check_sweep(sweep: Sweep, resume: bool, *, may_fetch: bool = True) -> dict[str, Start]:
    """How each member will begin. Raises ConfigError, before anything is created or deleted, if any
    member can't work. `may_fetch`: see `check_recipe`."""
    check_alone("a sweep")
    if sweep.section.table is not None:
        check_page(sweep.section.table)

    if (sweep.dir / LOCK).exists():
        with held_lock(sweep.dir, LOCK, "sweep"):
            pass

    if resume and not is_sweep_folder(sweep.dir):
        raise ConfigError(
            f"{sweep.dir}: there is no sweep to resume: leave --resume out, or give its folder "
            "with run.dir"
        )

    if not resume:
        _check_folder(sweep)

    from agentevo.runs.orchestration.checks import check_recipe

    problems: list[str] = []
    starts: dict[str, Start] = {}
    for member in {member.variant: member for member in sweep.members}.values():
        try:
            check_recipe(member.config, "train", resume=resume, may_fetch=may_fetch)
        except AgentEvoError as error:
            problems += [f"{member.variant}: {line}" for line in str(error).splitlines()]

    for member in sweep.members:
        starts[member.name] = _start_of(member) if resume else "started"
        if starts[member.name] != "started":
            problems += _differences(member)

    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))

    return starts


def _check_folder(sweep: Sweep) -> None:
    check_new_folder(sweep.dir, "run.dir")
    holds = (
        "a sweep" if is_sweep_folder(sweep.dir) else "a run" if is_run_folder(sweep.dir) else None
    )
    if holds is not None and not sweep.overwrite:
        remedy = "continue it with --resume, give" if holds == "a sweep" else "give"
        raise ConfigError(
            f"{sweep.dir} holds {holds} already: {remedy} another run.dir, or delete it with "
            "run.overwrite=true"
        )

    if holds is None and sweep.dir.is_dir() and any(sweep.dir.iterdir()):
        raise ConfigError(
            f"{sweep.dir} is not empty and is not a sweep's folder: give another run.dir"
        )


def _start_of(member: Member) -> Start:
    folder = member.config.run_dir
    if finished_summary(folder) is not None:
        return "finished"

    from agentevo.training.checkpoint import Checkpoints

    is_resumable = (
        Checkpoints(folder / "checkpoints", member.config.checkpoint.keep_last).steps()
        if is_run_folder(folder)
        else []
    )
    return "resumed" if is_resumable else "started"


def _differences(member: Member) -> list[str]:
    return [
        f"{short(member.config.run_dir)} was run with {key}={was!r} and not {now!r}: delete that "
        "folder, or give the sweep another run.dir"
        for key, (was, now) in changes(member.config).items()
        if key != "run.threads"
    ]


def _prepare(sweep: Sweep) -> None:
    if sweep.overwrite and sweep.dir.exists():
        shutil.rmtree(sweep.dir)
    for folder in ("recipes", "logs"):
        (sweep.dir / folder).mkdir(parents=True, exist_ok=True)
    write_atomic(sweep.dir / SWEEP_FILE, dump_yaml(sweep.section.model_dump(mode="json")))
    for member in sweep.members:
        recipe = sweep.dir / "recipes" / f"{member.name}.yaml"
        recipe.write_text(to_yaml(member.config), encoding="utf-8")


def _run_members(
    sweep: Sweep, starts: dict[str, Start], view: SweepView, received: Sequence[int], lock: int
) -> list[str]:
    """Runs the members until all have ended or, after a signal, the running ones have stopped.
    Returns a text for each member that failed."""
    waiting = deque(member for member in sweep.members if starts[member.name] != "finished")
    under_way: list[_SweepRunUnderWay] = []
    failures: list[str] = []

    view.plan(
        len(sweep.members),
        [member.name for member in sweep.members if starts[member.name] == "finished"],
    )
    heeded = 0
    try:
        while under_way or (waiting and not received):
            while waiting and len(under_way) < sweep.parallel and not received:
                member = waiting.popleft()
                under_way.append(_start(sweep, member, starts[member.name], lock))
                view.note_start(member.name, starts[member.name])

            if len(received) > heeded:
                heeded = len(received)
                for run in under_way:
                    run.process.send_signal(signal.SIGKILL if heeded > 1 else signal.SIGINT)
                view.note(
                    "stopping"
                    if heeded > 1
                    else "stopping after the step of each run under way; press Ctrl-C again to "
                    "stop at once"
                )

            time.sleep(POLL_S)
            for run in [run for run in under_way if run.process.poll() is not None]:
                under_way.remove(run)
                failure = _report_end(run, view)
                failures += [failure] if failure else []

            view.running(
                {
                    run.member.name: (time.monotonic() - run.since, last_lines(run.log, 1))
                    for run in under_way
                }
            )
    finally:
        for run in under_way:
            run.process.kill()
            run.process.wait()

    return failures


def _start(sweep: Sweep, member: Member, start: Start, lock: int) -> _SweepRunUnderWay:
    """In a session of its own, so that the terminal's Ctrl-C reaches it only through this
    process, and only once."""
    log = sweep.dir / "logs" / f"{member.name}.log"
    # A starting member's folder holds only data from before its first checkpoint.
    extra_words = ["--resume"] if start == "resumed" else ["run.overwrite=true"]
    recipe = str(sweep.dir / "recipes" / f"{member.name}.yaml")
    words = [sys.executable, "-m", "agentevo", "train", recipe, *extra_words]
    threads = (
        {"OMP_NUM_THREADS": str(member.config.run.threads)} if member.config.run.threads else {}
    )
    with log.open("ab" if start == "resumed" else "wb") as out:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | threads,
            start_new_session=True,
            pass_fds=(lock,),
        )

    return _SweepRunUnderWay(member, process, log, time.monotonic())


def _report_end(run: _SweepRunUnderWay, view: SweepView) -> str:
    """Reports how a run ended. Returns the problem, or an empty text."""
    code = run.process.returncode
    name = run.member.name
    seconds = time.monotonic() - run.since
    summary = finished_summary(run.member.config.run_dir)
    if code == 0 and summary is not None:
        before, after = (
            "none" if rate is None else f"{rate:.1%}"
            for rate in (summary["eval"]["before"], summary["eval"]["after"])
        )
        view.note_end(name, f"success {before} -> {after}", seconds, ok=True)
        return ""

    if code == STOPPED:
        view.note_end(name, "stopped", seconds, ok=False)
        return ""

    how = f"killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    view.note_end(name, how, seconds, ok=False)
    return why_failed(name, how, run.log)
