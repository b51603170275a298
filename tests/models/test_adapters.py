"""Adapters: what they change and what not, fast passes with them, several over one base, folders,
merging, refusals."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from adapted_models import moved
from fused_passes import fused, logits, num_fused_calls, unfused
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from slow import soak
from torch import nn
from transformers import AutoModelForCausalLM

from agentevo.config import LoraSection, ModelSection
from agentevo.errors import MissingExtraError, ModelError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.adapters import (
    adapter_names,
    add_adapter,
    check_lora,
    dropping_out,
    load_adapter,
    num_parameters,
    use_adapter,
)
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.linear import available, drop_packed
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.files.merge import merge_adapter
from agentevo.models.files.save import save_model
from agentevo.types import SamplingParams

IDS = [5, 9, 60, 3, 41, 8]
LORA = LoraSection(rank=4)
VARIANTS = {
    "plain": LORA,
    "rslora": LoraSection(rank=4, rslora=True, alpha=3),
    "dora": LoraSection(rank=4, dora=True),
    "names": LoraSection(
        rank=4,
        targets=("q_proj", "down_proj"),
        layers=(1,),
        rank_pattern={"q_proj": 2},
        alpha_pattern={"q_proj": 9},
    ),
    "bias": LoraSection(rank=2, bias="lora_only"),
    "whole": LoraSection(rank=2, targets=("v_proj",), modules_to_save=("o_proj",)),
}
needs_onednn = pytest.mark.skipif(
    not available(),
    reason="oneDNN's linear operator is not in this build of PyTorch, or this is no x86 CPU",
)


def alone(model: nn.Module) -> torch.Tensor:
    """[len(IDS), V] of one sequence as transformers and PEFT compute it by themselves."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.fixture
def base(random_model):
    """`base(name)`: a plain model that may be changed."""

    def make(name: str = "qwen2") -> nn.Module:
        return copy.deepcopy(random_model(name).alone).requires_grad_(True)

    return make


@pytest.fixture
def base_folder(tiny: LoadedModel, tmp_path: Path) -> Path:
    return save_model(tiny.model, tiny.tokenizer, tmp_path / "base")


@pytest.mark.slow
@pytest.mark.parametrize("init", ["default", "gaussian", "orthogonal"])
def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(init, base):
    plain = base()
    before = alone(plain)
    total = sum(p.numel() for p in plain.parameters())
    state = torch.random.get_rng_state()
    model = add_adapter(plain, LoraSection(rank=4, init=init), seed=3)
    assert torch.equal(torch.random.get_rng_state(), state), "nobody else's draws change"

    torch.testing.assert_close(alone(model), before, rtol=1e-5, atol=1e-5)
    shapes = [
        m.weight.shape for n, m in base().model.layers.named_modules() if isinstance(m, nn.Linear)
    ]
    assert num_parameters(model) == (
        sum(4 * (o + i) for o, i in shapes),
        total + sum(4 * (o + i) for o, i in shapes),
    )
    assert all(("lora_" in name) == p.requires_grad for name, p in model.named_parameters())

    again, other = (
        add_adapter(base(), LoraSection(rank=4, init=init), seed=seed) for seed in (3, 4)
    )
    weights = [
        torch.cat([p.flatten() for p in one.parameters() if p.requires_grad])
        for one in (model, again, other)
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_options_mean_what_they_mean_in_peft(base):
    model = add_adapter(base(), VARIANTS["names"], seed=0)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert {name.split("layers.")[1] for name in layers} == {
        "1.self_attn.q_proj",
        "1.mlp.down_proj",
    }

    q = layers[next(n for n in layers if n.endswith("q_proj"))]
    down = layers[next(n for n in layers if n.endswith("down_proj"))]
    assert (q.r["default"], q.scaling["default"]) == (2, 4.5)
    assert (down.r["default"], down.scaling["default"]) == (4, 2.0), (
        "alpha is twice the rank by default"
    )

    rslora = add_adapter(base(), VARIANTS["rslora"], seed=0)
    assert next(
        m.scaling["default"] for m in rslora.modules() if hasattr(m, "lora_A")
    ) == pytest.approx(3 / 4**0.5)

    excluded = add_adapter(base(), LoraSection(rank=2, exclude=("gate_proj", "up_proj")), seed=0)
    assert not any(
        "gate_proj.lora" in n or "up_proj.lora" in n for n, _ in excluded.named_parameters()
    )

    biases = add_adapter(base(), VARIANTS["bias"], seed=0)
    assert {
        n.rsplit(".", 2)[1] for n, p in biases.named_parameters() if p.requires_grad and "bias" in n
    } == {"base_layer"}


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", *soak("qwen2", "qwen3", "mistral")])
def test_fused_passes_hold_the_adapters(name, variant, base):
    model = prepare(moved(add_adapter(base(name), VARIANTS[variant], seed=1)))
    plain = fused(prepare(base(name)))
    with torch.no_grad():
        assert (fused(model) - plain).abs().max() > 1e-2, "the adapters do something"

    torch.testing.assert_close(fused(model), unfused(model), rtol=1e-4, atol=5e-5)
    assert num_fused_calls(model) == (model.config.num_hidden_layers if variant != "whole" else 0)
    with model.disable_adapter(), torch.no_grad():
        if variant != "bias":
            torch.testing.assert_close(fused(model), plain, rtol=1e-4, atol=5e-5)

    torch.testing.assert_close(fused(model), unfused(model), rtol=1e-4, atol=5e-5)


@needs_onednn
@pytest.mark.parametrize("change", ["in-place", "fused-update", "scale"])
def test_fused_passes_have_the_adapters_of_now(change, base):
    model = prepare(moved(add_adapter(base(), LORA, seed=1)))
    before = fused(model)

    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    if change == "in-place":
        with torch.no_grad():
            layer.lora_B["default"].weight.mul_(3)
    elif change == "scale":
        layer.set_scale("default", 3.0)
    else:
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=0.05, fused=True
        )
        logits(model).square().sum().backward()
        optimizer.step()

    after = fused(model)
    assert (after - before).abs().max() > 1e-3

    torch.testing.assert_close(after, unfused(model), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@needs_onednn
def test_hooks_dropout_and_merged_adapters_take_the_ordinary_way(base):
    model = prepare(moved(add_adapter(base(), LoraSection(rank=4, dropout=0.5), seed=1)))
    layers = model.config.num_hidden_layers
    assert num_fused_calls(model) == layers

    still = fused(model)
    with dropping_out(model, seed=5):
        first = fused(model)
        assert num_fused_calls(model) == 0

    with dropping_out(model, seed=5):
        assert torch.equal(fused(model), first), "the seed decides what drops out"
    assert (first - still).abs().max() > 1e-3

    torch.testing.assert_close(fused(model), still)
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    seen = []
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(1))
    assert num_fused_calls(model) == layers - 1 and seen

    hook.remove()
    layer.merge()
    drop_packed(model)
    torch.testing.assert_close(fused(model), still, rtol=1e-4, atol=5e-5)


def test_only_adapters_get_gradients_and_a_frozen_base_keeps_no_activations(base):
    kept: list[int] = []

    def bytes_kept(model: nn.Module) -> torch.Tensor:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            return logits(model)

    model = prepare(
        moved(add_adapter(base("llama"), LoraSection(rank=2, targets=("q_proj",)), seed=1))
    )
    bytes_kept(model).square().sum().backward()
    with_adapters = sum(kept)
    assert all(
        (p.grad is not None and bool(p.grad.any())) == ("lora_" in name)
        for name, p in model.named_parameters()
    )

    whole = prepare(base("llama"))
    bytes_kept(whole)
    assert with_adapters < sum(kept)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_adapter_is_the_same_to_plain_peft_and_to_us(variant, base_folder, tmp_path):
    section = ModelSection(name=str(base_folder), device="cpu", lora=VARIANTS[variant])
    loaded = load_model(section, seed=4)
    expected = alone(moved(loaded.model))
    folder = save_model(loaded.model, loaded.tokenizer, tmp_path / "adapter")
    assert not (folder / "model.safetensors").exists(), "the base is not saved"
    assert json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(base_folder)

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), folder)
    assert torch.equal(alone(theirs), expected)

    ours = load_model(
        ModelSection(name=str(base_folder), device="cpu", lora=LoraSection(adapter=folder))
    )
    assert torch.equal(alone(ours.model), expected)
    assert [n for n, p in ours.model.named_parameters() if p.requires_grad] == [
        n for n, p in loaded.model.named_parameters() if p.requires_grad
    ]
    assert ours.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["dora", "names", *soak(*(one for one in VARIANTS if one not in ("dora", "names")))]
)
def test_a_merged_model_is_a_plain_one_with_the_same_answers(variant, base_folder, tmp_path):
    loaded = load_model(
        ModelSection(name=str(base_folder), device="cpu", lora=VARIANTS[variant]), seed=4
    )
    expected = alone(moved(loaded.model))
    adapter = save_model(loaded.model, loaded.tokenizer, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(merge_adapter(adapter, tmp_path / "merged"))
    torch.testing.assert_close(alone(merged), expected, rtol=1e-4, atol=1e-4)

    plain = AutoModelForCausalLM.from_pretrained(base_folder)
    assert {n: p.shape for n, p in merged.named_parameters()} == {
        n: p.shape for n, p in plain.named_parameters()
    }
    assert (alone(plain) - expected).abs().max() > 1e-2
    assert (
        load_model(ModelSection(name=str(tmp_path / "merged"), device="cpu")).tokenizer.get_vocab()
        == loaded.tokenizer.get_vocab()
    )


@pytest.mark.slow
def test_a_bfloat16_base_has_float32_adapters_and_merges_to_bfloat16(tiny, tmp_path):
    base = save_model(tiny.model.bfloat16(), tiny.tokenizer, tmp_path / "base")
    loaded = load_model(
        ModelSection(name=str(base), device="cpu", dtype="bfloat16", lora=LORA), seed=4
    )
    assert {p.dtype for p in loaded.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in loaded.model.parameters() if not p.requires_grad} == {torch.bfloat16}

    expected = alone(moved(loaded.model, by=0.05)).float()
    adapter = save_model(loaded.model, loaded.tokenizer, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(merge_adapter(adapter, tmp_path / "merged"))
    assert merged.dtype == torch.bfloat16

    torch.testing.assert_close(alone(merged).float(), expected, rtol=0.05, atol=0.1)


@pytest.mark.slow
def test_a_base_that_moved_is_given_again(base_folder, tmp_path):
    loaded = load_model(ModelSection(name=str(base_folder), device="cpu", lora=LORA), seed=4)
    expected = alone(moved(loaded.model))
    adapter = save_model(loaded.model, loaded.tokenizer, tmp_path / "adapter")
    base_folder.rename(tmp_path / "elsewhere")

    with pytest.raises(Exception, match="no such folder"):
        merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()

    merged = AutoModelForCausalLM.from_pretrained(
        merge_adapter(adapter, tmp_path / "merged", str(tmp_path / "elsewhere"))
    )
    torch.testing.assert_close(alone(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_several_adapters_over_one_base(base_folder, tmp_path):
    folders = []
    expected = []
    for seed in (1, 2):
        loaded = load_model(
            ModelSection(
                name=str(base_folder), device="cpu", lora=LoraSection(rank=2 * seed, dora=seed == 2)
            ),
            seed=seed,
        )
        expected.append(alone(moved(loaded.model, seed)))
        folders.append(save_model(loaded.model, loaded.tokenizer, tmp_path / f"adapter{seed}"))

    model = load_model(ModelSection(name=str(base_folder), device="cpu")).model
    for name, folder in zip(("first", "second"), folders, strict=True):
        model = load_adapter(model, folder, name)

    assert adapter_names(model) == ["first", "second"]
    assert not any(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)
    for name, wanted in (("second", expected[1]), ("first", expected[0]), ("second", expected[1])):
        use_adapter(model, name)
        assert torch.equal(alone(model), wanted)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "lora_" in n), (
        "use does not train"
    )

    again = save_model(model, loaded.tokenizer, tmp_path / "again")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), again)
    torch.testing.assert_close(alone(theirs), expected[1])
    prepare(model)

    for name in ("first", "second", "first"):
        use_adapter(model, name)
        torch.testing.assert_close(fused(model), unfused(model), rtol=1e-4, atol=5e-5)

    with pytest.raises(ModelError, match="no adapter 'third' \\(it has: first, second\\)"):
        use_adapter(model, "third")
    with pytest.raises(ModelError, match="'first' already"):
        load_adapter(model, folders[0], "first")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            LoraSection(rank=2, targets=("q_proj", "query")),
            "no module query: its linear layers are down_proj, gate_proj",
        ),
        (LoraSection(rank=2, targets=("nothing",)), "model.lora: .*nothing"),
        (LoraSection(rank=2, modules_to_save=("haed",)), "no module haed"),
        (
            LoraSection(rank=2, targets=("q_proj", "lm_head")),
            "input and output embeddings are one matrix",
        ),
        (
            LoraSection(rank=2, modules_to_save=("embed_tokens",)),
            "input and output embeddings are one matrix",
        ),
    ],
)
def test_layers_that_can_have_no_adapter(section, message, base):
    with pytest.raises(ModelError, match=message):
        add_adapter(base("llama"), section, seed=0)  # its embeddings are tied


@pytest.mark.slow
def test_folders_that_are_no_fitting_adapter(base_folder, base, tmp_path):
    with pytest.raises(ModelError, match="holds no adapter"):
        check_lora(LoraSection(adapter=base_folder))

    loaded = load_model(ModelSection(name=str(base_folder), device="cpu", lora=LORA))
    adapter = save_model(loaded.model, loaded.tokenizer, tmp_path / "adapter")
    check_lora(LoraSection(adapter=adapter))

    with pytest.raises(ModelError, match=f"does not fit this base .*{base_folder}"):
        load_adapter(base("llama"), adapter)
    with pytest.raises(ModelError, match=r"holds an adapter .*model\.lora\.adapter"):
        load_model(ModelSection(name=str(adapter), device="cpu"))

    get_peft_model(
        base(), IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    ).save_pretrained(tmp_path / "ia3", save_embedding_layers=False)
    with pytest.raises(ModelError, match="only LoRA"):
        check_lora(LoraSection(adapter=tmp_path / "ia3"))

    config = LoraConfig(init_lora_weights="olora", target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(base(), config).save_pretrained(tmp_path / "olora", save_embedding_layers=False)
    with pytest.raises(ModelError, match="changes the base"):
        load_adapter(base(), tmp_path / "olora")

    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="save it again"):
        check_lora(LoraSection(adapter=adapter))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rounding"), [("8bit", 0.1), ("4bit", 0.5)])
def test_adapters_over_a_quantized_base(kind, rounding, tiny_policy, tmp_path):
    """The base keeps its answers but for rounding, takes no gradient, and stays small; adapters
    start at nothing and learn."""
    whole = tiny_policy(hidden_size=64)  # bitsandbytes quantizes 64 weights together
    folder = str(save_model(whole.model, whole.tokenizer, tmp_path / "base"))
    plain = load_model(ModelSection(name=folder, device="cpu")).model
    loaded = load_model(
        ModelSection(name=folder, device="cpu", lora=LoraSection(rank=4, quantize=kind))
    )
    stored = {type(module).__name__ for module in loaded.model.modules()}
    assert {"8bit": "Linear8bitLt", "4bit": "Linear4bit"}[kind] in stored

    found = alone(loaded.model)
    exact = alone(plain)
    assert 0 < float((found - exact).abs().mean()) < rounding * float(exact.abs().mean())
    assert all("lora_" in name for name, p in loaded.model.named_parameters() if p.requires_grad)

    prepared = prepare(loaded.model)
    logits(prepared).logsumexp(-1).sum().backward()
    assert any(bool(p.grad.any()) for p in prepared.parameters() if p.grad is not None)

    torch.testing.assert_close(fused(prepared), unfused(prepared), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", *soak("float32")])
@pytest.mark.parametrize("kind", ["whole", "4bit", *soak("none", "8bit")])
def test_gradients_are_the_same_after_a_generation(kind, dtype, tiny_policy, tmp_path):
    """Passes without gradients, of an engine and of held-out rows, leave nothing behind in a base
    that changes the next pass with gradients."""
    if kind in ("8bit", "4bit"):
        pytest.importorskip("bitsandbytes")

    saved = tiny_policy(hidden_size=64)
    folder = str(save_model(saved.model, saved.tokenizer, tmp_path / "base"))
    lora = LoraSection() if kind == "whole" else LoraSection(rank=4, quantize=kind)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    section = ModelSection(name=folder, device=device, dtype=dtype, lora=lora)
    loaded = load_model(section)
    model = prepare(loaded.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05, generator=torch.Generator(device).manual_seed(1))

    def gradients() -> torch.Tensor:
        model.zero_grad()
        logits(model)[..., :50].float().square().mean().backward()
        of_parameters = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
        return torch.cat(of_parameters).double()

    before = gradients()
    engine = TorchEngine(model, loaded.tokenizer)
    sampling = SamplingParams(max_new_tokens=4, temperature=1.0, seed=3)
    asyncio.run(engine.generate(IDS, sampling, deadline_s=300.0))
    with torch.no_grad():
        logits(model.eval())

    assert float(before.norm()) > 0
    apart = float((gradients() - before).norm() / before.norm())
    assert apart < 1e-6, f"{apart:.3f} of the gradient's norm from what it was"


def test_a_base_in_4_bits_is_never_packed(tiny_policy, tmp_path, monkeypatch):
    """On no CPU: bitsandbytes' product of packed weights passes no gradient on, without an
    error."""
    layers = pytest.importorskip("bitsandbytes.nn.modules")
    monkeypatch.setattr(layers, "has_avx512bf16", lambda: True)
    saved = tiny_policy(hidden_size=64)
    folder = str(save_model(saved.model, saved.tokenizer, tmp_path / "base"))
    lora = LoraSection(rank=4, quantize="4bit")
    model = load_model(ModelSection(name=folder, device="cpu", lora=lora)).model

    packs = [m.support_avx512bf16_for_cpu for m in model.modules() if type(m) is layers.Linear4bit]
    assert packs and not any(packs)


def test_without_bitsandbytes_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentevo\[qlora\]'"):
        check_lora(LoraSection(rank=4, quantize="4bit"))


def test_without_peft_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentevo\[lora\]'"):
        check_lora(LORA)
    check_lora(LoraSection())
