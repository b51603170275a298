"""Checks that the files of a run's folder, other than its store, are as the run wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentevo.agents.named_texts import FOLDER as TEXTS_FOLDER
from agentevo.config.texts import digest_of_text
from agentevo.errors import CheckpointError, ConfigError, StoreError
from agentevo.observability.metrics import digests_by_step
from agentevo.rollout.given_tasks import TASKS_FILE
from agentevo.runs.audit.findings import Audit
from agentevo.runs.folder.chain import HEAD, KEY, LOG, NUMBERS, Head, file_digest
from agentevo.runs.folder.lock import LOCK
from agentevo.runtime.parsing import read_text
from agentevo.store.records import StepRecord
from agentevo.training.checkpoint import INDEX, Checkpoints
from agentevo.training.token_numbers import FOLDER as NUMBERS_FOLDER
from agentevo.training.token_numbers import name_of

PROVEN_FILES = {HEAD, LOCK, "metrics.jsonl", "checkpoints", TEXTS_FOLDER, NUMBERS_FOLDER}
"""Files that the audit checks in addition to those of head.json and the store. The lock needs no
check."""


def check_head(
    head: Head | None, records: Sequence[StepRecord], folder: Path, report: Audit
) -> None:
    """Checks that the store has the step that head.json names, with the same chain."""
    chains = {0: ""} | {record.step: record.record.get(KEY) for record in records}
    if head is None:
        if records and not (folder / HEAD).exists():
            report.add(f"{HEAD} is missing: the last step is unknown")
    elif head.given_up and records:
        what = f"{HEAD} says that nothing was trained, but the store has steps"
        report.add(what, step=records[0].step)
    elif head.step not in chains:
        what = f"{HEAD} says that it was committed, but the store has no record of it"
        report.add(what, step=head.step)
    elif head.chain != chains[head.step]:
        what = f"its chain in {HEAD} differs from the one in its record"
        report.add(what, step=head.step)


def check_files(
    head: Head | None, records: Sequence[StepRecord], folder: Path, report: Audit
) -> None:
    """Checks config.yaml and the record of given tasks by head.json, and metrics.jsonl by the
    steps' records."""
    known_digests = {} if head is None else head.files
    for name in sorted({*known_digests, "config.yaml", TASKS_FILE}):
        digest = file_digest(folder / name)
        if name in known_digests and digest not in known_digests[name]:
            what = "is missing" if digest is None else "is not what the run wrote"
            report.add(f"{name} {what}")
        elif name not in known_digests and head is not None and digest is not None:
            report.add(f"{name} is not in {HEAD}")

    logged = [(record.step, record.record[LOG]) for record in records if LOG in record.record]
    try:
        digests = digests_by_step(folder / "metrics.jsonl") if logged else {}
    except StoreError as error:
        report.add(str(error))
        return

    wrong = [step for step, digest in logged if digests.get(step) != digest]
    if wrong:
        what = f"metrics.jsonl is not what was logged, at the latest from step {wrong[0]} on"
        report.add(what, step=wrong[0])

    last = records[-1].step if records else 0
    later = sorted(step for step in digests if step > last)
    if later and later[-1] > last + 1:  # the row of a step is logged before its commit
        what = f"metrics.jsonl has rows up to step {later[-1]}, which was not committed"
        report.add(what)
    elif later:
        report.unproven_files.append(f"metrics.jsonl after step {last}")


def check_numbers(records: Sequence[StepRecord], folder: Path, report: Audit) -> None:
    """Checks the files of token numbers by the steps' records. Files may be deleted."""
    for record in records:
        digest = file_digest(folder / name_of(record.step))
        if digest is None:
            continue
        if NUMBERS not in record.record:
            report.unproven_files.append(name_of(record.step))
        elif digest != record.record[NUMBERS]:
            what = f"{name_of(record.step)} is not what the run wrote"
            report.add(what, step=record.step)


def list_unproven(
    head: Head | None, records: Sequence[StepRecord], folder: Path, report: Audit
) -> None:
    """Lists the folder's other content, and the folders that are checked only in part."""
    proven = PROVEN_FILES | ({} if head is None else head.files).keys()
    for path in sorted(folder.iterdir()):
        if path.name not in proven and not path.name.startswith("store.sqlite"):
            report.unproven_files.append(f"{path.name}/" if path.is_dir() else path.name)

    last = records[-1].step if records else 0
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    saved = checkpoints.folders()
    checked_paths = {checkpoints.path(step) for step in saved if step <= last}
    checked_paths |= {folder / name_of(record.step) for record in records}
    checked_paths |= {
        folder / TEXTS_FOLDER / f"{digest}.txt"
        for digests in report.texts.values()
        for digest in digests
    }
    for name in ("checkpoints", NUMBERS_FOLDER, TEXTS_FOLDER):
        unproven_paths = {*(folder / name).glob("*")} - checked_paths
        if name == "checkpoints" and saved:
            unproven_paths.add(checkpoints.folder / INDEX)  # also lists a file that was deleted
        for path in sorted(unproven_paths):
            report.unproven_files.append(f"{name}/{path.name}{'/' if path.is_dir() else ''}")


def check_checkpoints(
    head: Head | None, records: Sequence[StepRecord], folder: Path, report: Audit
) -> None:
    """Checks that existing checkpoints are complete, and listed in their record or in head.json."""
    named: dict[int, dict[str, Any]] = {
        record.step: record.record["checkpoint"]
        for record in records
        if record.record.get("checkpoint")
    }
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    last = records[-1].step if records else 0
    for step in sorted({*named, *(s for s in checkpoints.folders() if s <= last)}):
        path = checkpoints.path(step)
        if not path.is_dir():
            report.gone.append(step)
            continue

        try:
            sha256 = Checkpoints.verify(path).sha256
        except CheckpointError as error:
            if path.is_dir():
                report.add(str(error), step=step)
            elif step in named:  # a running run has deleted it in the meantime
                report.gone.append(step)
            continue

        if step in named and sha256 == named[step]["sha256"]:
            report.checkpoints.append(step)
        elif head is not None and sha256 == head.checkpoints.get(step):
            report.remade.append(step)
        elif step in named:
            what = f"{path} is complete, but neither its record nor {HEAD} says that it was saved"
            report.add(what, step=step)
        else:
            report.unrecorded.append(step)


def check_texts(folder: Path, report: Audit) -> None:
    """Checks that every stored text of the attempts has the digest in its name."""
    for digest in sorted({digest for digests in report.texts.values() for digest in digests}):
        path = folder / TEXTS_FOLDER / f"{digest}.txt"
        if not path.is_file():
            report.texts_gone.append(digest)
            continue

        try:
            is_same = digest_of_text(read_text(path)) == digest
        except ConfigError as error:
            report.add(f"the text {digest} can't be read: {error}")
            continue

        if not is_same:
            report.add(f"the text {path.name} was changed: it has another digest than its name")
