"""The command that asks a run under way for something."""

from __future__ import annotations

import getpass
import socket
import time
import uuid
from contextlib import suppress
from typing import Annotated

import typer

from agentevo.cli.arguments import RunDir, seconds
from agentevo.errors import ConfigError

POLL_INTERVAL_S = 0.1


def control(
    run_dir: RunDir,
    do: Annotated[
        str,
        typer.Argument(
            metavar="stop|save|pause|resume",
            help="After the current step: stop ends the run as SIGTERM does, save writes a "
            "checkpoint, pause waits; resume ends a pause.",
        ),
    ],
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", parser=seconds, help="Seconds to wait for the answer."
        ),
    ] = 10.0,
) -> None:
    """Stop, save, pause or resume a running run, between two steps."""
    from agentevo.runs.folder.control import ACTIONS, answer_to, ask, session_of
    from agentevo.runs.folder.records import CHANGES, add_record
    from agentevo.runs.folder.run_folder import check_run_folder

    if do not in ACTIONS:
        raise ConfigError(f"{do[:40]!r}: a run can {', '.join(ACTIONS)}")

    folder = check_run_folder(run_dir).absolute()
    id = uuid.uuid4().hex

    session, why = session_of(folder)
    if session is None:
        raise ConfigError(f"{run_dir}: {why}")

    who = "the command line"
    with suppress(OSError, KeyError):
        who = getpass.getuser()

    about = {"at": time.time(), "who": who, "address": socket.gethostname(), "id": id}
    add_record(folder / CHANGES, {**about, "what": f"{do}: asked"})
    ask(folder, do, id=id, session=session.id, who=who)

    ends = time.monotonic() + wait_s
    while (answer := answer_to(folder, id)) is None:
        if time.monotonic() >= ends:
            print(f"requested: {do} takes effect after the run's current step")
            return
        time.sleep(POLL_INTERVAL_S)

    if not answer.is_done:
        raise ConfigError(f"{run_dir}: {do}: {answer.result}")

    print(f"{do}: {answer.result}")
