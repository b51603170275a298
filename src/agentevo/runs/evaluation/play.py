"""Models play tasks, several attempts each, and every attempt becomes a line of results.

Every model plays the same tasks in the same order, with the same agent and the same seeds. An
attempt's seeds follow from the run's seed, the task and the attempt's number. Models play one after
the other, so only one is in memory. The tasks of a model play at the same time, as many as its
engine or server accepts. The attempts of a model at a task are written when all of them have ended.
An engine that fails permanently ends the evaluation, which can be resumed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from agentevo.config import RunConfig
from agentevo.config.agents import EnvironmentAgentSection, SingleTurnSection
from agentevo.config.named_agents import trained_agents
from agentevo.config.routing import without_routing
from agentevo.config.sections import RunSection
from agentevo.config.tasks import TasksSection
from agentevo.errors import ConfigError, storable
from agentevo.rewards.answer_texts import place_of
from agentevo.rewards.reward import completion_of, stated_answer
from agentevo.rollout.given_tasks import TaskList, images_of_list, read_tasks
from agentevo.rollout.sampler import Sampler
from agentevo.rollout.scoring import Scoring
from agentevo.rollout.task_source import TaskSource, source_names
from agentevo.runs.evaluation.contestants import Contestant
from agentevo.runs.evaluation.results import AttemptLine, ResultsFolder
from agentevo.runs.evaluation.results import storable as storable_attempt
from agentevo.runtime.event_loop import gather_all
from agentevo.runtime.heap import lasting_heap
from agentevo.types import Task, Trajectory

if TYPE_CHECKING:
    from agentevo.runs.orchestration.components import Components

LABEL = "eval"
MAX_ANSWER_CHARS = 2000
"""The maximum number of characters of a stated answer in a line."""


@dataclass(frozen=True)
class PlaySettings:
    """The tasks and settings with which every model plays."""

    tasks: Sequence[Task]
    attempts: int
    temperature: float
    sources: Mapping[str, str] = field(default_factory=dict)
    """Maps a task's id to the task's source."""
    notes: Sequence[str] = ()
    """Notes about the tasks."""


def find_tasks(
    config: RunConfig, files: Sequence[str], limit: int | None, given_tasks: Sequence[Task] = ()
) -> tuple[TaskList, dict[str, str], list[str]]:
    """The tasks, the source of each task, and notes about bad rows. The tasks come from these
    files, or are the given ones, or else the configuration's held-out tasks. Raises ConfigError."""
    if given_tasks:
        return TaskList(given_tasks[:limit], images_of_list(given_tasks)), {}, []

    if not files:
        source = TaskSource(config, None)
        return TaskList(source.held_out()[:limit], source.images), {}, []

    section = TasksSection(
        train=tuple(files), fields=config.tasks.fields, allow_bad_rows=config.tasks.allow_bad_rows
    )
    read = read_tasks(section, config.agent, train_key="--tasks")
    names = source_names(section.train)
    of_each = [name for name, size in zip(names, read.sizes, strict=True) for _ in range(size)]
    sources = {task.id: name for task, name in zip(read.train, of_each, strict=True)}
    lines = [line for report in read.reports for line in report.lines()]
    return TaskList(read.train[:limit], read.images), sources, lines


def config_for_playing(config: RunConfig, files: Sequence[str]) -> RunConfig:
    """The configuration for playing. With task files, no other part provides tasks. An agent of an
    environment is replaced by an agent that sends a single prompt."""
    if not files:
        return config
    changes: dict[str, object] = {"environment": None, "tasks": TasksSection()}
    if isinstance(config.agent, EnvironmentAgentSection):
        changes["agent"] = SingleTurnSection()
    return config.model_copy(update=changes)


@contextmanager
def run_folder(config: RunConfig, folder: Path | None) -> Iterator[RunConfig]:
    """The configuration with that folder for files other than attempts, such as price logs. None
    uses a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="agentevo-eval-") as temporary:
        settings = config.run.model_dump(exclude={"dir"})
        run = RunSection(**settings, dir=(folder or Path(temporary)).absolute())
        yield config.model_copy(update={"run": run})


@asynccontextmanager
async def open_player(
    contestant: Contestant,
    config: RunConfig,
    note: Callable[[str], None],
    folder: Path | None = None,
) -> AsyncIterator[Sampler]:
    """Opens a sampler for the model. The model's own recipe loads it, and `config` decides how it
    plays. `folder`: see `run_folder`."""
    with run_folder(config, folder) as opened_config:
        async with _sampler(contestant, opened_config, note) as sampler:
            yield sampler


@asynccontextmanager
async def _sampler(
    contestant: Contestant, config: RunConfig, note: Callable[[str], None]
) -> AsyncIterator[Sampler]:
    if contestant.remote is not None:
        from agentevo.rollout.sampler import RemoteSampler
        from agentevo.runs.orchestration.players import find_agent

        agent = find_agent(config, None)
        sampler = RemoteSampler(config, contestant.remote, agent, note)
        try:
            yield sampler
        finally:
            sampler.close()
            await agent.close()

        return

    async with local_parts(contestant, config, note) as parts:
        yield parts.sampler


@asynccontextmanager
async def local_parts(
    contestant: Contestant, config: RunConfig, note: Callable[[str], None]
) -> AsyncIterator[Components]:
    """The components of a model that runs in this process, with a temporary store."""
    from agentevo.runs.orchestration.components import load_policy, open_components

    config = without_routing(config)
    loaded = load_policy(without_routing(contestant.config), contestant.checkpoint)
    with tempfile.TemporaryDirectory(prefix="agentevo-eval-") as folder:
        url = f"sqlite:///{folder}/store.sqlite"
        async with open_components(
            config, checkpoint=contestant.checkpoint, store_url=url, loaded=loaded, note=note
        ) as parts:
            with lasting_heap():
                yield parts


async def play(
    contestant: Contestant,
    config: RunConfig,
    what: PlaySettings,
    kept_lines: Mapping[tuple[str, str, int], AttemptLine],
    folder: ResultsFolder | None,
    *,
    note: Callable[[str], None],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[AttemptLine]:
    """Plays the attempts that `kept_lines` lacks, and returns all lines in the order of tasks and
    attempts."""
    label = contestant.label
    lines_by_task = dict[str, list[AttemptLine]]()
    for task in what.tasks:
        lines = [kept_lines.get((label, task.id, number)) for number in range(what.attempts)]
        if all(line is not None for line in lines):
            lines_by_task[task.id] = [line for line in lines if line is not None]

    remaining = [task for task in what.tasks if task.id not in lines_by_task]
    if not remaining:
        return [line for task in what.tasks for line in lines_by_task[task.id]]

    kept_in = None if folder is None else folder.path / "models" / quote(label, safe="")[-100:]
    async with open_player(contestant, config, note, kept_in) as sampler:
        sampler.use_images(images_of_list(what.tasks))
        room = asyncio.Semaphore(_num_concurrent(contestant, config, what.attempts))

        async def attempt(task: Task) -> None:
            async with room:
                played = await sampler.play(
                    task,
                    attempts=what.attempts,
                    temperature=what.temperature,
                    step=0,
                    label=LABEL,
                )
                trajectories = [
                    storable_attempt(trajectory) for trajectory in _of_main_agent(played, config)
                ]
                lines = [
                    await line_of(trajectory, task, contestant.label, config, what)
                    for trajectory in trajectories
                ]
                if folder is not None:
                    folder.add(lines, trajectories)

                lines_by_task[task.id] = lines
                progress(len(lines_by_task), len(what.tasks))

        progress(len(lines_by_task), len(what.tasks))
        await gather_all([attempt(task) for task in remaining])

    return [line for task in what.tasks for line in lines_by_task[task.id]]


def _num_concurrent(contestant: Contestant, config: RunConfig, attempts: int) -> int:
    """The number of groups that play at the same time."""
    most = config.engine.max_running
    if contestant.remote is not None:
        most = 2 * config.remote_models[contestant.remote].max_at_once
    return max(1, most // attempts)


def _of_main_agent(trajectories: Sequence[Trajectory], config: RunConfig) -> list[Trajectory]:
    """With several agents, the numbers are the main agent's."""
    if not config.agents:
        return list(trajectories)
    return [
        trajectory for trajectory in trajectories if trajectory.agent == trained_agents(config)[0]
    ]


async def line_of(
    trajectory: Trajectory, task: Task, label: str, config: RunConfig, what: PlaySettings
) -> AttemptLine:
    """The result of an attempt, as a line."""
    completed = trajectory.status == "completed"
    metrics = trajectory.metrics
    return AttemptLine(
        model=label,
        task=task.id,
        attempt=trajectory.attempt,
        status=trajectory.status,
        reward=trajectory.reward if completed else None,
        parts=trajectory.reward_parts if completed else {},
        success=trajectory.success and completed,
        scorer=scorer_of(task, config),
        source=what.sources.get(task.id, ""),
        answer=await _answer(trajectory, task),
        tokens=trajectory.num_completion_tokens() or int(metrics.get("policy_tokens", 0)),
        turns=len(trajectory.turns),
        seconds=round(trajectory.duration_s, 3),
        cost=metrics.get("remote_cost", 0.0),
        truncated=trajectory.truncated,
        error=trajectory.error,
    )


def scorer_of(task: Task, config: RunConfig) -> str:
    """The name of the scorer of a task's attempts."""
    if task.scorer:
        return task.scorer
    if config.rewards:
        return ",".join(reward.title for reward in config.rewards)
    return config.environment.type if config.environment is not None else "agent"


async def _answer(trajectory: Trajectory, task: Task) -> str:
    try:
        stated = await stated_answer(trajectory, task, place_of(task, "auto"))
    except TimeoutError:
        stated = completion_of(trajectory)
    return storable(stated or "", MAX_ANSWER_CHARS)


def check_play(config: RunConfig, tasks: Sequence[Task], *, has_engine: bool) -> None:
    """Raises ConfigError for tasks that can't be played or scored, before anything is created.
    `has_engine`: whether rewards can use the policy's engine."""
    from agentevo.agents.task_agent import asks_once, check_agent_names
    from agentevo.inference.remote_models.model import check_keys
    from agentevo.runs.orchestration.players import find_agent, solo_environment

    if not tasks:
        raise ConfigError("there are no tasks: give --tasks FILE, or a recipe that has some")

    check_keys(config.remote_models)
    if config.environment is not None:
        with solo_environment(config):
            pass

    agent = find_agent(config, None)
    check_agent_names(tasks, config.agent.type)
    needed = agent.needs_scorer or any(map(asks_once, tasks))
    scoring = Scoring(config.rewards, models=config.remote_models)
    scoring.check(tasks, needed=needed)
    check_engine(scoring, tasks, has_engine=has_engine)


def check_engine(scoring: Scoring, tasks: Sequence[Task], *, has_engine: bool) -> None:
    """Raises ConfigError for a task whose rewards need a missing engine."""
    asking = next((task for task in tasks if scoring.asks_policy(task)), None)
    if asking is not None and not has_engine:
        raise ConfigError(
            f"rewards: the scorer of task {asking.id!r} needs the policy's engine, which a remote "
            "model and stored attempts do not have: choose rewards that score the text alone"
        )
