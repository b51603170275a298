"""Python functions and classes as tools.

A function is one tool without state. A class gives every attempt its own object, which gets the
task if the constructor has a parameter `task`; the public methods are the tools. At the end,
`outcome` is called and returns the attempt's reward (anything that an agent function can return: a
number, named parts, an Outcome, or None). Then `close` is called. The user sees a failure of
`close`.

A tool that is not async runs on a thread, so a tool that hangs costs only its call. The methods of
one object run on one thread, one after the other. The return value of a tool is the result: a text
or a ToolResult unchanged, an image or a list of texts and images as parts (result_parts.py),
anything else as JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
import typing
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import docstring_parser
import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo

from agentevo.agents.tools.result_parts import (
    has_image,
    parts_of_returned,
    result_of_parts,
)
from agentevo.agents.tools.tool import ToolResult, ToolSession, Toolset, ToolSpec, ordered_schema
from agentevo.config.agents import is_async
from agentevo.config.field_words import wrong_value
from agentevo.config.imports import OF_YOUR_OWN
from agentevo.config.tools import FunctionToolSection, public_methods, says_cached, tools
from agentevo.errors import (
    ConfigError,
    ToolArgumentsError,
    ToolUnavailableError,
    UnknownNameError,
    describe_error,
)
from agentevo.rewards.returned_values import plain_number
from agentevo.runtime.console import to_stderr
from agentevo.runtime.daemon_threads import DedicatedThread, run_in_thread
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.signals import Interrupt
from agentevo.runtime.tracebacks import traceback_of
from agentevo.types import Task
from agentevo.types.images import ImageFile

MAX_PROBLEMS = 5
"""The most wrong arguments that are reported to the policy."""


class Signature:
    """The parameters of a function: their JSON schema, from type hints and the docstring (in the
    style of Google, numpy or Sphinx), and the check of arguments. A type hint can be any type that
    pydantic supports. A parameter without a type hint accepts any JSON. `skip_first` leaves out the
    `self` of a method."""

    def __init__(
        self, name: str, function: Callable[..., Any], *, skip_first: bool = False
    ) -> None:
        """Raises ConfigError for a function that can't be called with keyword arguments, or whose
        type hints have no JSON schema."""
        self.name = name
        self._model = _model(name, function, skip_first)
        text = docstring_parser.parse(inspect.getdoc(function) or "")
        paragraphs = [part for part in (text.short_description, text.long_description) if part]

        try:
            parameters = self._model.model_json_schema()
        except pydantic.PydanticInvalidForJsonSchema as error:
            raise ConfigError(f"the tool {name!r}: a type has no JSON schema: {error}") from error

        described = {
            param.arg_name: param.description for param in text.params if param.description
        }
        self.spec = ToolSpec(
            name=name,
            description="\n\n".join(paragraphs),
            parameters=_described_schema(parameters, described),
        )

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, converted to the function's types. Raises ToolArgumentsError."""
        try:
            checked = self._model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            problems = [_problem(wrong, self._model) for wrong in error.errors()[:MAX_PROBLEMS]]
            raise ToolArgumentsError(
                f"wrong arguments for {self.name}: {'; '.join(problems)}"
            ) from None

        return {
            field.alias or name: getattr(checked, name)
            for name, field in type(checked).model_fields.items()
            if name in checked.model_fields_set
        }


def checked_options(name: str, item: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a tool class, converted to the type hints of its constructor, like the
    arguments of calls. An option whose hint pydantic does not support is not changed. Raises
    ConfigError."""
    constructor = inspect.unwrap(item.__init__)  # type: ignore[misc]
    hints = getattr(constructor, "__annotations__", {})
    checked = dict(options)
    for key in options.keys() & hints.keys():
        holder = SimpleNamespace(__annotations__={key: hints[key]})
        try:
            hint = typing.get_type_hints(holder, constructor.__globals__, include_extras=True)[key]
            adapter = pydantic.TypeAdapter[Any](hint)
        except (AttributeError, TypeError, NameError, pydantic.errors.PydanticUserError):
            continue  # a type imported only for type checkers, or one that pydantic does not know

        try:
            checked[key] = adapter.validate_python(options[key])
        except pydantic.ValidationError as error:
            wrong = error.errors()[0]
            info = FieldInfo.from_annotation(hint)
            raise ConfigError(
                f"the tool {name!r}: {item.__name__}: the option {key}"
                f"{wrong_value(info, wrong['loc'], wrong['input'])}"
            ) from None

    return checked


def _model(name: str, function: Callable[..., Any], skip_first: bool) -> type[pydantic.BaseModel]:
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip_first:]
        hints = typing.get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"the tool {name!r}: its parameters can't be read: {error}") from error

    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if (
            parameter.kind is parameter.POSITIONAL_ONLY
            or parameter.kind is parameter.VAR_POSITIONAL
        ):
            raise ConfigError(
                f"the tool {name!r} takes {parameter}: arguments are passed by name, so name each"
            )

        if parameter.kind is parameter.VAR_KEYWORD:
            raise ConfigError(f"the tool {name!r} takes {parameter}: name each parameter")

        default = ... if parameter.default is parameter.empty else parameter.default
        # Under another name: pydantic reserves some (model_*, schema, names with underscores).
        fields[f"p{number}"] = (
            hints.get(parameter.name, Any),
            Field(default, alias=parameter.name),
        )

    try:
        return pydantic.create_model(
            name, __config__=pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False),
            **fields,
        )  # fmt: skip
    except pydantic.errors.PydanticUserError as error:
        raise ConfigError(f"the tool {name!r}: {str(error).splitlines()[0]}") from error


def _described_schema(schema: dict[str, Any], described: Mapping[str, str]) -> dict[str, Any]:
    """The schema without pydantic's titles, and with the docstring's parameter descriptions."""
    schema = {key: value for key, value in schema.items() if key != "title"}
    properties = {}
    for name, property_schema in schema.get("properties", {}).items():
        properties[name] = {key: value for key, value in property_schema.items() if key != "title"}
        if name in described:
            properties[name].setdefault("description", described[name])
    return ordered_schema({**schema, "properties": properties})


def _problem(wrong: Any, model: type[pydantic.BaseModel]) -> str:
    place = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "missing":
        return f"{place} is missing"
    if wrong["type"] == "extra_forbidden":
        argument_names = (
            ", ".join(str(field.alias) for field in model.model_fields.values()) or "none"
        )
        return f"there is no {place} (arguments: {argument_names})"
    return f"{place}: {wrong['msg'][:1].lower()}{wrong['msg'][1:]}"


CLOSING_S = 10.0
"""The time limit of an async close. The end of a process also waits this long for the others."""


class FunctionTools(Toolset):
    """The toolset of a registered function or class; see the module."""

    def __init__(self, section: FunctionToolSection) -> None:
        """Raises ConfigError for an item whose type hints have no JSON schema, and for options that
        the constructor does not have."""
        self.name = section.name
        self._limit_s = section.timeout_s
        self._ending: set[DedicatedThread] = set()
        self._told = set[type]()

        try:
            self._item = tools.get(section.name)
        except UnknownNameError as error:
            raise UnknownNameError(f"{error}{OF_YOUR_OWN}") from None

        self._options = dict(section.options)
        self._function: _ToolFunction | None = None
        if not inspect.isclass(self._item):
            if self._options:
                raise ConfigError(
                    f"the tool {section.name!r} is a function, and a function takes no options: "
                    "make it a class"
                )
            self._function = _ToolFunction(section.name, self._item, says_cached(section.name))
            return

        if section.cache:
            raise ConfigError(
                f"the tool {section.name!r} is a class, which has its own state in each attempt: "
                "its calls can't be cached"
            )

        self._signatures = {
            name: Signature(name, method, skip_first=not _is_static(self._item, name))
            for name, method in public_methods(self._item).items()
        }
        self._takes = _constructor(section.name, self._item, self._options)
        self._options = checked_options(section.name, self._item, self._options)

    @property
    def has_outcome(self) -> bool:
        return self._function is None and hasattr(self._item, "outcome")

    @asynccontextmanager
    async def session(self, task: Task, seed: int) -> AsyncIterator[ToolSession]:
        if self._function is not None:
            yield self._function
            return

        context = {"task": task, "seed": seed}
        options = self._options | {name: context[name] for name in self._takes}
        thread = DedicatedThread("tool")
        instances: list[Any] = []

        def make() -> None:
            instances.append(self._item(**options))

        try:
            try:
                await asyncio.wait_for(thread.call(make), self._limit_s)
            except TimeoutError:
                raise ToolUnavailableError(
                    f"the tool {self.name!r}: {self._item.__name__} was not made within "
                    f"{self._limit_s:g} s (its timeout_s). It is at:\n{thread.format_stack()}"
                ) from None

            yield _AttemptObject(instances[0], self._signatures, thread)
        finally:
            try:
                if instances and is_async(getattr(instances[0], "close", None)):
                    await self._close_async(instances.pop())
            finally:
                # This also closes an object that was created after the time limit.
                thread.end(partial(self._close, instances))
                self._ending = {busy for busy in self._ending if not busy.has_ended(0)} | {thread}

    async def close(self) -> None:
        deadline = time.monotonic() + CLOSING_S

        def wait() -> None:
            for thread in self._ending:
                if not thread.is_stuck:
                    thread.has_ended(max(0.0, deadline - time.monotonic()))

        await in_thread(wait)

    def _close(self, instances: Sequence[Any]) -> None:
        """Closes the object, if there is one; runs on the object's thread."""
        try:
            for item in instances:
                closing = item.close() if hasattr(item, "close") else None
                if inspect.isawaitable(closing):
                    asyncio.run(_await(closing))
        except BaseException as error:  # noqa: BLE001 (the attempt has its outcome already)
            self._show(error)

    async def _close_async(self, item: Any) -> None:
        try:
            await asyncio.wait_for(item.close(), CLOSING_S)
        except Interrupt:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (see _close)
            self._show(error)

    def _show(self, error: BaseException) -> None:
        if type(error) not in self._told:
            self._told.add(type(error))
            to_stderr(
                f"the tool {self.name}: close failed: {describe_error(error)}\n"
                f"{traceback_of(error)}"
            )


class _ToolFunction(ToolSession):
    """One function, shared by all attempts."""

    def __init__(self, name: str, function: Callable[..., Any], cacheable: bool) -> None:
        self._function = function
        self._signature = Signature(name, function)
        spec = self._signature.spec
        self.specs: Sequence[ToolSpec] = [
            ToolSpec(
                name=name,
                description=spec.description,
                parameters=spec.parameters,
                cacheable=cacheable,
            )
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        call = partial(self._function, **self._signature.read(arguments))
        if is_async(self._function):
            return await _result(await call())
        return await _result(await run_in_thread(lambda: _read(call()), "tool"))


class _AttemptObject(ToolSession):
    """One attempt's object of a class."""

    def __init__(
        self, item: Any, signatures: Mapping[str, Signature], thread: DedicatedThread
    ) -> None:
        self._item = item
        self._signatures = signatures
        self._thread = thread
        self.specs = [signature.spec for signature in signatures.values()]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        method = getattr(self._item, name)
        call = partial(method, **self._signatures[name].read(arguments))
        return await _result(await self._run(method, lambda: _read(call())))

    async def outcome(self) -> Any:
        method = getattr(self._item, "outcome", None)
        returned = None if method is None else await self._run(method, method)
        return await returned if inspect.isawaitable(returned) else returned

    async def _run(self, method: Any, call: Callable[[], Any]) -> Any:
        if is_async(method):
            return call()
        if self._thread.is_stuck:
            raise ToolUnavailableError("an earlier call of these tools has not returned")
        return await self._thread.call(call)


def _read(returned: Any) -> Any:
    """Serializes a tool's return value on the tool's thread, since a large one takes long."""
    return returned if inspect.isawaitable(returned) else result_of(returned)


async def _result(read: Any) -> ToolResult:
    """Converts what `_read` or an async tool returned to a tool result. New images are decoded or
    encoded on a thread."""
    returned = await read if inspect.isawaitable(read) else read
    return await in_thread(result_of, returned) if has_image(returned) else result_of(returned)


async def _await(awaitable: Any) -> None:
    await awaitable


def result_of(returned: Any) -> ToolResult:
    """A tool's return value as its result. Raises TypeError or ValueError for one that can't be a
    result or can't be written as JSON."""
    if isinstance(returned, ToolResult):
        if not isinstance(returned.text, str):
            raise TypeError(f"the text of a ToolResult is a {type(returned.text).__name__}")
        reward = plain_number(returned.reward, "the reward of a ToolResult")
        return _with_parts(
            ToolResult(
                text=returned.text,
                is_error=bool(returned.is_error),
                reward=reward,
                parts=returned.parts,
            )
        )

    if isinstance(returned, str):
        return ToolResult(text=returned)
    if returned is None:
        return ToolResult(text="")
    if (parts := parts_of_returned(returned)) is not None:
        return result_of_parts(parts)

    try:
        text = json.dumps(_plain(returned), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the tool returned a {type(returned).__name__} that can't be written as JSON: return "
            "a text"
        ) from error

    return ToolResult(text=text)


def _with_parts(result: ToolResult) -> ToolResult:
    """The result with its parts read, behind its own text."""
    if not result.parts:
        return result

    is_read = all(isinstance(part, str | ImageFile) for part in result.parts)
    if is_read and result_of_parts(result.parts).text == result.text:
        return result

    given = [result.text, *result.parts] if result.text else list(result.parts)
    parts = parts_of_returned(given)
    if parts is None:
        raise TypeError("the parts of a ToolResult have no image: give its text alone")
    return result_of_parts(parts, is_error=result.is_error, reward=result.reward)


def _is_static(item: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(item, name), staticmethod)


def _plain(returned: Any) -> Any:
    return pydantic.TypeAdapter(Any).dump_python(returned, mode="json")


def _constructor(name: str, item: type, options: Mapping[str, Any]) -> list[str]:
    """Which of the parameters `task` and `seed` the constructor has. Raises ConfigError for unknown
    and for missing options."""
    parameters = inspect.signature(item).parameters
    has_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [key for key in options if key not in parameters and not has_any]
    if unknown:
        option_names = ", ".join(key for key in parameters if key not in ("task", "seed")) or "none"
        raise ConfigError(
            f"the tool {name!r}: {item.__name__} takes no option {unknown[0]!r} "
            f"(options: {option_names})"
        )

    takes = [key for key in ("task", "seed") if key in parameters and key not in options]
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and key not in options
        and key not in takes
    ]
    if missing:
        raise ConfigError(
            f"the tool {name!r}: {item.__name__} needs {missing[0]!r}: give it under `options`"
        )

    return takes
