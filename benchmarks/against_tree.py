"""What a change costs: our side of each benchmark in this tree beside the same in another one.

    git worktree add build/before COMMIT
    .venv/bin/python benchmarks/against_tree.py build/before [--only train_shared,store] [--save]

Each tree computes in a process of its own with its own `src` and `benchmarks`. In each round both
take the same turn, one after the other, while the other process is stopped; the tree that goes
first changes from round to round. Prints `ratio NAME_vs_before VALUE`: the median over all rounds
after the first of the other tree's seconds over ours of the same round. Below 1, this tree is
slower.

    generate_N       N requests with different prompts of 48 tokens, 64 new ones each
    prefix500_64     64 requests that share a prompt of 500 tokens
    turns_8          8 conversations of 8 turns, 64 observed and 32 new tokens in each
    train_KIND       a training step of GRPO on given rows, which share a prompt or nothing
    prefix_merging   forward and backward pass over a group of 8 attempts of 8 turns
    sft              a supervised step with LoRA
    grpo             a whole step: generate, score, update
    store            a group's way through the store on SQLite
    run              `agentevo train frozen_lake` for two steps, start and end included
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 64
START_S = 60.0


class TreeWorker:
    """A process that measures one tree."""

    def __init__(self, tree: Path) -> None:
        tree = tree.resolve()
        environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree / 'benchmarks'}"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # so that no run compiles its source
        # -P: this script's own folder must not come before the tree's.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker", str(tree)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._process.send_signal(signal.SIGSTOP)

    def seconds(self, case: str, repeat: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        print(json.dumps([case, repeat]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{case}: the worker ended with {self._process.wait(START_S)}")
        self._process.send_signal(signal.SIGSTOP)
        return float(json.loads(answer))

    def end(self) -> None:
        self._process.kill()
        self._process.wait(START_S)


def work(tree: Path) -> None:
    """Answers each `[case, repeat]` with the seconds that it took. Only one case's models are in
    memory at a time."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    current = ""
    measure: Callable[[int], float] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for line in sys.stdin:
            case, repeat = json.loads(line)
            if case != current or measure is None:
                measure = None
                gc.collect()
                measure = CASES[case](case, Path(scratch))
                current = case

            print(json.dumps(measure(repeat)), file=answers, flush=True)


def generation(case: str, _: Path) -> Callable[[int], float]:
    from generate import random_prompts
    from ours import load, make_engine, model_folder, time_generate

    engine = make_engine(load(model_folder()))
    kind, _, count = case.rpartition("_")

    def seconds(repeat: int) -> float:
        if kind == "prefix500":
            prompts = random_prompts(1, 500, repeat) * int(count)
        else:
            prompts = random_prompts(int(count), 48, repeat)
        return time_generate(engine, prompts, NEW_TOKENS, 1.0, seed=repeat)[0]

    return seconds


def conversations(case: str, _: Path) -> Callable[[int], float]:
    from ours import load, make_engine, model_folder
    from turns import play

    engine = make_engine(load(model_folder()))
    count = int(case.rpartition("_")[2])
    return lambda repeat: sum(asyncio.run(play(engine, count, repeat)))


def training(case: str, _: Path) -> Callable[[int], float]:
    from ours import load, model_folder
    from train_step import ROWS, TrainStep

    loaded = load(model_folder())
    ours = TrainStep(loaded, ROWS[case.removeprefix("train_")](loaded.model), {})
    return lambda _: ours.step()[0].seconds


def merging(_: str, __: Path) -> Callable[[int], float]:
    from prefix_merging import CPU, MICRO_BATCH_TOKENS, micro_batches, run, samples_of, small_model

    model = small_model()
    each = samples_of(model, 8)[1]
    plan = partial(micro_batches, max_tokens=MICRO_BATCH_TOKENS, device=CPU)
    return lambda _: run(model, each, plan).seconds


def fine_tuning(_: str, scratch: Path) -> Callable[[int], float]:
    from ours import model_folder
    from sft import SupervisedStep, make_adapter

    ours = SupervisedStep(model_folder(), make_adapter(model_folder(), scratch / "adapter"))
    return lambda _: ours.step()[0].seconds


def whole_step(_: str, __: Path) -> Callable[[int], float]:
    from grpo_step import GrpoStep
    from ours import load, make_engine, model_folder

    loaded = load(model_folder())
    ours = GrpoStep(loaded, make_engine(loaded))
    return lambda _: ours.step()[0]


def storage(_: str, scratch: Path) -> Callable[[int], float]:
    """Seconds of a trajectory's way: leased, written, read."""
    from store import cycle, measure

    def seconds(repeat: int) -> float:
        url = f"sqlite:///{scratch / f'store-{repeat}-{random.random()}.db'}"
        (rates,) = asyncio.run(measure("sqlite", url, [1_000], 3))
        return 1 / cycle(rates["per_s"])

    return seconds


def whole_run(_: str, __: Path) -> Callable[[int], float]:
    keys = ["trainer.steps=2", "evaluation.every=0", "evaluation.tasks=1", "tracking.report=false"]
    keys.append("cold_start.episodes=32")

    def seconds(repeat: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "agentevo", "train", "frozen_lake", *keys]
            command += [f"run.seed={repeat}", f"run.dir={folder}/run"]
            started = time.perf_counter()
            subprocess.run(
                command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            return time.perf_counter() - started

    return seconds


CASES: dict[str, Callable[[str, Path], Callable[[int], float]]] = {
    "generate_1": generation,
    "generate_16": generation,
    "generate_64": generation,
    "prefix500_64": generation,
    "turns_8": conversations,
    "train_shared": training,
    "train_unshared": training,
    "prefix_merging": merging,
    "sft": fine_tuning,
    "grpo": whole_step,
    "store": storage,
    "run": whole_run,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, help="the other tree's folder")
    parser.add_argument("--only", default=",".join(CASES), help="some cases, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after one that warms up")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/...json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.tree)
        return
    wrong = set(options.only.split(",")) - set(CASES)
    if wrong or not (options.tree / "benchmarks").is_dir():
        parser.error(f"TREE is a folder with src and benchmarks, --only some of {', '.join(CASES)}")

    from figures import Figure, write_results
    from machine import describe_machine

    machine = describe_machine()
    workers = {"this": TreeWorker(HERE.parent), "before": TreeWorker(options.tree)}
    figures = []
    try:
        for case in options.only.split(","):
            seconds: dict[str, list[float]] = {name: [] for name in workers}
            for repeat in range(options.repeats + 1):
                for name in sorted(workers, reverse=repeat % 2 == 0):
                    seconds[name].append(workers[name].seconds(case, repeat))

            ratios = [
                before / this
                for before, this in zip(seconds["before"][1:], seconds["this"][1:], strict=True)
            ]
            raw = {"unit": "s", "repeats": seconds, "ratios": ratios}
            raw["medians"] = {name: median(values[1:]) for name, values in seconds.items()}
            figures.append(Figure(f"{case}_vs_before", median(ratios), __doc__ or "", raw))
            spread = quantiles(ratios, n=4) if len(ratios) > 1 else ratios
            print(
                figures[-1].line(), "quartiles", *(f"{value:.3f}" for value in spread), flush=True
            )
    finally:
        for worker in workers.values():
            worker.end()

    if options.save:
        print(write_results(figures, {}, {}, machine, "against_tree"))


if __name__ == "__main__":
    main()
