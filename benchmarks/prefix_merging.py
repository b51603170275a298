"""What prefix merging is worth on ReAct trajectories: the same GRPO loss and gradient, merged, a
sample per turn, and packed.

    .venv/bin/python benchmarks/prefix_merging.py --turns 1,2,4,8,16 --repeats 3
    .venv/bin/python benchmarks/prefix_merging.py --turns 8 --model FOLDER  # not the random one

A group of 8 attempts at a task of T turns: a prompt of 250 tokens that all share, then per turn an
action (10 to 30 tokens, trained) and an observation (40 to 80), each turn's prompt being all before
it. Three ways to the same gradient:

    merged   every turn a sample of its own with its whole history, of which each distinct token is
             computed once
    turns    the same samples without merging: each in a pass of its own, or side by side without
             padding, whichever is faster
    packed   one sequence per attempt, side by side; the group's prompt is computed for each

and, in the raw numbers, `merged attempts`: the sequences of packed, merged, as the trainer makes
them of trajectories that only grow.

Losses and gradient norms of all must agree. `prefix_merging_T8_G8` is time(turns) / time(merged) at
T = 8; the efficiency is that over the ratio of the tokens computed; the plan is all that is done
before the first layer (split, tree, index tensors).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentevo.config import AlgorithmSection
from agentevo.models.compute.attention import prepare
from agentevo.training.batching.packing import PackedBatch, pack
from agentevo.training.batching.passes import micro_batches
from agentevo.training.policy_loss import MinibatchLoss
from agentevo.types import Sample
from figures import Figure, check_equal
from grpo_rows import noisy_logprobs, random_ids
from ours import load

TURNS = (1, 2, 4, 8, 16)
GROUP_SIZE = 8
PROMPT_TOKENS = 250
ACTION_TOKENS = (10, 30)
OBSERVATION_TOKENS = (40, 80)
EFFICIENCY_TURNS = 8
MICRO_BATCH_TOKENS = 16384
CPU = torch.device("cpu")
Batches = list[tuple[list[int], PackedBatch]]


def small_model() -> PreTrainedModel:
    """SmolLM2's kind with random weights, an eighth of its cost per token: 64 samples of 550 tokens
    take minutes with SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return prepare(LlamaForCausalLM(config).eval())


@dataclass(frozen=True)
class Attempt:
    """One trajectory."""

    ids: list[int]
    actions: list[tuple[int, int]]
    """First token of each action and the one after its last."""
    advantage: float

    def sample(self, name: str, logprobs: Sequence[float], turns: range) -> Sample:
        """Trains the actions of these turns and ends with the last of them. logprobs: of all
        trained tokens of the attempt, in order."""
        place = sum(end - start for start, end in self.actions[: turns.start])
        length = self.actions[turns[-1]][1]
        mask = [False] * length
        old = [0.0] * length
        for start, end in (self.actions[turn] for turn in turns):
            mask[start:end] = [True] * (end - start)
            old[start:end] = logprobs[place : place + end - start]
            place += end - start

        return Sample(
            trajectory_id=name,
            group_id="group",
            ids=self.ids[:length],
            loss_mask=mask,
            logprobs=old,
            versions=[0 if m else -1 for m in mask],
            advantages=[self.advantage for m in mask if m],
        )


def attempts(num_turns: int, vocabulary: int) -> list[Attempt]:
    rng = random.Random(num_turns)
    prompt = random_ids(rng, vocabulary, PROMPT_TOKENS)
    found = []
    for _ in range(GROUP_SIZE):
        ids = list(prompt)
        actions = []
        for turn in range(num_turns):
            if turn:
                ids += random_ids(rng, vocabulary, rng.randint(*OBSERVATION_TOKENS))
            start = len(ids)
            ids += random_ids(rng, vocabulary, rng.randint(*ACTION_TOKENS))
            actions.append((start, len(ids)))

        found.append(Attempt(ids, actions, rng.gauss(0.0, 1.0)))

    return found


def samples_of(model: PreTrainedModel, num_turns: int) -> tuple[list[Sample], list[Sample]]:
    """One per attempt, and one per turn."""
    group = attempts(num_turns, model.config.vocab_size)
    turns = range(num_turns)
    blank = [0.0] * (num_turns * ACTION_TOKENS[1])
    old = noisy_logprobs(model, [attempt.sample("", blank, turns) for attempt in group], num_turns)
    members = list(zip(range(GROUP_SIZE), group, old, strict=True))
    whole = [attempt.sample(f"attempt {i}", logprobs, turns) for i, attempt, logprobs in members]
    each = [
        attempt.sample(f"attempt {i}", logprobs, range(t, t + 1))
        for i, attempt, logprobs in members
        for t in turns
    ]
    return whole, each


def alone(samples: Sequence[Sample]) -> Batches:
    return [([index], pack([sample], CPU, merge=False)) for index, sample in enumerate(samples)]


@dataclass(frozen=True)
class Pass:
    """Forward and backward."""

    seconds: float
    plan_seconds: float
    loss: float
    grad_norm: float
    num_tokens: int


def run(
    model: PreTrainedModel, samples: Sequence[Sample], plan: Callable[[Sequence[Sample]], Batches]
) -> Pass:
    minibatch = MinibatchLoss(AlgorithmSection())
    started = time.perf_counter()
    batches = plan(samples)
    planned = time.perf_counter()

    weights = minibatch.row_weights(samples)
    total = 0.0
    for indices, batch in batches:
        loss, _ = minibatch.loss(
            model, batch, weights[indices], kl_coef=0.0, entropy_coef=0.0, statistics={}
        )
        loss.backward()
        total += float(loss.detach())

    ended = time.perf_counter()
    norm = float(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )
    model.zero_grad(set_to_none=True)

    return Pass(
        ended - started,
        planned - started,
        total,
        norm,
        sum(batch.num_distinct for _, batch in batches),
    )


def figures(model: PreTrainedModel, num_turns: int, repeats: int) -> list[Figure]:
    """The first round compares results; then the ways take turns, of the two ways to compute turns
    apart only the faster one."""
    whole, each = samples_of(model, num_turns)
    merged = partial(micro_batches, max_tokens=MICRO_BATCH_TOKENS, device=CPU)
    side_by_side = partial(merged, merge=False)
    ways: dict[str, Callable[[], Pass]] = {
        "merged": lambda: run(model, each, merged),
        "merged attempts": lambda: run(model, whole, merged),
        "packed": lambda: run(model, whole, side_by_side),
        "turns, each alone": lambda: run(model, each, alone),
        "turns, side by side": lambda: run(model, each, side_by_side),
    }
    run(model, each[:1], merged)

    first = {name: way() for name, way in ways.items()}
    for name, found in first.items():
        check_equal(f"T={num_turns}, {name}, loss", first["merged"].loss, found.loss, 1e-5)
        check_equal(
            f"T={num_turns}, {name}, gradient norm",
            first["merged"].grad_norm,
            found.grad_norm,
            1e-4,
        )

    turns = min(
        (name for name in ways if name.startswith("turns")), key=lambda name: first[name].seconds
    )
    kept = ("merged", "merged attempts", "packed", turns)
    rounds = [{name: ways[name]() for name in kept} for _ in range(repeats)]
    medians = {name: median(taken[name].seconds for taken in rounds) for name in kept}
    plan = median(taken["merged"].plan_seconds for taken in rounds)
    raw = {
        "unit": "s",
        "medians": medians,
        "repeats": {name: [taken[name].seconds for taken in rounds] for name in kept},
        "first": {name: found.seconds for name, found in first.items()},
        "plan": plan,
        "tokens": {name: first[name].num_tokens for name in kept},
        "model": model.config.to_diff_dict(),
    }
    speedup = medians[turns] / medians["merged"]
    allowed = first[turns].num_tokens / first["merged"].num_tokens
    name = f"T{num_turns}_G{GROUP_SIZE}"
    found = [
        Figure(
            f"prefix_merging_{name}",
            speedup,
            f"seconds forward and backward, {turns} (tokens: {allowed:.2f})",
            raw,
        ),
        Figure(
            f"prefix_merging_{name}_vs_packed",
            medians["packed"] / medians["merged"],
            "the same, one sequence per attempt",
            raw,
        ),
    ]
    if num_turns == EFFICIENCY_TURNS:
        found.append(
            Figure(
                "prefix_merging_efficiency",
                speedup / allowed,
                "that speed-up over the ratio of tokens",
                raw,
            )
        )
        found.append(
            Figure(
                "plan_share_of_step",
                plan / medians["merged"],
                "seconds of the plan over forward and backward, merged",
                raw,
            )
        )

    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--turns", default=",".join(map(str, TURNS)), help="numbers of turns, separated by commas"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--model", type=Path, help="folder of a model; left out, a small one with random weights"
    )
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    model = small_model() if args.model is None else load(args.model).model
    for num_turns in map(int, args.turns.split(",")):
        for figure in figures(model, num_turns, args.repeats):
            print(figure.line(), flush=True)
            print(
                f"    {figure.meaning}: {json.dumps(figure.raw['medians'])} {figure.raw['unit']}",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    main()
