"""`model.config_overrides`: trainer, engine and saved folders compute what transformers computes
with such a configuration; what a model's class does not take is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agentevo.config import LoraSection, ModelSection, TinyModel
from agentevo.errors import ModelError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.positions import context_length
from agentevo.models.config_overrides import OVERRIDES_FILE
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.files.merge import merge_adapter
from agentevo.models.files.save import save_model
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Sample, SamplingParams

SHAPE = {
    "vocab_size": 266,  # as many as the byte tokenizer has
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_scaling": YARN, "max_position_embeddings": 128}
THETA = 5000.0
IDS = [(7 * n) % 256 + 3 for n in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for 32 tokens, with another base of RoPE than its class's default."""
    return save(llama(), tmp_path_factory.mktemp("models") / "short")


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": THETA}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope)).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    shape = TinyModel(hidden_size=32, num_layers=1, num_heads=2, tokenizer="byte")
    tokenizer = load_model(ModelSection(name="tiny", device="cpu", tiny=shape)).tokenizer
    return save_model(model, tokenizer, folder)


def loaded(folder: Path, overrides: Any, **options: Any) -> LoadedModel:
    section = ModelSection(name=str(folder), device="cpu", config_overrides=overrides, **options)
    return load_model(section)


def transformers_model(folder: Path) -> PreTrainedModel:
    """The model by transformers, its configuration written by hand."""
    rope = {**YARN, "rope_theta": THETA}
    config = LlamaConfig(**SHAPE | {"max_position_embeddings": 128}, rope_parameters=rope)
    return AutoModelForCausalLM.from_pretrained(folder, config=config)


def transformers_own(folder: Path) -> torch.Tensor:
    """Its log-probs of IDS."""
    return logprobs_of(transformers_model(folder))


def logprobs_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


def trained_logprobs(model: Any) -> torch.Tensor:
    sample = Sample.given("0", "", IDS, [False] + [True] * (len(IDS) - 1))
    with torch.no_grad():
        return token_logprobs(model, pack([sample], torch.device("cpu")))[0]


@pytest.mark.slow
def test_trainer_and_engine_compute_yarn_as_transformers_does(folder: Path) -> None:
    wanted = transformers_own(folder)
    plain = logprobs_of(AutoModelForCausalLM.from_pretrained(folder))
    assert (wanted - plain).abs().max() > 0.05, "the override must matter"

    model = prepare(loaded(folder, LONG).model)
    assert context_length(model.config) == 128

    torch.testing.assert_close(trained_logprobs(model), wanted, rtol=0, atol=1e-4)

    async def drawn() -> Any:
        async with asyncio.timeout(300):
            engine = TorchEngine(model)
            params = SamplingParams(max_new_tokens=20, seed=3)
            try:
                return await engine.generate(IDS[:90], params, deadline_s=300.0)
            finally:
                await engine.close()

    completion = asyncio.run(drawn())
    assert len(completion.ids) > 5

    ids = [*IDS[:90], *completion.ids]
    own = transformers_model(folder)
    with torch.no_grad():
        logits = own(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    expected = logits[89:-1].log_softmax(-1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
    found = torch.tensor(list(completion.logprobs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_saved_model_needs_no_override_and_takes_it_again(folder: Path, tmp_path: Path) -> None:
    wanted = transformers_own(folder)
    first = loaded(folder, LONG)
    saved = save_model(first.model, first.tokenizer, tmp_path / "long")
    assert json.loads((saved / "config.json").read_text())["max_position_embeddings"] == 128
    for overrides in ({}, LONG):
        found = logprobs_of(loaded(saved, overrides).model)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_other_values_for_its_own_kind_of_rope_keep_the_rest(folder: Path, tmp_path: Path) -> None:
    first = loaded(folder, LONG)
    saved = save_model(first.model, first.tokenizer, tmp_path / "long")
    rope = loaded(saved, {"rope_parameters": {"factor": 8.0}}).model.config.rope_parameters
    assert rope["factor"] == 8.0 and rope["rope_type"] == "yarn"
    assert rope["rope_theta"] == THETA
    plain = {"rope_parameters": {"rope_type": "default"}}
    assert set(loaded(saved, plain).model.config.rope_parameters) == {"rope_type", "rope_theta"}


def test_a_rope_for_each_kind_of_layer_is_given_by_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    ropes = {kind: {"rope_type": "default", "rope_theta": THETA} for kind in kinds}
    config = Gemma3TextConfig(
        **SHAPE, head_dim=8, layer_types=kinds, sliding_window=8, rope_parameters=ropes
    )
    folder = save(Gemma3ForCausalLM(config), tmp_path / "gemma")
    linear = {"rope_type": "linear", "factor": 2.0}
    model = loaded(folder, {"rope_parameters": {"full_attention": linear}}).model
    assert model.config.rope_parameters["sliding_attention"] == ropes["sliding_attention"]
    assert model.config.rope_parameters["full_attention"] == {**linear, "rope_theta": THETA}

    with pytest.raises(ModelError, match="full_attention, sliding_attention"):
        loaded(folder, {"rope_scaling": linear})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_position_embedings": 64}, "did you mean max_position_embeddings"),
        ({"rope_theta": 1e6}, "it is one of model.config_overrides.rope_parameters"),
        ({"dtype": "bfloat16"}, "what the weights are"),
        ({"max_position_embeddings": "many"}, "LlamaConfig does not take it"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"rope_scaling": {**YARN, "betafast": 3}}, "betafast"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor field must be"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "yarm"),
        ({"rope_scaling": 4.0}, "give a mapping"),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "give one of them"),
        ({"hidden_size": 64}, r"config_overrides=.*hidden_size.* can't be read"),
    ],
)
def test_what_the_class_does_not_take_is_refused(folder: Path, overrides: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        loaded(folder, overrides)


def test_a_value_that_the_class_undoes_is_refused(tmp_path: Path) -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    folder = save(model, tmp_path / "qwen2")
    with pytest.raises(ModelError, match="sliding_window=16 has no effect"):
        loaded(folder, {"sliding_window": 16})
    both = {"sliding_window": 16, "use_sliding_window": True}
    assert loaded(folder, both).model.config.sliding_window == 16


@pytest.mark.slow
def test_an_adapter_keeps_what_its_base_was_computed_with(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    trained = loaded(folder, LONG, lora=LoraSection(rank=4))
    adapter = save_model(trained.model, trained.tokenizer, tmp_path / "adapter")
    assert json.loads((adapter / OVERRIDES_FILE).read_text()) == LONG

    saved = LoraSection(adapter=adapter)
    with pytest.raises(ModelError, match=r"was made with model\.config_overrides="):
        loaded(folder, {}, lora=saved)

    again = loaded(folder, LONG, lora=saved)
    torch.testing.assert_close(logprobs_of(again.model), transformers_own(folder))
    merged = merge_adapter(adapter, tmp_path / "merged", str(folder))
    found = logprobs_of(AutoModelForCausalLM.from_pretrained(merged))
    torch.testing.assert_close(found, transformers_own(folder), rtol=0, atol=1e-5)
    plain = loaded(folder, {}, lora=LoraSection(rank=4))
    assert not (save_model(plain.model, plain.tokenizer, tmp_path / "p") / OVERRIDES_FILE).exists()
