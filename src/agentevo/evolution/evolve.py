"""`agentevo evolve`: one folder in which a server of tools becomes tasks, and these a better agent.

    FOLDER/tasks/                 the first tasks, held-out ones among them (task_making/files.py),
                                  and the agent's texts
    FOLDER/recipe.yaml            what every stage trains
    FOLDER/evolve.pipeline.yaml   the stages (stages.py); `agentevo pipeline` runs it as well
    FOLDER/run/                   the pipeline's folder: stages, report, table

Everything that can be refused is, before the server is called: the same pipeline is read with one
made-up task. The files appear in the order above; with the last of them the folder can be resumed.
"""

from __future__ import annotations

import json
import random
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from agentevo.config import sources
from agentevo.config.mcp import MCPServerSection
from agentevo.config.texts import with_texts_of_file
from agentevo.config.tool_entries import ToolEntry
from agentevo.config.tools import ToolSection, named_tool
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.event_loop import run_coroutine
from agentevo.evolution.schema import EvolveSection
from agentevo.evolution.stages import TEXTS, pipeline_of, recipe_of
from agentevo.files import must_write, write_atomic
from agentevo.observability.sweep_view import SweepView
from agentevo.paths import check_new_folder, short
from agentevo.pipeline import Pipeline, build_pipeline, load_pipeline, read_state, run_pipeline
from agentevo.pipeline.state import is_pipeline_folder
from agentevo.progress import bar
from agentevo.rollout.task_files import HELD_OUT, TRAIN, write_rows
from agentevo.task_making.demonstrations import demonstration
from agentevo.task_making.files import DEMONSTRATIONS, write_made
from agentevo.task_making.making import Wanted, check_wanted, make_tasks

PIPELINE, RECIPE, TASKS, RUN = "evolve.pipeline.yaml", "recipe.yaml", "tasks", "run"
_entry: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ToolEntry)
_MADE_UP = {"id": "none", "query": "none", "answer": "none", "scorer": "contains"}


class Evolution:
    """What is to be done, read and checked; nothing is created or called by that."""

    def __init__(self, tree: Mapping[str, Any], section: EvolveSection, sections: Sequence[Any]):
        """`tree`: the recipe, its section `evolve` apart; `sections`: the tools. Raises
        ConfigError."""
        run = tree.get("run")
        run = run if isinstance(run, Mapping) else {}
        self.tree, self.section = tree, section
        self.name, self.seed = str(run.get("name", "evolve")), int(run.get("seed", 0))
        folder = run.get("dir")
        self.folder = (Path(str(folder)) if folder else Path("runs") / self.name).absolute()
        self.sections = [_chosen(one, section) for one in sections]
        """The tools as the policy gets them."""
        self.wanted = _wanted(section, self.seed)
        check_wanted(self.wanted)

    @property
    def is_begun(self) -> bool:
        """Whether the folder can be resumed."""
        return (self.folder / PIPELINE).is_file()

    def check(self) -> Pipeline:
        """Reads all that will be run, with one made-up task. Raises ConfigError."""
        with tempfile.TemporaryDirectory(prefix="agentevo-evolve-") as scratch:
            tasks = Path(scratch) / TASKS
            tasks.mkdir()
            write_rows([_MADE_UP | {"query": "a"}], tasks / TRAIN)
            write_rows([_MADE_UP | {"id": "held", "query": "b"}], tasks / HELD_OUT)
            shown = {"messages": [{"role": r, "content": r} for r in ("user", "assistant")]}
            write_rows([shown], tasks / DEMONSTRATIONS)
            write_atomic(tasks / TEXTS, _yaml(self._texts))
            few = {"trainer": {"groups_per_step": 1}}
            recipe = sources.overlay(self._recipe(tasks), few)
            write_atomic(Path(scratch) / RECIPE, _yaml(recipe))
            return build_pipeline(
                self._pipeline(tasks), where="evolve", folder=Path(scratch), name=self.name
            )

    def prepare(self, note: Callable[[str], None]) -> None:
        """Makes the tasks and writes the folder. Raises what making tasks raises, with nothing
        written."""
        check_new_folder(self.folder, "run.dir")
        count = self.wanted.train + self.wanted.held_out
        with bar("making tasks", count, "tasks") as so_far:
            work = make_tasks(self.sections, self.wanted, tell=note, progress=so_far.to)
            made = run_coroutine(work)
        draw = random.Random(f"demonstrations-{self.seed}")
        system = str((self.tree.get("agent") or {}).get("system_prompt") or "")
        shown = [
            demonstration(draw.choice(made.train), made.known.specs, system)
            for _ in range(self.section.demonstrations.count)
        ]
        write_made(
            self.folder / TASKS,
            train=made.train,
            held_out=made.held_out,
            demonstrations=shown,
            account={**made.account, "seed": self.wanted.seed},
        )
        tasks = self.folder / TASKS
        with must_write(self.folder, "make room there, or give another run.dir"):
            write_atomic(tasks / TEXTS, _yaml(self._texts))
            write_atomic(self.folder / RECIPE, _yaml(self._recipe(tasks)))
            write_atomic(self.folder / PIPELINE, _yaml(self._pipeline(tasks)), durable=True)

    @property
    def _texts(self) -> Mapping[str, Any]:
        """The agent's texts as they are given."""
        agent = self.tree.get("agent")
        texts = agent.get("texts") if isinstance(agent, Mapping) else None
        return texts if isinstance(texts, Mapping) else {}

    def _recipe(self, tasks: Path) -> dict[str, Any]:
        return recipe_of(self.section, self.tree, [named_tool(one) for one in self.sections], tasks)

    def _pipeline(self, tasks: Path) -> dict[str, Any]:
        words = _words(self.section, self.folder / RECIPE)
        return pipeline_of(self.section, self.tree, tasks, words, name=self.name, seed=self.seed)


def read_evolution(target: str, overrides: Sequence[str], **given: Any) -> Evolution:
    """`target`: a URL, a command, or a YAML file whose section `evolve` says the rest. `given`:
    keys of that section that count before all others. Raises ConfigError."""
    is_file = target.endswith((".yaml", ".yml"))
    path = sources.find_recipe(target) if is_file else None
    tree: dict[str, Any] = {} if path is None else sources.read_yaml(path)
    changes = sources.overridden(overrides, lambda key: key.endswith(("name", "server")))
    tree = sources.overlay(tree, _nested(changes))
    section = tree.pop("evolve", None) or {}
    if not isinstance(section, Mapping):
        raise ConfigError("evolve: it is a section, such as {rounds: 3}")
    if path is None:
        section = {**section, "server": target}
    try:
        read = EvolveSection.model_validate(sources.overlay(section, given))
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f"evolve.{key}: {wrong['msg'].removeprefix('Value error, ')}") from error
    home = Path.cwd() if path is None else path.parent.absolute()
    tree = _at_home(tree, home)
    model = tree.get("model")
    if not (isinstance(model, Mapping) and model.get("name")) and not isinstance(model, str):
        raise ConfigError(
            "model.name: which model is to learn? Give model.name=PATH_OR_NAME, one with a chat "
            "template that knows tools"
        )
    return Evolution(tree, read, [_in_folder(one, home) for one in _tools_of(read, tree)])


def evolve(evolution: Evolution, *, resume: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """Makes the tasks, or goes on, and runs the stages. Blocks. Returns the pipeline's results.
    Raises as `run_pipeline`, and what making tasks raises."""
    folder = evolution.folder
    if evolution.is_begun and not resume:
        raise ConfigError(
            f"{short(folder)} is an evolution already: go on with --resume, or give another run.dir"
        )
    if not evolution.is_begun:
        evolution.check()
        evolution.prepare(note)
    pipeline = load_pipeline(folder / PIPELINE)
    began = is_pipeline_folder(folder / RUN)
    return run_pipeline(pipeline, resume=began, view=SweepView(evolution.name))


def last_run(folder: Path) -> Path | None:
    """The folder of the last stage that has trained, for `agentevo serve --openai`."""
    try:
        state = read_state(folder / RUN)
    except AgentEvoError:
        return None
    done = [
        name
        for name, one in state.stages.items()
        if one.status == "finished" and one.kind in ("train", "sft")
    ]
    return folder / RUN / "stages" / done[-1] if done else None


def _tools_of(section: EvolveSection, tree: Mapping[str, Any]) -> list[ToolSection]:
    if section.server is not None:
        words = shlex.split(section.server)
        if not words:
            raise ConfigError("evolve.server: it is empty: give a URL or a command")
        try:
            if "://" in words[0]:
                is_sse = words[0].rstrip("/").endswith("/sse")
                transport: Any = "sse" if is_sse else "http"
                return [MCPServerSection(name="server", url=words[0], transport=transport)]
            return [MCPServerSection(name="server", command=words[0], args=tuple(words[1:]))]
        except pydantic.ValidationError as error:
            raise ConfigError(f"evolve.server: {error.errors()[0]['msg']}") from error
    agent = tree.get("agent")
    entries = agent.get("tools") if isinstance(agent, Mapping) else None
    if not entries:
        raise ConfigError("evolve.server: give a URL or a command, or agent.tools in the recipe")
    try:
        return [_entry.validate_python(one) for one in entries]
    except pydantic.ValidationError as error:
        raise ConfigError(f"agent.tools: {error.errors()[0]['msg']}") from error


def _at_home(tree: dict[str, Any], home: Path) -> dict[str, Any]:
    """The tree with the files of `import` by their absolute paths, and with the agent's texts
    themselves: the recipe that is written lies elsewhere. Raises ConfigError."""
    if isinstance(agent := tree.get("agent"), Mapping):
        agent, problem = with_texts_of_file(agent, home)
        if problem:
            raise ConfigError(problem)
        tree = {**tree, "agent": agent}
    modules = tree.get("import")
    if not isinstance(modules, list):
        return tree
    absolute = [
        str((home / str(one)).resolve())
        if str(one).endswith(".py") and (home / str(one)).is_file()
        else one
        for one in modules
    ]
    return {**tree, "import": absolute}


def _in_folder(section: Any, home: Path) -> Any:
    """A tool's section whose files are found from there, too; a command runs there."""
    changes: dict[str, Any] = {}
    file = getattr(section, "file", None)
    if file is not None:
        changes["file"] = home / Path(file).expanduser()
    if isinstance(section, MCPServerSection) and section.command and section.sandbox is None:
        changes["cwd"] = home / (section.cwd or ".")
    return section.model_copy(update=changes)


def _chosen(section: Any, given: EvolveSection) -> Any:
    """A tool's section with what the evolution says of it."""
    changes: dict[str, Any] = {}
    if given.include:
        changes["include"] = given.include
    if given.exclude:
        changes["exclude"] = (*section.exclude, *given.exclude)
    if isinstance(section, MCPServerSection):
        if given.outcome is not None:
            changes["outcome"] = given.outcome
        if section.url is not None and given.tasks.worlds > 1:
            changes["send_task"] = True
    return section.model_copy(update=changes)


def _wanted(section: EvolveSection, seed: int) -> Wanted:
    tasks = section.tasks
    return Wanted(
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


def _words(section: EvolveSection, recipe: Path) -> list[str]:
    """Of `agentevo tasks make` for a later round."""
    tasks = section.tasks
    words = ["--train", str(section.new_tasks), "--held-out", "0", "--worlds", str(tasks.worlds)]
    words += ["--max-calls", str(min(12, tasks.max_calls + 2))]
    for option, values in (
        ("--kind", tasks.kinds),
        ("--language", tasks.languages),
        ("--persona", filter(None, tasks.personas)),
    ):
        words += [word for value in values for word in (option, value)]
    words += [
        word
        for name, values in tasks.values.items()
        for word in ("--value", f"{name}={json.dumps(values)}")
    ]
    return [*words, str(recipe)]


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    from agentevo.config.sweep import nested

    return nested(changes)


def _yaml(tree: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(tree, default=str))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)
