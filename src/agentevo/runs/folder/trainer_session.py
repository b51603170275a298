"""Whether a run accepts requests now, and the trainer session that accepts them."""

from __future__ import annotations

from pathlib import Path

from agentevo.runs.folder.control import ControlSession, read_session
from agentevo.runs.folder.run_folder import command_of, resume_command
from agentevo.runs.folder.run_state import RunReader
from agentevo.runs.folder.sources import RunSource


def session_of(folder: Path, state: str | None = None) -> tuple[ControlSession | None, str]:
    """The session of the process that trains in the folder now, or None and the reason. `state`:
    the run's state, if it is known. Reads files."""
    if state is None:
        reader = RunReader(RunSource(folder.name, folder.name, folder))
        reader.read()
        state = reader.view.state

    if state != "running":
        command = resume_command(folder, command_of(folder))
        resume = f"`{command}`" if command else "The command that started it, with --resume,"
        resume_hint = "" if state == "finished" else f". {resume} resumes it"
        return None, f"the run is not training (it is {state}){resume_hint}"

    session = read_session(folder)
    if session is None or session.has_ended:
        why = "it is still starting, or is a command or several processes that accept no requests"
        return None, f"this run accepts no requests now: {why}, or is of an older version"

    return session, ""
