"""`agentevo annotate`: people say of a run's attempts what they are worth, one at a time, in a
terminal or through a pipe. What they say is in the file that the dashboard writes and reads
(runs/folder/annotations.py), each answer at once, so a user who stops loses nothing and continues
later.
"""

from __future__ import annotations

import getpass
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from agentevo.cli.arguments import RunDir, Wait, refuse_options
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.runs.folder.annotations import Annotation, Record
    from agentevo.store import Store, TrajectorySummary
    from agentevo.types import Trajectory

T = TypeVar("T", str, tuple[str, str])
HELP = "r right, w wrong, e edit the last reply, n note, s skip, u undo, q quit"
PAIR_HELP = "1 or 2 is better, s skip (neither), u undo, q quit"
LONGEST_SHOWN = 6000
"""Characters of a message that are shown."""


def annotate(
    context: typer.Context,
    run_dir: RunDir,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Ask which of two attempts at a task is better.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after this many labels.")
    ] = None,
    task: Annotated[str, typer.Option(metavar="ID", help="Only attempts at this task.")] = "",
    who: Annotated[
        str, typer.Option(metavar="NAME", help="The annotator's name. Default: the user's name.")
    ] = "",
    agreement: Annotated[
        bool,
        typer.Option(
            "--agreement",
            help="Instead, print how often people's labels and the rewards agree: the share with "
            "its 95% interval, and Cohen's kappa.",
        ),
    ] = False,
    passed_from: Annotated[
        float,
        typer.Option(
            metavar="VALUE",
            help="With --agreement: the lowest value of a reward part that counts as a pass.",
        ),
    ] = 0.5,
    wait: Wait = None,
) -> None:
    """Label a run's attempts: right or wrong, the better of two, or a corrected reply. Reads
    answers from stdin (h lists them) and saves each at once. `agentevo trajectories export
    --annotations` turns them into training data."""
    if agreement:
        reason = "is for labelling: leave it out with --agreement"
        refuse_options(context, reason, allowed=("agreement", "passed_from"))
        _print_agreement(run_dir, passed_from)
        return

    refuse_options(context, "is for --agreement: add it", ("passed_from",))

    from agentevo.runs.folder.annotations import (
        attempts_to_label,
        pairs_to_compare,
        read_annotations,
    )
    from agentevo.runs.folder.run_folder import check_run_folder, read_store

    folder = check_run_folder(run_dir)
    annotations = read_annotations(folder)
    name = who or _user()

    async def list_attempts(store: Store) -> list[TrajectorySummary]:
        summaries_of_run = await store.summaries()
        return [summary for summary in summaries_of_run if not task or summary.task_id == task]

    def attempt(trajectory_id: str) -> Trajectory:
        async def work(store: Store) -> Trajectory:
            return await store.trajectory(trajectory_id)

        return read_store(run_dir, work, wait_s=wait)

    summaries = read_store(run_dir, list_attempts, wait_s=wait)
    if task and not summaries:
        raise ConfigError(f"--task {task}: the run has no attempt at it")

    session = _LabellingSession(folder, name, attempt)
    if pairs:
        session.ask_each(pairs_to_compare(summaries, annotations)[:limit], session.ask_pair)
    else:
        session.ask_each(attempts_to_label(summaries, annotations)[:limit], session.ask_attempt)

    num_kept = session.num_kept
    answers = "answer" if num_kept == 1 else "answers"
    print(f"{num_kept} {answers} kept in {folder / 'annotations.jsonl'}")


def _print_agreement(run_dir: Path, passed_from: float) -> None:
    from agentevo.runs.folder.annotations import calibration, read_annotations
    from agentevo.runs.folder.run_folder import check_run_folder

    rows = calibration(read_annotations(check_run_folder(run_dir)), passed_from)
    if not rows:
        print("no attempt is labelled yet (agentevo annotate)")

    for row in rows:
        rate = row.rate or 0.0
        low, high = row.interval or (0.0, 1.0)
        kappa = "" if row.kappa is None else f", kappa {row.kappa:.2f}"
        print(f"{row.judge}: {rate:.0%} of {row.num} agree [{low:.0%}, {high:.0%}]{kappa}")


class _LabellingSession:
    """One user who answers."""

    def __init__(self, folder: Path, who: str, attempt: Callable[[str], Trajectory]) -> None:
        self._folder = folder
        self._who = who
        self._attempt = attempt
        self.num_kept = 0

    def ask_each(self, items: Sequence[T], ask: Callable[[T, str], str]) -> None:
        """Asks about one item after the other, until the last, `q`, or the end of stdin. `ask`
        gives `kept`, or one of the words s, u and q."""
        place = 0
        answered = list[int]()
        while place < len(items):
            outcome = ask(items[place], f"{place + 1} of {len(items)}")
            if outcome == "q":
                return

            if outcome == "u" and not answered:
                print("there is nothing to undo")
            elif outcome == "u":
                place = answered.pop()
                self._take_back(items[place])
            else:
                answered += [place] if outcome == "kept" else []
                place += 1

    def _take_back(self, item: str | tuple[str, str]) -> None:
        from agentevo.runs.folder.annotations import annotation_of, preference_of

        if isinstance(item, str):
            self._keep(annotation_of(self._attempt(item), **self._signature()))
        else:
            first, second = map(self._attempt, item)
            self._keep(preference_of("", first, second, **self._signature()))

    def ask_attempt(self, name: str, heading: str) -> str:
        trajectory = self._attempt(name)
        _show(trajectory, heading)

        annotation: Annotation | None = None
        while True:
            word = _line(f"[{HELP}] > ")
            if word is None or word in ("q", "s", "u"):
                return (word or "q") if annotation is None or word != "s" else "kept"

            new_annotation = self._annotation_from(word, trajectory, annotation)
            if new_annotation is None:
                print(HELP)
                continue

            if self._keep(new_annotation):
                annotation = new_annotation
                if new_annotation.verdict:
                    return "kept"

    def _annotation_from(
        self, word: str, trajectory: Trajectory, before: Annotation | None
    ) -> Annotation | None:
        """What an answer says, added to what the answer before said of the attempt; None for a word
        that is none, and for what can't be kept."""
        from agentevo.runs.folder.annotations import annotation_of

        letter, _, rest = word.partition(" ")
        verdict = "" if before is None else before.verdict
        note = "" if before is None else before.note
        reply = None if before is None else before.reply

        if letter in ("r", "right", "w", "wrong"):
            verdict = "right" if letter[0] == "r" else "wrong"
            note = rest or note
        elif letter in ("n", "note"):
            note = rest or _line("note > ") or note
        elif letter in ("e", "edit"):
            reply = rest or _lines("the last reply as it should be; a line with . alone ends it")
        else:
            return None

        try:
            annotation = annotation_of(
                trajectory, verdict=verdict, note=note, reply=reply, **self._signature()
            )
        except ConfigError as error:
            print(f"not kept: {error}")
            return None

        return annotation if annotation.says_something else None

    def ask_pair(self, pair: tuple[str, str], heading: str) -> str:
        from agentevo.runs.folder.annotations import preference_of

        first, second = map(self._attempt, pair)
        _show(first, f"{heading}, number 1")
        _show(second, f"{heading}, number 2")

        while True:
            word = _line(f"[{PAIR_HELP}] > ")
            if word is None or word in ("q", "s", "u"):
                return word or "q"

            better = {"1": first.id, "2": second.id}.get(word)
            if better is None:
                print(PAIR_HELP)
            elif self._keep(preference_of(better, first, second, **self._signature())):
                return "kept"

    def _signature(self) -> dict[str, str]:
        """Who says it, and an id under which it counts once."""
        return {"who": self._who, "id": secrets.token_hex(8)}

    def _keep(self, record: Record) -> bool:
        from agentevo.runs.folder.annotations import annotate as keep
        from agentevo.runs.folder.records import RecordTooLongError

        try:
            keep(self._folder, record)
        except RecordTooLongError as error:
            print(f"not kept: {error}")
            return False

        self.num_kept += record.says_something
        return True


def _show(trajectory: Trajectory, heading: str) -> None:
    """The messages, for a terminal: whatever an attempt holds is only text."""
    turns = trajectory.turns or trajectory.remote_turns
    print(f"\n== {heading}: {_plain(trajectory.id)}, task {_plain(trajectory.task_id)}")
    for turn in turns:
        for message in turn.messages:
            print(f"[{message.role}] {_plain(message.text)}")
            for call in message.tool_calls:
                print(f"  calls {_plain(call.name)} {_plain(call.arguments)}")

    parts = ", ".join(f"{_plain(k)} {v:g}" for k, v in sorted(trajectory.reward_parts.items()))
    success = "success" if trajectory.success else "no success"
    print(f"-- reward {trajectory.reward:g}, {success}{f' ({parts})' if parts else ''}", flush=True)


def _plain(text: str, limit: int = LONGEST_SHOWN) -> str:
    """Without what moves, colours or ends on a terminal."""
    from agentevo.observability.pages.text import shown

    return shown(text, limit)


def _line(prompt: str) -> str | None:
    """The next line of stdin, without the space around it; None at its end."""
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        print()
        return None
    return line.strip()


def _lines(prompt: str) -> str | None:
    """Lines up to one with a dot alone, or the end of stdin; None for nothing."""
    print(prompt, flush=True)
    lines = []
    while (line := sys.stdin.readline()) and line.strip() != ".":
        lines.append(line.rstrip("\n"))
    return "\n".join(lines) or None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        return ""
