"""Runs the losses and group statistics of TRL's own trainers on the inputs of `recording.py` and
writes trl.json. No AgentEvo here.

A real trainer is built over a random Llama of two layers. Its `_compute_loss` is then called,
unchanged, with a model that answers the given log-probs; its `_generate_and_score_completions`
runs, unchanged, with generation and reward functions that answer given tokens and rewards. Made
with TRL 1.16.0 in an environment of its own:

    python3.11 -m venv PEER
    PEER/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    PEER/bin/pip install trl==1.16.0
    PEER/bin/python tests/conformance/peers/record_trl.py
"""

from __future__ import annotations

import tempfile
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from recording import Batch, batches, write
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

Case = dict[str, Any]
WORDS = [*"abcdefgh", "<eos>", "<pad>", "<unk>"]


def tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


@cache
def model_folder() -> str:
    """A random model on disk: trainers with a reference load it a second time."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(WORDS),
        max_position_embeddings=64,
        pad_token_id=WORDS.index("<pad>"),
        **sizes,
    )
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).save_pretrained(folder)

    return folder


def build(
    trainer: type, config: type, rows: int, data: dict[str, list[Any]], **settings: Any
) -> Any:
    """A trainer of that class, on the CPU, told nothing but `settings`."""
    args = config(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        report_to=[],
        bf16=False,
        per_device_train_batch_size=rows,
        disable_tqdm=True,
        **settings,
    )
    extra: dict[str, Any] = (
        {"reward_funcs": [lambda completions, **_: [0.0] * len(completions)] * 3}
        if "prompt" in data and len(data) == 1
        else {}
    )
    if trainer in (GRPOTrainer, GMPOTrainer, RLOOTrainer):
        extra["reward_funcs"] = extra["reward_funcs"][: len(settings.get("reward_weights") or [0])]

    built = trainer(
        model=LlamaForCausalLM.from_pretrained(model_folder()),
        args=args,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        **extra,
    )
    built.current_gradient_accumulation_steps = 1
    return built


class Answers(torch.nn.Module):
    """A model whose log-probs are the given ones, call after call."""

    def __init__(self, *log_probs: torch.Tensor) -> None:
        super().__init__()
        self.left = list(log_probs)

    def forward(self, **_: Any) -> SimpleNamespace:
        given = self.left.pop(0)
        zeros = torch.zeros_like(given)
        return SimpleNamespace(
            log_probs=given,
            entropy=zeros,
            mean_logits=zeros,
            is_top1=zeros.bool(),
            loss=given.sum(),
        )


PROMPTS = {"prompt": ["a b"] * 12}


def grpo_loss(
    made: dict[str, Batch],
    batch: str,
    trainer: type,
    config: type,
    *,
    steps: int = 1,
    rows: slice | None = None,
    on_policy: bool = False,
    **settings: Any,
) -> Case:
    """Loss and gradient by the trainer's `_compute_loss`; `steps`: gradient accumulation; `rows`:
    the micro-batch, all of them if None; `on_policy`: the old log-probs are the present ones."""
    taken = rows or slice(None)
    inputs = {key: value[taken] for key, value in made[batch].items()}
    if on_policy:
        inputs["old_logp"] = inputs["logp"]

    size, tokens = inputs["mask"].shape
    divisible = {
        "num_generations": 2,
        "steps_per_generation": steps,
        "gradient_accumulation_steps": steps,
    }
    built = build(
        trainer, config, 6, PROMPTS, max_completion_length=tokens, **divisible, **settings
    )
    built.model.train()

    built.current_gradient_accumulation_steps = steps
    logp = inputs["logp"].clone().requires_grad_()
    given = {
        "prompt_ids": torch.zeros(size, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(size, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(size, tokens, dtype=torch.int64),
        "completion_mask": inputs["mask"],
        "advantages": inputs["advantages"].sum(1) / inputs["mask"].sum(1).clamp(min=1),
        "old_per_token_logps": inputs["old_logp"],
        "old_logps": (inputs["old_logp"] * inputs["mask"]).sum(1),
        "ref_per_token_logps": inputs["ref_logp"],
        "num_items_in_batch": made[batch]["mask"].sum(),
    }
    loss = built._compute_loss(Answers(logp), given)

    return {
        "function": f"{trainer.__name__}._compute_loss",
        "batch": batch,
        "rows": [taken.start, taken.stop],
        "steps": steps,
        "settings": settings,
        "loss": loss,
        "gradient": torch.autograd.grad(loss, logp)[0],
        "dtype": str(loss.dtype).removeprefix("torch."),
    }


def losses(made: dict[str, Batch]) -> dict[str, Case]:
    grpo = (GRPOTrainer, GRPOConfig)
    cases: dict[str, Case] = {}
    for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"):
        extra = {"epsilon_high": 5.0} if name == "cispo" else {}
        cases[f"loss/{name}"] = grpo_loss(made, "loss", *grpo, loss_type=name, **extra)

    cases["loss/clip_higher"] = grpo_loss(made, "loss", *grpo, loss_type="dapo", epsilon_high=0.28)
    for weighted in (True, False):
        name = "weighted" if weighted else "plain"
        cases[f"loss/beta/{name}"] = grpo_loss(
            made, "loss", *grpo, loss_type="dapo", beta=0.1, use_bias_correction_kl=weighted
        )

    cases["loss/beta/default"] = grpo_loss(made, "loss", *grpo, loss_type="dapo", beta=0.1)
    sequence = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    cases["loss/gspo"] = grpo_loss(made, "loss", *grpo, loss_type="grpo", **sequence)
    cases["loss/gspo_dapo"] = grpo_loss(made, "loss", *grpo, loss_type="dapo", **sequence)
    cases["loss/gmpo"] = grpo_loss(
        made, "loss", GMPOTrainer, GMPOConfig, epsilon=0.4, epsilon_high=0.4
    )
    cases["loss/gmpo/default"] = grpo_loss(made, "loss", GMPOTrainer, GMPOConfig)
    for name in ("off_policy", "on_policy"):
        cases[f"loss/rloo/{name}"] = grpo_loss(
            made, "loss", RLOOTrainer, RLOOConfig, on_policy=name == "on_policy", beta=0.0
        )

    for name in ("grpo", "bnpo", "dr_grpo", "dapo"):
        cases[f"loss_empty/{name}"] = grpo_loss(made, "loss_empty", *grpo, loss_type=name)
        for index, rows in enumerate((slice(0, 2), slice(2, 6))):
            cases[f"micro/{name}/{index}"] = grpo_loss(
                made, "loss", *grpo, steps=2, rows=rows, loss_type=name
            )

    cases["extreme/dapo"] = grpo_loss(made, "extreme", *grpo, loss_type="dapo")
    cases["extreme/dapo_delta"] = grpo_loss(made, "extreme", *grpo, loss_type="dapo", delta=3.0)
    cases["extreme/gspo"] = grpo_loss(made, "extreme", *grpo, loss_type="grpo", **sequence)
    cases["extreme/sapo"] = grpo_loss(made, "extreme", *grpo, loss_type="sapo")
    cases["extreme/beta"] = grpo_loss(
        made, "extreme", *grpo, loss_type="dapo", beta=0.1, delta=3.0, use_bias_correction_kl=False
    )
    return cases


def advantages(
    made: dict[str, Batch],
    trainer: type,
    config: type,
    generations: int,
    rewards: torch.Tensor,
    **settings: Any,
) -> Case:
    """What `_generate_and_score_completions` makes of `rewards` [rows, functions], in groups of
    `generations` in order."""
    rows, functions = rewards.shape
    given = {
        "num_generations": generations,
        "reward_weights": settings.pop("reward_weights", [1.0] * functions),
    }
    built = build(
        trainer, config, rows, PROMPTS, beta=0.0, max_completion_length=4, **given, **settings
    )
    ids = [[0, 1, WORDS.index("<eos>")]] * rows
    generated = (
        ([[0]] * rows, ids, ["a"] * rows)
        if trainer is RLOOTrainer
        else ([[0]] * rows, ids, None, ["a"] * rows, None, {}, None, None)
    )
    built._generate = lambda *_: generated
    built._calculate_rewards = lambda *_: rewards
    scored = built._generate_and_score_completions([{"prompt": "a b"}] * rows)

    return {
        "function": f"{trainer.__name__}._generate_and_score_completions",
        "rewards": rewards,
        "generations": generations,
        "settings": settings | {"reward_weights": given["reward_weights"]},
        "advantages": scored["advantages"],
        "dtype": str(scored["advantages"].dtype).removeprefix("torch."),
    }


def all_advantages(made: dict[str, Batch]) -> dict[str, Case]:
    one = torch.tensor(
        [1.0, 0.25, 0.0, 1.0, 1.0, -0.5, 0.5, 0.5, 0.5, 0.9, 0.1, 0.1], dtype=torch.float64
    )[:, None]
    several = torch.cat(
        [one, torch.randn(12, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)],
        dim=1,
    )
    unscored = one.clone()
    unscored[1] = torch.nan
    cases = {
        f"advantages/grpo/{scale}": advantages(
            made, GRPOTrainer, GRPOConfig, 3, one, scale_rewards=scale
        )
        for scale in ("group", "none", "batch")
    }
    cases["advantages/grpo/unscored"] = advantages(
        made, GRPOTrainer, GRPOConfig, 3, unscored, scale_rewards="group"
    )
    cases["advantages/grpo/equal_float32"] = advantages(
        made, GRPOTrainer, GRPOConfig, 12, torch.full((12, 1), 0.7), scale_rewards="group"
    )

    weighted = {"reward_weights": [1.0, 0.5, 2.0]}
    cases["advantages/gdpo"] = advantages(
        made,
        GRPOTrainer,
        GRPOConfig,
        3,
        several,
        multi_objective_aggregation="normalize_then_sum",
        **weighted,
    )
    cases["advantages/rloo"] = advantages(made, RLOOTrainer, RLOOConfig, 3, one)
    cases["advantages/rloo/normalized"] = advantages(
        made, RLOOTrainer, RLOOConfig, 3, one, normalize_advantages=True
    )
    return cases


def spread(
    summed: torch.Tensor, lengths: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs per token whose sums are `summed`, and the mask, both [answers, tokens]."""
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return summed[:, None] / lengths[:, None] * mask, mask


def pair_gradients(loss: torch.Tensor, *logps: torch.Tensor) -> Case:
    return {"loss": loss, "gradients": [one.tolist() for one in torch.autograd.grad(loss, logps)]}


def dpo(made: dict[str, Batch], **settings: Any) -> Case:
    inputs = made["pairs"]
    tokens = 8
    built = build(
        DPOTrainer,
        DPOConfig,
        6,
        {"prompt": ["a"] * 6, "chosen": ["b"] * 6, "rejected": ["c"] * 6},
        **settings,
    )

    chosen, rejected = (
        inputs[f"{one}_logp"].clone().requires_grad_() for one in ("chosen", "rejected")
    )
    lengths = torch.cat([inputs["chosen_lengths"], inputs["rejected_lengths"]])
    policy, mask = spread(torch.cat([chosen, rejected]), lengths, tokens)
    reference, _ = spread(
        torch.cat([inputs["ref_chosen_logp"], inputs["ref_rejected_logp"]]), lengths, tokens
    )
    built.ref_model = Answers(reference)
    full = torch.cat(
        [torch.zeros(12, 1, dtype=torch.int64), mask], dim=1
    )  # one prompt token before each answer
    given = {
        "input_ids": torch.zeros_like(full),
        "attention_mask": torch.ones_like(full),
        "completion_mask": full,
    }
    loss = built._compute_loss(Answers(policy), given, False)

    return {
        "function": "DPOTrainer._compute_loss",
        "batch": "pairs",
        "settings": settings,
        **pair_gradients(loss, chosen, rejected),
    }


def kto(made: dict[str, Batch], kl: float, **settings: Any) -> Case:
    """`kl`: added to the log-ratios of the mismatched answers, whose mean is the baseline."""
    inputs = made["pairs"]
    tokens = 8
    texts = {
        "prompt": ["a"] * 6,
        "completion": ["b", "c"] * 3,
        "label": inputs["desirable"].tolist(),
    }
    built = build(KTOTrainer, KTOConfig, 6, texts, **settings)
    logp = inputs["chosen_logp"].clone().requires_grad_()
    lengths = inputs["chosen_lengths"]
    policy, mask = spread(logp, lengths, tokens)
    reference, _ = spread(inputs["ref_chosen_logp"], lengths, tokens)
    other, _ = spread(inputs["ref_rejected_logp"] + inputs["kl_gap"] + kl, lengths, tokens)
    other_reference, _ = spread(inputs["ref_rejected_logp"], lengths, tokens)
    built.ref_model = Answers(other_reference, reference)
    full = torch.cat([torch.zeros(6, 1, dtype=torch.int64), mask], dim=1)
    given = {
        "input_ids": torch.zeros_like(full),
        "attention_mask": torch.ones_like(full),
        "completion_mask": full,
        "label": inputs["desirable"],
    }
    given |= {f"KL_{key}": value for key, value in given.items() if key != "label"}
    loss = built._compute_loss(Answers(other, policy), given, False)

    return {
        "function": "KTOTrainer._compute_loss",
        "batch": "pairs",
        "kl": kl,
        "settings": settings,
        **pair_gradients(loss, logp),
    }


def orpo(made: dict[str, Batch]) -> Case:
    """The odds-ratio term alone, by `odds_ratio_loss`; the supervised term is an ordinary cross
    entropy over prompt and answer."""
    inputs = made["pairs"]
    built = build(
        ORPOTrainer,
        ORPOConfig,
        6,
        {"prompt": ["a"] * 6, "chosen": ["b"] * 6, "rejected": ["c"] * 6},
        beta=0.1,
    )
    chosen, rejected = (
        inputs[f"{one}_logp"].clone().requires_grad_() for one in ("chosen", "rejected")
    )
    losses = built.odds_ratio_loss(
        chosen / inputs["chosen_lengths"], rejected / inputs["rejected_lengths"]
    )[0]

    return {
        "function": "ORPOTrainer.odds_ratio_loss",
        "batch": "pairs",
        "settings": {"beta": 0.1},
        "dtype": str(losses.dtype).removeprefix("torch."),
        **pair_gradients(-losses.mean(), chosen, rejected),
    }


def preferences(made: dict[str, Batch]) -> dict[str, Case]:
    cases = {f"dpo/{name}": dpo(made, loss_type=[name]) for name in ("sigmoid", "ipo", "sppo_hard")}
    cases["dpo/sigmoid_smoothed"] = dpo(made, loss_type=["sigmoid"], label_smoothing=0.2)
    cases["dpo/robust"] = dpo(made, loss_type=["robust"], label_smoothing=0.2)
    cases["kto"] = kto(made, 0.0, desirable_weight=1.5, undesirable_weight=0.5)
    cases["kto/negative_kl"] = kto(made, -5.0)
    cases["orpo"] = orpo(made)
    return cases


if __name__ == "__main__":
    everything = batches()
    recorded = losses(everything) | all_advantages(everything) | preferences(everything)
    write(
        "TRL",
        {name: version(name) for name in ("trl", "transformers", "torch")},
        everything,
        recorded,
    )
