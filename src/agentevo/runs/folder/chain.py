"""The hash chain of a run's committed steps, and the end of the chain.

    chain(s) = sha256(chain(s - 1), s, the record of step s without its chain)       chain(0) = ""

Every record contains its own chain value. A change of a record (plan, metrics, checkpoint,
progress, digest of the log) therefore breaks the chain at that step, and so does the removal of a
step from the middle. RUN/head.json protects the end of the chain:

    {"step": 12, "chain": "ab...",                  the newest committed step
     "files": {"config.yaml": ["cd..."]},           the allowed sha256 of the run's files, such as
                                                    the given tasks and the summary
     "checkpoints": {"12": "ef..."},                checkpoints that no record names
     "given_up": false}                             whether the run ended without any training

The file is written after each commit, so the store has the file's step. If the process is killed
between commit and write, the file is one step behind. Like a commit of SQLite, it is not synced to
the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from agentevo.errors import AgentEvoError, CheckpointError, ConfigError
from agentevo.observability.metrics import digests_by_step
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import must_write, write_atomic
from agentevo.runtime.parsing import check_file
from agentevo.store.codec import canonical_record
from agentevo.store.records import StepRecord

KEY = "chain"
"""The key in a step's record with the chain value."""
LOG = "log"
"""The key in a step's record with the sha256 of metrics.jsonl up to the step's row."""
NUMBERS = "token_numbers"
"""The key in a step's record with the sha256 of the file with its tokens' measurements, if there is
one."""
ROWS = "rows"
"""The key in a step's record with its RecordedRows."""
SUMMARY = "summary.json"
HEAD = "head.json"
OLDER_VERSION = (
    "its steps were recorded by an older version of AgentEvo, whose records can't be checked: "
    "use that version, or start the run again with run.overwrite=true"
)


class End(msgspec.Struct, frozen=True):
    """A committed step and its chain value."""

    step: int = 0
    chain: str = ""


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of RUN/head.json. The module describes the fields."""

    step: int = 0
    chain: str = ""
    files: dict[str, list[str]] = {}
    """Maps a file's name in the run's folder to the sha256 of its content. While a file is
    replaced, it has two values."""
    checkpoints: dict[int, str] = {}
    """Maps a step to the sha256 (`CheckpointManifest.sha256`) of a checkpoint that was saved after
    the step's commit."""
    given_up: bool = False
    """Whether the run ended before its first step, because every attempt failed."""


class RecordedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a step's record lists in addition to those of its plan. Each map goes from an id to
    the first digits of the content's digest."""

    tasks: dict[str, str] = {}
    """Tasks that were played for the first time since the trainer was started."""
    untrained: dict[str, str] = {}
    """Attempts that the step sampled and did not train on."""
    evaluated: dict[str, str] = {}
    """Attempts that evaluated the policy since the previous record."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """The rows of a step's record. Empty if the record has none, or malformed ones, in which
        case its chain is broken."""
        try:
            return msgspec.convert(record.get(ROWS, {}), cls)
        except msgspec.ValidationError:
            return cls()


def link(step: int, record: Mapping[str, Any], before: str) -> str:
    """chain(step), by the formula in the module's docstring. `before`: chain(step - 1)."""
    content = canonical_record(step, {name: value for name, value in record.items() if name != KEY})
    return hashlib.sha256(f"{before}\n{step}\n".encode() + content).hexdigest()


def broken_links(records: Iterable[StepRecord], end: End) -> list[int]:
    """The steps after `end` whose record differs from the committed record. A record can't be
    checked if the step before it is missing."""
    broken = []
    for record in records:
        chain = str(record.record.get(KEY))
        if record.step == end.step + 1 and chain != link(record.step, record.record, end.chain):
            broken.append(record.step)
        end = End(record.step, chain)
    return broken


def file_digest(path: Path) -> str | None:
    """The sha256 of a file. None if it does not exist or can't be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError:
        return None


def read_head(folder: Path) -> Head | None:
    """The content of RUN/head.json, or None if there is no such file. Raises CheckpointError if the
    file can't be read."""
    path = folder / HEAD
    if not path.exists():
        return None

    try:
        check_file(path)
        return decode_json(path.read_bytes(), Head)
    except (ConfigError, OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{path} can't be read ({error}): restore it from a copy, or delete it to continue "
            f"from the newest step that the store has"
        ) from error


def is_given_up(folder: Path) -> bool:
    """Whether the run in the folder ended without training, because every attempt of its first
    evaluation or first step failed. A new run may then start in the folder. A run with a checkpoint
    or a row of a step has trained, and is not deleted, even if head.json says otherwise."""
    try:
        head = read_head(folder)
        if head is None or not head.given_up or head.step:
            return False
        has_rows = any(digests_by_step(folder / "metrics.jsonl"))
    except (AgentEvoError, OSError):
        return False

    checkpoints = (folder / "checkpoints").glob("step-*")
    return not has_rows and not any(path.name.strip("step-0") for path in checkpoints)


class HeadFile:
    """RUN/head.json of a running trainer. No other process writes the file. Methods that write
    raise DiskError."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError for a head.json that can't be read."""
        self._folder = folder
        self._head = read_head(folder) or Head()

    def note_commit(self, end: End) -> None:
        """Records that the step is in the store, and that no later step is."""
        checkpoints = {s: sha for s, sha in self._head.checkpoints.items() if s <= end.step}
        self._write(step=end.step, chain=end.chain, checkpoints=checkpoints, given_up=False)

    def give_up(self) -> None:
        """Records that the run ends without training."""
        self._write(given_up=True)

    def note_checkpoint(self, step: int, sha256: str) -> None:
        """Records a checkpoint that was saved after its step's commit."""
        self._write(checkpoints=self._head.checkpoints | {step: sha256})

    def write_file(self, name: str, content: str) -> None:
        """Writes a file of the run, and records its digest. During the write, the digest of the old
        content is valid too."""
        new = hashlib.sha256(content.encode()).hexdigest()
        old = file_digest(self._folder / name)
        files = self._head.files
        self._write(files=files | {name: sorted({new, old or new})})
        self._put(self._folder / name, content.encode())
        self._write(files=files | {name: [new]})

    def record_file(self, name: str) -> None:
        """Records the digest of a file that other code has written, if the file exists."""
        digest = file_digest(self._folder / name)
        if digest is not None:
            self._write(files=self._head.files | {name: [digest]})

    def _write(self, **changes: Any) -> None:
        head = msgspec.structs.replace(self._head, **changes)
        self._put(self._folder / HEAD, msgspec.json.encode(head))
        self._head = head

    @staticmethod
    def _put(path: Path, content: bytes) -> None:
        with must_write(path):
            write_atomic(path, content)
