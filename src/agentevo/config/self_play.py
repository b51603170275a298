"""The recipe's key `tasks.self_play`: a proposer writes the tasks that a solver trains on.

    tasks:
      eval: held_out.jsonl
      self_play: {family: sums}

They are the agents `solver` and `proposer` of the section `agents`. If that section is empty, both
play with the recipe's model and train it, as in Absolute Zero (arXiv 2505.03335); `agents: {solver:
{}, proposer: {}}` gives each its own weights, as in R-Zero (arXiv 2508.05004).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field

from agentevo.errors import ConfigError
from agentevo.runtime.registry import Registry
from agentevo.runtime.section import Section

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig

SOLVER = "solver"
"""Name of the agent that solves tasks."""
PROPOSER = "proposer"
"""Name of the agent that proposes them."""
ROLES: dict[str, dict[str, str]] = {SOLVER: {}, PROPOSER: {"weights_of": SOLVER}}
"""The default of the section `agents`."""

PROPOSES = "proposes_for_step"
"""Metadata key of a task that asks the proposer for a question; its value is the step. Given tasks
may not use it."""

question_families: Registry[Any] = Registry("question_families")
F = TypeVar("F", bound=Callable[..., Any])


class SelfPlay(Section):
    """Each step asks the proposer for trainer.groups_per_step questions. The solver makes
    trainer.group_size attempts at each valid question that is new in the step. The proposer's
    reward depends on how often the solver succeeds."""

    family: str
    """The kind of questions: the name of a class under `@agentevo.question_family`, which writes
    the proposer's prompt and parses questions and their answers in its replies."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the family's constructor, by name."""
    group_size: int | None = Field(default=None, ge=2)
    """Number of proposals for one prompt, which are compared with one another. It must divide
    trainer.groups_per_step. Default: trainer.groups_per_step, one prompt per step."""
    reward: Literal["r_zero", "absolute_zero"] = "r_zero"
    """Reward of a valid question, if the share p of the solver's attempts solve it. r_zero: 1 - 2
    |p - 1/2|. absolute_zero: 1 - p, and 0 if p is 0 or 1."""
    repetition: float = Field(default=1.0, ge=0)
    """Repetition penalty: this factor times the share of the prompt's proposals with the same
    question (including this one) is subtracted, down to a reward of 0. 0 disables it."""
    invalid: float = Field(default=-1.0, le=0)
    """The reward of a reply in which the family finds no question."""


def question_family(name: str) -> Callable[[F], F]:
    """Decorator that registers a question family under `name`. A recipe imports its module with the
    key `import`.

        @agentevo.question_family("sums")
        class Sums:
            def __init__(self, largest=9): ...
            def prompt(self, rng): return "Ask for a sum."
            def read(self, text, prompt): return agentevo.Question("2 + 3", "5")

    `prompt(rng)` returns the proposer's prompt, a text or chat messages. `rng` is a `random.Random`
    that depends on the step and the prompt's number. `read(text, prompt)` parses the question in a
    reply, or raises ValueError with the reason why there is none.
    Raises ConfigError for a class without these methods."""

    def add(family: F) -> F:
        missing = [
            method for method in ("prompt", "read") if not callable(getattr(family, method, None))
        ]
        if missing:
            raise ConfigError(
                f"the question family {name!r} has no {missing[0]}: give the class the methods "
                "`prompt(self, rng)` and `read(self, text, prompt)`"
            )

        for method, signature in (("prompt", "self, rng"), ("read", "self, text, prompt")):
            try:
                arguments = [None] * len(signature.split(","))
                inspect.signature(getattr(family, method)).bind(*arguments)
            except TypeError:
                raise ConfigError(
                    f"the question family {name!r}: its method `{method}` is called as "
                    f"`{method}({signature})`: give it these parameters"
                ) from None

        question_families.register(name)(family)
        return family

    return add


def with_roles(tree: Any) -> Any:
    """A recipe as written, with the two agents added if it has self-play and names no agents."""
    tasks = tree.get("tasks") if isinstance(tree, Mapping) else None
    has_self_play = (
        tasks.get("self_play") if isinstance(tasks, Mapping) else getattr(tasks, "self_play", 0)
    )
    if not has_self_play or tree.get("agents"):
        return tree
    return {**tree, "agents": ROLES}


def self_play_contradictions(config: RunConfig) -> Iterator[str]:
    """Contradictions with other sections, as 'what: remedy'."""
    section = config.tasks.self_play
    groups = config.trainer.groups_per_step
    if section is None:
        return

    names = set(config.agents)
    solver = config.agents.get(SOLVER)
    if names != {SOLVER, PROPOSER} or next(iter(config.agents)) != SOLVER:
        yield (
            f"agents: tasks.self_play needs the agents {SOLVER} and {PROPOSER}, in this order, "
            f"not {', '.join(config.agents)}: rename them, or remove agents"
        )
    elif solver is None or not solver.is_trained or solver.weights_of is not None:
        yield (
            f"agents.{SOLVER}: tasks.self_play trains the solver, which needs its own weights: "
            f"write {SOLVER}: {{}}"
        )
    elif config.agents[PROPOSER].remote is not None:
        yield (
            f"agents.{PROPOSER}.remote: a remote model can't be the proposer: remove the key, or "
            "set train: false for a proposer whose weights stay fixed"
        )

    size = groups if section.group_size is None else section.group_size
    if size < 2 or groups % size:
        yield (
            f"tasks.self_play.group_size={size} does not divide trainer.groups_per_step={groups} "
            "into prompts of 2 proposals or more: change one of them"
        )

    for key, value in (
        ("staleness", config.rollout.staleness),
        ("samplers", config.rollout.samplers),
    ):
        if value:
            yield (
                f"rollout.{key}={value}: tasks.self_play solves a step's proposals in the same "
                f"step, in one process: set rollout.{key}=0"
            )
