"""Tensors of a model's folder that its class does not load are in every folder written from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
)

from agentevo.api.run import train
from agentevo.config import LoraSection, ModelSection, TinyModel, build_config
from agentevo.errors import ModelError
from agentevo.inference.vllm.weights import write_base
from agentevo.models.compute.parts import WeightPart
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.files.merge import merge_adapter
from agentevo.models.files.model_copy import copy_policy
from agentevo.models.files.save import save_model
from agentevo.models.files.split_models import InParts, register_in_parts
from agentevo.models.tiny_tokenizer import tiny_tokenizer

UNUSED = {
    "mtp.fc.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "model.layers.2.eh_proj.weight": torch.randn(5, 7, generator=torch.manual_seed(1)),
    "model.layers.2.steps": torch.tensor(3),
}
KINDS = ("single", "sharded")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found = load_file(path)
        assert not found.keys() & tensors.keys()
        tensors |= found
    return tensors


def assert_kept(folder: Path, unused: dict[str, torch.Tensor]) -> None:
    """The folder has them to the bit, and its index names each tensor's file."""
    tensors = tensors_of(folder)
    for name, tensor in unused.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)


def base_folder(folder: Path, kind: str) -> Path:
    """A Llama of two layers with further tensors, in one file or several."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(TinyModel(tokenizer="byte"), ())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        num_nextn_predict_layers=1,
    )
    model = LlamaForCausalLM(config)
    tokenizer.save_pretrained(folder)
    if kind == "single":
        model.save_pretrained(folder)
        path = folder / "model.safetensors"
        save_file(load_file(path) | UNUSED, path, {"format": "pt"})
        return folder

    model.save_pretrained(folder, max_shard_size="20KB")
    save_file(UNUSED, folder / "rest.safetensors", {"format": "pt"})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert len(set(index["weight_map"].values())) > 1
    index["weight_map"] |= dict.fromkeys(UNUSED, "rest.safetensors")
    path.write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: base_folder(tmp_path_factory.mktemp("base") / kind, kind) for kind in KINDS}


def loaded(folder: Path, **options: Any) -> LoadedModel:
    return load_model(ModelSection(name=str(folder), device="cpu", **options))


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Changes every weight, and returns them all."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_has_them_and_so_has_what_is_trained_from_it(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    first = loaded(bases[kind])
    weights = trained(first.model)
    saved = save_model(first.model, first.tokenizer, tmp_path / "saved")
    assert_kept(saved, UNUSED)
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert all(torch.equal(again.state_dict()[name], t) for name, t in weights.items())

    second = loaded(saved)
    copied = copy_policy(second.model)
    shutil.rmtree(saved)  # as a run deletes old checkpoints
    for model in (second.model, copied):
        assert_kept(save_model(model, second.tokenizer, tmp_path / "again"), UNUSED)


def test_a_model_without_such_tensors_is_one_file_as_before(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    first = loaded(bases["single"])
    first.model.save_pretrained(tmp_path / "plain")
    first.tokenizer.save_pretrained(tmp_path / "plain")
    plain = loaded(tmp_path / "plain")
    saved = save_model(plain.model, plain.tokenizer, tmp_path / "saved")
    assert [path.name for path in saved.glob("model*")] == ["model.safetensors"]


def test_a_model_that_is_written_from_parts_has_them(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    first = loaded(bases["single"])
    parts = {name: WeightPart.of(p) for name, p in first.model.named_parameters()}
    register_in_parts(first.model, InParts(first.model, lambda only_trained: parts))
    assert_kept(save_model(first.model, first.tokenizer, tmp_path / "saved"), UNUSED)


def test_layers_that_the_recipe_leaves_out_are_not_kept(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    first = loaded(bases["single"], config_overrides={"num_hidden_layers": 1})
    saved = save_model(first.model, first.tokenizer, tmp_path / "saved")
    assert_kept(saved, UNUSED)
    assert not any(name.startswith("model.layers.1.") for name in tensors_of(saved))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_has_those_of_its_base(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    first = loaded(bases[kind], lora=LoraSection(rank=2))
    adapter = save_model(first.model, first.tokenizer, tmp_path / "adapter")
    assert not UNUSED.keys() & tensors_of(adapter).keys()
    assert_kept(merge_adapter(adapter, tmp_path / "merged"), UNUSED)


def test_an_engine_that_drafts_gets_them(bases: dict[str, Path], tmp_path: Path) -> None:
    model = loaded(bases["single"]).model
    write_base(model, tmp_path / "drafting", is_drafting=True)
    assert_kept(tmp_path / "drafting", UNUSED)
    write_base(model, tmp_path / "plain")
    assert not UNUSED.keys() & tensors_of(tmp_path / "plain").keys()


ODD = ("complex64", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "uint32", "uint64")


def test_tensors_of_every_dtype_are_kept(bases: dict[str, Path], tmp_path: Path) -> None:
    odd = {name: torch.arange(1, 9).to(getattr(torch, name)) for name in ODD}
    folder = shutil.copytree(bases["single"], tmp_path / "base")
    path = folder / "model.safetensors"
    save_file(load_file(path) | odd, path, {"format": "pt"})

    first = loaded(folder)
    written = tensors_of(save_model(first.model, first.tokenizer, tmp_path / "saved"))
    for name, tensor in odd.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_tensor_that_cannot_be_written_is_refused_when_the_model_is_loaded(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(bases["sharded"], tmp_path / "base")
    header = json.dumps({"mtp.x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    header += b" " * (-len(header) % 8)
    rest = folder / "rest.safetensors"
    rest.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(ModelError, match=r"rest.safetensors: .*'mtp.x', and its dtype F4 can't be"):
        loaded(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_beside_the_model_is_no_part_of_it(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(bases[kind], tmp_path / "base")
    adapter = {"base_model.model.x.lora_A.weight": torch.ones(2)}
    save_file(adapter, folder / "adapter_model.safetensors", {"format": "pt"})
    first = loaded(folder)
    saved = save_model(first.model, first.tokenizer, tmp_path / "saved")
    assert_kept(saved, UNUSED)
    assert not adapter.keys() & tensors_of(saved).keys()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 that sees, with a drafting head."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer(TinyModel(tokenizer="byte"), ())
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 128,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    folder = tmp_path_factory.mktemp("seeing")
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"mtp.fc.weight": torch.ones(2, 3)}, path, {"format": "pt"})
    return folder


def named(names: Iterable[str], part: str) -> list[str]:
    return [name for name in names if part in name]


@pytest.mark.slow
def test_a_model_that_sees_is_whole_again_after_training_on_text(
    seeing: Path, tmp_path: Path
) -> None:
    before = AutoModelForImageTextToText.from_pretrained(seeing).state_dict()
    first = loaded(seeing)
    weights = trained(first.model)
    saved = save_model(first.model, first.tokenizer, tmp_path / "saved")
    assert_kept(saved, {"mtp.fc.weight": torch.ones(2, 3)})

    whole = AutoModelForImageTextToText.from_pretrained(saved)
    assert type(whole).__name__ == "Qwen3_5ForConditionalGeneration"
    after = whole.state_dict()
    towers = named(before, "visual")
    assert towers and all(torch.equal(after[name], before[name]) for name in towers)
    assert torch.equal(
        after["model.language_model.embed_tokens.weight"], weights["model.embed_tokens.weight"]
    )

    again = loaded(saved)
    assert type(again.model) is type(first.model)
    assert all(torch.equal(again.model.state_dict()[name], t) for name, t in weights.items())

    write_base(again.model, tmp_path / "engine", is_drafting=True)
    written = tensors_of(tmp_path / "engine")
    assert named(written, "mtp") and not named(written, "visual")
    assert "vision_config" not in json.loads((tmp_path / "engine" / "config.json").read_text())


@pytest.mark.soak
def test_every_checkpoint_of_a_run_has_them_also_after_a_resume(
    bases: dict[str, Path], tmp_path: Path, quiet_view: Any
) -> None:
    def config_of(steps: int) -> Any:
        return build_config(
            {
                "run": {"dir": str(tmp_path / "run"), "threads": 1},
                "model": {"name": str(bases["single"]), "device": "cpu"},
                "environment": {"type": "coins"},
                "sampling": {"max_new_tokens": 8},
                "trainer": {"steps": steps, "groups_per_step": 1, "group_size": 2},
                "evaluation": {"every": 0},
                "checkpoint": {"every": 1, "keep_last": 1, "keep_best": False},
                "tracking": {"tensorboard": False, "report": False},
            }
        )

    train(config_of(1), view=quiet_view())
    assert_kept(tmp_path / "run" / "checkpoints" / "step-000001", UNUSED)
    train(config_of(2), resume=True, view=quiet_view())
    (last,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert last.name == "step-000002"
    assert_kept(last, UNUSED)
