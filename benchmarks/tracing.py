"""What tracing costs: the CPU time of a span in the thread that plays and in the tracer's, and its
share of a run.

    .venv/bin/python benchmarks/tracing.py [--only span,run] [--pairs N] [--steps 6] [--save]

    span       attempts of CALLS policy calls and as many tool calls each, recorded with and without
               a tracer: microseconds of CPU for a span in the thread that plays (the difference)
               and in the tracer's thread, without contents (jsonl), with contents of 2,000
               characters a message (contents), over OTLP to a collector in another process (otlp)
    run        ratios tracing_share_of_run and tracing_share_of_run_otlp: CPU seconds of the
               tracer's thread of a training of `frozen_lake`, and of its spans in the thread that
               plays, over all CPU seconds of that process from the tracer's beginning to its end,
               as JSON lines and to a collector in another process. Lower is better; at most 0.05
    --pairs N  N runs with tracing and N without in turns, the same seed: their CPU seconds are in
               the raw numbers beside the share, which they are too noisy to show

CPU time counts, of threads by their own clocks, so other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from agentevo.observability.tracing.otlp import JsonLines, collector_exporter
from agentevo.observability.tracing.spans import RunFacts, Spans, run_resource
from agentevo.observability.tracing.texts import SpanTexts
from agentevo.observability.tracing.tracer import CallExporter, TraceLimits, Tracer
from agentevo.store import call_log
from agentevo.store.call_log import AttemptCalls, CallLog, record_call
from agentevo.store.trace_context import TracedMessage
from agentevo.types import Message
from figures import Figure, write_results
from machine import describe_machine

CALLS = 8
"""Of either kind in an attempt."""
ATTEMPTS = 1500
MOST = 0.05
"""Of a training that makes 300 spans in a second of CPU time."""
KINDS = ("jsonl", "contents", "otlp")
RUNS = ("jsonl", "otlp")
WORDS = "word " * 400


class Nowhere:
    """A store of calls that keeps none."""

    async def write_calls(self, calls: Any) -> None: ...
    async def renew_calls(self, recorder: str) -> None: ...
    async def close(self) -> None: ...


async def play(log: CallLog, contents: bool) -> float:
    """CPU seconds of this thread for ATTEMPTS attempts, and of what it has to do for them."""
    began = time.thread_time()
    for number in range(ATTEMPTS):
        calls = AttemptCalls(log, f"task-{number}/train@1#0")
        with calls.attempt("Player") as attempt:
            for turn in range(CALLS):
                with record_call("policy", "generate", prompt_tokens=400) as call:
                    call.note(turn=turn, completion_tokens=40, completions=1, version=3)
                    if (tracing := call.tracing) is not None and tracing.contents:
                        call.traced_message = TracedMessage(
                            messages=[Message("user", WORDS)] * (turn + 1),
                            answers=[Message("assistant", WORDS)],
                            finish_reasons=["stop"],
                        )

                with record_call("tool", "search") as tool:
                    tool.keep(arguments='{"query": "a lake"}', result=WORDS)

            attempt.note(reward=1.0)

        await asyncio.sleep(0)

    return time.thread_time() - began


async def recorded(tracer: Tracer | None) -> tuple[float, float]:
    """CPU seconds of the thread that plays, and of the tracer's."""

    async def nowhere() -> Any:
        return Nowhere()

    contents = tracer is not None and tracer.contents
    if tracer is None:
        async with CallLog(nowhere) as log:
            return await play(log, contents), 0.0

    before = exporting.seconds
    async with tracer, CallLog(nowhere, tracing=tracer) as log:
        playing = await play(log, contents)
    assert not tracer.num_lost, (tracer.num_exported, tracer.num_lost)
    return playing, exporting.seconds - before


class Exporting:
    """CPU seconds of making and exporting spans, in whichever thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        export = CallExporter.export

        def timed(exporter: CallExporter, spans: Any) -> Any:
            began = time.thread_time()
            result = export(exporter, spans)
            self.seconds += time.thread_time() - began
            return result

        CallExporter.export = timed  # type: ignore[method-assign]


exporting = Exporting()


def spans(kind: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Microseconds of a span, medians of the repeats after one that warms up."""
    number = ATTEMPTS * (1 + 2 * CALLS)
    call_log.MAX_STARTS = call_log.MAX_HELD = 10**9  # or what comes so fast is not recorded

    runs: dict[str, list[float]] = {"player_us": [], "tracer_us": []}
    with collector() if kind == "otlp" else _nothing() as url:
        for repeat in range(repeats + 1):
            plain, _ = asyncio.run(recorded(None))
            facts = RunFacts("bench", "run-1", "tiny", False)
            has_contents = kind == "contents"
            made = Spans(facts, SpanTexts(16384), run_resource(), contents=has_contents)
            path = folder / f"{kind}-{repeat}.jsonl"

            def make_exporter(path: Path = path, url: str = url) -> Any:
                return collector_exporter(url) if url else JsonLines(path)

            tracer = Tracer(
                make_exporter,
                made,
                run_id="r",
                contents=has_contents,
                limits=TraceLimits(queue=number),
                flush_s=600,
            )
            playing, working = asyncio.run(recorded(tracer))
            if repeat:
                runs["player_us"].append(1e6 * (playing - plain) / number)
                runs["tracer_us"].append(1e6 * working / number)

    medians = {name: statistics.median(values) for name, values in runs.items()}
    print(f"{kind}: {medians}", file=sys.stderr, flush=True)
    return {**runs, "medians": medians, "unit": "CPU us"}


@contextmanager
def _nothing() -> Any:
    yield ""


@contextmanager
def collector() -> Any:
    """The URL of a collector in a process of its own, which throws everything away."""
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_collect, args=(theirs,))
    process.start()
    try:
        yield f"http://127.0.0.1:{pipe.recv()}"
    finally:
        process.kill()
        process.join()


def _collect(pipe: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_address[1])
    server.serve_forever()


def train_here(words: Sequence[str], told: Path) -> None:
    """In a process of its own: trains, and writes what the tracer has cost."""
    from agentevo.cli.main import main

    begin = Tracer.__aenter__
    end = Tracer.close
    started = [0.0]
    found: dict[str, float] = {}

    async def timed_begin(self: Tracer) -> Tracer:
        started[0] = time.process_time()
        return await begin(self)

    def timed_end(self: Tracer) -> None:
        end(self)
        found.update(
            tracer_s=exporting.seconds,
            spans=self.num_exported,
            lost=self.num_lost,
            process_s=time.process_time() - started[0],
        )
        told.write_text(json.dumps(found))

    Tracer.__aenter__ = timed_begin  # type: ignore[method-assign]
    Tracer.close = timed_end  # type: ignore[method-assign]
    sys.argv = ["agentevo", *words]
    main()


def train(folder: Path, traced: Sequence[str], steps: int, seed: int) -> dict[str, float]:
    """CPU seconds of one run in a process of its own, and what its tracer says. `traced`: the keys
    that ask for one."""
    run = Path(tempfile.mkdtemp(prefix="run-", dir=folder)) / "run"
    told = run.parent / "told"
    words = ["train", "frozen_lake", f"run.dir={run}", f"trainer.steps={steps}", f"run.seed={seed}"]
    words += ["evaluation.tasks=8", "tracking.report=false"]
    words += traced
    program = [sys.executable, __file__, "--train-here", str(told), *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(program, check=True, capture_output=True, cwd=folder)

    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"whole_s": whole, **(json.loads(told.read_text()) if traced else {})}


def share(folder: Path, arguments: argparse.Namespace, kind: str, player_us: float) -> Figure:
    """Tracing's CPU seconds over a run's."""
    raw: dict[str, list[float]] = {"share": [], "spans_per_s": [], "traced_s": [], "plain_s": []}
    with collector() if kind == "otlp" else _nothing() as url:
        keys = [f"tracing.backend={kind}", *([f"tracing.endpoint={url}"] if url else [])]
        for number in range(max(arguments.pairs, 1)):
            order = (keys, []) if number % 2 else ([], keys)
            for traced in order if arguments.pairs else (keys,):
                found = train(folder, traced, arguments.steps, number)
                raw["traced_s" if traced else "plain_s"].append(found["whole_s"])
                if traced:
                    assert not found["lost"], found
                    tracing_s = found["tracer_s"] + 1e-6 * player_us * found["spans"]
                    raw["share"].append(tracing_s / found["process_s"])
                    raw["spans_per_s"].append(found["spans"] / found["process_s"])

                print({"traced": traced, **found}, file=sys.stderr, flush=True)

    medians = {name: statistics.median(values) for name, values in raw.items() if values}
    meaning = f"CPU seconds of tracing ({kind}) over those of frozen_lake; at most {MOST}"
    content = {**raw, "player_us": player_us, "medians": medians, "unit": "CPU s"}
    name = "tracing_share_of_run" + ("" if kind == "jsonl" else f"_{kind}")
    return Figure(name, medians["share"], meaning, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="span,run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    machine = describe_machine()

    only = arguments.only.split(",")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="agentevo-bench-tracing-") as name:
        folder = Path(name)
        found = {
            kind: spans(kind, folder, arguments.repeats)
            for kind in (KINDS if "span" in only else RUNS)
        }
        for kind, raw in found.items() if "span" in only else ():
            both = raw["medians"]["player_us"] + raw["medians"]["tracer_us"]
            meaning = f"CPU milliseconds of a span in both threads, {kind}"
            figures.append(Figure(f"tracing_span_ms_{kind}", both / 1000, meaning, raw))

        if "run" in only:
            for kind in RUNS:
                # A difference has noise.
                player_us = max(found[kind]["medians"]["player_us"], 0.0)
                figures.append(share(folder, arguments, kind, player_us))

    for figure in figures:
        print(figure.line())
        print(figure.details(), file=sys.stderr)

    if arguments.save:
        print(write_results(figures, {}, {}, machine, "tracing"), file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train-here"]:
        train_here(sys.argv[3:], Path(sys.argv[2]))
    else:
        main()
