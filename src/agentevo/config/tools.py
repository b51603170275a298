"""The tools of an agent: entries of `agent.tools`, each a name or a section, and the registration
of a user's own tools.

    @agentevo.tool("add")                 a function: its type hints and docstring are the schema
    def add(a: int, b: int) -> int: ...

    @agentevo.tool("account")             a class: one object for each attempt, whose public methods
    class Account: ...                    are the tools

The sections are here, because reading a recipe must not import modules that open connections.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field

from agentevo.errors import ConfigError
from agentevo.runtime.registry import Registry
from agentevo.runtime.section import Section

T = TypeVar("T")
RESERVED = ("close", "outcome")
"""Methods of a tool class that are not tools: `close` ends an attempt's object, and `outcome`
returns the attempt's reward from the final state."""


class ToolSection(Section):
    """The keys that every entry of `agent.tools` has."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one call, in seconds. Beyond it, the policy gets an error instead of a
    result."""
    max_result_chars: int = Field(default=10_000, ge=100)
    """Maximum length of a result, in characters. A longer result is cut in the middle, with a note
    about how much is left out."""
    max_concurrent: int = Field(default=256, ge=1)
    """Maximum number of concurrent calls of these tools in one process. Further calls wait; the
    wait does not count as their time."""
    retries: int = Field(default=2, ge=0)
    """Retries of a call that did not reach the tool's server. A call that was sent and got no reply
    is retried only if `cache` is true."""
    cache: bool | None = None
    """Whether equal calls have equal results and no side effects. If true, equal calls run once per
    process. Default: the tool's own declaration, else false."""
    include: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names, or patterns with * and ?, of the tools that the policy gets. Default: all."""
    exclude: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names or patterns of the tools that the policy does not get."""
    narrow: Mapping[str, Mapping[str, Mapping[str, Any]]] = Field(default_factory=dict)
    """Keywords of JSON schema that a parameter of a tool gets in addition, such as {read_query:
    {query: {pattern: "^SELECT [a-z ]+$"}}}. The policy reads them, and constrained decoding keeps
    to them. The tool does not check them."""


class FunctionToolSection(ToolSection):
    """A function or class registered with @agentevo.tool."""

    type: Literal["function"] = "function"
    name: str
    """The registered name of the tool (`agentevo list tools`)."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of a class's constructor, by name, in addition to the task."""


class VerlToolsSection(ToolSection):
    """The tools of verl's tool_config_path: {tools: [{class_name: MODULE.CLASS, config: {...},
    tool_schema: {type: function, function: {...}}}]}. A row's extra_info.tools_kwargs gives the
    arguments of each tool. The reward that `execute` returns is the reward of the turn."""

    type: Literal["verl_tools"] = "verl_tools"
    name: str = Field(default="verl", pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """Name of this entry, which distinguishes its tools from others of the same name."""
    file: Path
    """The file, such as gsm8k_tool_config.yaml. Its classes come from `import`, from installed
    packages, or from verl."""


Tool: TypeAlias = str | Mapping[str, Any] | Section | Callable[..., Any] | type
"""A tool by name, as an entry of `agent.tools`, or as a function or class."""
PACKAGED: Mapping[str, str] = {
    "booking": "agentevo.agents.tool_servers.booking:BookingOffice",
    "calculator": "agentevo.agents.tool_servers.calculator:calculator",
    "database": "agentevo.agents.tool_servers.database:DatabaseTools",
    "fetch": "agentevo.agents.tools.fetch:Fetch",
    "files": "agentevo.agents.tool_servers.files:FileTools",
    "search": "agentevo.agents.tools.search:CorpusSearch",
    "web_search": "agentevo.agents.tools.web_search:WebSearch",
}
"""Name -> class or function of the tools that AgentEvo provides. The first use imports the
module."""
tools: Registry[Any] = Registry("tools", PACKAGED)
"""Name -> function or class."""
_cached: set[str] = set()
"""Names of the tools that were registered with cache=True."""


def tool(name: str, *, cache: bool = False) -> Callable[[T], T]:
    """Decorator that registers a tool under `name`: a function, async or not, or a class. A recipe
    imports its module with the key `import`; `agentevo.train(tools=[...])` also accepts the name.

    Set `cache` if equal calls have equal results and no side effects. Results are then reused.
    Raises ConfigError for an object that cannot be a tool.
    """

    def add(item: T) -> T:
        check_tool(name, item)
        if cache and inspect.isclass(item):
            raise ConfigError(
                f"the tool {name!r} is a class with a state for each attempt, so its calls can't "
                "be cached: leave out cache=True"
            )

        tools.register(name)(item)
        if cache:
            _cached.add(name)

        return item

    return add


def says_cached(name: str) -> bool:
    """Whether a registered tool declares that equal calls have equal results."""
    return name in _cached


def tool_entry(candidate: Tool) -> Any:
    """The entry of `agent.tools` for a tool. A function or class is registered under its own
    name. Raises ConfigError."""
    if isinstance(candidate, (str, Mapping)):
        return candidate
    if isinstance(candidate, Section):
        return candidate.model_dump(mode="json", exclude_defaults=True) | {"type": candidate.type}  # type: ignore[attr-defined]

    name = getattr(candidate, "__name__", None)
    if not callable(candidate) or not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"tools: {candidate!r} has no name: give a function, a class, the name of a registered "
            "tool, or an entry as in a recipe's agent.tools"
        )

    registered_name = tools.name_of(candidate)
    if registered_name is None:
        tool(name)(candidate)

    return registered_name or name


def public_methods(item: type) -> dict[str, Any]:
    """Name -> function of each public method of a tool class."""
    functions = inspect.getmembers(item, inspect.isfunction)
    return {
        name: function
        for name, function in functions
        if not name.startswith("_") and name not in RESERVED
    }


def check_tool(name: str, item: Any) -> None:
    """Raises ConfigError for an object that can't be a tool. The first use of a
    tool reads its types and docstrings."""
    if inspect.isclass(item):
        if not public_methods(item):
            raise ConfigError(
                f"the tool {name!r}: the class {item.__name__} has no public methods, which are "
                "the tools of a class: add one"
            )
        return

    if not callable(item):
        raise ConfigError(f"the tool {name!r} is {item!r}: give a function or a class")
