"""The section `agent`: which registered agent plays, and its options.

An agent is registered by name, as a function `run(task, policy)` or `run(task)`, async or not, or
as a class with such a method. A class may have its own options: its `Config` is a subclass of
`AgentSection`. A run makes an object of the class by `Class(config)`, or by
`Class(config, make_environment)` where the class sets `plays_environment = True`. A class that sets
`brings_tasks = True` has a method `tasks()`, which returns the training tasks and the held-out ones
(rollout/agent_tasks.py). The sections of the built-in agents are here, because reading a recipe
must not import the agents themselves (they import torch).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator

from agentevo.config.browse import BrowseSection
from agentevo.config.context import ContextSection
from agentevo.config.sandbox import SandboxSection
from agentevo.config.section import Section
from agentevo.config.texts import check_texts
from agentevo.config.tool_entries import ToolEntry
from agentevo.errors import ConfigError
from agentevo.registry import Registry

A = TypeVar("A")


class AgentSection(Section):
    """The agent, chosen by `type` (`agentevo list agents`), with its options. These are the ones
    that every agent has."""

    text_names: ClassVar[tuple[str, ...] | None] = None
    """Patterns of the names that `texts` may have; None where only the agent's code knows."""

    type: str = "environment"
    """Registered name of the agent."""
    max_turns: int = Field(default=10, ge=1)
    """Calls of the policy per episode. The built-in agents keep to it; an agent of your own may."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Longest time for one episode, in seconds; then it is recorded as failed. What the engine
    sleeps meanwhile (rollout.sharing: turns) does not count."""
    texts: dict[str, str] = Field(default_factory=dict)
    """Named texts in place of the agent's own (docs/prompts.md): a mapping such as {system: ...},
    or a YAML file of NAME: TEXT, such as the texts.yaml that `agentevo optimize` writes."""

    @field_validator("texts", mode="after")
    @classmethod
    def _are_texts(cls, texts: dict[str, str]) -> dict[str, str]:
        return check_texts(texts, cls.text_names)


class EnvironmentAgentSection(AgentSection):
    """How the environment agent talks to the policy and reads its answers."""

    text_names = ("system", "rules")

    type: Literal["environment"] = "environment"
    format: Literal["plain", "answer", "think_answer"] = "answer"
    """`plain`: the whole completion is the action; `answer`: inside <answer>...</answer>;
    `think_answer`: after <think>...</think>."""
    answer_tag: str = Field(default="answer", pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    """The tag around the action, such as `ans` for <ans>...</ans>."""
    format_penalty: float = Field(default=0.1, ge=0)
    """Subtracted from the reward of a turn that breaks the format or holds an invalid action.
    Default: 0.1, and 0 with algorithm.advantage=maxrl, which divides by the mean reward."""
    system_prompt: str | None = None
    """System message. None leaves the chat template's own default."""
    memory: Literal["episode", "turn"] = "episode"
    """What the policy sees: the `episode` so far, or in each `turn` only the rules and the newest
    observation (for environments that show their whole state: shorter contexts, and much quicker to
    learn)."""
    actions_per_turn: int = Field(default=1, ge=1)
    """Actions that one turn may hold, separated by action_separator; the rest is ignored."""
    action_separator: str = Field(default="||", min_length=1)
    """What separates several actions in one turn."""
    step_timeout_s: float | None = Field(default=None, gt=0)
    """Longest wait for the environment's reset or for one step, in seconds; then the attempt fails.
    None leaves it to timeout_s."""


class CommandAgentSection(AgentSection):
    """A program in any language, started once for each attempt, whose client calls the policy by
    the run's gateway. Its environment says where the policy, its task and its rewards are
    (docs/agents.md)."""

    type: Literal["command"] = "command"
    command: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """The program and its arguments, such as [node, agent.js]. No shell reads them."""
    cwd: Path | None = None
    """Folder in which it runs. Default: the recipe's."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Variables for it, besides those of this process and those that lead to the policy. They are
    kept in the run's folder: leave secrets in this process's own environment."""
    max_processes: int | None = Field(default=None, ge=1)
    """Attempts that run at once in one process of the run; others wait, which is no part of their
    time. Default: four for each core."""


class FunctionAgentSection(AgentSection):
    """An agent function that a Python program passes to `agentevo.train`. It lives in that program:
    other processes can't play it."""

    type: Literal["function"] = "function"


class SingleTurnSection(AgentSection):
    """Asks the policy a task's query once; the recipe's `rewards` judge the reply."""

    text_names = ("system", "instruction", "examples")

    type: Literal["single_turn"] = "single_turn"
    system_prompt: str | None = None
    """System message. None leaves the chat template's own default."""
    instruction: str | None = None
    """What follows the query in the user's message, such as `Put the answer in <answer> tags.`"""
    max_turns: Literal[1] = 1
    """Calls of the policy per episode: one."""


class ToolAgentSection(AgentSection):
    """Asks a task's query, makes the tool calls of each reply and gives their results back, until a
    reply is the final answer. The recipe's `rewards` judge it, or what its tools say of the state
    that they are left in."""

    text_names = ("system", "instruction", "examples", "tools.*")

    type: Literal["tool_agent"] = "tool_agent"
    tools: tuple[ToolEntry, ...] = Field(min_length=1)
    """What it may call: names of registered tools (`agentevo list tools`), or entries with
    options."""
    format: Literal["native", "react", "search_tags"] = "native"
    """How calls are written: `native` as the model's chat template has it, with the tools in the
    prompt as the template writes them; `react` as text, Thought, Action and Action Input, for
    models whose template knows no tools; `search_tags` as Search-R1's <search> and <information>,
    for one tool that searches."""
    system_prompt: str | None = None
    """System message. None leaves the chat template's own default."""
    instruction: str | None = None
    """What follows the query in the user's message."""
    final: Literal["reply", "answer_tag"] = "reply"
    """What the final answer is: the first `reply` without a call, or the first with
    <answer>...</answer>; a reply with neither is then told so, and the attempt goes on."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Calls of tools per attempt. Default: no limit but that of the turns."""
    max_calls_per_turn: int = Field(default=16, ge=1)
    """Calls of one reply that are made, at the same time; further ones are refused."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the policy may draw in one attempt. Default: no limit but the context's."""
    context: ContextSection = ContextSection()
    """What the policy sees of a long history."""
    browse: BrowseSection = BrowseSection()
    """Who summarises long results, such as web pages, before the policy reads them."""
    max_repeats: int = Field(default=3, ge=1)
    """How often one reply's calls may be those of the reply before, to the letter; then the attempt
    ends."""
    call_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the reward of a turn with a malformed call, an unknown tool, or arguments
    that the tool does not take."""


class CodeAgentSection(AgentSection):
    """Writes Python code that runs in a sandbox, reads what it prints, and goes on until a reply
    without code is the final answer. Variables live for the whole attempt; its tools are functions
    of the code."""

    text_names = ("system", "instruction", "examples", "tools.*")

    type: Literal["code_agent"] = "code_agent"
    tools: tuple[ToolEntry, ...] = ()
    """Functions of the code, as agent.tools of the tool agent."""
    sandbox: SandboxSection = SandboxSection()
    """Where the code runs, and what it may use."""
    system_prompt: str | None = None
    """System message; what functions there are is written behind it. Default: how to write code."""
    instruction: str | None = None
    """What follows the query in the user's message."""
    final: Literal["reply", "answer_tag"] = "reply"
    """What the final answer is: the first `reply` without code, or the first with
    <answer>...</answer>; a reply with neither is then told so, and the attempt goes on."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the policy may draw in one attempt. Default: no limit but the context's."""
    context: ContextSection = ContextSection()
    """What the policy sees of a long history."""
    max_output_chars: int = Field(default=4000, ge=100)
    """What the policy reads of a block's output, in characters: head and tail."""
    keep_files_kib: int = Field(default=1024, ge=0, le=8192)
    """What is kept with the trajectory of the files that the code has made or changed, in KiB; what
    does not fit is left out. 0 keeps none."""
    code_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the reward of a turn whose code failed or was not closed."""


agents: Registry[Any] = Registry("agents")
"""Name -> function or class. The built-in agents are registered when `agentevo.agents` is imported;
their sections are in SECTIONS."""
SECTIONS: dict[str, type[AgentSection]] = {
    "code_agent": CodeAgentSection,
    "command": CommandAgentSection,
    "environment": EnvironmentAgentSection,
    "function": FunctionAgentSection,
    "single_turn": SingleTurnSection,
    "tool_agent": ToolAgentSection,
}


def agent(name: str) -> Callable[[A], A]:
    """Decorator that registers an agent under `name`. The agent is a function `run(task, policy)`
    or `run(task)`, or a class with such a method. A recipe imports its module with the key
    `import`.

    Raises ConfigError for an object that cannot be an agent.
    """

    def add(item: A) -> A:
        _check(name, item)
        if name in SECTIONS:
            raise ConfigError(f"agents: the name {name!r} is built in: choose another")
        agents.register(name)(item)
        return item

    return add


def agent_names() -> list[str]:
    """The names that `agent.type` may have."""
    return sorted({*SECTIONS, *agents.names()})


def agent_section(name: str) -> type[AgentSection]:
    """The options of a known agent. Raises ConfigError if the registered object is no agent."""
    if name in SECTIONS:
        return SECTIONS[name]
    item = agents.get(name)
    _check(name, item)
    return getattr(item, "Config", AgentSection)


def brings_tasks(name: str) -> bool:
    """Whether an agent of that name gives its own tasks: a registered class with `brings_tasks =
    True` and a method `tasks()`."""
    is_registered = name not in SECTIONS and name in agents.names()
    return is_registered and bool(getattr(agents.get(name), "brings_tasks", False))


def is_async(function: Any) -> bool:
    """Whether a call returns an awaitable: the agent is an async function, or an object with an
    async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def takes_policy(function: Any, name: str | None = None) -> bool:
    """Whether the agent function is called as `run(task, policy)`, and not as `run(task)`. A second
    parameter with a default value is the policy if its name is `policy`. Raises ConfigError for a
    function that can be called in neither way."""
    name = name or getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise ConfigError(f"the agent {name!r} is no function: {_SHAPES}")

    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the agent {name!r} does not say what it takes: {_SHAPES}") from error

    places = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, _NAMED)
    ]
    has_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    num_needed = sum(parameter in places for parameter in needed)
    if (
        num_needed > 2
        or not (places or has_more)
        or any(parameter.kind is _KEYWORD for parameter in needed)
    ):
        raise ConfigError(f"the agent {name!r} takes {_words(parameters)}: {_SHAPES}")

    return num_needed == 2 or has_more or (len(places) > 1 and places[1].name == "policy")


_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_SHAPES = "make it `run(task)` or `run(task, policy)`, with `def` or `async def`"


def _words(parameters: list[inspect.Parameter]) -> str:
    return ", ".join(parameter.name for parameter in parameters) or "no parameters"


def _check(name: str, item: Any) -> None:
    if not inspect.isclass(item):
        takes_policy(item, name)
        return

    run = getattr(item, "run", None)
    if not callable(run):
        raise ConfigError(
            f"the agent {name!r} needs a method `async def run(self, task, policy)` in "
            f"{item.__name__}"
        )

    if getattr(item, "brings_tasks", False) and not callable(getattr(item, "tasks", None)):
        raise ConfigError(
            f"the agent {name!r} has brings_tasks = True, and {item.__name__} has no method "
            "`tasks()`: give it one that returns the tasks to train on and the held-out ones"
        )

    is_plain = inspect.isfunction(inspect.getattr_static(item, "run"))
    takes_policy(partial(run, None) if is_plain else run, name)

    options = getattr(item, "Config", AgentSection)
    if not (inspect.isclass(options) and issubclass(options, AgentSection)):
        raise ConfigError(
            f"the agent {name!r} needs a {item.__name__}.Config that is a subclass of "
            "agentevo.AgentSection"
        )
