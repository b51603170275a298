"""What the gateway costs: requests per second, added latency and memory, in front of an engine that
answers at once.

    .venv/bin/python benchmarks/gateway.py [--seconds 8] [--repeats 3] [--no-peer] [--save]

The server (gateway, sampler's loop and engine) is a process of its own; the load comes from this
one, over plain sockets that stay open, so that little of its time is a client's. Every answer is
read and its text checked.

    ratio gateway_vs_litellm    requests/s with 64 clients over those of LiteLLM, one worker,
                                whose answer is its own `mock_response`: the two take turns
    ratio gateway_stream_vs_whole   the same with `stream: true`, over ours without
    added_ms                    median of one client's requests, one after the other
    ttft_added_ms               median time to a stream's first text beyond the engine's token
    session_kib                 memory of a session with 8 turns, of 1,000 that are open at once
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil

from figures import Figure, write_results
from machine import describe_machine
from peers import PeerError, interpreter

LITELLM_SETTINGS = {
    "LITELLM_LOG": "ERROR",
    "NO_DOCS": "True",
    # It then checks no key, which is less than ours does.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}
CLIENTS = 64
SLOW_SEED = 7
FIRST_S = 0.03
"""A request with SLOW_SEED gets its first token after so long, and the others after as long."""
SESSIONS = 1000
TURNS = 8
TEXT = "the quick brown fox jumps over the lazy dog"
QUESTION = {"role": "user", "content": "What is the answer to everything? Say it in one line."}
START_S = 180.0


async def serve(sessions: int) -> None:
    """Says {"base_url", "keys"} on stdout and serves until stdin ends."""
    from agentevo.agents import Policy
    from agentevo.agents.gateway.gateway import Gateway
    from agentevo.config import ModelSection
    from agentevo.config.gateway import GatewaySection
    from agentevo.inference.conversations.conversation import Conversation
    from agentevo.models.chat.chat_format import ChatFormat
    from agentevo.models.files.load import load_model
    from agentevo.types import Completion, SamplingParams

    tiny = {"tokenizer": "byte", "hidden_size": 16, "num_layers": 1, "context_length": 65536}
    chat = ChatFormat(load_model(ModelSection(name="tiny", tiny=tiny)).tokenizer)
    ids = [*chat.tokenizer.encode(TEXT, add_special_tokens=False), chat.end_of_turn_id]

    class AtOnce:
        version = 0

        async def generate(self, prompt_ids: Any, sampling: Any, **more: Any) -> Completion:
            is_slow = sampling.seed == SLOW_SEED
            listen = more.get("listen")
            for token in ids if listen is not None or is_slow else ():
                if is_slow and token in (ids[0], ids[-1]):
                    await asyncio.sleep(FIRST_S)
                if listen is not None:
                    listen([token], [-1.0])

            logprobs = [-1.0] * len(ids)
            versions = [0] * len(ids)
            return Completion(ids=ids, logprobs=logprobs, versions=versions, finish_reason="stop")

        async def release(self, session: str) -> None:
            return

    gateway = Gateway(GatewaySection(), model="tiny", timeout_s=60.0)
    policies = [
        Policy(
            Conversation(
                AtOnce(),  # type: ignore[arg-type]
                chat,
                SamplingParams(max_new_tokens=256),
                name=f"s{number}",
                seed=number,
                context_length=65536,
                timeout_s=60.0,
            ),
            gateway,
        )
        for number in range(sessions)
    ]
    keys = [policy.api_key for policy in policies]
    print(json.dumps({"base_url": policies[0].base_url, "keys": keys}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    gateway.close()


@contextlib.contextmanager
def our_server(sessions: int) -> Iterator[tuple[str, list[str], psutil.Process]]:
    """(base URL, keys, process)."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(sessions)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        said = json.loads(process.stdout.readline())
        yield said["base_url"], said["keys"], psutil.Process(process.pid)
    finally:
        process.stdin.close()
        process.wait(60)


@contextlib.contextmanager
def litellm_proxy() -> Iterator[str]:
    """The base URL of LiteLLM's proxy. Raises PeerError where it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        answer = {"model": "openai/any", "api_key": "none", "mock_response": TEXT}
        config.write_text(
            json.dumps({"model_list": [{"model_name": "policy", "litellm_params": answer}]})
        )

        log = (Path(folder) / "log").open("w")
        process = subprocess.Popen(
            [
                str(interpreter("agentlightning").parent / "litellm"),
                "--config",
                str(config),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--num_workers",
                "1",
            ],
            stdout=log,
            stderr=log,
            env=os.environ | LITELLM_SETTINGS,
        )
        try:
            deadline = time.monotonic() + START_S
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise PeerError(f"LiteLLM's proxy did not start: {Path(log.name).read_text()}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(30)


class Client:
    """One connection that stays open, and what it asks."""

    def __init__(self, base_url: str, key: str) -> None:
        self._host, _, self._port = base_url.split("//")[1].split("/")[0].partition(":")
        self._key = key

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))

    async def begin(self, body: bytes) -> str:
        """Sends a request; the head of its answer."""
        self._writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            + f"authorization: Bearer {self._key}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        if " 200 " not in head.splitlines()[0]:
            raise RuntimeError(head + (await self._reader.read(2000)).decode())
        return head

    async def first_text(self, body: bytes) -> None:
        """Returns with the first text of a stream, whose rest is read afterwards."""
        await self.begin(body)
        await self._reader.readuntil(b'"content":"' + TEXT[:1].encode())

    async def rest(self) -> None:
        """Reads a stream to its end."""
        await self._reader.readuntil(b"\r\n0\r\n\r\n")

    async def ask(self, body: bytes) -> str:
        """The text of the answer."""
        head = await self.begin(body)
        if "content-length: " in head:
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            answer = json.loads(await self._reader.readexactly(length))
            return str(answer["choices"][0]["message"]["content"])

        said = b""
        while size := int(await self._reader.readline(), 16):
            said += await self._reader.readexactly(size)
            await self._reader.readline()

        await self._reader.readline()
        events = [line[6:] for line in said.splitlines() if line.startswith(b"data: {")]
        deltas = [choice["delta"] for e in events for choice in json.loads(e)["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def clients(base_url: str, keys: list[str]) -> AsyncIterator[list[Client]]:
    """Open ones, one for each key."""
    opened = [Client(base_url, key) for key in keys]
    await asyncio.gather(*(client.open() for client in opened))
    try:
        yield opened
    finally:
        for client in opened:
            client.close()


def request(**more: Any) -> bytes:
    """A body whose answer is TEXT."""
    return json.dumps({"model": "policy", "messages": [QUESTION], **more}).encode()


async def rate(base_url: str, keys: list[str], seconds: float, body: bytes) -> float:
    """Requests per second of as many clients as there are keys."""
    done = 0
    async with clients(base_url, keys) as opened:
        ends = time.perf_counter() + seconds

        async def ask(client: Client) -> None:
            nonlocal done
            while time.perf_counter() < ends:
                if await client.ask(body) != TEXT:
                    raise RuntimeError("another answer than the engine's")
                done += 1

        begun = time.perf_counter()
        await asyncio.gather(*map(ask, opened))
        return done / (time.perf_counter() - begun)


async def latency_ms(base_url: str, key: str, count: int) -> float:
    """The median of one client's requests, one after the other."""
    times = []
    async with clients(base_url, [key]) as (client,):
        for _ in range(count):
            begun = time.perf_counter()
            await client.ask(request())
            times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


async def first_text_ms(base_url: str, key: str, count: int) -> float:
    """The median of what one client waits for a stream's first text beyond the engine's."""
    times = []
    body = request(stream=True, seed=SLOW_SEED)
    async with clients(base_url, [key]) as (client,):
        for _ in range(count):
            begun = time.perf_counter()
            await client.first_text(body)
            times.append(time.perf_counter() - begun - FIRST_S)
            await client.rest()

    return 1e3 * statistics.median(times)


async def open_sessions(base_url: str, keys: list[str], process: psutil.Process) -> list[float]:
    """MiB of the server after each turn of all sessions, each of which goes on from the last."""
    memory = [process.memory_info().rss / 2**20]
    histories: list[list[dict[str, str]]] = [[] for _ in keys]
    async with clients(base_url, keys[:CLIENTS]) as opened:
        for _ in range(TURNS):

            async def turn(first: int, client: Client) -> None:
                for place in range(first, len(keys), CLIENTS):
                    client._key = keys[place]
                    histories[place].append(QUESTION)
                    body = json.dumps({"model": "policy", "messages": histories[place]}).encode()
                    histories[place].append(
                        {"role": "assistant", "content": await client.ask(body)}
                    )

            await asyncio.gather(*(turn(n, client) for n, client in enumerate(opened)))
            memory.append(process.memory_info().rss / 2**20)

    return memory


def measure(seconds: float, repeats: int, *, peer: bool) -> list[Figure]:
    """All figures."""
    raw: dict[str, list[float]] = {"ours": [], "ours_stream": [], "litellm": []}
    raw |= {"added_ms": [], "ttft_added_ms": []}
    with contextlib.ExitStack() as stack:
        # A session's tree grows with its turns, so each repeat has sessions of its own.
        base_url, keys, _ = stack.enter_context(our_server(2 * CLIENTS * (repeats + 1) + 1))
        theirs = stack.enter_context(litellm_proxy()) if peer else ""
        fresh = iter([keys[n : n + CLIENTS] for n in range(1, len(keys), CLIENTS)])
        for repeat in range(repeats + 1):  # the first one warms up
            lasts = seconds if repeat else 1.0
            found = {
                "ours": asyncio.run(rate(base_url, next(fresh), lasts, request())),
                "ours_stream": asyncio.run(
                    rate(base_url, next(fresh), lasts, request(stream=True))
                ),
                "added_ms": asyncio.run(latency_ms(base_url, keys[0], 300)),
                "ttft_added_ms": asyncio.run(first_text_ms(base_url, keys[0], 30)),
            }
            if peer:
                found["litellm"] = asyncio.run(rate(theirs, ["none"] * CLIENTS, lasts, request()))

            print({name: round(value, 2) for name, value in found.items()}, file=sys.stderr)
            for name, value in found.items() if repeat else ():
                raw[name].append(value)

    with our_server(SESSIONS) as (base_url, keys, process):
        memory = asyncio.run(open_sessions(base_url, keys, process))

    print(f"MiB after each turn of {SESSIONS} sessions: {memory}", file=sys.stderr)
    print(f"added_ms {statistics.median(raw['added_ms']):.2f}")
    print(f"ttft_added_ms {statistics.median(raw['ttft_added_ms']):.2f}")
    print(f"requests_per_s {statistics.median(raw['ours']):.0f}")
    print(f"session_kib {1024 * (memory[-1] - memory[0]) / SESSIONS:.0f}")

    ours = statistics.median(raw["ours"])
    details: dict[str, Any] = {**raw, "memory_mib": memory, "clients": CLIENTS}
    stream = statistics.median(raw["ours_stream"]) / ours

    meaning = "requests/s with 64 clients, streamed over whole"
    figures = [Figure("gateway_stream_vs_whole", stream, meaning, details)]
    if peer:
        value = ours / statistics.median(raw["litellm"])
        meaning = "requests/s with 64 clients over LiteLLM's proxy with one worker"
        figures.append(Figure("gateway_vs_litellm", value, meaning, details))

    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
        return

    before = describe_machine()
    figures = measure(arguments.seconds, arguments.repeats, peer=not arguments.no_peer)
    for figure in figures:
        print(figure.line())

    if arguments.save:
        peers = {} if arguments.no_peer else {"litellm": {"version": "1.106.2", "workers": 1}}
        print(write_results(figures, {}, peers, before, part="gateway"), file=sys.stderr)


if __name__ == "__main__":
    main()
