"""The reward contract: the input of a scorer, its result, and its registration by name.

A reward is one of:

    function   def reward(completion: str, task: Task) -> float      plain or async
    scorer     a class with   async def score(self, trajectory, task) -> Score
    group      a class with   async def score_group(self, trajectories, task) -> list[Score]

A function takes any of PARAMETERS, by name. `register_scorer` registers a function of another
package whose parameters have other names. Functions and methods return a number, a mapping of named
parts (their sum is the value), or a `Score`. A class can have options: its `Config` subclasses
`RewardConfig`, and a single object, `Class(config)`, serves the whole run.

The common part of the rewards that compare answers: the stated answer and the right answers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec
import pydantic

from agentevo.errors import ConfigError, shown
from agentevo.rewards.answer_texts import Place, find_answer, place_of, references
from agentevo.rewards.baselines import BaselineScorers
from agentevo.rewards.returned_values import named_parts, plain_bool, plain_number, plain_numbers
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.registry import Registry
from agentevo.runtime.user_code import construct
from agentevo.types import Task, Trajectory
from agentevo.types.images import ImageFile

R = TypeVar("R")
PARAMETERS = (
    "completion",
    "task",
    "trajectory",
    "answer",
    "query",
    "metadata",
    "models",
    "images",
    "model_answer",
    "solution_str",
    "ground_truth",
    "data_source",
    "extra_info",
)
"""The parameters that a reward function can have. The first eight are the policy's last reply, the
task, the whole attempt, the task's answer, query and metadata, the run's remote models by name, and
the images that the attempt's messages name, by digest (types.images.ImageFile). The last five are
names from AgentRL and verl. `model_answer` is the answer that the reply states (at the task's
`answer_schema`, else `auto`), `solution_str` the last reply, `ground_truth` the task's answer.
`data_source` and `extra_info` are columns of its row."""


class Score(msgspec.Struct, frozen=True):
    value: float
    parts: dict[str, float] = {}
    """The named parts that sum to the value, or empty."""
    success: bool | None = None
    """Whether the task is solved. None: a value of 1 or more is a success."""
    reason: str = ""
    """An explanation for people, such as a judge's verdict. It is stored with the attempt's
    calls."""

    def __post_init__(self) -> None:
        total = sum(self.parts.values())
        if self.parts and not math.isclose(total, self.value, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(
                f"parts {self.parts} sum to {total:g}, but value is {self.value:g}: give parts "
                "that sum to the value, or none"
            )

    @property
    def is_success(self) -> bool:
        return self.value >= 1.0 if self.success is None else self.success


class Unscored(msgspec.Struct, frozen=True):
    """The result of a group scorer for an attempt that it cannot score. The attempt is recorded as
    failed, with the reason `why`."""

    why: str
    evidence: str = ""
    """What the decision is based on, for people. It is stored with the attempt's calls."""


class RewardConfig(pydantic.BaseModel):
    """The options of every reward in a recipe's list `rewards`. Subclass it to add options of your
    own."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    name: str
    """Registered name of the reward."""
    weight: float = 1.0
    """The factor of this reward in the sum of the list's rewards."""
    timeout_s: float = pydantic.Field(default=60.0, gt=0)
    """The time limit of a score, in seconds. Beyond it, the attempt is recorded as failed."""
    requires: tuple[str, ...] = ()
    """Rewards of the list that must succeed for this one to count. If one of them does not succeed,
    or does not count itself, this reward's score is 0."""
    label: str | None = pydantic.Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,99}$")
    """The reward's name in metrics, in `requires` and in the `scorer` of a row. Needed if the list
    has the same reward more than once, with different options. Default: name."""

    from_step: int = pydantic.Field(default=1, ge=1)
    """The first training step at which it counts, for rewards that change during training."""
    until_step: int | None = pydantic.Field(default=None, ge=1)
    """The last training step at which it counts. By default it counts to the end. Evaluations use
    the rewards that count at the end, so that they are comparable."""

    def counts_at(self, step: int | None) -> bool:
        """Whether the reward counts at a training step. With None, whether it counts in an
        evaluation."""
        if step is None:
            return self.until_step is None
        return self.from_step <= step and (self.until_step is None or step <= self.until_step)

    @property
    def title(self) -> str:
        """The label, else the name. The title is unique in the list."""
        return self.label or self.name


class Scorer(Protocol):
    """Scores attempts separately. It may raise an error: the attempt is then recorded as failed."""

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """It can also have the parameters `models`, the run's remote models by name, `images`, the
        images that the attempt's messages name, by digest, and `policy`, a ScoredPolicy. A scorer
        with `policy` can have a method `async prepare(tasks, policy)`, which is awaited before the
        first score."""
        ...


class ScorerModel(Protocol):
    """A remote model of the run, for a scorer."""

    @property
    def sees_images(self) -> bool:
        """Whether it takes images."""
        ...

    async def generate(
        self,
        messages: Sequence[Any],
        *,
        role: str = "",
        attempt: str = "",
        seed: int | None = None,
        schema: Mapping[str, Any] | None = None,
        images: Mapping[str, ImageFile] = MappingProxyType({}),
    ) -> Any:
        """The reply: `text` is the model's text, and `finish_reason` is `length` if it was cut off.
        `role` and `attempt` describe the call in the price log. `seed` is passed to servers that
        support seeds. `schema` is the JSON schema of the answer, which the server enforces if it
        can. `images`: maps a digest to the image, for those that messages name."""
        ...


class ScoredPolicy(Protocol):
    """The policy that made an attempt, for a scorer that needs its log-probs of other answers."""

    agent: str
    """The agent's name in an attempt of several agents, else empty."""
    baselines: BaselineScorers
    """Log-probs that the run computes once and stores."""

    async def score(
        self, context_ids: Sequence[int], ids: Sequence[int]
    ) -> tuple[list[float], int]:
        """The log-prob of each of `ids`, after the context and the ids before it, under the current
        weights. Also returns the version of the weights. Raises the engine's errors, which don't
        count as failures of the scorer."""
        ...

    def encode(self, text: str) -> list[int]:
        """The token ids of a text that continues another text."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """The text of a completion's first tokens."""
        ...

    def first_prompt(self, task: Task) -> list[int] | None:
        """The first prompt of an attempt at this task, if it is known in advance."""
        ...


class GroupScorer(Protocol):
    """Scores the completed attempts of a group together, in their order."""

    async def score_group(
        self, trajectories: Sequence[Trajectory], task: Task
    ) -> Sequence[Score | Unscored]:
        """The method may have the parameters `models`, the run's remote models by name, and
        `images`, the images that the attempts' messages name, by digest."""
        ...


rewards: Registry[Any] = Registry("rewards")
"""Maps a name to a function or class."""


def reward(name: str) -> Callable[[R], R]:
    """Decorator: registers a function or class as the reward `name`, for recipes that import its
    module (key `import`).

    Raises ConfigError for an item that can't be a reward.
    """

    def add(item: R) -> R:
        check_reward(name, item)
        rewards.register(name)(item)
        return item

    return add


def register_scorer(name: str, function: Callable[..., Any]) -> None:
    """Registers a function of two or three positional parameters with any names, plain or async.
    Its arguments are the stated answer (a text, empty if there is none), the task's answer, and the
    task. AgentRL's scorers are such functions.

    Raises ConfigError for any other function.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the scorer {name!r} can't be called: {error}") from error

    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [parameter for parameter in parameters if parameter.kind in positional]
    needed = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter in taken
    ]
    required_keywords = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    if len(taken) < 2 or len(needed) > 3 or required_keywords:
        raise ConfigError(
            f"the scorer {name!r} needs two or three positional parameters, as in `async def "
            "scorer(model_answer, ground_truth, task)`; agentevo.reward takes parameters by name"
        )

    number = 3 if len(needed) == 3 else 2

    def scorer(model_answer: str, ground_truth: Any, task: Task) -> Any:
        return function(*(model_answer, ground_truth, task)[:number])

    scorer.__module__ = getattr(function, "__module__", scorer.__module__)
    scorer.__qualname__ = getattr(function, "__qualname__", name)
    reward(name)(scorer)


def check_reward(name: str, item: Any) -> None:
    """Raises ConfigError for an item that can't be a reward."""
    if not inspect.isclass(item):
        unknown = [name for name in _parameter_names(item) if name not in PARAMETERS]
        if unknown:
            raise ConfigError(
                f"the parameters {', '.join(unknown)} of the reward {name!r} are unknown: a reward "
                f"may have {', '.join(PARAMETERS)}, as in `def reward(completion, task) -> float`"
            )
        return

    methods = [
        getattr(item, method) for method in ("score", "score_group") if hasattr(item, method)
    ]
    if not methods or not all(inspect.iscoroutinefunction(method) for method in methods):
        raise ConfigError(
            f"the reward {name!r} needs a method `async def score(self, trajectory, task)` or "
            f"`async def score_group(self, trajectories, task)` in {item.__name__}"
        )

    options = getattr(item, "Config", RewardConfig)
    if not (inspect.isclass(options) and issubclass(options, RewardConfig)):
        raise ConfigError(
            f"the reward {name!r} needs a {item.__name__}.Config that is a subclass of "
            "agentevo.RewardConfig"
        )


def reward_config(name: str) -> type[RewardConfig]:
    """The options of a known reward. Raises ConfigError if the registered item is not a reward."""
    item = rewards.get(name)
    check_reward(name, item)
    options: type[RewardConfig] = getattr(item, "Config", RewardConfig)
    return options


def make_reward(config: RewardConfig) -> Any:
    """The function that a config names, or an object of its class. Raises ConfigError, also if the
    user's class raises an error."""
    item = rewards.get(config.name)
    check_reward(config.name, item)
    if not inspect.isclass(item):
        return item

    make: Any = item
    return construct(lambda: make(config), f"rewards: {config.name}", item.__name__)


def call_function(
    function: Callable[..., Any],
    trajectory: Trajectory,
    task: Task,
    models: Mapping[str, ScorerModel],
    images: Mapping[str, ImageFile],
) -> Callable[[], Any]:
    """A function without parameters that calls the reward function with its arguments."""
    reply = completion_of(trajectory)
    available: dict[str, Callable[[], Any]] = {
        "completion": lambda: reply,
        "solution_str": lambda: reply,
        "model_answer": lambda: find_answer(reply, place_of(task, "auto")) or "",
        "task": lambda: task,
        "trajectory": lambda: trajectory,
        "answer": lambda: task.answer,
        "ground_truth": lambda: task.answer,
        "query": lambda: task.query,
        "metadata": lambda: task.metadata,
        "data_source": lambda: task.metadata.get("data_source"),
        "extra_info": lambda: task.metadata.get("extra_info"),
        "models": lambda: models,
        "images": lambda: images,
    }
    names = _parameter_names(function)
    return lambda: function(**{name: available[name]() for name in names})


def call_scorer(
    scorer: Any,
    trajectory: Trajectory,
    task: Task,
    models: Mapping[str, ScorerModel],
    images: Mapping[str, ImageFile],
    policy: ScoredPolicy | None = None,
    sandboxes: Any = None,
) -> Any:
    """The coroutine of a scorer's `score`. The scorer gets the remote models, the images, the
    policy and sandboxes if it has parameters for them."""
    available = {"models": models, "images": images, "policy": policy, "sandboxes": sandboxes}
    return scorer.score(trajectory, task, **_arguments_for(scorer.score, available))


def call_group_scorer(
    scorer: Any,
    trajectories: Sequence[Trajectory],
    task: Task,
    models: Mapping[str, ScorerModel],
    images: Mapping[str, ImageFile],
) -> Any:
    """The coroutine of a scorer's `score_group`. The scorer gets the remote models and the images
    if it has parameters for them."""
    arguments = _arguments_for(scorer.score_group, {"models": models, "images": images})
    return scorer.score_group(trajectories, task, **arguments)


def _arguments_for(method: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters
    return {name: value for name, value in available.items() if name in parameters}


def completion_of(trajectory: Trajectory) -> str:
    """The policy's last reply as text. Empty if there is none."""
    for turn in reversed(trajectory.turns):
        for message in reversed(turn.messages):
            if message.role == "assistant":
                return text_of(message.content)
    return ""


def text_of(content: Any) -> str:
    """A message's text. If the content is a list of parts, all text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(getattr(part, "text", None) or "" for part in content)


def score_of(returned: Any) -> Score:
    """A reward's return value as a record of plain values. Raises TypeError or ValueError for any
    other value."""
    if isinstance(returned, Score):
        success = returned.success
        return Score(
            plain_number(returned.value, "its value"),
            plain_numbers(returned.parts, "its parts"),
            None if success is None else plain_bool(success, "its success"),
            str(returned.reason),
        )

    if isinstance(returned, Mapping):
        parts = named_parts(returned, "the mapping that it returned")
        return Score(plain_number(sum(parts.values()), "its value"), parts)

    if returned is None or isinstance(returned, str):
        raise TypeError(
            f"it returned {shown(returned)}: return a number, a mapping of named parts, or an "
            "agentevo.Score"
        )

    return Score(plain_number(returned, "its value"))


def _parameter_names(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the reward {function!r} can't be called: {error}") from error

    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for parameter in parameters
        if parameter.name in PARAMETERS
        or (parameter.default is parameter.empty and parameter.kind in named)
    ]


class AnswerConfig(RewardConfig):
    """A reward that compares the stated answer with the task's."""

    place: Place = "auto"
    """Where a reply states its answer: `boxed`, `hashes`, `number`, `whole`, `json:KEY`,
    `regex:PATTERN`, or the name of an XML tag such as `answer`. `auto` is the first of <answer>,
    \\\\boxed{...} and #### that the reply has, else the whole reply. A task's own `answer_schema`
    overrides it."""


async def stated_answer(trajectory: Trajectory, task: Task, place: str) -> str | None:
    """The stated answer of the last reply, at the task's place or else at `place`. None if there is
    no answer. Raises TimeoutError for a regular expression that does not end."""
    where = place_of(task, place)
    reply = completion_of(trajectory)
    if where.startswith("regex:"):
        return await in_thread(find_answer, reply, where)
    return find_answer(reply, where)


def right_answers(task: Task) -> list[Any]:
    """The task's right answers. Raises ValueError for a task without an answer."""
    if task.answer is None or task.answer == []:
        raise ValueError(
            f"the task {task.id!r} has no answer to compare with: give its row one "
            f"(tasks.fields); its query begins {(task.query or '')[:60]!r}"
        )
    return references(task.answer)
