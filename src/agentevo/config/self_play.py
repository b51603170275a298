"""The recipe's key `tasks.self_play`: a proposer writes the tasks that a solver trains on.

    tasks:
      eval: held_out.jsonl
      self_play: {family: sums}

They are the agents `solver` and `proposer` of the section `agents`. Where that section is empty,
both play with the recipe's model and train it, as in Absolute Zero (arXiv 2505.03335);
`agents: {solver: {}, proposer: {}}` gives each its own weights, as in R-Zero (arXiv 2508.05004).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field

from agentevo.config.section import Section
from agentevo.errors import ConfigError
from agentevo.registry import Registry

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig

SOLVER = "solver"
"""Name of the agent that solves tasks."""
PROPOSER = "proposer"
"""Name of the agent that proposes them."""
ROLES: dict[str, dict[str, str]] = {SOLVER: {}, PROPOSER: {"weights_of": SOLVER}}
"""The section `agents` where the recipe gives none."""

PROPOSES = "proposes_for_step"
"""Key of the metadata of a task that asks the proposer for a question, with its step. No given task
may have it."""

question_families: Registry[Any] = Registry("question_families")
F = TypeVar("F", bound=Callable[..., Any])


class SelfPlay(Section):
    """A step asks the proposer for trainer.groups_per_step questions. The solver makes
    trainer.group_size attempts at each that is valid and new in the step, and how often it succeeds
    is what the proposer is paid by."""

    family: str
    """What is proposed: a class under `@agentevo.question_family`, which writes the proposer's
    prompt and reads questions, with their answers, out of its replies."""
    options: dict[str, Any] = Field(default_factory=dict)
    """What the family is made with, by name."""
    group_size: int | None = Field(default=None, ge=2)
    """Questions that are proposed in answer to one prompt and compared with one another; it divides
    trainer.groups_per_step. Default: trainer.groups_per_step, which is one prompt in a step."""
    reward: Literal["r_zero", "absolute_zero"] = "r_zero"
    """What a valid question is worth of which the solver's attempts solve the share p. r_zero: 1 -
    2 |p - 1/2|. absolute_zero: 1 - p, and 0 where p is 0 or 1."""
    repetition: float = Field(default=1.0, ge=0)
    """What repeating costs: so much times the share of the prompt's proposals that ask the same
    question as this one, itself included, down to a reward of 0. 0 takes nothing."""
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
                    f"`{method}({signature})`: let it take these"
                ) from None

        question_families.register(name)(family)
        return family

    return add


def with_roles(tree: Any) -> Any:
    """A recipe as written, with the two agents where it has self-play and names no agents."""
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
            f"agents: tasks.self_play has the agents {SOLVER} and {PROPOSER}, in this order, and "
            f"not {', '.join(config.agents)}: name them so, or leave agents out"
        )
    elif solver is None or not solver.is_trained or solver.weights_of is not None:
        yield (
            f"agents.{SOLVER}: tasks.self_play trains it, with weights of its own: write "
            f"{SOLVER}: {{}}"
        )
    elif config.agents[PROPOSER].remote is not None:
        yield (
            f"agents.{PROPOSER}.remote: a remote model's words are not kept as proposals: leave it "
            "out, or train: false for a proposer that stays as it is"
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
                f"rollout.{key}={value}: what tasks.self_play proposes in a step is solved in it, "
                f"in one process: set rollout.{key}=0"
            )
