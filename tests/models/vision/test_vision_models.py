"""Vision-language models: what is loaded and saved, which parts are trained, and refusals."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from seeing import (
    FILES,
    TOLERANCE,
    Seeing,
    group_of,
    load_seeing,
    log_prob_difference,
    processor_in,
)
from slow import slow, soak
from tiny_vision import FAMILIES, VARIANTS, write_tiny_vision

from agentevo.config import LoraSection, ModelSection, VisionSection
from agentevo.errors import ModelError
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.linear import FastLinear, available
from agentevo.models.compute.rows import row_settings, run_rows
from agentevo.models.files.load import load_hollow, load_model
from agentevo.models.files.merge import merge_adapter
from agentevo.models.files.save import save_model
from agentevo.models.vision.features import ImageEncoder
from agentevo.models.vision.parts import part_of, processor_of, vision_parameters
from agentevo.models.vision.processor import PROCESSOR_FILES

QUICK = ("qwen3_vl", "gemma3")
OTHERS = [name for name in (*FAMILIES, *VARIANTS) if name not in QUICK]
NAMES = [*QUICK, *slow(*OTHERS)]
OTHERS_OF_SOAK = [name for name in OTHERS if name != "idefics3"]
SAMPLED = [*QUICK, *slow("idefics3"), *soak(*OTHERS_OF_SOAK)]
LANGUAGE_TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`folders(name)`: a tiny model. The same folder for every test."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = write_tiny_vision(name, tmp_path_factory.mktemp(name))
        return written[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_with_a_tower_is_whole_after_saving_and_loading(
    name: str, folders: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders(name), tmp_path / "first")
    first = load_seeing(folder)
    assert processor_of(first.model) is first.processor is not None
    assert first.processor.encode("no image", []).images == ()
    with torch.no_grad():
        for parameter in first.model.parameters():
            parameter.add_(0.5)

    twin = copy.deepcopy(first.model)
    assert processor_of(twin) is first.processor
    shutil.rmtree(folder)  # as a run deletes old checkpoints
    saved = save_model(twin, first.tokenizer, tmp_path / "saved")
    again = load_seeing(saved)
    assert processor_in(again).fingerprint == first.processor.fingerprint
    assert again.tokenizer.chat_template == first.tokenizer.chat_template
    weights = first.model.state_dict()
    found = again.model.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


@pytest.mark.slow
def test_the_text_half_of_a_folder_stays_a_text_model(folders: Any, tmp_path: Path) -> None:
    """If its type has one: without an image processor, nothing can be shown to it."""
    folder = shutil.copytree(folders("qwen3_5"), tmp_path / "model")
    (folder / PROCESSOR_FILES[0]).unlink()
    loaded = load_seeing(folder)
    assert type(loaded.model).__name__ == "Qwen3_5ForCausalLM"
    assert loaded.processor is None
    with pytest.raises(ModelError, match=r"model.vision.freeze is for models that see.*tower"):
        load_seeing(folder, vision=VisionSection(freeze=("tower",)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("gemma3", "Gemma3ForConditionalGeneration"), ("qwen3_5", "Qwen3_5ForCausalLM")],
)
def test_a_model_that_is_shown_no_images_is_a_text_model(
    name: str, kind: str, folders: Any, tmp_path: Path
) -> None:
    folder = folders(name)
    loaded = load_seeing(folder, vision=VisionSection(images=False))
    assert type(loaded.model).__name__ == kind
    assert loaded.processor is None and processor_of(loaded.model) is None
    assert not any(p.requires_grad for _, p in vision_parameters(loaded.model))
    prepare(loaded.model)
    has_recurrence = name == "qwen3_5"
    assert (row_settings(loaded.model) is not None) == has_recurrence

    saved = save_model(loaded.model, loaded.tokenizer, tmp_path / "saved")
    names = {name for name, _ in load_seeing(saved).model.named_parameters()}
    assert names == {name for name, _ in load_seeing(folder).model.named_parameters()}
    with pytest.raises(ValueError, match="max_pixels is for images, and images=false shows none"):
        VisionSection(images=False, max_pixels=64)


@pytest.mark.slow
def test_older_folders_have_their_template_in_a_file_of_its_own(
    folders: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders("llava"), tmp_path / "model")
    template = (folder / "chat_template.jinja").read_text().replace("Assistant:", "A:")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    loaded = load_seeing(folder)
    assert loaded.tokenizer.chat_template == template

    (folder / "chat_template.json").write_text("{}")
    with pytest.raises(ModelError, match=r"chat_template.json has no text under chat_template"):
        load_seeing(folder)


@pytest.mark.slow
def test_sizes_of_images_are_saved(folders: Any, tmp_path: Path) -> None:
    folder = folders("qwen2_vl")
    own = load_seeing(folder)
    small = load_seeing(folder, vision=VisionSection(max_pixels=128, min_pixels=64))
    processors = [processor_in(loaded) for loaded in (own, small)]
    counts = [p.count_features(p.process(FILES[2])) for p in processors]
    assert counts[0] == 8 and counts[1] < counts[0]
    saved = save_model(small.model, small.tokenizer, tmp_path / "saved")
    assert processor_in(load_seeing(saved)).fingerprint == processors[1].fingerprint
    assert processors[0].fingerprint != processors[1].fingerprint

    with pytest.raises(ModelError, match=r"at least 64 and at most 32 pixels: set both"):
        load_seeing(folder, vision=VisionSection(max_pixels=32))
    with pytest.raises(ModelError, match=r"models of the family llava scale every image"):
        load_seeing(folders("llava"), vision=VisionSection(max_pixels=64))


def trained_once(model: Any, loss: torch.Tensor) -> None:
    """One step of AdamW, with weight decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)
    loss.backward()
    optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("freeze", [(), ("tower",), *soak(("projector",), ("tower", "projector"))])
def test_only_parts_that_are_not_frozen_get_gradients_and_change(
    name: str, freeze: tuple[Any, ...], folders: Any
) -> None:
    model = Seeing.read(folders(name), "rows", vision=VisionSection(freeze=freeze))
    inner = model.loaded.model
    before = {name: p.detach().clone() for name, p in inner.named_parameters()}
    prompt = model.prompt("look: ", FILES[0], " seen")
    (features,) = model.features(prompt)
    assert features.pooled.requires_grad == (len(freeze) < 2)
    logits = run_rows(inner, group_of(model, [prompt]), [features]).logits
    trained_once(inner, logits.square().sum())
    touched = set()
    for key, parameter in inner.named_parameters():
        part = part_of(inner, key)
        if part in freeze:
            assert parameter.grad is None and torch.equal(parameter, before[key]), key
        elif parameter.grad is not None and not torch.equal(parameter, before[key]):
            touched.add(part)
    assert touched == {None, "tower", "projector"} - set(freeze)


def adapted_names(model: Any) -> set[str]:
    return {
        name.removesuffix(".lora_A")
        for name, module in model.get_base_model().named_modules()
        if name.endswith(".lora_A")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", *slow("idefics3"), *soak("gemma3", *OTHERS_OF_SOAK)])
def test_adapters_reach_the_language_model_and_other_parts_by_name(name: str, folders: Any) -> None:
    pytest.importorskip("peft")
    folder = folders(name)
    plain = load_seeing(folder, lora=LoraSection(rank=2))
    names = adapted_names(plain.model)
    assert names and all(part_of(plain.model, key) is None for key in names)
    assert not any("lm_head" in key for key in names)

    few = load_seeing(folder, lora=LoraSection(rank=2, targets=["q_proj", "k_proj"]))
    assert adapted_names(few.model) == {k for k in names if k.endswith(("q_proj", "k_proj"))}

    tower = load_seeing(folder, lora=LoraSection(rank=2, targets=["q_proj", "tower"]))
    parts = {part_of(tower.model, key) for key in adapted_names(tower.model)}
    assert parts == {None, "tower"}
    assert any(p.requires_grad for _, p in vision_parameters(tower.model, ["tower"]))
    with pytest.raises(ModelError, match=r"lora trains .* keeps the tower as it is: remove one"):
        load_seeing(
            folder,
            lora=LoraSection(rank=2, targets=["tower"]),
            vision=VisionSection(freeze=("tower",)),
        )

    options = LoraSection(rank=2, targets=["all-linear", "projector"])
    if name == "gemma3":
        with pytest.raises(ModelError, match="no linear layers: train it in full by"):
            load_seeing(folder, lora=options)
        options = LoraSection(rank=2, modules_to_save=["multi_modal_projector"])
    both = load_seeing(folder, lora=options)
    trained = {part_of(both.model, k) for k, p in inner_parameters(both.model) if p.requires_grad}
    assert trained == {None, "projector"}


def inner_parameters(model: Any) -> Any:
    return model.get_base_model().named_parameters()


@pytest.mark.slow
def test_a_name_that_only_the_tower_has_reaches_it(folders: Any) -> None:
    pytest.importorskip("peft")
    section = LoraSection(rank=2, targets=["qkv", "visual.merger.linear_fc1", "q_proj"])
    names = adapted_names(load_seeing(folders("qwen3_vl"), lora=section).model)
    assert {key.rpartition(".")[2] for key in names} == {"qkv", "linear_fc1", "q_proj"}
    assert "model.visual.merger.linear_fc1" in names
    with pytest.raises(ModelError, match="the model has no module tower_of_babel"):
        load_seeing(folders("qwen3_vl"), lora=LoraSection(rank=2, targets=["tower_of_babel"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", *slow("idefics3"), *soak("qwen3_vl", *OTHERS_OF_SOAK)])
def test_an_adapted_model_computes_what_its_merged_weights_do(
    name: str, folders: Any, tmp_path: Path
) -> None:
    """Adapters in all parts; the merged folder is read by transformers alone."""
    pytest.importorskip("peft")
    parts = ["all-linear", "tower"] + ([] if name == "gemma3" else ["projector"])
    model = Seeing.read(folders(name), "rows", lora=LoraSection(rank=2, targets=parts))
    adapted = model.loaded.model
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    adapter = save_model(adapted, model.loaded.tokenizer, tmp_path / "adapter")
    assert (adapter / "preprocessor_config.json").is_file()
    merged = Seeing.read(merge_adapter(adapter, tmp_path / "merged"), "rows")
    assert merged.processor.fingerprint == model.processor.fingerprint
    prompt = model.prompt("look: ", FILES[1], " seen")
    with torch.no_grad():
        found = run_rows(adapted, group_of(model, [prompt]), model.features(prompt)).logits[0]
        assert log_prob_difference(found, merged.plain_logits(prompt)) < TOLERANCE
        assert log_prob_difference(found, model.plain_logits(prompt)) > 100 * TOLERANCE


@pytest.mark.slow
def test_only_the_language_model_is_prepared(folders: Any) -> None:
    loaded = load_seeing(folders("llava"))
    prepare(loaded.model)
    config = loaded.model.config
    assert config.text_config._attn_implementation == "agentevo"
    assert config.vision_config._attn_implementation == "sdpa"
    for name, module in loaded.model.named_modules():
        if part_of(loaded.model, name) is None:
            assert type(module) is not torch.nn.Linear or not available()
        else:
            assert type(module) is not FastLinear
            assert "forward" not in vars(module)


def test_half_precision_encodes(folders: Any) -> None:
    loaded = load_seeing(folders("gemma3"), dtype="bfloat16")
    processor = processor_in(loaded)
    with torch.no_grad():
        (features,) = ImageEncoder(loaded.model, processor).encode([processor.process(FILES[0])])
    assert features.pooled.dtype == torch.bfloat16
    assert features.pooled.isfinite().all()


@pytest.mark.slow
def test_a_model_without_weights_has_its_processor(folders: Any) -> None:
    folder = folders("qwen3_vl")
    section = ModelSection(name=str(folder), device="cpu")
    hollow = load_hollow(section, folder)
    assert processor_in(hollow).fingerprint == processor_in(load_model(section)).fingerprint
    prepare(hollow.model)


def test_keys_for_models_that_see_are_refused_for_others(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="the tiny policy reads text only"):
        ModelSection(name="tiny", vision=VisionSection(freeze=("tower",)))
    with pytest.raises(ValidationError, match="freeze"):
        VisionSection(freeze=("decoder",))  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="min_pixels=9 is more than max_pixels=4"):
        VisionSection(min_pixels=9, max_pixels=4)


@pytest.mark.slow
def test_a_damaged_image_processor_is_refused(folders: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(folders("llava"), tmp_path / "model")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Nobody"}')
    with pytest.raises(ModelError, match=r"the image processor in .* can't be read"):
        load_seeing(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no image processor|can't be read"):
        load_seeing(folder, vision=VisionSection(freeze=("tower",)))
    assert load_file(folder / "model.safetensors")
