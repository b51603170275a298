"""A model's folder that is written tensor by tensor is the one that transformers writes."""

from __future__ import annotations

import io
import json

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from agentevo.models.compute.parts import Spec, WeightPart
from agentevo.models.files.split_models import InParts, write_from_parts
from agentevo.models.files.tensor_file import TensorFile


def whole_parts(model):
    found = {name: WeightPart.of(p) for name, p in model.named_parameters()}
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return found | {n: WeightPart.of(t) for n, t in model.state_dict().items() if n not in named}


def tensors_of(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe", "mixtral"])
def test_a_folder_is_that_of_save_pretrained(name, random_model, tmp_path):
    """Tied weights once, merged experts as they are in files; in several files with an index."""
    model = random_model(name).alone
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    ours.mkdir()
    write_from_parts(InParts(model, lambda only_trained: whole_parts(model)), ours, file_bytes=9000)
    model.save_pretrained(theirs)
    found = tensors_of(ours)
    expected = tensors_of(theirs)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()

    files = list(ours.glob("model-*.safetensors"))
    assert len(files) > 1

    index = json.loads((ours / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert set(index["weight_map"].values()) == {path.name for path in files}

    again = dict(AutoModelForCausalLM.from_pretrained(ours).named_parameters())
    assert all(torch.equal(again[key], p) for key, p in model.named_parameters())


def test_a_file_has_every_dtype_in_any_order():
    """Wider elements lie first, so that an odd number of bytes before them disturbs nobody."""
    kinds = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float8_e5m2)
    given = {f"of {kind}": torch.arange(3).to(kind) for kind in kinds}
    given |= {"none": torch.empty(0, 4), "one": torch.tensor(2.5, dtype=torch.float64)}
    buffer = io.BytesIO()
    file = TensorFile(buffer, {n: Spec(t.dtype, tuple(t.shape)) for n, t in given.items()})
    file.add_all(iter(given.items()))
    found = load(buffer.getvalue())
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in given.items()}
    assert all(torch.equal(found[n].float(), t.float()) for n, t in given.items())

    with pytest.raises(ValueError, match=r"one: torch\.float32"):
        file.add("one", torch.tensor(1.0))
