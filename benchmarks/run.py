"""Speed against peers, all in one run: prints `ratio NAME VALUE` lines (higher is better for us,
but for shares).

    .venv/bin/python benchmarks/run.py [--only turns,train] [--repeats 3] [--model NAME_OR_FOLDER]

A run of everything writes its raw numbers to results/<date>-<machine>.json, one of a part with
--save.
A peer that can't be installed or started costs its own figures only, as does one that computes
something else than we do: they are named on stderr and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # everybody on the CPU

import torch

import asynchronous
import peers
import store
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.files.load import LoadedModel
from algorithms import share_of_forward
from engine_transport import AT_ONCE, transport
from figures import Figure, NotComparableError, write_results
from generate import concurrent, shared_prefix
from grpo_step import GrpoStep, against_trl, chat_prompts
from logprobs import ROWS, without_logits
from machine import describe_machine
from ours import MODEL, load, make_engine, model_folder
from prefix_merging import TURNS, figures, small_model
from sft import SupervisedStep, against_transformers, make_adapter, peer_row
from train_step import ROWS as TRAIN_ROWS
from train_step import against_trl as train_against_trl
from train_step import against_trl_in_memory
from turns import flatness

GROUPS = (
    "algorithms",
    "logprobs",
    "turns",
    "generate",
    "prefix",
    "prefix_merging",
    "train",
    "train_memory",
    "sft",
    "store",
    "transport",
    "async",
    "grpo",
)


class Bench:
    """One run: our model, the peers that were started, figures and failures."""

    def __init__(self, model: str, threads: int, repeats: int) -> None:
        self.model = model
        self.threads = threads
        self.repeats = repeats
        self.figures: list[Figure] = []
        self.failures: dict[str, str] = {}
        self.peers: dict[str, Any] = {}

    @cached_property
    def folder(self) -> Path:
        return model_folder(self.model)

    @cached_property
    def loaded(self) -> LoadedModel:
        return load(self.folder)

    @cached_property
    def engine(self) -> TorchEngine:
        return make_engine(self.loaded)

    def add(self, name: str, measure: Callable[[], list[Figure]]) -> None:
        """Measures and prints the figures of one case; a peer's failure is recorded under
        `name`."""
        try:
            figures = measure()
        except (peers.PeerError, NotComparableError) as error:
            self.fail(name, error)
            return

        self.figures += figures
        for figure in figures:
            print(figure.line(), flush=True)

        print(figures[0].details(), file=sys.stderr, flush=True)

    def fail(self, name: str, error: Exception) -> None:
        self.failures[name] = str(error)
        print(f"failed {name}: {error}", file=sys.stderr, flush=True)

    @contextmanager
    def started(self, *wanted: Callable[[], peers.Peer]) -> Iterator[list[peers.Peer]]:
        """The peers that could be started, for the time of the block."""
        with ExitStack() as stack:
            running = []
            for make in wanted:
                try:
                    peer = stack.enter_context(make())
                except peers.PeerError as error:
                    self.fail(make.__name__, error)
                    continue
                self.peers[peer.name] = peer.record()
                running.append(peer)

            yield running

    def transformers_generate(self) -> peers.Peer:
        return peers.transformers_generate(self.folder, self.threads)

    def vllm_generate(self) -> peers.Peer:
        return peers.vllm_generate(self.folder, self.threads, tuned=False)

    def vllm_tuned(self) -> peers.Peer:
        return peers.vllm_generate(self.folder, self.threads, tuned=True)


def run_generate(bench: Bench, only: set[str]) -> None:
    with bench.started(
        bench.transformers_generate, bench.vllm_generate, bench.vllm_tuned
    ) as running:
        if running and "generate" in only:
            for count in (1, 16, 64):
                bench.add(
                    f"generate_{count}_vs_best",
                    lambda count=count: concurrent(bench.engine, running, count, bench.repeats),
                )  # type: ignore[misc]

        vllm = [peer for peer in running if peer.name != "transformers"]
        if vllm and "prefix" in only:
            bench.add(
                "prefix500_64_vs_vllm", lambda: shared_prefix(bench.engine, vllm, bench.repeats)
            )


def run_grpo(bench: Bench, scratch: Path) -> None:
    prompts = scratch / "prompts.json"
    prompts.write_text(json.dumps(chat_prompts(bench.loaded)))

    def trl_grpo_step() -> peers.Peer:
        return peers.trl_grpo_step(bench.folder, prompts, bench.threads)

    with bench.started(trl_grpo_step) as running:
        if running:
            bench.add(
                "grpo_step_vs_trl",
                lambda: [
                    against_trl(GrpoStep(bench.loaded, bench.engine), running[0], bench.repeats)
                ],
            )


def run_prefix_merging(bench: Bench) -> None:
    model = small_model()
    for num_turns in TURNS:
        bench.add(
            f"prefix_merging_T{num_turns}",
            lambda num_turns=num_turns: figures(model, num_turns, bench.repeats),
        )  # type: ignore[misc]


def run_train(bench: Bench, scratch: Path) -> None:
    for kind, make_rows in TRAIN_ROWS.items():
        rows = make_rows(bench.loaded.model)
        file = scratch / f"{kind}.json"
        file.write_text(json.dumps([row.json() for row in rows]))

        def trl_train_step(file: Path = file) -> peers.Peer:
            return peers.trl_train_step(bench.folder, file, bench.threads)

        with bench.started(trl_train_step) as running:
            if running:
                trl = running[0]
                bench.add(
                    f"train_{kind}",
                    partial(train_against_trl, bench.folder, trl, kind, rows, bench.repeats),
                )


def run_sft(bench: Bench, scratch: Path) -> None:
    adapter = make_adapter(bench.folder, scratch / "adapter")
    rows = scratch / "conversations.json"
    ours = SupervisedStep(bench.folder, adapter)
    rows.write_text(json.dumps([peer_row(sample) for sample in ours.samples]))

    def transformers_sft() -> peers.Peer:
        return peers.transformers_sft(bench.folder, adapter, rows, bench.threads)

    with bench.started(transformers_sft) as running:
        if running:
            bench.add("sft", lambda: against_transformers(ours, running[0], bench.repeats))


def run_store(bench: Bench) -> None:
    results, flatness_figures = store.over_backends(
        list(store.BACKENDS), list(store.ROWS), bench.repeats
    )
    for figure in flatness_figures:
        bench.add(figure.name, lambda figure=figure: [figure])  # type: ignore[misc]

    for start in store.PEERS:
        with bench.started(start) as running:
            for peer in running:
                bench.add(
                    f"store_vs_{peer.name}",
                    lambda peer=peer: store.against(peer, results, bench.repeats),
                )  # type: ignore[misc]


def run_async(bench: Bench, scratch: Path) -> None:
    def measure() -> list[Figure]:
        figures, reasons = asynchronous.compare(
            scratch, "lognormal", [(2, asynchronous.RECOMMENDED)], range(bench.repeats)
        )
        if not figures:
            raise NotComparableError("; ".join(reasons.values()))
        return figures

    bench.add("async", measure)


def main() -> int:  # noqa: C901, PLR0912 (a branch for each part that --only can name)
    parser = argparse.ArgumentParser(description="Speed against peers, as ratios in one run.")
    parser.add_argument(
        "--only", default=",".join(GROUPS), help=f"some of {', '.join(GROUPS)}, separated by commas"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed rounds, after one that warms up"
    )
    parser.add_argument("--model", default=MODEL, help="a known model's name or a folder")
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the raw numbers of a part as well, to results/<date>-<machine>-<names>.json",
    )
    args = parser.parse_args()
    only = set(args.only.split(","))
    if only - set(GROUPS) or args.repeats < 1:
        parser.error(f"--only takes some of {', '.join(GROUPS)}, --repeats at least 1")

    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # leave through the `with` blocks, which end the peers
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    before = describe_machine()

    bench = Bench(args.model, threads, args.repeats)
    if "algorithms" in only:
        bench.add("algorithms_share_of_forward", lambda: share_of_forward(args.repeats))

    if "logprobs" in only:
        for part, all_rows in ROWS.items():
            for rows in all_rows:
                bench.add(
                    "logprobs",
                    lambda part=part, rows=rows: without_logits(
                        bench.loaded, part, rows, bench.repeats
                    ),
                )  # type: ignore[misc]

    if "turns" in only:
        for episodes in (1, 8):
            bench.add(
                "turn_flatness",
                lambda episodes=episodes: [flatness(bench.engine, episodes, bench.repeats)],
            )  # type: ignore[misc]

    if only & {"generate", "prefix"}:
        run_generate(bench, only)
    if "prefix_merging" in only:
        run_prefix_merging(bench)

    with tempfile.TemporaryDirectory() as scratch:
        if "train" in only:
            run_train(bench, Path(scratch))

        if "train_memory" in only:
            bench.add(
                "train_memory",
                lambda: against_trl_in_memory(
                    bench.folder, bench.loaded.model, Path(scratch), threads
                ),
            )

        if "sft" in only:
            run_sft(bench, Path(scratch))
        if "store" in only:
            run_store(bench)
        if "transport" in only:
            bench.add("transport", lambda: transport(list(AT_ONCE), args.repeats))
        if "async" in only:
            run_async(bench, Path(scratch))
        if "grpo" in only:  # last: it changes the weights
            run_grpo(bench, Path(scratch))

    if args.save or only == set(GROUPS):
        part = "" if only == set(GROUPS) else "-".join(name for name in GROUPS if name in only)
        print(
            "raw numbers: "
            f"{write_results(bench.figures, bench.failures, bench.peers, before, part)}",
            file=sys.stderr,
        )

    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
