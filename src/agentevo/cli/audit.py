"""The commands that check a run afterwards: `audit` and `replay`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from agentevo.cli.arguments import RunDir, Wait
from agentevo.errors import ConfigError

STORE_TIMEOUT_S = 3600.0
"""The deadline of one call, which reads a whole store, in seconds."""


def audit(
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
        bool, typer.Option("--json", help="Print everything as one JSON object.")
    ] = False,
    wait: Wait = None,
) -> None:
    """Verify that every committed step used exactly the recorded data, once, and within the
    staleness limit. Exit code 1 if not."""
    import msgspec

    from agentevo.runs.folder import run_store_url, use_store

    url = run_store_url(run_dir)
    if token:
        from agentevo.audit.token_history import follow

        trajectory, turn, position = _place(token)
        history = use_store(
            url,
            lambda store: follow(store, run_dir, trajectory, turn, position),
            timeout_s=STORE_TIMEOUT_S,
            wait_s=wait,
            read_only=True,
        )
        print(msgspec.json.encode(history).decode()) if as_json else _print(history.lines())
        return

    from agentevo.audit.audit import audit as prove

    report = use_store(
        url,
        lambda store: prove(store, run_dir),
        timeout_s=STORE_TIMEOUT_S,
        wait_s=wait,
        read_only=True,
    )
    if as_json:
        print(
            msgspec.json.encode(
                {**msgspec.to_builtins(report, str_keys=True), "ok": report.ok}
            ).decode()
        )
    else:
        _print(report.lines(dropped=dropped))
        for violation in report.violations:
            print(f"violation: {violation}", file=sys.stderr)

        print(
            "everything agrees with the records"
            if report.ok
            else f"{len(report.violations)} violations"
        )

    if not report.ok:
        raise typer.Exit(1)


def replay(
    run_dir: RunDir,
    trajectory: Annotated[str, typer.Argument(metavar="[TRAJECTORY]", help="Its whole id.")] = "",
    sample: Annotated[
        int,
        typer.Option(
            "--all", metavar="N", min=0, help="Replay N random training trajectories instead."
        ),
    ] = 0,
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="Rebuild weights that no file has any more, by training again from the store.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Generate a trajectory again from its seeds and the stored weights, and compare all tokens.
    Exit code 1 if they differ."""
    if bool(trajectory) == (sample > 0):
        raise ConfigError(
            "replay: give the id of a trajectory, or --all N for N of them, drawn at random"
        )

    import msgspec

    from agentevo.runs.folder import run_config

    config = run_config(run_dir)
    from agentevo.api.run import Run

    run = Run(config)
    replays = (
        run.replays(sample, rebuild=rebuild)
        if sample
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


def _print(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{width}}  {text}".rstrip())
