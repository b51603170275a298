"""What decoder layers keep for the backward pass: less of it, the same gradient."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentevo.config import (
    AlgorithmSection,
    CriticSection,
    LoraSection,
    MemorySection,
    TrainerSection,
)
from agentevo.errors import ModelError
from agentevo.models.compute import activations
from agentevo.models.compute.activations import keep_activations
from agentevo.models.compute.adapters import add_adapter, dropping_out
from agentevo.models.compute.attention import prepare
from agentevo.models.files.model_copy import copy_policy
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.trainer import Trainer

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma2", "mistral", "granite-swa", "gpt-oss", "llama4"]
QUICK = ("llama", "gpt-oss")
MARKS = (pytest.mark.soak, pytest.mark.slow)
"""CI runs the others with all that a section can ask for at once."""
CHANGING = ("gpt-oss", "llama4")
"""Models that change results of products in place."""
SECTIONS = {
    "selective": MemorySection(checkpointing="selective"),
    "full": MemorySection(checkpointing="full"),
    "offload": MemorySection(offload_activations=True),
    "full-offload": MemorySection(checkpointing="full", offload_activations=True),
}


def batch_of(samples_of, length: int = 60):
    prompt = [3 + k % 50 for k in range(length // 2)]
    return pack(
        samples_of(
            [[*prompt, *(5 + (7 * k + n) % 80 for k in range(length // 2))] for n in range(3)]
        ),
        torch.device("cpu"),
    )


def run(model, batch, gradient) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logp, entropy = token_logprobs(model, batch)
    (logp.square().mean() + 0.1 * entropy.mean()).backward()
    return logp.detach(), gradient(model)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Bytes that autograd holds of each layer's own making, by storage."""
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes

    sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in found.values()))


@pytest.fixture
def everything_leaves(monkeypatch):
    """As if the model were on a GPU."""
    moved = []

    def leaves(tensor: torch.Tensor) -> bool:
        moved.append(tensor)
        return True

    monkeypatch.setattr(activations, "_leaves_device", leaves)
    monkeypatch.setattr(activations, "SMALLEST_OFFLOAD", 0)
    return moved


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if name in QUICK else MARKS[kind == "full-offload"])
        for name in ARCHITECTURES
        for kind in SECTIONS
        if kind != "selective" or name not in CHANGING
    ],
)
def test_log_probs_and_gradient_stay_the_same(
    name, kind, random_model, samples_of, gradient, everything_leaves
):
    plain = copy.deepcopy(random_model(name).model)
    model = keep_activations(copy.deepcopy(plain), SECTIONS[kind])
    batch = batch_of(samples_of)
    logp, expected = run(plain, batch, gradient)
    other, found = run(model, batch, gradient)
    assert torch.equal(logp, other)

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert bool(everything_leaves) == SECTIONS[kind].offload_activations

    parameters = {p.data_ptr() for p in model.parameters()}
    assert not any(tensor.data_ptr() in parameters for tensor in everything_leaves), (
        "weights stay where they are"
    )
    assert [*dict(model.named_parameters())] == [*dict(plain.named_parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_adapters_with_dropout_draw_the_same_again(kind, random_model, samples_of, gradient):
    base = copy.deepcopy(random_model("qwen2").alone)
    plain = prepare(add_adapter(base, LoraSection(rank=4, dropout=0.5), seed=1))
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)

    model = keep_activations(copy.deepcopy(plain), SECTIONS[kind])
    batch = batch_of(samples_of)
    found = []
    for one in (plain, model):
        with dropping_out(one, seed=3):
            found.append(run(one, batch, gradient)[1])

    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)
    assert not torch.equal(found[0], run(plain, batch, gradient)[1]), "it did drop out"


@pytest.mark.slow
def test_a_frozen_base_is_packed_beside_what_is_kept(samples_of, gradient):
    """The first layer's products need no gradient of the base: their weights are packed in the
    first pass, in which no engine has drawn yet."""
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
    shape = LlamaConfig(vocab_size=97, num_hidden_layers=2, num_key_value_heads=4, **wide)
    adapted = prepare(add_adapter(LlamaForCausalLM(shape).eval(), LoraSection(rank=4), seed=1))
    sparing = keep_activations(copy_policy(adapted), SECTIONS["selective"])
    batch = batch_of(samples_of)

    wanted = run(adapted, batch, gradient)
    torch.testing.assert_close(run(sparing, batch, gradient), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_less_is_kept(random_model, samples_of):
    plain = random_model("llama").model
    batch = batch_of(samples_of, 400)
    kept = {}
    for kind in ("none", "selective", "full"):
        model = keep_activations(copy.deepcopy(plain), MemorySection(checkpointing=kind))
        calls = count_products(model, batch)
        with counted_bytes() as sizes:
            logp, _ = token_logprobs(model, batch)
        kept[kind] = sizes[0], calls
        logp.sum().backward()

    assert kept["full"][0] < kept["none"][0] / 4
    assert kept["full"][1] > kept["selective"][1] == kept["none"][1], (
        "selective makes no product twice, full makes those of layers twice"
    )


def count_products(model, batch) -> int:
    """Matrix products of the forward and backward pass that are really computed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counter.count += func.overloadpacket in activations._expensive_operators()
            return func(*args, **(kwargs or {}))

    with Counter():
        logp, _ = token_logprobs(model, batch)
        logp.sum().backward()

    model.zero_grad()
    return Counter.count


def test_passes_without_gradient_stay_fused_and_twins_keep_what_they_were_given(
    random_model, samples_of, gradient
):
    plain = copy.deepcopy(random_model("llama").model)
    model = keep_activations(copy.deepcopy(plain), SECTIONS["full"])
    batch = batch_of(samples_of)
    with torch.no_grad():
        assert torch.equal(token_logprobs(model, batch)[0], token_logprobs(plain, batch)[0])
        forward = vars(model.model.layers[0])["forward"]
        packed = getattr(forward.inner, "packed", None)
        forward.drop()
        assert packed is None or forward.inner.packed is None, (
            "what publishing drops is found behind it"
        )

    twin = copy_policy(model)
    assert vars(twin.model.layers[0])["forward"].layer is twin.model.layers[0]
    with torch.no_grad():
        next(iter(twin.model.layers[0].parameters())).mul_(1.5)

    assert not torch.equal(run(twin, batch, gradient)[0], run(model, batch, gradient)[0])


@pytest.mark.parametrize("name", CHANGING)
def test_results_that_change_in_place_are_not_kept(name, random_model):
    model = copy.deepcopy(random_model(name).model)
    with pytest.raises(ModelError, match=r"selective is not possible with .*: set it to full"):
        keep_activations(model, SECTIONS["selective"])


def test_a_model_without_decoder_layers_is_refused():
    model = torch.nn.Linear(2, 2)
    assert keep_activations(model, MemorySection()) is model
    with pytest.raises(ModelError, match=r"memory\.checkpointing=none"):
        keep_activations(model, SECTIONS["full"])


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_policy_and_critic_learn_the_same(trunk, random_model, samples_of):
    samples = []
    for one in samples_of([[3 + (5 * n + k) % 90 for k in range(20)] for n in range(6)]):
        values = [0.1 * k for k in range(sum(one.loss_mask))]
        samples.append(
            msgspec.structs.replace(one, columns={"returns": values, "values": [0.0] * len(values)})
        )

    found = []
    for kind in ("none", "selective", "full"):
        model = keep_activations(
            copy.deepcopy(random_model("qwen2").model), MemorySection(checkpointing=kind)
        )
        trainer = Trainer(
            model,
            TrainerSection(warmup_steps=0),
            AlgorithmSection(name="ppo"),
            critic=CriticSection(trunk=trunk),
        )
        trainer.begin()
        found.append(trainer.step(samples))

    assert found[0]["critic/grad_norm"] > 0
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-4, abs=1e-6)
