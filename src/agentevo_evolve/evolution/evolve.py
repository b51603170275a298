"""`agentevo evolve`: makes tasks from a tool server or documents, and trains an agent on them, in
one folder.

    FOLDER/tasks/                 the first tasks, held-out ones among them
                                  (agentevo_evolve/task_making/files.py), and the agent's texts
    FOLDER/recipe.yaml            the recipe of every stage
    FOLDER/evolve.pipeline.yaml   the stages (stages.py); `agentevo pipeline` also runs it
    FOLDER/run/                   the pipeline's folder: stages, report, table

All checks run before the server is called: the same pipeline is read with a single invented task.
The files are written in the order above. When the last one exists, the folder can be resumed.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pydantic
import yaml

from agentevo.config import sources
from agentevo.config.field_words import entry_problem
from agentevo.config.mcp import MCPServerSection
from agentevo.config.remote_models import RemoteModelSection
from agentevo.config.sweep import nest_keys
from agentevo.config.texts import with_texts_of_file
from agentevo.config.tool_entries import ToolEntry
from agentevo.config.tools import ToolSection, tool_entry
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.sweep_view import SweepView
from agentevo.rollout.task_files import DEMONSTRATIONS, HELD_OUT, TRAIN, write_rows
from agentevo.runtime.files import must_write, write_atomic
from agentevo.runtime.paths import check_new_folder, short
from agentevo_evolve.evolution.schema import EvolveSection
from agentevo_evolve.evolution.source import DocumentsSource, ServerSource, TaskOrigin
from agentevo_evolve.evolution.stages import TEXTS, pipeline_of, recipe_of
from agentevo_evolve.pipeline import (
    Pipeline,
    build_pipeline,
    load_pipeline,
    read_state,
    run_pipeline,
)
from agentevo_evolve.pipeline.reading import checked_config
from agentevo_evolve.pipeline.state import is_pipeline_folder
from agentevo_evolve.prompts.budget import Budget, comparison
from agentevo_evolve.task_making.document_files import is_document
from agentevo_evolve.task_making.files import write_made

PIPELINE = "evolve.pipeline.yaml"
RECIPE = "recipe.yaml"
TASKS = "tasks"
RUN = "run"
_entry: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ToolEntry)
_MADE_UP = {"id": "none", "query": "none", "answer": "none", "scorer": "contains"}


class Evolution:
    """A plan of an evolution, read and checked. The constructor creates and calls nothing."""

    def __init__(self, tree: Mapping[str, Any], section: EvolveSection, home: Path):
        """`tree`: the recipe without its section `evolve`. `home`: the folder that its relative
        paths start from. Raises ConfigError."""
        run = tree.get("run")
        run = run if isinstance(run, Mapping) else {}
        self.tree = tree
        self.section = section
        self.name = str(run.get("name", "evolve"))
        self.seed = int(run.get("seed", 0))
        folder = run.get("dir")
        self.folder = (Path(str(folder)) if folder else Path("runs") / self.name).absolute()
        self.source = _source_of(tree, section, home, self.seed)

    @property
    def is_begun(self) -> bool:
        """Whether the folder can be resumed."""
        return (self.folder / PIPELINE).is_file()

    def check(self, note: Callable[[str], None] = lambda line: None) -> Pipeline:
        """Reads all stages, with a single invented task. Raises ConfigError."""
        with tempfile.TemporaryDirectory(prefix="agentevo-evolve-") as scratch:
            tasks = Path(scratch) / TASKS
            tasks.mkdir()
            if source_note := self.source.check(tasks):
                note(source_note)

            write_rows([_MADE_UP | {"query": "a"}], tasks / TRAIN)
            write_rows([_MADE_UP | {"id": "held", "query": "b"}], tasks / HELD_OUT)
            shown = {"messages": [{"role": r, "content": r} for r in ("user", "assistant")]}
            write_rows([shown], tasks / DEMONSTRATIONS)
            write_atomic(tasks / TEXTS, _yaml(self._texts))

            few = {"trainer": {"groups_per_step": 1}}
            recipe = sources.overlay(self._recipe(tasks), few)
            write_atomic(Path(scratch) / RECIPE, _yaml(recipe))

            read = build_pipeline(
                self._pipeline(tasks), where="evolve", folder=Path(scratch), name=self.name
            )
            self._check_searches(read)
            return read

    def _check_searches(self, pipeline: Pipeline) -> None:
        """Raises ConfigError if a search for texts spends all its attempts on the comparison on
        held-out tasks. Without this check, it would fail hours later."""
        searches = [instance for instance in pipeline.plan.instances if instance.kind.makes_texts]
        if not searches:
            return

        config = checked_config(pipeline, pipeline.recipes(self.seed), searches[0])
        assert config is not None

        num_held_out = min(self.section.tasks.held_out, config.evaluation.tasks)
        try:
            Budget(config.optimize, comparison(config.optimize, num_held_out)).check()
        except ConfigError as error:
            raise ConfigError(
                f"evolve.prompts.attempts: {error} (evolve.tasks.held_out, evolve.prompts.config)"
            ) from error

    def prepare(self, note: Callable[[str], None]) -> None:
        """Makes the tasks and writes the folder. If making tasks fails, nothing is written."""
        check_new_folder(self.folder, "run.dir")
        with tempfile.TemporaryDirectory(prefix="agentevo-evolve-") as scratch:
            first_tasks = self.source.make(note, Path(scratch))

        write_made(
            self.folder / TASKS,
            train=first_tasks.train,
            held_out=first_tasks.held_out,
            demonstrations=first_tasks.demonstrations,
            corpus=first_tasks.corpus,
            documents=first_tasks.documents,
            account=first_tasks.account,
        )
        tasks = self.folder / TASKS
        with must_write(self.folder, "make room there, or give another run.dir"):
            write_atomic(tasks / TEXTS, _yaml(self._texts))
            write_atomic(self.folder / RECIPE, _yaml(self._recipe(tasks)))
            write_atomic(self.folder / PIPELINE, _yaml(self._pipeline(tasks)), durable=True)

    @property
    def _texts(self) -> Mapping[str, Any]:
        """The texts that the recipe gives the agent."""
        agent = self.tree.get("agent")
        texts = agent.get("texts") if isinstance(agent, Mapping) else None
        return texts if isinstance(texts, Mapping) else {}

    def _recipe(self, tasks: Path) -> dict[str, Any]:
        tools = [tool_entry(section) for section in self.source.sections(tasks)]
        return recipe_of(self.section, self.tree, tools, tasks)

    def _pipeline(self, tasks: Path) -> dict[str, Any]:
        words = self.source.words(self.folder / RECIPE, tasks)
        return pipeline_of(self.section, self.tree, tasks, words, name=self.name, seed=self.seed)


def read_evolution(
    target: str, overrides: Sequence[str], *, documents: Sequence[str] = (), **section_keys: Any
) -> Evolution:
    """Reads and checks a plan. `target`: a URL, a command, documents, or a YAML file with a section
    `evolve`. `documents`: further documents. `section_keys`: keys that override those of the
    section. Raises
    ConfigError."""
    is_file = target.endswith((".yaml", ".yml"))
    path = sources.find_recipe(target) if is_file else None
    tree: dict[str, Any] = {} if path is None else sources.read_yaml(path)
    changes = sources.overridden(overrides, lambda key: key.endswith(("name", "server")))
    tree = sources.overlay(tree, nest_keys(changes))
    section = tree.pop("evolve", None) or {}
    if not isinstance(section, Mapping):
        raise ConfigError("evolve must be a section, such as {rounds: 3}")

    if path is None and is_document(target):
        section = {**section, "documents": [target, *documents]}
    elif documents:
        raise ConfigError(
            f"{documents[0]!r} is not KEY=VALUE: write one such as trainer.steps=10. To give "
            "several documents, make the first argument a document too"
        )
    elif path is None:
        section = {**section, "server": target}

    try:
        read = EvolveSection.model_validate(sources.overlay(section, section_keys))
    except pydantic.ValidationError as error:
        lines = [entry_problem("evolve", EvolveSection, wrong) for wrong in error.errors()]
        raise ConfigError("\n".join(lines)) from error

    home = Path.cwd() if path is None else path.parent.absolute()
    tree = _at_home(tree, home)
    model = tree.get("model")
    if not (isinstance(model, Mapping) and model.get("name")) and not isinstance(model, str):
        raise ConfigError(
            "model.name is missing: give model.name=PATH_OR_NAME, a model with a chat template "
            "that supports tools"
        )

    return Evolution(tree, read, home)


def evolve(evolution: Evolution, *, resume: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """Makes the tasks, or resumes, and runs the stages. Blocks. Returns the pipeline's results.
    Raises the errors of `run_pipeline`, and those of making tasks."""
    folder = evolution.folder
    if evolution.is_begun and not resume:
        raise ConfigError(
            f"{short(folder)} already has an evolution: continue with --resume, or give another "
            "run.dir"
        )

    if evolution.is_begun:
        if change_note := evolution.source.changes(folder / TASKS):
            note(change_note)
    else:
        evolution.check()
        evolution.prepare(note)

    pipeline = load_pipeline(folder / PIPELINE)
    is_begun = is_pipeline_folder(folder / RUN)
    return run_pipeline(pipeline, resume=is_begun, view=SweepView(evolution.name))


def last_run(folder: Path) -> Path | None:
    """The folder of the last completed training stage, for `agentevo serve --openai`."""
    try:
        state = read_state(folder / RUN)
    except AgentEvoError:
        return None

    done = [
        name
        for name, stage in state.stages.items()
        if stage.status == "finished" and stage.kind in ("train", "sft")
    ]
    return folder / RUN / "stages" / done[-1] if done else None


def _source_of(
    tree: Mapping[str, Any], section: EvolveSection, home: Path, seed: int
) -> TaskOrigin:
    """Raises ConfigError."""
    system = str((tree.get("agent") or {}).get("system_prompt") or "")
    models = _models_of(tree)
    tools = [_in_folder(tool_section, home) for tool_section in _tools_of(section, tree)]
    if not section.documents:
        return ServerSource(section, tools, seed=seed, system=system, models=models)
    paths = [home / Path(document).expanduser() for document in section.documents]
    return DocumentsSource(section, paths, tools, seed=seed, system=system, models=models)


def _models_of(tree: Mapping[str, Any]) -> dict[str, RemoteModelSection]:
    """The valid remote models of the recipe. The check of the recipe reports the others."""
    sections = tree.get("remote_models")
    models = dict[str, RemoteModelSection]()
    for name, section in sections.items() if isinstance(sections, Mapping) else ():
        with suppress(pydantic.ValidationError):
            models[str(name)] = RemoteModelSection.model_validate(section)
    return models


def _tools_of(section: EvolveSection, tree: Mapping[str, Any]) -> list[ToolSection]:
    if section.server is not None:
        words = shlex.split(section.server)
        if not words:
            raise ConfigError("evolve.server: it is empty: give a URL or a command")

        try:
            if "://" in words[0]:
                is_sse = words[0].rstrip("/").endswith("/sse")
                transport: Any = "sse" if is_sse else "http"
                reached: Any = {"url": words[0], "transport": transport}
            else:
                reached = {"command": words[0], "args": tuple(words[1:])}
            return [MCPServerSection(name="server", api_key=section.api_key, **reached)]
        except pydantic.ValidationError as error:
            raise ConfigError(f"evolve.server: {error.errors()[0]['msg']}") from error

    agent = tree.get("agent")
    entries = agent.get("tools") if isinstance(agent, Mapping) else None
    if not entries and not section.documents:
        raise ConfigError(
            "evolve.server: give a URL or a command, evolve.documents, or agent.tools in the recipe"
        )

    try:
        return [_entry.validate_python(entry) for entry in entries or ()]
    except pydantic.ValidationError as error:
        raise ConfigError(f"agent.tools: {error.errors()[0]['msg']}") from error


def _at_home(tree: dict[str, Any], home: Path) -> dict[str, Any]:
    """The tree with absolute paths in `import`, and with the agent's texts inlined, because the
    recipe is written to another folder. Raises ConfigError."""
    if isinstance(agent := tree.get("agent"), Mapping):
        agent, problem = with_texts_of_file(agent, home)
        if problem:
            raise ConfigError(problem)
        tree = {**tree, "agent": agent}

    modules = tree.get("import")
    if not isinstance(modules, list):
        return tree

    absolute = [
        str((home / str(module)).resolve())
        if str(module).endswith(".py") and (home / str(module)).is_file()
        else module
        for module in modules
    ]
    return {**tree, "import": absolute}


def _in_folder(section: Any, home: Path) -> Any:
    """The section of a tool, with its files relative to `home`, and with commands that run
    there."""
    changes: dict[str, Any] = {}
    file = getattr(section, "file", None)
    if file is not None:
        changes["file"] = home / Path(file).expanduser()
    if isinstance(section, MCPServerSection) and section.command and section.sandbox is None:
        changes["cwd"] = home / (section.cwd or ".")
    return section.model_copy(update=changes)


def _yaml(tree: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(tree, default=str))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)
