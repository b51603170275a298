"""One whole GRPO step (generate, score, update) against TRL's trainer: same prompts, same sizes,
same reward, same weights at the start.

Both sides sample 4 prompts x 8 completions of up to 16 tokens at temperature 1, score each by its
number of different characters, and take one AdamW step on all of them (float32, no KL term, no
gradient checkpointing).
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.files.load import LoadedModel
from agentevo.training.batching.selection import select
from agentevo.training.trainer import Trainer
from agentevo.training.workload import DISTINCT
from agentevo.types import SamplingParams, Trajectory, Turn
from figures import Figure
from generate import generation_flops
from machine import Rate
from ours import DEADLINE_S
from peers import Peer

GROUP_SIZE = 8
NEW_TOKENS = 16
LEARNING_RATE = 1e-6
QUESTIONS = (
    "Write a long story about a fox who counts coins by the river every evening and one day "
    "finds that there is one too many.",
    "Explain slowly and in detail how a bicycle stays upright while someone is riding it, as you "
    "would to a curious child.",
    "List every single step that a baker takes, from flour, water and salt in the evening to a "
    "warm loaf of bread at dawn.",
    "Describe at length what a sailor sees, hears and smells when the old ship leaves the "
    "harbour on a cold morning.",
)


def chat_prompts(loaded: LoadedModel) -> list[str]:
    """The questions as text in the model's chat format, about 55 tokens each."""
    return [
        str(
            loaded.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
        )
        for question in QUESTIONS
    ]


class GrpoStep:
    """Our side: the engine and the trainer on the same weights in memory."""

    def __init__(self, loaded: LoadedModel, engine: TorchEngine) -> None:
        self.loaded = loaded
        self.engine = engine
        self.prompts = [
            list(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in chat_prompts(loaded)
        ]
        section = TrainerSection(
            groups_per_step=len(QUESTIONS),
            group_size=GROUP_SIZE,
            learning_rate=LEARNING_RATE,
            warmup_steps=0,
        )
        self.trainer = Trainer(loaded.model, section, AlgorithmSection())
        self.num_steps = 0
        self.flops_per_s: list[float] = []
        """Of each step: operations of generation and update over its wall seconds."""

    def step(self) -> tuple[float, int]:
        """Wall seconds of one step, and how many completion tokens it trained on."""
        started = time.perf_counter()
        trajectories = asyncio.run(self._sample())
        kept, _ = select(trajectories, self.trainer.algorithm)
        samples = self.trainer.prepare(kept).samples
        metrics = self.trainer.step(samples)
        self.num_steps += 1
        asyncio.run(self.engine.publish(self.num_steps))
        seconds = time.perf_counter() - started
        completions = [trajectory.num_completion_tokens() for trajectory in trajectories]
        prompts = [len(ids) for ids in self.prompts]
        flops = generation_flops(self.loaded.model, prompts, completions) + metrics[DISTINCT]
        self.flops_per_s.append(flops / seconds)

        return seconds, sum(completions)

    async def _sample(self) -> list[Trajectory]:
        members = [
            (group, attempt) for group in range(len(self.prompts)) for attempt in range(GROUP_SIZE)
        ]
        return list(
            await asyncio.gather(*(self._attempt(group, attempt) for group, attempt in members))
        )

    async def _attempt(self, group: int, attempt: int) -> Trajectory:
        seed = (self.num_steps * 1009 + group) * 1009 + attempt
        eos = self.loaded.tokenizer.eos_token_id
        params = SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=(eos,), seed=seed)
        completion = await self.engine.generate(self.prompts[group], params, deadline_s=DEADLINE_S)
        turn = Turn(
            index=0,
            prompt_ids=self.prompts[group],
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            seed=seed,
        )
        text = self.loaded.tokenizer.decode(completion.ids, skip_special_tokens=True)
        name = f"{self.num_steps}/{group}"

        return Trajectory(
            id=f"{name}/{attempt}",
            task_id=str(group),
            group_id=name,
            attempt=attempt,
            turns=[turn],
            reward=float(len(set(text))),
        )


def against_trl(ours: GrpoStep, trl: Peer, repeats: int) -> Figure:
    """One warm-up step each, then steps in turn."""
    seconds: dict[str, list[float]] = {"agentevo": [], "trl": []}
    tokens: dict[str, list[float]] = {"agentevo": [], "trl": []}
    for repeat in range(repeats + 1):
        our_seconds, our_tokens = ours.step()
        answer = trl.ask({"steps": 1})
        if repeat:
            seconds["agentevo"].append(our_seconds)
            seconds["trl"].append(answer["seconds"][0])
            tokens["agentevo"].append(our_tokens)
            tokens["trl"].append(answer["tokens"])

    medians = {name: median(values) for name, values in seconds.items()}
    meaning = (
        f"seconds of a whole GRPO step, {len(QUESTIONS)} prompts x {GROUP_SIZE} "
        f"completions of up to {NEW_TOKENS} tokens"
    )
    prompt_tokens = [len(ids) for ids in ours.prompts]
    rate = Rate(flops_per_s=median(ours.flops_per_s[1:]))
    raw = {
        "unit": "s",
        "medians": medians,
        "repeats": seconds,
        "completion_tokens": tokens,
        "prompt_tokens": prompt_tokens,
    }
    return Figure("grpo_step_vs_trl", medians["trl"] / medians["agentevo"], meaning, raw, rate)
