"""The named texts of a run's attempts: counted by digest, and compared with the texts in the run's
folder (agents/named_texts.py)."""

from __future__ import annotations

from pathlib import Path

from agentevo.agents.named_texts import FOLDER
from agentevo.config.texts import digest_of_text
from agentevo.errors import ConfigError
from agentevo.runs.audit.findings import Audit, AuditViolation
from agentevo.runtime.parsing import read_text
from agentevo.store.records import StoredTrajectory


def count_texts(stored: StoredTrajectory, report: Audit) -> None:
    """Counts the texts of one trajectory."""
    for name, digest in stored.trajectory.texts.items():
        digests = report.texts.setdefault(name, {})
        digests[digest] = digests.get(digest, 0) + 1


def check_texts(folder: Path, report: Audit) -> None:
    """Checks that every stored text has the digest in its name."""
    for digest in sorted({digest for digests in report.texts.values() for digest in digests}):
        path = folder / FOLDER / f"{digest}.txt"
        if not path.is_file():
            report.texts_gone.append(digest)
            continue

        try:
            is_same = digest_of_text(read_text(path)) == digest
        except ConfigError as error:
            report.violations.append(AuditViolation(f"the text {digest} can't be read: {error}"))
            continue

        if not is_same:
            report.violations.append(
                AuditViolation(
                    f"the text {path.name} was changed: it has another digest than its name"
                )
            )
