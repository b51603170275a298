"""verl's tools: classes with `create`, `execute` and `release`, listed in a file.

An attempt has one instance of each tool that it calls. The instance is made before the first call,
with the row's `create_kwargs`, and released at the end. (verl 0.9 creates an instance for every
call. A tool that stores its state under the instance's id works with both.) The result is a text,
or the `text` of an object and the list `image` behind it. `calc_reward` is not called: put a score
into the recipe's `rewards`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentevo.agents.tools.functions import result_of
from agentevo.agents.tools.tool import ToolResult, ToolSession, Toolset, ToolSpec, object_schema
from agentevo.config.tools import VerlToolsSection
from agentevo.errors import ConfigError, LoadingTimeoutError, describe_error
from agentevo.rewards.returned_values import plain_number
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.parsing import ParseError, parse_yaml, read_text
from agentevo.runtime.tracebacks import describe_failure
from agentevo.runtime.user_code import load_in_time
from agentevo.types import Task

RELEASE_S = 10.0
_CLASS = re.compile(r"(?:\w+\.)+\w+")


class VerlTools(Toolset):
    """The toolset of a file."""

    def __init__(self, section: VerlToolsSection) -> None:
        """Raises ConfigError for a file or a class that can't be used."""
        self.name = section.name
        where = f"agent.tools: {section.file}"
        try:
            tree = parse_yaml(read_text(section.file.expanduser()))
        except ParseError as error:
            raise ConfigError(f"{where} is not YAML: {error}") from error

        rows = tree.get("tools") if isinstance(tree, Mapping) else None
        if not isinstance(rows, list) or not rows:
            raise ConfigError(
                f"{where}: needs a list `tools` of {{class_name, config, tool_schema}}, as verl's "
                "tool_config_path has"
            )

        self._tools = [_made(f"{where}: tools[{index}]", row) for index, row in enumerate(rows)]

    @asynccontextmanager
    async def session(self, task: Task, seed: int) -> AsyncIterator[ToolSession]:
        session = _VerlSession(self._tools, task)
        try:
            yield session
        finally:
            await session.release()


class _VerlSession(ToolSession):
    """One attempt's instances."""

    def __init__(self, tools: Sequence[tuple[ToolSpec, Any]], task: Task) -> None:
        self.specs: Sequence[ToolSpec] = [spec for spec, _ in tools]
        self._tools = {spec.name: tool for spec, tool in tools}
        info = task.metadata.get("extra_info")
        tools_kwargs = info.get("tools_kwargs") if isinstance(info, Mapping) else None
        self._kwargs: Mapping[str, Any] = tools_kwargs if isinstance(tools_kwargs, Mapping) else {}
        self._instances: dict[str, Any] = {}
        self._creating = asyncio.Lock()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        tool = self._tools[name]
        async with self._creating:
            if name not in self._instances:
                created = await _await_if_needed(tool.create(**self._given(name, "create_kwargs")))
                self._instances[name] = created[0] if isinstance(created, tuple) else created

        kwargs = self._given(name, "execute_kwargs")
        done = await _await_if_needed(
            tool.execute(self._instances[name], dict(arguments), **kwargs)
        )
        response, reward = done[:2] if isinstance(done, tuple) and len(done) > 1 else (done, 0.0)
        text = response if isinstance(response, str) else getattr(response, "text", None)
        images = getattr(response, "image", None) or ()
        return await in_thread(
            result_of,
            ToolResult(
                text=text if isinstance(text, str) else "",
                reward=plain_number(reward or 0.0, f"the reward of {name}"),
                parts=tuple(images) if isinstance(images, list | tuple) else (images,),
            ),
        )

    async def release(self) -> None:
        """Releases all instances, even if one of them raises."""
        for name, instance in self._instances.items():
            release = getattr(self._tools[name], "release", None)
            if release is None:
                continue

            try:
                async with asyncio.timeout(RELEASE_S):
                    await _await_if_needed(release(instance, **self._given(name, "release_kwargs")))
            except Exception as error:  # noqa: BLE001 (the attempt has its outcome already)
                to_stderr(f"the tool {name}: release failed: {describe_error(error)}")

    def _given(self, name: str, what: str) -> dict[str, Any]:
        tool_kwargs = self._kwargs.get(name)
        kwargs = tool_kwargs.get(what) if isinstance(tool_kwargs, Mapping) else None
        return dict(kwargs) if isinstance(kwargs, Mapping) else {}


async def _await_if_needed(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _made(where: str, row: Any) -> tuple[ToolSpec, Any]:
    """A tool of the file. Raises ConfigError."""
    path = row.get("class_name") if isinstance(row, Mapping) else None
    schema = row.get("tool_schema") if isinstance(row, Mapping) else None
    function = schema.get("function") if isinstance(schema, Mapping) else None

    if not isinstance(path, str) or not _CLASS.fullmatch(path):
        raise ConfigError(f"{where}: class_name is {path!r}: give MODULE.CLASS")

    if (
        not isinstance(schema, Mapping)
        or not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
    ):
        raise ConfigError(
            f"{where}: tool_schema: needs a `function` with its name, description and parameters"
        )

    module, _, name = path.rpartition(".")

    def make() -> Any:
        tool_class = getattr(importlib.import_module(module), name)
        return tool_class(config=dict(row.get("config") or {}), tool_schema=_verl_schema(schema))

    try:
        tool = load_in_time(make, f"{where}: the constructor of {path}")
    except (LoadingTimeoutError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's code can raise anything, also SystemExit
        raise ConfigError(
            f"{where}: {path} can't be made (list its file under the recipe's `import`, or install "
            f"its package): {describe_failure(error)}"
        ) from error

    if not callable(getattr(tool, "create", None)) or not callable(getattr(tool, "execute", None)):
        raise ConfigError(f"{where}: {path} has no `create` and `execute`, as verl's tools have")

    about = function.get("description")
    spec = ToolSpec(
        name=function["name"],
        description=about if isinstance(about, str) else "",
        parameters=object_schema(function.get("parameters")),
    )
    return spec, tool


def _verl_schema(schema: Mapping[str, Any]) -> Any:
    """The schema in the class that verl passes to its tools, if verl is installed. Otherwise the
    mapping."""
    try:
        schemas = importlib.import_module("verl.tools.schemas")
    except ImportError:
        return dict(schema)
    return schemas.OpenAIFunctionToolSchema.model_validate(schema)
