"""FLOPs by arithmetic against those that PyTorch counts while a model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slow import soak
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agentevo.config import LoraSection
from agentevo.models.compute.adapters import add_adapter, load_adapter, use_adapter
from agentevo.models.compute.flops import (
    ForwardWork,
    ModelFlops,
    model_flops,
    work_of_depths,
    work_of_sequences,
)
from agentevo.models.compute.windows import Chunk, Window

SHAPE: dict[str, Any] = {
    "vocab_size": 193,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama, wide heads": LlamaConfig(**SHAPE, head_dim=32),
    "qwen2, tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=48),
    "gemma3": Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 6}, head_dim=16, sliding_window=8),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2),
    "qwen3 moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=8, head_dim=16),
    "qwen3 moe, one layer dense": Qwen3MoeConfig(
        **SHAPE, **EXPERTS, num_experts=8, head_dim=16, mlp_only_layers=[1]
    ),
}
IN_CI = ("qwen2, tied", "gemma3", "qwen3 moe, one layer dense")
TOKENS = 24
PREDICTED = torch.arange(3, TOKENS, 2)


def _model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )


def _counted(model: PreTrainedModel) -> tuple[int, int]:
    """Operations of a forward pass, and of forward and backward. Eager attention multiplies every
    query with every key."""
    ids = torch.randint(0, 193, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as forward:
        loss = (
            model(input_ids=ids, use_cache=False, logits_to_keep=PREDICTED)
            .logits.logsumexp(-1)
            .sum()
        )

    with FlopCounterMode(display=False) as backward:
        loss.backward()

    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


def _computed(flops: ModelFlops) -> tuple[float, float]:
    work = ForwardWork(TOKENS, len(PREDICTED), dict.fromkeys(flops.windows, TOKENS**2))
    return flops.forward(work), flops.training(work)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_CI, *soak(*(n for n in CONFIGS if n not in IN_CI))])
def test_full_fine_tuning(name: str):
    model = _model(CONFIGS[name])
    forward, training = _counted(model)
    assert _computed(model_flops(model)) == (
        pytest.approx(forward, rel=0.02),
        pytest.approx(training, rel=0.02),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [{"modules_to_save": ("lm_head",)}, *soak({}, {"targets": ("q_proj", "v_proj")})],
    ids=str,
)
def test_a_frozen_base_needs_no_gradient_of_its_weights(lora: dict[str, Any]):
    """The first layer's inputs need no gradient either, which the formula leaves aside: the more
    layers, the less it matters."""
    model = add_adapter(
        _model(LlamaConfig(**{**SHAPE, "num_hidden_layers": 24})), LoraSection(rank=4, **lora), 0
    )
    forward, training = _counted(model)
    computed = _computed(model_flops(model))
    assert computed == (pytest.approx(forward, rel=0.02), pytest.approx(training, rel=0.02))
    assert (
        training
        < 0.85
        * _computed(model_flops(_model(LlamaConfig(**{**SHAPE, "num_hidden_layers": 24}))))[1]
    ), "the base is frozen"


@pytest.mark.slow
def test_only_the_adapter_in_use_counts(tmp_path):
    model = add_adapter(_model(LlamaConfig(**SHAPE)), LoraSection(rank=16), 0)
    alone = model_flops(model)
    model.save_pretrained(tmp_path)
    model = load_adapter(model, tmp_path, "second")
    use_adapter(model, "default")
    assert model_flops(model).trained + model_flops(model).frozen == alone.trained + alone.frozen


def test_layers_by_window():
    assert model_flops(_model(CONFIGS["gemma3"])).layers == {8: 5, None: 1}
    assert model_flops(_model(MistralConfig(**SHAPE, sliding_window=16))).layers == {16: 3}
    assert model_flops(_model(CONFIGS["llama"])).layers == {None: 3}
    chunks = {"no_rope_layers": [1, 1, 0], "attention_chunk_size": 16, "intermediate_size_mlp": 96}
    llama4 = Llama4TextConfig(**SHAPE, **chunks, num_local_experts=2)
    assert model_flops(_model(llama4)).layers == {Chunk(16): 2, None: 1}


@pytest.mark.parametrize("window", [None, 1, 4, 7, 100, Chunk(1), Chunk(4), Chunk(7), Chunk(100)])
def test_pairs_of_sequences_are_those_of_their_masks(window: Window):
    lengths = [1, 4, 9]

    def is_seen(q: int, k: int) -> bool:
        if isinstance(window, Chunk):
            return q // window.size == k // window.size
        return window is None or q - k < window

    slow = sum(is_seen(q, k) for n in lengths for q in range(n) for k in range(q + 1))
    depths = torch.cat([torch.arange(n) for n in lengths])[None]

    assert work_of_sequences(lengths, 5, [window]) == ForwardWork(14, 5, {window: slow})
    assert work_of_depths(depths, 5, [window]) == ForwardWork(14, 5, {window: slow})
