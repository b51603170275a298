"""`agentevo tools`: the tools of a recipe, called by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentevo.cli.arguments import Overrides, check_arguments
from agentevo.console import without_controls
from agentevo.errors import ConfigError

if TYPE_CHECKING:
    from agentevo.config.tools import ToolSection
    from agentevo.types import Task, ToolCall

tools = typer.Typer(no_args_is_help=True, help="Test a recipe's tools.")
LONGEST = 500
"""Characters of a result that are printed."""


@tools.callback()
def _group() -> None: ...


@tools.command("test")
def try_tools(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE|FILE", help="A recipe, or an mcp_config.json.")
    ],
    overrides: Overrides = None,
    call: Annotated[
        str | None, typer.Option("--call", metavar="TOOL", help="Call only this tool.")
    ] = None,
    arguments: Annotated[
        str | None,
        typer.Option(
            "--arguments",
            metavar="JSON",
            help="The arguments of --call. Default: generated from the schema.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the calls without making them.")
    ] = False,
) -> None:
    """Call each tool once, with arguments generated from its schema, and print results, times and
    errors. The calls are real: use the toolset's `exclude` or --call for tools with side effects.
    Exit code 1 if a tool fails."""
    from agentevo.event_loop import run_coroutine

    if arguments is not None and call is None:
        raise ConfigError("--arguments are those of one tool: name it by --call")
    if arguments is not None:
        check_arguments(arguments)

    sections, task = _of_file(recipe) if recipe.endswith(".json") else _of(recipe, overrides or [])
    num_broken = run_coroutine(_test_tools(sections, task, call, arguments, dry_run))
    if num_broken:
        raise typer.Exit(1)


async def _test_tools(
    sections: Sequence[ToolSection],
    task: Task,
    call: str | None,
    arguments: str | None,
    dry_run: bool,
) -> int:
    """How many calls broke."""
    from agentevo.tools.trial import try_calls
    from agentevo.types import ToolCall

    if dry_run or (call is not None and arguments is None):
        calls = await _make_calls(sections, task, call)
        if dry_run:
            for planned in calls:
                line = f"{planned.name}({planned.arguments}){_note(planned.name, sections)}"
                print(without_controls(line))
            return 0
    else:
        calls = [] if call is None else [ToolCall(call, str(arguments))]

    num_broken = 0
    async for tried_call in try_calls(sections, task, calls):
        num_broken += tried_call.status == "broken"
        text = (
            tried_call.text
            if len(tried_call.text) <= LONGEST
            else f"{tried_call.text[:LONGEST]}..."
        )
        made_call = without_controls(f"{tried_call.name}({tried_call.arguments})")
        print(f"{tried_call.status:<9}{made_call}  {tried_call.seconds:.2f} s", flush=True)
        lines = without_controls(text).splitlines()
        print("".join(f"    {line}\n" for line in lines), end="")

    return num_broken


def _note(name: str, sections: Sequence[ToolSection]) -> str:
    """The note on a tool that other recipes hide: a file has no key for it."""
    from agentevo.config.mcp import MCPFileSection

    is_file = any(isinstance(section, MCPFileSection) for section in sections)
    if not is_file or name.rpartition("__")[2] != "outcome":
        return ""
    return "  (a recipe's entry of type mcp hides it from the policy, by `outcome: outcome`)"


async def _make_calls(
    sections: Sequence[ToolSection], task: Task, call: str | None
) -> list[ToolCall]:
    """The calls with arguments made from the schemas. Raises ConfigError for a tool that there is
    not."""
    from agentevo.registry import nearest
    from agentevo.tools.toolbox import Toolbox
    from agentevo.tools.trial import made_call

    toolbox = Toolbox(sections)
    try:
        async with toolbox.open(task, seed=0) as opened:
            calls_by_tool = {
                schema["function"]["name"]: made_call(schema) for schema in opened.schemas
            }
    finally:
        await toolbox.close()

    if call is not None and call not in calls_by_tool:
        guess = nearest(call, list(calls_by_tool))
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(
            f"--call: there is no tool {call!r}: {hint}tools: {', '.join(calls_by_tool)}"
        )

    return list(calls_by_tool.values()) if call is None else [calls_by_tool[call]]


def _of(recipe: str, overrides: list[str]) -> tuple[Sequence[ToolSection], Task]:
    """The tools of a recipe, and its first task. Raises ConfigError."""
    from agentevo.config import load_config
    from agentevo.rollout.given_tasks import read_tasks
    from agentevo.types import Task

    config = load_config(recipe, overrides, needs_environment=False)
    sections = getattr(config.agent, "tools", ())
    if not sections:
        raise ConfigError(
            f"{recipe}: agent.type={config.agent.type} has no tools: give a recipe whose "
            "agent.tools lists some"
        )

    tasks = read_tasks(config.tasks, config.agent).train if config.tasks.train else []
    return sections, tasks[0] if tasks else Task(id="test")


def _of_file(file: str) -> tuple[Sequence[ToolSection], Task]:
    from agentevo.config.mcp import MCPFileSection
    from agentevo.types import Task

    return [MCPFileSection(file=Path(file))], Task(id="test")
