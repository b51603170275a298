"""The prompts and resources of an MCP server. A prompt is a text for a model; resources can be
listed and read. `client` is the SDK's. A server's answers are not trusted: lists are bounded.
Audio and binary resources are replaced by their type and size; so are images, except in
results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from agentevo.agents.tools.result_parts import limit_pixels, read_or_tell, result_of_parts
from agentevo.agents.tools.tool import ToolResult, ToolSpec
from agentevo.errors import ToolArgumentsError, ToolUnavailableError
from agentevo.runtime.event_loop import in_thread
from agentevo.types.images import ImageFile

MAX_LISTED = 1000
"""The maximum number of prompts or resources. The rest of a longer list is dropped."""
MAX_PAGES = 100
MAX_PROMPT = 100_000
"""The maximum number of characters of a prompt."""
LIST_RESOURCES = "list_resources"
READ_RESOURCE = "read_resource"
RESOURCE_TOOLS = (
    ToolSpec(
        name=LIST_RESOURCES,
        description="Lists what can be read.",
        parameters={"type": "object", "properties": {}},
    ),
    ToolSpec(
        name=READ_RESOURCE,
        description="Reads one of the resources that list_resources names.",
        parameters={
            "type": "object",
            "properties": {"uri": {"type": "string", "description": "Its URI."}},
            "required": ["uri"],
        },
    ),
)
"""The tools with which the policy lists and reads a server's resources."""


async def prompt_lines(client: Any) -> list[str]:
    """A line for each prompt: its name, its arguments and its description."""
    lines = []
    for prompt in await _list_all(client, "prompts"):
        arguments = [f"{a.name}{'' if a.required else '?'}" for a in prompt.arguments or ()]
        lines.append(f"{prompt.name}({', '.join(arguments)})  {_one_line(prompt.description)}")
    return lines


async def prompt_text(client: Any, name: str, arguments: Mapping[str, str]) -> str:
    """The texts of a prompt's messages. Raises ToolUnavailableError for a prompt that the server
    does not have."""
    from mcp import MCPError

    try:
        prompt = await client.get_prompt(name, dict(arguments))
    except MCPError as error:
        prompt_names = [line.partition("  ")[0] for line in await prompt_lines(client)]
        raise ToolUnavailableError(
            f"the server has no prompt {name!r} ({error.message}): "
            f"there are {', '.join(prompt_names) or 'none'}"
        ) from None

    text = "\n\n".join(part_text(message.content) for message in prompt.messages)
    if len(text) > MAX_PROMPT:
        raise ToolUnavailableError(
            f"the server's prompt {name!r} is longer than {MAX_PROMPT:,} characters"
        )

    return text


async def resource_lines(client: Any) -> list[str]:
    """A line for each resource, and for each template of resource URIs."""
    lines = [
        f"{resource.uri}  {_one_line(resource.description or resource.name)}"
        for resource in await _list_all(client, "resources")
    ]
    return lines + [
        f"{template.uri_template}  {_one_line(template.description or template.name)}"
        for template in await _list_all(client, "resource_templates")
    ]


async def call_resource_tool(client: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
    """The result of one of RESOURCE_TOOLS. Raises ToolArgumentsError and the SDK's errors."""
    if name == LIST_RESOURCES:
        return ToolResult(text="\n".join(await resource_lines(client)) or "There are none.")
    uri = arguments.get("uri")
    if not isinstance(uri, str) or set(arguments) != {"uri"}:
        raise ToolArgumentsError(f"{READ_RESOURCE} takes one argument, uri, a text")
    answer = await client.read_resource(uri)
    return result_of_parts(await read_resources(answer.contents) or ["It is empty."])


async def _list_all(client: Any, kind: str) -> Sequence[Any]:
    """All items of one kind; empty if the server has none."""
    from mcp import MCPError
    from mcp_types import METHOD_NOT_FOUND

    entries: list[Any] = []
    cursor = None
    for _ in range(MAX_PAGES):
        try:
            page = await getattr(client, f"list_{kind}")(cursor=cursor)
        except MCPError as error:
            if error.code == METHOD_NOT_FOUND:
                return []
            raise

        entries += getattr(page, kind)
        cursor = page.next_cursor
        if not cursor or len(entries) >= MAX_LISTED:
            break

    return entries[:MAX_LISTED]


def part_text(content: Any) -> str:
    """One part of a result or prompt as text. Other content is replaced by its type and size."""
    if content.type == "text":
        return str(content.text)
    if content.type in ("image", "audio"):
        return f"[{content.type}, {content.mime_type}, {len(content.data) * 3 // 4:,} bytes]"
    if content.type == "resource":
        return contents_text(content.resource)
    return f"[{content.type} {getattr(content, 'uri', '')}]"


def contents_text(contents: Any) -> str:
    """The content of a resource as text."""
    with suppress(AttributeError):
        return str(contents.text)
    return f"[resource {contents.uri}, {len(contents.blob) * 3 // 4:,} bytes]"


async def read_parts(contents: Sequence[Any]) -> list[str | ImageFile]:
    """The parts of a result as texts and images. Images are decoded on a thread."""
    if any(content.type in ("image", "resource") for content in contents):
        return await in_thread(lambda: limit_pixels(map(_part, contents)))
    return [part_text(content) for content in contents]


async def read_resources(contents: Sequence[Any]) -> list[str | ImageFile]:
    """The contents of a resource as texts and images."""
    return await in_thread(lambda: limit_pixels(map(_resource, contents)))


def _part(content: Any) -> str | ImageFile:
    if content.type == "resource":
        return _resource(content.resource)
    if content.type != "image":
        return part_text(content)
    source = {"type": "image", "data": content.data}
    return read_or_tell(source, lambda: part_text(content)[1:-1])


def _resource(contents: Any) -> str | ImageFile:
    if not str(contents.mime_type or "").startswith("image/") or not hasattr(contents, "blob"):
        return contents_text(contents)
    source = {"type": "image", "data": contents.blob}
    return read_or_tell(source, lambda: contents_text(contents)[1:-1])


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())[:300]
