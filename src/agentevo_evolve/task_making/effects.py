"""Finds the tools that change what others show, and whether sessions share the state of a server.

A tool is called between two equal calls of a reader that is asked about the same object
(readers.py). Where a server has no hints, only one reader is asked at a time: another reader in
between could be the tool that changes something.

If a new session sees what an earlier one changed, the attempts of a training run would change each
other's state. Then no task needs a tool that changes something, and no further one is called.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from agentevo.agents.tools.tool import ToolSpec
from agentevo.agents.tools.toolbox import AttemptTools
from agentevo_evolve.task_making.calls import CallResult, ToolWorld, call_all, call_tool
from agentevo_evolve.task_making.readers import reader_calls
from agentevo_evolve.task_making.survey import Survey

Effect = Literal["changed", "same", "refused"]
"""What a call did to the results of readers."""
NUM_ROUNDS = 8
"""The maximum number of rounds in which a tool is called to see whether it changes something."""
NUM_CALLS = 2
"""The number of accepted calls between equal results of a reader after which a tool is considered
not to change what this reader shows."""
MAX_READERS = 12
NUM_SHARED_TESTS = 3
"""The maximum number of tools, and of calls of each, that test whether sessions share the state."""
SHARED = (
    "it changes the state that all sessions share, so attempts would disturb each other: give each "
    "attempt its own server, for example with `sandbox: true` in a recipe"
)
UNKNOWN = (
    "whether it changes something is not known: it refuses too many calls, or no other tool shows "
    "what it changes"
)
DESTRUCTIVE = (
    "it may delete or overwrite, by its server's hint, and whether sessions share the state is not "
    "known: run the server with `sandbox: true` in a recipe"
)


async def find_changing_tools(
    world: ToolWorld, surveyed: Survey, hints: Mapping[str, ToolSpec], draw: random.Random
) -> None:
    """Fills `changing`, `readers`, `left_out` and `is_shared` of the survey."""
    open_names = [
        name
        for name in surveyed.schemas
        if name not in surveyed.readers
        and name not in surveyed.databases
        and name not in surveyed.left_out
        and not (hints[name].changes_nothing and name in surveyed.unstable)
        and not (hints[name].changes_nothing is None and name not in surveyed.answered)
    ]
    careful = [name for name in open_names if not hints[name].is_destructive]
    await _test_tools(world, surveyed, careful, hints, draw)

    destructive = [name for name in open_names if hints[name].is_destructive]
    is_isolated = world.is_isolated or (bool(surveyed.changing) and not surveyed.is_shared)
    if is_isolated:
        await _test_tools(world, surveyed, destructive, hints, draw)

    for name in open_names:
        is_suspect = name in surveyed.changing or hints[name].changes_nothing is False
        if surveyed.is_shared and is_suspect:
            surveyed.left_out[name] = SHARED
        elif name in destructive and not is_isolated:
            surveyed.left_out[name] = DESTRUCTIVE
        elif name in surveyed.answered and not _is_known(surveyed, name):
            surveyed.left_out[name] = UNKNOWN

    surveyed.unstable -= surveyed.changing


def _is_known(surveyed: Survey, name: str) -> bool:
    return name in surveyed.changing | surveyed.readers | surveyed.unstable


async def _test_tools(
    world: ToolWorld,
    surveyed: Survey,
    names: Sequence[str],
    hints: Mapping[str, ToolSpec],
    draw: random.Random,
) -> None:
    """Tests whether these tools change something. When the sessions prove to share their state,
    tools that change it by their hints are not called again."""
    quiet: dict[str, dict[str, int]] = {name: {} for name in names}
    seen = set[str]()
    async with world.open(0) as tools:
        for _ in range(NUM_ROUNDS):
            for name in names:
                if surveyed.is_shared and hints[name].changes_nothing is False:
                    continue

                groups = _reader_groups(surveyed, name, hints)
                groups = [group for group in groups if quiet[name].get(group[0], 0) < NUM_CALLS]
                for group in groups:
                    if name in surveyed.changing or name in surveyed.left_out:
                        break
                    effect = await _effect(tools, surveyed, name, group, draw)
                    if effect == "same":
                        quiet[name][group[0]] = quiet[name].get(group[0], 0) + 1
                    elif effect == "changed":
                        surveyed.changing.add(name)

                is_news = name in surveyed.changing and name not in seen
                if is_news and len(seen) < NUM_SHARED_TESTS and not surveyed.is_shared:
                    seen.add(name)
                    surveyed.is_shared = not world.is_isolated and await _is_shared(
                        world, surveyed, name, draw
                    )

    for name in names:
        is_reader = hints[name].changes_nothing is None and name not in surveyed.unstable
        groups = _reader_groups(surveyed, name, hints)
        is_tested = all(quiet[name].get(group[0], 0) >= NUM_CALLS for group in groups)
        if name not in surveyed.changing and name in surveyed.answered and is_reader and is_tested:
            surveyed.readers.add(name)
    surveyed.readers -= surveyed.changing


def _reader_groups(
    surveyed: Survey, name: str, hints: Mapping[str, ToolSpec]
) -> list[tuple[str, ...]]:
    """The readers that are asked together. Readers by their hints are one group."""
    hinted = tuple(
        reader for reader in surveyed.readers if hints[reader].changes_nothing and reader != name
    )
    if hinted:
        return [tuple(reader for reader in surveyed.schemas if reader in hinted)]

    candidates = [
        other
        for other in surveyed.answered
        if other != name
        and other not in surveyed.unstable | surveyed.changing
        and other not in surveyed.left_out
    ]
    return [(candidate,) for candidate in candidates[:MAX_READERS]]


async def _effect(
    tools: AttemptTools, surveyed: Survey, name: str, readers: Sequence[str], draw: random.Random
) -> Effect:
    """Calls a tool between two equal calls of the readers."""
    arguments = surveyed.draw_arguments(name, draw)
    calls = reader_calls(surveyed, readers, [arguments], draw)
    before = await call_all(tools, calls)
    result = await call_tool(tools, name, arguments)
    surveyed.learn(result)
    surveyed.leave_out_if_slow(result)
    if result.is_error:
        surveyed.unresponsive.setdefault(name, " ".join(result.text.split())[:200])
        return "refused"

    surveyed.answered.setdefault(name, result)
    surveyed.unresponsive.pop(name, None)
    after = await call_all(tools, calls)
    for reply in after:
        surveyed.learn(reply)
    return "changed" if _texts(before) != _texts(after) else "same"


async def _is_shared(world: ToolWorld, surveyed: Survey, name: str, draw: random.Random) -> bool:
    """Whether a later session sees what a call of the tool changes in an earlier one. False if the
    tool refuses its calls in a new session."""
    readers = [reader for reader in surveyed.answered if reader not in surveyed.changing]
    readers = [reader for reader in readers if reader not in surveyed.unstable]
    for _ in range(NUM_SHARED_TESTS):
        arguments = surveyed.draw_arguments(name, draw)
        calls = reader_calls(surveyed, readers[:MAX_READERS], [arguments], draw)
        async with world.open(0) as tools:
            before = await call_all(tools, calls)
        async with world.open(0) as tools:
            control = await call_all(tools, calls)
            result = await call_tool(tools, name, arguments)
        if result.is_error:
            continue

        async with world.open(0) as tools:
            after = await call_all(tools, calls)
        triples = zip(before, control, after, strict=True)
        return any(was.text == again.text and again.text != now.text for was, again, now in triples)

    return False


def _texts(replies: Sequence[CallResult]) -> list[str]:
    return [reply.text for reply in replies]
