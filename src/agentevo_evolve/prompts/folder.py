"""The folder of a search for better texts, from which an interrupted search is resumed.

    optimize.json   the settings of the search, written first
    log.jsonl       every candidate, attempt and answer of the writer; append-only
    run/            files other than those of attempts, such as price logs
    texts.yaml      the texts for a recipe (`agent.texts`), written at the end
    summary.json    the results, and report.md to read

The search is a function of the settings and the log. A resumed search makes the same choices again,
and reads finished attempts and answers from the log. The start of an attempt is logged before it
plays. So an attempt that was lost with a killed process counts in the budget, and is played again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from agentevo.agents.named_texts import Declared
from agentevo.config.texts import digest_of_text
from agentevo.errors import ConfigError
from agentevo.runs.folder.lock import check_empty, locked_output
from agentevo.runs.folder.records import MAX_READ, add_record, read_records
from agentevo.runtime.files import must_write, write_atomic
from agentevo.runtime.parsing import read_json_object

SETTINGS = "optimize.json"
LOG = "log.jsonl"
RUN = "run"
TEXTS = "texts.yaml"
SUMMARY = "summary.json"
REPORT = "report.md"
LOCK = "optimize.lock"
REMEDY = "make room there, or make it writable, and continue with --resume"
MAX_TALK_CHARS = 60_000
"""The maximum number of stored characters of an attempt's messages. Longer conversations are left
out."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, tag="candidate"):
    """A candidate: texts that might be better."""

    texts: dict[str, str]
    """All searched texts, by name."""
    parent: str = ""
    how: str = "as the agent has them"

    @property
    def id(self) -> str:
        """The id, the same for the same texts."""
        return digest_of_text(json.dumps(self.texts, sort_keys=True))

    @property
    def size(self) -> int:
        """The number of characters of all texts."""
        return sum(map(len, self.texts.values()))


class SearchBegun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The record of attempts that are about to start."""

    candidate: str
    task: str
    label: str
    number: int
    """The number of attempts."""
    at: float = 0.0


class PlayedAttempt(msgspec.Struct, frozen=True, kw_only=True, tag="attempt"):
    """The result of an attempt."""

    candidate: str
    task: str
    label: str
    attempt: int
    status: Literal["completed", "failed", "cancelled"]
    reward: float = 0.0
    success: bool = False
    error: str = ""
    messages: list[dict[str, Any]] = []
    """The messages of the last conversation, in OpenAI's form. Empty if it was too long."""
    texts: dict[str, str] = {}
    """The digests of the texts that the attempt was played with."""
    at: float = 0.0


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """An answer of the writer, or the reason why there is none."""

    key: str
    text: str = ""
    error: str = ""
    at: float = 0.0


class SearchSession(msgspec.Struct, frozen=True, kw_only=True, tag="session"):
    """The record of a process that starts to work on the search."""

    at: float = 0.0
    lead_s: float = 0.0
    """The seconds before this record, in which the process loaded the model."""


Record = Candidate | SearchBegun | PlayedAttempt | Written | SearchSession


class OptimizeFolder:
    """Reads and writes the folder of a search. Only one process may use it at a time, see
    `lock`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self) -> AbstractContextManager[None]:
        """Raises ConfigError if another process works there, or if the folder can't be locked."""
        return locked_output(self.path, LOCK, "optimizes")

    @property
    def is_begun(self) -> bool:
        """Whether the folder has a search to resume."""
        return os.path.isfile(self.path / SETTINGS)

    def check_new(self) -> None:
        """Raises ConfigError if the folder is not empty."""
        if self.is_begun:
            raise ConfigError(
                f"{self.path} has a search already: continue it with --resume, or give another "
                "--out"
            )
        check_empty(self.path, but=(LOCK, RUN))

    def begin(self, settings: Mapping[str, Any], declared: Mapping[str, Declared]) -> None:
        """Writes the settings, and the texts that the agent declares."""
        declarations = {name: asdict(declaration) for name, declaration in declared.items()}
        with must_write(self.path, REMEDY):
            content = _json({**settings, "declared": declarations})
            write_atomic(self.path / SETTINGS, content, durable=True)

    def read_declared(self) -> dict[str, Declared]:
        """The texts of the agent, as `begin` wrote them. Raises ConfigError."""
        try:
            declared_fields = read_json_object(self.path / SETTINGS)["declared"]
            return {name: Declared(**fields) for name, fields in declared_fields.items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.path / SETTINGS} is damaged: start another search") from error

    def go_on(self, settings: Mapping[str, Any]) -> bool:
        """Whether the folder has this search to resume. Raises ConfigError if it has another
        search."""
        path = self.path / SETTINGS
        if not self.is_begun:
            return False

        before = read_json_object(path)
        now = json.loads(_json(settings))
        changed = next((key for key in now if now[key] != before.get(key)), None)
        if changed is not None:
            was, is_now = (str(setting)[:100] for setting in (before.get(changed), now[changed]))
            raise ConfigError(
                f"{self.path}: its search started with {changed} = {was}, and this command has "
                f"{changed} = {is_now}: give the same arguments as then, or another --out"
            )

        return True

    def add(self, record: Record) -> None:
        """Appends a record with the current time. Raises ConfigError."""
        if not isinstance(record, Candidate):
            record = msgspec.structs.replace(record, at=time.time())
        add_record(self.path / LOG, msgspec.to_builtins(record))

    def records(self) -> list[Record]:
        """The whole log, the oldest record first. Raises ConfigError."""
        path = self.path / LOG
        if path.exists() and path.stat().st_size > MAX_READ:
            raise ConfigError(f"{path} has more than {MAX_READ:,} bytes: start another search")

        log: list[Record] = []
        for row in read_records(path):
            try:
                log.append(msgspec.convert(row, Record))
            except msgspec.ValidationError:
                continue  # a partial line, or a line of another program

        return log

    def end(self, texts: Mapping[str, str], summary: Mapping[str, Any], report: str) -> None:
        """Writes the results. The texts come last, so that they are never without a report."""
        with must_write(self.path, REMEDY):
            write_atomic(self.path / REPORT, report, durable=True)
            write_atomic(self.path / SUMMARY, _json(summary), durable=True)
            written = yaml.safe_dump(dict(texts), allow_unicode=True, sort_keys=True, width=10_000)
            write_atomic(self.path / TEXTS, written, durable=True)


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
