"""The source of an evolution's tasks: a tool server, or documents.

A source provides the policy's tools, makes the first tasks, and provides the command that makes the
tasks of later rounds. It calls and reads nothing before `check` or `make`.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from agentevo.config.mcp import MCPServerSection
from agentevo.config.remote_models import RemoteModelSection
from agentevo.config.tools import FunctionToolSection
from agentevo.data.rows import read_rows
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.inference.remote_models.model import RemoteModel, key_of_model
from agentevo.rollout.task_files import write_rows
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.progress import bar
from agentevo_evolve.evolution.schema import EvolveSection
from agentevo_evolve.task_making.demonstrations import finish_tasks, show_lookups
from agentevo_evolve.task_making.document_files import Documents, changed_files, read_documents
from agentevo_evolve.task_making.documents import check_made, make_read_tasks, passage_row
from agentevo_evolve.task_making.files import CORPUS, DOCUMENTS
from agentevo_evolve.task_making.server_tasks import WantedTasks, check_wanted, make_tasks
from agentevo_evolve.task_making.writer import writer_section

Note = Callable[[str], None]


@dataclass
class FirstTasks:
    """The first tasks of a source."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    account: dict[str, Any]
    demonstrations: list[dict[str, Any]] = field(default_factory=list)
    corpus: list[dict[str, Any]] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)
    """The paths and sha256 of the documents."""


class TaskOrigin(ABC):
    """A source of tasks. `tasks` is the folder of the first tasks, which may not exist yet."""

    def check(self, tasks: Path) -> str:
        """Raises ConfigError for problems that can be found before a task is made. Writes the files
        that a check of the tools needs into the folder, which is deleted later. Returns a
        description of the source, or an empty text."""
        return ""

    @abstractmethod
    def sections(self, tasks: Path) -> list[Any]:
        """The sections of the policy's tools."""

    @abstractmethod
    def make(self, note: Note, scratch: Path) -> FirstTasks:
        """Makes the tasks. Blocks. Raises ConfigError, AgentEvoError. `scratch`: a temporary
        folder."""

    @abstractmethod
    def words(self, recipe: Path, tasks: Path) -> list[str]:
        """The command line of `agentevo data make` for a later round, without --seed, --after and
        --out."""

    def changes(self, tasks: Path) -> str:
        """A description of the changes since the first tasks were made. Empty if there are none."""
        return ""


class ServerSource(TaskOrigin):
    """The tools of a server, or of the recipe."""

    def __init__(
        self,
        section: EvolveSection,
        sections: Sequence[Any],
        *,
        seed: int,
        system: str,
        models: Mapping[str, RemoteModelSection],
    ) -> None:
        """`sections`: the configuration of the tools. `system`: the agent's system prompt. Raises
        ConfigError."""
        self._section = section
        self._system = system
        self._models = models
        self._tools = [_chosen(tool, section) for tool in sections]
        self.wanted = _wanted_tasks(section, seed)
        check_wanted(self.wanted)
        self._writer = _writer_of(section, models)

    def sections(self, tasks: Path) -> list[Any]:
        return self._tools

    def make(self, note: Note, scratch: Path) -> FirstTasks:
        """Makes real calls."""
        request = self.wanted
        writer = None if self._writer is None else RemoteModel("writer", self._writer)
        with bar("making tasks", request.train + request.held_out, "tasks") as so_far:
            work = make_tasks(
                self._tools,
                request,
                writer=writer if self._section.tasks.write_scenarios else None,
                on_note=note,
                progress=so_far.to,
            )
            tasks_made = run_coroutine(work)

        if tasks_made.shortage:
            raise AgentEvoError(tasks_made.shortage)
        account, shown = finish_tasks(
            tasks_made,
            writer,
            seed=request.seed,
            num_shown=self._section.demonstrations.count,
            system=self._system,
        )
        return FirstTasks(tasks_made.train, tasks_made.held_out, account, shown)

    def words(self, recipe: Path, tasks: Path) -> list[str]:
        section = self._section.tasks
        words = ["--train", str(self._section.new_tasks), "--held-out", "0"]
        words += ["--worlds", str(section.worlds)]
        words += ["--max-calls", str(min(12, section.max_calls + 2))]
        for option, values in (
            ("--kind", section.kinds),
            ("--language", section.languages),
            ("--persona", filter(None, section.personas)),
        ):
            words += [word for value in values for word in (option, value)]

        words += [
            word
            for name, values in section.values.items()
            for word in ("--value", f"{name}={json.dumps(values)}")
        ]
        return [*words, *_writer_words(self._section), str(recipe)]


class DocumentsSource(TaskOrigin):
    """Texts, corpora and folders of both, with the tool `search` over their passages."""

    def __init__(
        self,
        section: EvolveSection,
        paths: Sequence[Path],
        tool_sections: Sequence[Any],
        *,
        seed: int,
        system: str,
        models: Mapping[str, RemoteModelSection],
    ) -> None:
        """`tool_sections`: the recipe's own tools. A tool with the name `search` configures the
        search. Raises ConfigError."""
        self._section = section
        self._paths = paths
        self._given = tool_sections
        self._seed = section.tasks.seed or seed
        self._system = system
        self._writer = _writer_of(section, models)

    @cached_property
    def documents(self) -> Documents:
        """The documents, which are read once. Raises ConfigError."""
        return read_documents(self._paths)

    def check(self, tasks: Path) -> str:
        read = self.documents
        write_rows([passage_row(read.passages[0])], tasks / CORPUS)
        counts_text = f"{len(read.digests):,} documents, {len(read.passages):,} passages"
        return "; ".join(filter(None, (counts_text, read.note())))

    def sections(self, tasks: Path) -> list[Any]:
        corpus = {"corpus": str(tasks / CORPUS)}
        search_tools = [tool for tool in self._given if _is_search(tool)]
        with_corpus = [
            tool.model_copy(update={"options": {**tool.options, **corpus}})
            if tool in search_tools
            else tool
            for tool in self._given
        ]
        return (
            with_corpus
            if search_tools
            else [FunctionToolSection(name="search", options=corpus), *with_corpus]
        )

    def make(self, note: Note, scratch: Path) -> FirstTasks:
        if left_out_note := self.documents.note():
            note(left_out_note)

        passages = self.documents.passages
        tasks = self._section.tasks
        corpus = [passage_row(passage) for passage in passages]

        with bar("making tasks", tasks.train + tasks.held_out, "tasks") as so_far:
            tasks_made = make_read_tasks(
                passages,
                None if self._writer is None else RemoteModel("writer", self._writer),
                language=tasks.languages[0],
                train=tasks.train,
                held_out=tasks.held_out,
                per_passage=tasks.per_passage,
                seed=self._seed,
                progress=so_far.to,
            )

        check_made(tasks_made, tasks.held_out)
        write_rows(corpus, scratch / CORPUS)
        shown, num_unfound = run_coroutine(
            show_lookups(
                tasks_made.train,
                passages,
                [section for section in self.sections(scratch) if _is_search(section)],
                count=self._section.demonstrations.count,
                seed=self._seed,
                system=self._system,
            )
        )

        missing = tasks.train + tasks.held_out - len(tasks_made.train) - len(tasks_made.held_out)
        if missing > 0:
            note(f"{missing} tasks are missing: the documents give no more")
        if num_unfound:
            note(f"{num_unfound} tasks have no demonstration: search does not find their passages")

        account = {
            "train": len(tasks_made.train),
            "held_out": len(tasks_made.held_out),
            "passages": len(passages),
            "documents": len(self.documents.digests),
            "left_out": self.documents.left_out,
            "writer": tasks_made.reasons,
            "not_found": num_unfound,
            "seed": self._seed,
        }
        read = [
            {"path": os.path.abspath(path), "sha256": digest}
            for path, digest in self.documents.digests.items()
        ]
        return FirstTasks(tasks_made.train, tasks_made.held_out, account, shown, corpus, read)

    def words(self, recipe: Path, tasks: Path) -> list[str]:
        section = self._section.tasks
        words = [str(tasks / CORPUS), "--held-out", "0"]
        words += ["--train", str(self._section.new_tasks)]
        words += ["--per-passage", str(section.per_passage), "--language", section.languages[0]]
        return [*words, *_writer_words(self._section)]

    def changes(self, tasks: Path) -> str:
        rows = [row.value for row in read_rows(str(tasks / DOCUMENTS))]
        changed = changed_files({str(row["path"]): str(row["sha256"]) for row in rows})
        if not changed:
            return ""

        rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return (
            f"{changed[0]}{rest} changed since the tasks were made: this run continues with the "
            "old content; use a new run.dir for the new content"
        )


def _is_search(section: Any) -> bool:
    return isinstance(section, FunctionToolSection) and section.name == "search"


def _writer_of(
    section: EvolveSection, models: Mapping[str, RemoteModelSection]
) -> RemoteModelSection | None:
    """Raises ConfigError."""
    writer = section.tasks.writer
    if writer is None:
        return None

    try:
        chosen = writer_section(writer, known_models=models)
        key_of_model("writer", chosen)
        return chosen
    except ConfigError as error:
        raise ConfigError(f"evolve.tasks.writer: {error}") from error


def _writer_words(section: EvolveSection) -> list[str]:
    writer = section.tasks.writer
    return [] if writer is None else ["--writer", writer]


def _chosen(section: Any, evolve_section: EvolveSection) -> Any:
    """A tool's section with the settings of the evolution."""
    changes: dict[str, Any] = {}
    if evolve_section.include:
        changes["include"] = evolve_section.include
    if evolve_section.exclude:
        changes["exclude"] = (*section.exclude, *evolve_section.exclude)

    if isinstance(section, MCPServerSection):
        if evolve_section.outcome is not None:
            changes["outcome"] = evolve_section.outcome
        if section.session == "attempt" and evolve_section.tasks.worlds > 1:
            changes["send_task"] = True

    return section.model_copy(update=changes)


def _wanted_tasks(section: EvolveSection, seed: int) -> WantedTasks:
    tasks = section.tasks
    return WantedTasks(
        train=tasks.train,
        held_out=tasks.held_out,
        seed=tasks.seed or seed,
        worlds=tasks.worlds,
        max_calls=tasks.max_calls,
        languages=tasks.languages,
        personas=tasks.personas,
        kinds=tasks.kinds,
        min_difficulty=tasks.min_difficulty,
        max_difficulty=tasks.max_difficulty,
        values=tasks.values,
    )
