"""What routing replay costs: the engine with and without recording, an update with and without
replay, and a token's record in the store.

    .venv/bin/python benchmarks/routing.py

One mixture of random weights on one CPU core, in float32: 6 layers, 32 experts of which 4 are
chosen, width 256. Seconds are the process's own on the CPU, so that a machine's other work counts
little; both ways take turns, and the median of their ratios counts. Bytes are those of the store's
own packing, with the record and without.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

import msgspec
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentevo.config import AlgorithmSection, EngineSection, TrainerSection
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.routers import enable_routing
from agentevo.store.codec import encode_trajectories
from agentevo.training.trainer import Trainer
from agentevo.types import SamplingParams, Trajectory, Turn

PROMPT = 64
COMPLETION = 64
ATTEMPTS = 16
VOCABULARY = 512


def mixture() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        initializer_range=0.05,
    )
    return enable_routing(prepare(Qwen3MoeForCausalLM(config).eval()))


def drawn(model: PreTrainedModel, records: bool) -> tuple[list[Trajectory], float]:
    """Attempts of groups of four, and the tokens that were drawn per CPU second."""
    engine = TorchEngine(model, config=EngineSection(routed_experts=records))
    prompts = [
        [(7 * n + 13 * (i // 4)) % VOCABULARY for n in range(PROMPT)] for i in range(ATTEMPTS)
    ]

    async def together() -> list[Trajectory]:
        requests = [
            engine.generate(
                prompt, SamplingParams(max_new_tokens=COMPLETION, seed=i), deadline_s=600
            )
            for i, prompt in enumerate(prompts)
        ]
        found = []
        for i, one in enumerate(await asyncio.gather(*requests)):
            turn = Turn(
                index=0,
                prompt_ids=prompts[i],
                completion_ids=one.ids,
                logprobs=one.logprobs,
                versions=one.versions,
                finish_reason=one.finish_reason,
                routed_experts=one.routed_experts,
            )
            group = f"g{i // 4}"
            found.append(
                Trajectory(
                    id=f"t{i}", task_id=group, group_id=group, turns=[turn], reward=float(i % 2)
                )
            )

        return found

    began = time.process_time()
    trajectories = asyncio.run(together())
    return trajectories, ATTEMPTS * COMPLETION / (time.process_time() - began)


def updated(model: PreTrainedModel, trajectories: list[Trajectory], mode: str) -> float:
    """CPU seconds of one update. Its rate is too small to change a weight."""
    section = TrainerSection(routing_replay=mode, learning_rate=1e-30, micro_batch_tokens=1024)
    trainer = Trainer(model, section, AlgorithmSection())
    trainer.begin()
    began = time.process_time()
    trainer.step(trainer.prepare(trajectories).samples)
    return time.process_time() - began


def without(trajectory: Trajectory) -> Trajectory:
    turns = [msgspec.structs.replace(turn, routed_experts=None) for turn in trajectory.turns]
    return msgspec.structs.replace(trajectory, turns=turns)


def stored_bytes(trajectories: list[Trajectory]) -> int:
    return sum(len(one.data or b"") for one in encode_trajectories(trajectories, "train", 1))


def ratio(rounds: int, plain: Callable[[], float], other: Callable[[], float]) -> tuple[float, ...]:
    """Medians of both, and of their ratios, the other's over the plain one's."""
    pairs = [(plain(), other()) for _ in range(rounds)]
    columns = (*zip(*pairs, strict=True), [b / a for a, b in pairs])
    return tuple(map(statistics.median, columns))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)

    model = mixture()
    trajectories, _ = drawn(model, True)
    bare = [without(one) for one in trajectories]
    drawn(model, False)
    rates = ratio(rounds, lambda: drawn(model, False)[1], lambda: drawn(model, True)[1])
    print("engine: {:.0f} tokens/s, recording {:.0f} tokens/s, {:.3f} of it".format(*rates))
    updated(model, bare, "none")

    seconds = ratio(
        rounds,
        lambda: updated(model, bare, "none"),
        lambda: updated(model, trajectories, "rollout"),
    )
    print("update: {:.3f} s, replaying {:.3f} s, {:.3f} times".format(*seconds))
    tokens = ATTEMPTS * (PROMPT + COMPLETION)
    rows = trajectories[0].turns[0].routed_experts
    assert rows is not None

    whole = stored_bytes(trajectories)
    plain = stored_bytes(bare)
    print(
        f"store: {plain / tokens:.1f} bytes per token, with the record {whole / tokens:.1f}: "
        f"{(whole - plain) / tokens:.1f} for {rows.bytes_per_token} bytes of {rows.layers} layers"
    )


if __name__ == "__main__":
    main()
