"""`agentevo audit`: checks a run afterwards, by its records or by sampling tokens again."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from agentevo.cli.arguments import RunDir, Wait, refuse_options
from agentevo.cli.printing import print_table
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.store import Store

T = TypeVar("T")
STORE_TIMEOUT_S = 3600.0
"""The deadline of one call, which reads a whole store, in seconds."""


def audit(
    context: typer.Context,
    run_dir: RunDir,
    token: Annotated[
        str,
        typer.Option(
            metavar="TRAJECTORY:TURN:POSITION",
            help="Trace one token instead; all numbers count from 0.",
        ),
    ] = "",
    dropped: Annotated[
        bool,
        typer.Option(
            "--dropped",
            help="Also list each trajectory that training did not use, with the reason.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: one object, or one per replayed trajectory."),
    ] = False,
    replay: Annotated[
        str,
        typer.Option(
            "--replay",
            metavar="TRAJECTORY",
            help="Instead, generate the trajectory of this whole id again from its seeds and the "
            "stored weights, and compare all tokens.",
        ),
    ] = "",
    replay_random: Annotated[
        int,
        typer.Option(
            "--replay-random",
            metavar="N",
            min=0,
            help="Instead, do so with N random training trajectories.",
        ),
    ] = 0,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="For a replay: rebuild weights that no file has any more, by training again from "
            "the store.",
        ),
    ] = False,
    wait: Wait = None,
) -> None:
    """Verify that every committed step used exactly the recorded data, once, and within the
    staleness limit. With --replay, generate trajectories again. Exit code 1 if something
    differs."""
    if replay or replay_random:
        reason = "checks records, and a replay generates tokens: leave it out"
        allowed = ("replay", "replay_random", "rebuild", "as_json")
        refuse_options(context, reason, allowed=allowed)
        if replay and replay_random:
            raise ConfigError("--replay and --replay-random both name trajectories: give one")
        _replay(run_dir, replay, replay_random, rebuild=rebuild, as_json=as_json)
        return

    refuse_options(context, "is for a replay: add --replay TRAJECTORY", ("rebuild",))

    if token:
        _trace_token(run_dir, token, wait, as_json=as_json)
    else:
        _check_records(run_dir, wait, dropped=dropped, as_json=as_json)


def _trace_token(run_dir: Path, token: str, wait: float | None, *, as_json: bool) -> None:
    import msgspec

    from agentevo.runs.audit.token_history import follow

    trajectory, turn, position = _place(token)
    history = _read(run_dir, lambda store: follow(store, run_dir, trajectory, turn, position), wait)
    print(msgspec.json.encode(history).decode()) if as_json else print_table(history.lines())


def _check_records(run_dir: Path, wait: float | None, *, dropped: bool, as_json: bool) -> None:
    import msgspec

    from agentevo.runs.audit.audit import audit as prove

    report = _read(run_dir, lambda store: prove(store, run_dir), wait)
    if as_json:
        content = {**msgspec.to_builtins(report, str_keys=True), "ok": report.ok}
        print(msgspec.json.encode(content).decode())
    else:
        print_table(report.lines(dropped=dropped))
        for violation in report.violations:
            print(f"violation: {violation}", file=sys.stderr)

        num_violations = len(report.violations)
        print(
            f"{num_violations} violations"
            if num_violations
            else "everything agrees with the records"
        )

    if not report.ok:
        raise typer.Exit(1)


def _read(run_dir: Path, work: Callable[[Store], Awaitable[T]], wait: float | None) -> T:
    """Runs `work`, which may read the whole store."""
    from agentevo.runs.folder.run_folder import run_store_url, use_store

    url = run_store_url(run_dir)
    return use_store(url, work, timeout_s=STORE_TIMEOUT_S, wait_s=wait, read_only=True)


def _replay(
    run_dir: Path, trajectory: str, num_random: int, *, rebuild: bool, as_json: bool
) -> None:
    import msgspec

    from agentevo.runs.folder.run_folder import run_config

    config = run_config(run_dir)
    from agentevo.api.run import Run

    run = Run(config)
    replays = (
        run.replays(num_random, rebuild=rebuild)
        if num_random
        else [run.replay(trajectory, rebuild=rebuild)]
    )
    for result in replays:
        print(msgspec.json.encode(result).decode() if as_json else result.line())

    if not all(result.same for result in replays):
        raise typer.Exit(1)


def _place(token: str) -> tuple[str, int, int]:
    """The three parts of TRAJECTORY:TURN:POSITION."""
    parts = token.rsplit(":", 2)
    if len(parts) < 3 or not (parts[0] and parts[1].isdigit() and parts[2].isdigit()):
        raise ConfigError(
            f"--token {token}: write TRAJECTORY:TURN:POSITION, such as train-3/train@1#0:0:2"
        )
    return parts[0], int(parts[1]), int(parts[2])
