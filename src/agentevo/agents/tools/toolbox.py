"""All tools of an agent: one `Toolbox` in a process, one `AttemptTools` for each attempt.

    toolbox = Toolbox(section.tools)
    async with toolbox.open(task, seed) as tools:
        reply = await policy.generate(messages, tools=tools.schemas)
        results = await tools.call(parsed.tool_calls)

A failed call has an error as its result: an unknown tool, arguments that are not JSON or that the
tool does not accept, no answer in time, an unreachable server, an exception of the tool's code. The
attempt continues, and each kind of failure is counted (METRICS). The policy knows a tool by its own
name, with "_" for characters that APIs and chat templates don't accept. If two toolsets have a tool
of the same name, both tools are called TOOLSET__NAME. If names of one toolset become equal, or have
no accepted letter, all except the first get a number (`a_b_2`, `tool_2`). A name that is too long
is shortened and ends with a part of its digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from msgspec import structs

from agentevo.agents.tools.sources import make_toolsets
from agentevo.agents.tools.state_checks import STATE_CHECKS, StateCheck, state_checks, state_reached
from agentevo.agents.tools.tool import (
    Condense,
    Offering,
    ToolResult,
    ToolSession,
    Toolset,
    ToolSpec,
    shorten_text,
)
from agentevo.config.tools import ToolSection
from agentevo.errors import (
    ConfigError,
    EnvironmentFailure,
    ToolArgumentsError,
    ToolError,
    ToolUnavailableError,
    describe_error,
)
from agentevo.runtime.console import to_stderr
from agentevo.runtime.registry import nearest
from agentevo.runtime.tracebacks import traceback_of
from agentevo.store.call_log import RunningCall, record_call
from agentevo.types import Task, ToolCall

MAX_CHARS = 2**26
"""The limit on the characters of all cached results and the bytes of their images; the oldest
results are dropped first."""


class ResultCache:
    """The results of calls that change nothing: equal calls of all attempts in a process run once.
    An equal call that arrives while the first one runs waits for it. A failed call is not cached:
    the next waiter repeats it."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self.hits = 0
        self._max_chars = max_chars
        self._num_chars = 0
        self._results: OrderedDict[Hashable, ToolResult] = OrderedDict()
        self._running: dict[Hashable, asyncio.Event] = {}

    async def get(self, key: Hashable, make: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """The cached result of an equal call, or the result of `make`. Raises the errors of
        `make`."""
        while (done_event := self._running.get(key)) is not None:
            await done_event.wait()

        if key in self._results:
            self.hits += 1
            self._results.move_to_end(key)
            return self._results[key]

        done_event = self._running[key] = asyncio.Event()
        try:
            result = await make()
            if not result.is_error:
                self._keep(key, result)
            return result
        finally:
            del self._running[key]
            done_event.set()

    def _keep(self, key: Hashable, result: ToolResult) -> None:
        if result.size > self._max_chars:
            return
        self._results[key] = result
        self._num_chars += result.size
        while self._num_chars > self._max_chars:
            _, oldest = self._results.popitem(last=False)
            self._num_chars -= oldest.size


METRICS = {
    "num_tool_calls": "calls that a tool answered",
    "num_tool_errors": "results that are errors, whatever the reason",
    "num_unknown_tools": "calls of a tool that does not exist",
    "num_wrong_arguments": "calls with arguments that the tool does not take",
    "num_tool_timeouts": "calls without an answer in time",
    "num_tool_failures": "calls whose tool failed or could not be reached",
}
"""Maps a metric of an attempt to a description of what the metric counts."""
UNANSWERED = ("num_unknown_tools", "num_tool_timeouts", "num_tool_failures")
"""The metrics of calls whose result did not come from a tool."""
RETRY_PAUSE_S = 0.5
"""The pause before the second try of a call; each later pause is twice as long."""
MAX_NAME = 64
"""The maximum number of characters of a tool's name that models and APIs accept."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
AGENT_REWARD_PARTS = ("tool_results", "call_penalty", "code_penalty", STATE_CHECKS)
"""The names of the reward parts that come from the agent and not from its tools."""
MAX_UNKNOWN_ERROR = 10_000
"""The maximum number of characters of the result for an unknown tool."""


class Toolbox:
    """The tools of all attempts of a process."""

    def __init__(self, sections: Sequence[ToolSection], notify: Callable[[str], None] = to_stderr):
        """`notify` receives the first exception of each kind from each tool's code. Raises
        ConfigError for tools that can't be made."""
        self._offers = [
            _OfferedToolset(section, toolset)
            for section in sections
            for toolset in make_toolsets(section)
        ]
        names = Counter(offer.toolset.name for offer in self._offers)
        repeated = next((name for name, count in names.items() if count > 1), None)
        if repeated is not None:
            raise ConfigError(
                f"agent.tools: {repeated!r} is listed twice: give one entry, or another name"
            )

        reserved = next(
            (n for offer in self._offers if (n := offer.toolset.name) in AGENT_REWARD_PARTS), None
        )
        if reserved is not None:
            raise ConfigError(
                f"agent.tools: the name {reserved!r} is reserved for a part of the reward: give "
                "the entry another name"
            )

        self._notify = notify
        self._shown_kinds = set[tuple[str, type]]()
        self._cache = ResultCache()
        self.has_outcome = any(offer.toolset.has_outcome for offer in self._offers)
        """Whether an attempt's tools give its outcome."""

    @asynccontextmanager
    async def open(self, task: Task, seed: int) -> AsyncIterator[AttemptTools]:
        """The tools of one attempt; their state ends with the block. Raises ToolUnavailableError if
        they can't be opened, and EnvironmentFailure for a task whose `state_checks` are
        malformed."""
        try:
            checks = state_checks(task.metadata)
        except ValueError as error:
            raise EnvironmentFailure(f"the task {task.id!r}: metadata: {error}") from error

        async with AsyncExitStack() as stack:
            sessions = []
            for offer in self._offers:
                async with record_call("tool", f"open {offer.toolset.name}"):
                    session = offer.toolset.session(task, seed)
                    sessions.append((offer, await stack.enter_async_context(session)))
            yield AttemptTools(sessions, self._cache, self._show, checks)

    def _show(self, name: str, error: Exception) -> None:
        """Shows an exception of a tool's code immediately. Otherwise only the policy would see
        it."""
        kind = (name, type(error))
        if kind not in self._shown_kinds:
            self._shown_kinds.add(kind)
            self._notify(
                f"the tool {name} failed; the policy gets this error: {describe_error(error)}\n"
                f"{traceback_of(error)}\n(later failures of this kind are counted)"
            )

    async def close(self) -> None:
        """Closes all toolsets, even if one of them raises."""
        async with AsyncExitStack() as stack:
            for offer in self._offers:
                stack.push_async_callback(offer.toolset.close)


class _OfferedToolset:
    """An entry of `agent.tools`, its toolset, and their state in a process."""

    def __init__(self, section: ToolSection, toolset: Toolset) -> None:
        self.section = section
        self.toolset = toolset
        self.slots = asyncio.Semaphore(section.max_concurrent)

    def has(self, spec: ToolSpec) -> bool:
        """Whether the policy may use the tool."""
        included = self.section.include or ("*",)
        return _matches(spec, included) and not _matches(spec, self.section.exclude)

    def narrow(self, spec: ToolSpec) -> ToolSpec:
        """The tool with the keywords of `narrow` in its schema. Raises ConfigError for a parameter
        that it does not have."""
        keywords_by_parameter = {
            parameter: keywords
            for name, parameters in self.section.narrow.items()
            if name in spec.names
            for parameter, keywords in parameters.items()
        }
        if not keywords_by_parameter:
            return spec

        properties = dict(spec.parameters.get("properties", {}))
        for parameter, keywords in keywords_by_parameter.items():
            if parameter not in properties:
                raise ConfigError(
                    f"agent.tools: narrow: no parameter of {spec.name} is called {parameter!r}: "
                    f"{_existing(parameter, list(properties))}"
                )
            schema = properties[parameter]
            properties[parameter] = {**({} if schema is True else schema), **keywords}

        return structs.replace(spec, parameters={**spec.parameters, "properties": properties})


@dataclass(frozen=True)
class _AttemptTool:
    """One tool of an attempt."""

    offer: _OfferedToolset
    session: ToolSession
    spec: ToolSpec

    @property
    def is_cached(self) -> bool:
        cache_option = self.offer.section.cache
        return self.spec.cacheable if cache_option is None else cache_option


class AttemptTools:
    """The tools of one attempt. Calls may overlap."""

    def __init__(
        self,
        sessions: Sequence[tuple[_OfferedToolset, ToolSession]],
        cache: ResultCache,
        show: Callable[[str, Exception], None],
        checks: Sequence[StateCheck] = (),
    ) -> None:
        """`checks`: the task's checks of the final state. Raises ConfigError if the sections leave
        no tool."""
        self._sessions = sessions
        self._num_losses = {id(session): session.num_losses for _, session in sessions}
        """The number of times that each session had lost its state before the attempt."""
        self._cache = cache
        self._show = show
        self._checks = checks
        _check_names(sessions)
        self._tools = _name_tools(
            [
                _AttemptTool(offer, session, offer.narrow(spec))
                for offer, session in sessions
                for spec in session.specs
                if offer.has(spec)
            ]
        )
        self._by_full_name = {
            tool.spec.full_name: tool for tool in self._tools.values() if tool.spec.full_name
        }

        if sessions and not self._tools:
            names = ", ".join(offer.toolset.name for offer, _ in sessions)
            if not any(session.specs for _, session in sessions):
                raise ConfigError(
                    f"agent.tools: {names} has no tools: check `agentevo tools inspect`, and name "
                    "a server that has some"
                )
            raise ConfigError(f"agent.tools: `exclude` removes every tool of {names}: change it")

        self.instructions = "\n\n".join(
            session.instructions for _, session in sessions if session.instructions
        )
        """The text about the tools that the policy reads before the task."""
        self.schemas = [tool.spec.schema(name) for name, tool in self._tools.items()]
        """The schemas in OpenAI's form, under the names that the policy knows."""
        self.specs = {name: tool.spec for name, tool in self._tools.items()}
        """The tools' specs, by the same names."""
        self.metrics: Counter[str] = Counter()
        """The counters, by the names of METRICS."""
        self.condense: Condense | None = None
        """Shortens results before the policy reads them."""

    async def call(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Makes all calls concurrently, and returns their results in order."""
        return list(await asyncio.gather(*map(self._answer, calls)))

    async def offers(self) -> tuple[list[str], list[str]]:
        """A line for each prompt and each resource of the servers. Raises ToolUnavailableError."""
        prompts: list[str] = []
        resources: list[str] = []
        for _, session in self._sessions:
            if isinstance(session, Offering):
                offered = await session.offers()
                prompts += offered[0]
                resources += offered[1]

        return prompts, resources

    async def outcomes(self) -> dict[str, Any]:
        """Maps each toolset that gives an outcome of the attempt, and `state_checks` if the task
        has them, to the outcome. Raises the toolsets' errors, and EnvironmentFailure if a toolset
        does not answer."""
        outcomes: dict[str, Any] = {}
        for offer, session in self._sessions:
            limit_s = offer.section.timeout_s
            limit = asyncio.timeout(limit_s)
            try:
                async with limit:
                    if offer.toolset.has_outcome:
                        await session.prepare()
                        self._check_state(offer, session)
                    outcomes[offer.toolset.name] = await session.outcome()
            except TimeoutError as error:
                if not limit.expired():  # the tool raised it
                    raise
                raise EnvironmentFailure(
                    f"the tools {offer.toolset.name!r} gave no outcome of the attempt within "
                    f"{limit_s:g} s"
                ) from error

        if self._checks:
            outcomes[STATE_CHECKS] = await state_reached(self._checks, self._check_call)

        return {name: outcome for name, outcome in outcomes.items() if outcome is not None}

    async def _check_call(self, call: ToolCall) -> tuple[ToolResult, bool]:
        """The result of a check's call, and whether it came from a tool. Raises EnvironmentFailure
        if the attempt's state was lost."""
        metrics = self.metrics
        condense = self.condense
        self.metrics = Counter()
        self.condense = None
        try:
            result = await self._answer(call)
            was_answered = not any(self.metrics[name] for name in UNANSWERED)
        finally:
            self.metrics = metrics
            self.condense = condense

        tool = self._find_tool(call.name)
        if tool is not None:
            self._check_state(tool.offer, tool.session)
        return result, was_answered

    def _check_state(self, offer: _OfferedToolset, session: ToolSession) -> None:
        """Raises EnvironmentFailure if the session lost its state during the attempt."""
        if session.num_losses > self._num_losses[id(session)]:
            raise EnvironmentFailure(
                f"the server of the tools {offer.toolset.name!r} was restarted during the attempt: "
                "its state is no longer the state that the calls left"
            )

    async def _answer(self, call: ToolCall) -> ToolResult:
        async with record_call("tool", call.name) as recorded:
            recorded.keep(arguments=call.arguments)
            result = await self._call_recorded(call, recorded)
            tool = self._find_tool(call.name)
            if self.condense is not None and tool is not None and not result.is_error:
                condensed = await self.condense(tool.spec, call, result.text)
                if condensed is not None:
                    recorded.keep(whole_result=result.text, summary_problem=condensed.problem)
                    result = result.with_text(condensed.text)

            longest = MAX_UNKNOWN_ERROR if tool is None else tool.offer.section.max_result_chars
            result = result.with_text(shorten_text(result.text, longest))
            if result.is_error:
                self.metrics["num_tool_errors"] += 1
                recorded.outcome("failed", result.text)

            recorded.keep(result=result.text)

        return result

    def _find_tool(self, name: str) -> _AttemptTool | None:
        return self._tools.get(name) or self._by_full_name.get(name)

    async def _call_recorded(self, call: ToolCall, recorded: RunningCall) -> ToolResult:
        """Makes a call, and returns the result that the policy reads. If the call fails, the result
        is the error."""
        tool = self._find_tool(call.name)
        if tool is None:
            self.metrics["num_unknown_tools"] += 1
            guess = nearest(call.name, list(self._tools))
            hint = f"did you mean {guess}? " if guess else ""
            tool_names = ", ".join(self._tools) or "none"
            return _error(f"there is no tool {call.name!r}: {hint}tools: {tool_names}")

        recorded.note(toolset=tool.offer.toolset.name)
        try:
            result = await self._cached_result(tool, _arguments(call))
        except ToolArgumentsError as error:
            self.metrics["num_wrong_arguments"] += 1
            return _error(str(error))
        except ToolError as error:
            result = _error(str(error))
        except _NoAnswerError:
            self.metrics["num_tool_timeouts"] += 1
            return _error(f"{call.name}: no answer within {tool.offer.section.timeout_s:g} s")
        except ToolUnavailableError as error:
            self.metrics["num_tool_failures"] += 1
            return _error(f"{call.name} can't be reached: {error}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self.metrics["num_tool_failures"] += 1  # the tool's own wait was cancelled
            return _error(f"{call.name} failed: what it waited for was cancelled")
        except Exception as error:  # noqa: BLE001 (a tool's exception fails only its call)
            self.metrics["num_tool_failures"] += 1
            self._show(call.name, error)
            return _error(f"{call.name} failed: {describe_error(error)}")

        self.metrics["num_tool_calls"] += 1
        recorded.note(characters=len(result.text), reward=result.reward)
        return result

    async def _cached_result(self, tool: _AttemptTool, arguments: dict[str, Any]) -> ToolResult:
        if not tool.is_cached:
            return await self._call_with_retries(tool, arguments)

        key = (tool.offer.toolset.name, tool.spec.name, json.dumps(arguments, sort_keys=True))
        return await self._cache.get(key, lambda: self._call_with_retries(tool, arguments))

    async def _call_with_retries(self, tool: _AttemptTool, arguments: dict[str, Any]) -> ToolResult:
        """Makes the call, and repeats it if the server could not be reached."""
        limit = asyncio.timeout(None)
        section = tool.offer.section
        tries = 0
        pause = RETRY_PAUSE_S
        while True:
            try:
                await tool.session.prepare()
                async with tool.offer.slots:
                    limit = asyncio.timeout(section.timeout_s)
                    async with limit:
                        return await tool.session.call(tool.spec.name, arguments)
            except TimeoutError as error:
                if limit.expired():
                    raise _NoAnswerError from error
                raise  # the tool raised it
            except ToolUnavailableError as error:
                if tries >= section.retries or (error.was_sent and not tool.is_cached):
                    raise

            tries += 1
            await asyncio.sleep(pause)
            pause *= 2


def _matches(spec: ToolSpec, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in spec.names for pattern in patterns)


class _NoAnswerError(Exception):
    """A call did not return within its time limit."""


def _check_names(sessions: Sequence[tuple[_OfferedToolset, ToolSession]]) -> None:
    """Raises ConfigError for a name or pattern of `include`, or a name of `narrow`, that matches no
    tool."""
    for section in {id(offer.section): offer.section for offer, _ in sessions}.values():
        specs = [
            spec
            for offer, session in sessions
            if offer.section is section
            for spec in session.specs
        ]
        for pattern in section.include:
            if not any(_matches(spec, [pattern]) for spec in specs):
                raise _no_such_tool("include", pattern, specs)

        for name in section.narrow:
            if not any(name in spec.names for spec in specs):
                raise _no_such_tool("narrow", name, specs)


def _no_such_tool(key: str, name: str, specs: Sequence[ToolSpec]) -> ConfigError:
    existing = _existing(name, [spec.name for spec in specs])
    return ConfigError(f"agent.tools: {key}: no tool is called {name!r}: {existing}")


def _existing(name: str, names: list[str]) -> str:
    guess = nearest(name, names)
    hint = f"did you mean {guess}? " if guess else ""
    return f"{hint}there are {', '.join(names) or 'none'}"


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ToolArgumentsError(
            f"the arguments of {call.name} are no JSON ({error}): give an object"
        ) from None

    if not isinstance(arguments, dict):
        raise ToolArgumentsError(f"the arguments of {call.name} are no JSON object")

    return arguments


def _error(text: str) -> ToolResult:
    return ToolResult(text=f"Error: {text}", is_error=True)


def _name_tools(tools: Sequence[_AttemptTool]) -> dict[str, _AttemptTool]:
    """The tools by the names that the policy knows, in order."""
    owners: dict[str, set[str]] = {}
    for tool in tools:
        owners.setdefault(_plain_name(tool.spec.name), set()).add(tool.offer.toolset.name)

    preferred = []
    for tool in tools:
        name = _plain_name(tool.spec.name)
        if len(owners[name]) > 1:
            name = f"{_plain_name(tool.offer.toolset.name)}__{name}"
        preferred.append(_short_name(name))

    # If several tools prefer a name, the tool that has this name originally gets it.
    names: dict[int, str] = {}
    taken = set[str]()
    for number in sorted(range(len(tools)), key=lambda i: preferred[i] != tools[i].spec.name):
        names[number] = _free_name(preferred[number], taken)
        taken.add(names[number])

    return {names[number]: tool for number, tool in enumerate(tools)}


def _plain_name(name: str) -> str:
    """The name with only the characters that APIs accept in a name."""
    plain = _NOT_IN_NAMES.sub("_", name)
    return plain if plain.strip("_-") else "tool"


def _short_name(name: str) -> str:
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME - len(digest) - 1]}_{digest}"


def _free_name(name: str, taken: Collection[str]) -> str:
    """The name, with the lowest number that makes it unique if it is taken."""
    candidate = name
    for number in itertools.count(2):
        if candidate not in taken:
            break
        suffix = f"_{number}"
        candidate = f"{name[: MAX_NAME - len(suffix)]}{suffix}"
    return candidate
