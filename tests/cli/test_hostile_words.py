"""Generated command lines, recipes, overrides, data and run folders, none of which may give a
traceback, hang, leave anything behind or end with a code that says something else.

Where a command would begin to work in earnest (sample, train, listen) it stops: that is "accepted".
A failure prints the line that does it again. More: AGENTEVO_HOSTILE=20000 (how many cases), or
AGENTEVO_HOSTILE=@17 (one).
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hostile_words import SMALL, Hostile, furnish

from agentevo.cli.main import main
from agentevo.config import build_config
from agentevo.runs.orchestration.run import train

LIMIT_S = 2.0
"""CPU time of a refusal, twice that where others compute beside it; see `slowness`."""
HANGS_S = 60.0
VERDICTS = {"doctor", "audit"}
"""Commands whose exit code 1 is a result."""
AWAY = re.compile(r"can't be used now|does not answer|no answer within|nothing listens there")
"""What may fail on the way, whatever was typed: a database or an engine that is not there."""


class Accepted(BaseException):
    """The words were good: work would begin now."""


class Outcome(NamedTuple):
    code: int | None
    """None: accepted."""
    out: str
    err: str
    cpu_s: float
    error: str
    """A traceback that nobody caught."""


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    """A small run that has all kinds of files."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    tree = SMALL | {"tracking": {"tensorboard": False, "report": False}}
    train(build_config(tree, [f"run.dir={folder}", "run.threads=1"]))
    return folder


def slowness() -> float:
    """How much slower than the reference this machine computes, now."""
    started = time.process_time()
    sum(number * number for number in range(2_000_000))
    return max((time.process_time() - started) / 0.08, 1.0)


@pytest.fixture
def stopped_at_work(monkeypatch) -> None:
    """Whatever takes long, listens, or needs a network ends the command."""

    def stop(*arguments: object, **options: object) -> None:
        raise Accepted

    for place in (
        "agentevo.api.run.open_components",
        "agentevo.runs.orchestration.run.open_components",
        "agentevo.runs.audit.stored_weights.open_components",
        "agentevo.runs.doctor.diagnostics.open_components",
        "agentevo.runs.orchestration.reward_model.load_model",
        "agentevo.runs.processes.serve._serve",
        "agentevo.runs.processes.serve_model.run_coroutine",
        "agentevo.runs.processes.gateway.run_coroutine",
        "agentevo.runs.launch.node.catch_stop_signals",
        "agentevo.runs.launch.writer.submit",
        "agentevo.api.loop.server.Gateway",
        "agentevo.runs.processes.sample.run_coroutine",
        "agentevo.runs.processes.sandbox_server.run_coroutine",
        "agentevo_evolve.prompts.optimize.run_coroutine",
        "agentevo_ui.server.run_coroutine",
        "agentevo.agents.tool_servers.http_serving.listen",
        "agentevo.agents.tool_servers.serving.ToolServer.serve_stdio",
        "agentevo.runs.processes.sweep._run_members",
        "agentevo_evolve.pipeline.runner._PipelineProcess.run",
        "agentevo.models.files.resolve.ensure_cached",
        "huggingface_hub.snapshot_download",
    ):
        monkeypatch.setattr(place, stop)

    clock = SimpleNamespace(
        time=time.time, strftime=time.strftime, monotonic=time.monotonic, sleep=stop
    )
    monkeypatch.setattr("agentevo.cli.top.time", clock)  # other threads sleep as ever

    monkeypatch.setattr("os.nice", lambda increment: 0)  # or the later tests run at a low priority
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("agentevo.runs.folder.store_opening.OPEN_TIMEOUT_S", 0.2)
    monkeypatch.setattr("agentevo.runs.folder.run_folder.MAX_WAIT_S", 0.2)


def outcome_of(words: list[str]) -> Outcome:
    """Runs the command in this process."""
    out = io.StringIO()
    err = io.StringIO()
    error = ""
    code: int | None = None

    def hangs(*arguments: object) -> None:
        raise TimeoutError("the command hangs")

    signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, HANGS_S)
    started = time.process_time()

    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    except Accepted:
        pass
    except BaseException:  # noqa: BLE001 (that is what is looked for)
        error = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        torch.set_num_threads(1)

    return Outcome(code, out.getvalue(), err.getvalue(), time.process_time() - started, error)


def names_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything in the folder, with size and time of change; SQLite's own files left out."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(place, name)
            if not re.search(r"\.sqlite(-wal|-shm)?$", name):
                status = path.lstat()
                is_file = name in files
                found[str(path.relative_to(folder))] = (
                    (status.st_size, status.st_mtime_ns) if is_file else (0, 0)
                )

    return found


def faults(words: list[str], outcome: Outcome, created: set[str]) -> list[str]:
    """What is wrong with how a command ended."""
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    problems = [f"traceback:\n{outcome.error}"] if outcome.error else []
    if "Traceback" in outcome.err:
        problems.append("a traceback on stderr")
    if outcome.code == 1 and not (VERDICTS & {*words[:1]} or AWAY.search(outcome.err)):
        problems.append("exit code 1")
    if outcome.code not in (None, 0, 1, 2):
        problems.append(f"exit code {outcome.code}")

    if outcome.code == 2:
        if outcome.cpu_s > LIMIT_S and outcome.cpu_s > 2 * LIMIT_S * slowness():
            problems.append(f"{outcome.cpu_s:.1f} s")

        refusals = [line for line in lines if line.startswith("error: ")]
        if not refusals and not outcome.err.startswith("Usage: "):
            problems.append("nothing says what is wrong")
        if any(len(line) > 1500 for line in lines) or len(lines) > 60:
            problems.append("no clear line")
        if created:
            problems.append(f"left behind: {sorted(created)[:5]}")

    return problems


def check(seed: int, run: Path, place: Path) -> list[str]:
    """One case from its seed: what is wrong, in words."""
    folder = place / f"case-{seed}"
    folder.mkdir()
    hostile = Hostile(seed)
    furnish(folder, hostile, run)
    words = hostile.command_line()
    random.seed(seed)
    here = Path.cwd()

    os.chdir(folder)
    try:
        before = names_in(folder)
        outcome = outcome_of(words)
        after = names_in(folder)
    finally:
        os.chdir(here)

    created = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    problems = faults(words, outcome, created)
    if problems:
        shown = " ".join(ascii(word if len(word) < 300 else f"{word[:300]}...") for word in words)
        return [
            f"AGENTEVO_HOSTILE=@{seed} python -m pytest tests/cli/test_hostile_words.py -m slow",
            f"  agentevo {shown}",
            *(f"  {problem}" for problem in problems),
            f"  stderr: {outcome.err[:600]}",
        ]

    return []


def run_cases(seeds: list[int], run: Path, place: Path) -> None:
    problems = [line for seed in seeds for line in check(seed, run, place)]
    assert not problems, "\n".join(problems)


def asked_for(default: list[int]) -> list[int]:
    """The seeds that AGENTEVO_HOSTILE says, else the default ones."""
    wish = os.environ.get("AGENTEVO_HOSTILE", "")
    if wish.startswith("@"):
        return [int(seed) for seed in wish[1:].split(",")]
    return list(range(int(wish))) if wish else default


@pytest.mark.soak
@pytest.mark.usefixtures("stopped_at_work")
@pytest.mark.parametrize("part", range(8))
def test_a_thousand_hostile_command_lines(finished_run, tmp_path, part):
    seeds = asked_for([8 * number + place for number in range(250) for place in range(4)])
    run_cases(seeds[part::8], finished_run, tmp_path)


@pytest.mark.soak
def test_hostile_command_lines_in_processes_of_their_own(finished_run, tmp_path, monkeypatch):
    """The streams, the exit code and what Python does at its end are a process's."""
    refused = 0
    for seed in range(24):
        folder = tmp_path / str(seed)
        folder.mkdir()
        hostile = Hostile(seed)
        furnish(folder, hostile, finished_run)

        words = [word.replace("\0", "") for word in hostile.command_line()]
        if words[:1] not in (
            ["config"],
            ["list"],
            ["report"],
            ["trajectories"],
            ["store"],
        ):
            continue

        try:
            done = subprocess.run(
                [sys.executable, "-m", "agentevo", *words],
                cwd=folder,
                capture_output=True,
                timeout=HANGS_S,
                stdin=subprocess.DEVNULL,
                errors="replace",
                check=False,
            )
        except UnicodeEncodeError:  # no process can be given such a word
            continue

        shown = f"seed {seed}: agentevo {ascii(words)[:500]}\n{done.stderr[-1500:]}"
        assert "Traceback" not in done.stderr, shown
        assert done.returncode in (0, 2) or AWAY.search(done.stderr), shown

        refused += done.returncode == 2

    assert refused > 2
