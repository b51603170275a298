"""What the tool path costs: how busy 256 attempts with slow tools keep the engine, and MCP calls
per second.

    .venv/bin/python benchmarks/tools.py [--only busy,calls] [--repeats 3] [--save]

    ratio tools_engine_busy     seconds that the embedded engine computes over wall seconds, while
                                256 attempts of a small model are under way, each of whose turns
                                calls a tool that takes 200 ms, with its result in the next prompt
    ratio mcp_calls_TRANSPORT   calls per second through the toolbox, 64 at a time in one shared
                                session, over the 1,000 that are asked for: a small server over
                                stdio and over streamable HTTP, a manager (AgentDock's API), and
                                the same tool in a server of the official SDK over stdio (`sdk`)

The engine, the toolbox, its records and the connections are the real ones; servers are processes of
their own, and every answer is checked. The policy is a model with random weights, which would not
call tools by itself: its agent calls the tool after every reply.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from figures import Figure, write_results
from machine import describe_machine

ATTEMPTS = 256
TURNS = 6
NEW_TOKENS = 32
TOOL_S = 0.2
CLIENTS = 64
CALLS = 3000
ASKED_FOR = 1000
SHAPE = {
    "tokenizer": "byte",
    "hidden_size": 256,
    "num_layers": 4,
    "num_heads": 4,
    "context_length": 2048,
}
SYSTEM = "You may call the tool `wait`, which takes a number and gives it back after a while. " * 3
SERVER = Path(__file__).with_name("tools_server.py")


async def busy(turns: int) -> dict[str, float]:
    """Seconds of the engine and of the clock, from when all attempts are under way until the first
    has ended."""

    from agentevo.agents import Policy
    from agentevo.agents.tools.toolbox import Toolbox
    from agentevo.config import EngineSection, ModelSection
    from agentevo.config.tools import FunctionToolSection, tool_entry
    from agentevo.inference.conversations.conversation import Conversation
    from agentevo.inference.embedded.torch_engine import TorchEngine
    from agentevo.models.chat.chat_format import ChatFormat
    from agentevo.models.compute.attention import prepare
    from agentevo.models.files.load import load_model
    from agentevo.types import Message, SamplingParams, Task, ToolCall

    async def wait(number: int) -> int:
        """Gives a number back after a while."""
        await asyncio.sleep(TOOL_S)
        return number

    loaded = load_model(ModelSection(name="tiny", tiny=SHAPE))
    prepare(loaded.model)
    engine = TorchEngine(loaded.model, loaded.tokenizer, EngineSection())
    chat = ChatFormat(loaded.tokenizer)
    toolbox = Toolbox([FunctionToolSection(name=tool_entry(wait))])
    begun = asyncio.Event()
    ended = asyncio.Event()
    counter = itertools.count(1)

    async def attempt(number: int) -> None:
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=1.0)
        conversation = Conversation(
            engine,
            chat,
            sampling,
            name=f"a{number}",
            seed=number,
            context_length=SHAPE["context_length"],
            timeout_s=600.0,
        )
        policy = Policy(conversation)
        history = [Message("system", SYSTEM), Message("user", f"Begin with {number}.")]
        async with toolbox.open(Task(id=str(number)), number) as tools:
            for turn in range(turns):
                reply = await policy.generate(history, tools=tools.schemas)
                if turn == 0 and next(counter) == ATTEMPTS:
                    begun.set()
                (result,) = await tools.call([ToolCall("wait", json.dumps({"number": number}))])
                assert result.text == str(number), result.text
                history += [reply.message, Message("user", f"It gave {result.text}.")]

        ended.set()

    async def window() -> dict[str, float]:
        await begun.wait()
        before = engine.stats()
        started = time.perf_counter()
        cpu = time.process_time()
        await ended.wait()
        after = engine.stats()
        wall = time.perf_counter() - started

        return {
            "busy_s": after["engine/busy_s"] - before["engine/busy_s"],
            "wall_s": wall,
            "cpu_s": time.process_time() - cpu,
            "steps": after["engine/steps"] - before["engine/steps"],
            "tokens": after["engine/generated_tokens"] - before["engine/generated_tokens"],
        }

    works = [attempt(number) for number in range(ATTEMPTS)]
    found, *_ = await asyncio.gather(window(), *works)
    await toolbox.close()
    await engine.close()

    return found


@contextmanager
def server(kind: str) -> Iterator[str]:
    """The URL of a server that is a process of its own."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER), kind], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


async def calls(kind: str, url: str, count: int) -> dict[str, float]:
    """Calls per second, and CPU microseconds of a call on both sides."""
    from agentevo.agents.tools.toolbox import Toolbox
    from agentevo.config.mcp import MCPManagerSection, MCPServerSection
    from agentevo.types import Task, ToolCall

    if kind == "manager":
        toolbox = Toolbox([MCPManagerSection(url=url)])
    elif kind == "http":
        toolbox = Toolbox([MCPServerSection(name="s", url=url, session="shared")])
    else:
        command = {"command": sys.executable, "args": (str(SERVER), kind)}
        toolbox = Toolbox([MCPServerSection(name="s", session="shared", **command)])  # type: ignore[arg-type]

    async with toolbox.open(Task(id="t"), 0) as tools:

        async def client(number: int) -> None:
            for turn in range(count // CLIENTS):
                given = json.dumps({"a": number, "b": turn})
                (result,) = await tools.call([ToolCall("add", given)])
                assert result.text == str(number + turn), result.text

        await client(0)
        servers = psutil.Process().children()
        ours = time.process_time()
        theirs = _cpu_s(servers)
        started = time.perf_counter()
        await asyncio.gather(*map(client, range(CLIENTS)))
        wall = time.perf_counter() - started
        made = count // CLIENTS * CLIENTS
        found = {
            "calls_per_s": made / wall,
            "our_us": 1e6 * (time.process_time() - ours) / made,
            "server_us": 1e6 * (_cpu_s(servers) - theirs) / made,
        }

    await toolbox.close()
    return found


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def measure(only: set[str], repeats: int) -> list[Figure]:
    """All figures."""
    figures = []
    if "busy" in only:
        runs = _repeated("busy", repeats, lambda warm: asyncio.run(busy(TURNS if warm else 2)))
        raw = {**runs, "attempts": ATTEMPTS, "tool_s": TOOL_S, "shape": SHAPE}
        shares = [b / w for b, w in zip(runs["busy_s"], runs["wall_s"], strict=True)]
        meaning = f"engine's seconds over the clock's, {ATTEMPTS} attempts, tools of {TOOL_S} s"
        figures.append(_figure("tools_engine_busy", statistics.median(shares), meaning, raw))

    for kind in ("stdio", "http", "manager", "sdk") if "calls" in only else ():
        with ExitStack() as stack:
            url = stack.enter_context(server(kind)) if kind in ("http", "manager") else ""
            runs = _repeated(
                kind,
                repeats,
                lambda warm, kind=kind, url=url: asyncio.run(
                    calls(kind, url, CALLS if warm else CALLS // 10)
                ),
            )

        value = statistics.median(runs["calls_per_s"]) / ASKED_FOR
        raw = {**runs, "clients": CLIENTS, "calls": CALLS}
        meaning = f"calls/s through the toolbox over {ASKED_FOR}, {kind}"
        figures.append(_figure(f"mcp_calls_{kind}", value, meaning, raw))

    return figures


def _repeated(what: str, repeats: int, run: Any) -> dict[str, list[float]]:
    """What each repeat found, after one that warms up."""
    run(False)
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        one = run(True)
        print(what, {name: round(value, 3) for name, value in one.items()}, file=sys.stderr)
        for name, value in one.items():
            found.setdefault(name, []).append(value)

    return found


def _figure(name: str, value: float, meaning: str, raw: dict[str, Any]) -> Figure:
    medians = {key: statistics.median(one) for key, one in raw.items() if isinstance(one, list)}
    return Figure(name, value, meaning, {**raw, "medians": medians, "unit": "s, 1/s and us"})


def main() -> None:
    parser = argparse.ArgumentParser(description="What the tool path costs.")
    parser.add_argument("--only", default="busy,calls")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    machine = describe_machine()

    figures = measure(set(given.only.split(",")), given.repeats)
    for figure in figures:
        print(figure.line())
        print(figure.details(), file=sys.stderr)

    if given.save:
        print(write_results(figures, {}, {}, machine, "tools"), file=sys.stderr)


if __name__ == "__main__":
    main()
