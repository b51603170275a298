"""Prompts with images against transformers' own processors."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from slow import slow
from tiny_vision import FAMILIES, TinyVision, png, tiny_vision
from transformers import AutoModelForImageTextToText, ProcessorMixin

from agentevo.errors import ImageError, ModelError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.vision.processor import VisionProcessor, VisionPrompt, load_processor
from agentevo.types import Message, TextPart
from agentevo.types.images import ImageFile, image_file

SMALL, WIDE = png(20, 12, seed=1), png(40, 16, seed=2)
IMAGES = [image_file(data, "image/png") for data in (SMALL, WIDE)]
FILES = {image.part.sha256: image for image in IMAGES}
CONVERSATION = [
    Message("user", (TextPart("What is this?\n"), IMAGES[0].part, TextPart("And"))),
    Message("assistant", "A picture."),
    Message("user", (IMAGES[1].part, TextPart("this?"))),
]
QUICK = ("qwen2_vl", "gemma3")
CLASSES = {
    "qwen2_vl": "qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor",
    "qwen2_5_vl": "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor",
    "qwen3_vl": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    "qwen3_5": "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor",
    "idefics3": "idefics3.processing_idefics3.Idefics3Processor",
    "smolvlm": "smolvlm.processing_smolvlm.SmolVLMProcessor",
    "gemma3": "gemma3.processing_gemma3.Gemma3Processor",
    "gemma4": "gemma4.processing_gemma4.Gemma4Processor",
    "internvl": "internvl.processing_internvl.InternVLProcessor",
    "llava": "llava.processing_llava.LlavaProcessor",
}
OPTIONS = {
    "idefics3": {"image_seq_len": 4},
    "smolvlm": {"image_seq_len": 4},
    "gemma3": {"image_seq_length": 4},
    "internvl": {"image_seq_length": 4},
    "llava": {
        "patch_size": 4,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    },
}
NAMES_OF_TOKENS = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "gemma4": {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}
"""The attributes that the tokenizers of these families have for their processors."""


def make(parts: TinyVision) -> VisionProcessor:
    return VisionProcessor(parts.tokenizer, parts.image_processor, parts.config)


def load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"transformers.models.{module}"), name)


@pytest.mark.parametrize("name", [*QUICK, *slow(*(n for n in FAMILIES if n not in QUICK))])
def test_ids_and_pixels_equal_those_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tiny_vision(name)
    processor = make(parts)
    prompt = processor.prompt(CONVERSATION, FILES)

    expected = own_processor(name, parts, monkeypatch)(
        text=[processor.render(CONVERSATION)],
        images=[[Image.open(BytesIO(data)) for data in (SMALL, WIDE)]],
        return_tensors="pt",
        add_special_tokens=False,
    )

    assert prompt.ids == expected["input_ids"][0].tolist()
    joined = processor.join(prompt.images)
    assert joined
    for tensor_name, tensor in joined.items():
        assert torch.equal(tensor, expected[tensor_name]), tensor_name
    feature = parts.tokenizer.convert_tokens_to_ids(processor.family.feature)
    in_spans = [
        place for span in prompt.spans for place in range(span.offset, span.offset + span.length)
    ]
    assert set(np.flatnonzero(np.array(prompt.ids) == feature)) <= set(in_spans)
    assert [span.digest for span in prompt.spans] == list(FILES)


def own_processor(name: str, parts: TinyVision, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' processor, without the parts for video that need further packages."""
    monkeypatch.setattr(
        ProcessorMixin, "check_argument_for_proper_class", lambda *arguments: object
    )
    for attribute, text in NAMES_OF_TOKENS.get(name, {}).items():
        setattr(parts.tokenizer, attribute, text)
        setattr(parts.tokenizer, f"{attribute}_id", parts.tokenizer.convert_tokens_to_ids(text))
    options: dict[str, Any] = dict(OPTIONS.get(name, {}))
    if name in ("smolvlm", "internvl") or name.startswith("qwen"):
        options["video_processor"] = SimpleNamespace(merge_size=2)
    if name == "gemma4":
        options |= {"video_processor": SimpleNamespace(), "feature_extractor": SimpleNamespace()}
        folder = "transformers.models.gemma4"  # its processor imports a module for torchvision
        pillow = import_module(f"{folder}.image_processing_pil_gemma4")
        monkeypatch.setitem(sys.modules, f"{folder}.image_processing_gemma4", pillow)
    if name == "smolvlm":
        module = import_module("transformers.models.smolvlm.processing_smolvlm")
        monkeypatch.setattr(module, "num2words", str, raising=False)
    return load(CLASSES[name])(
        image_processor=parts.image_processor, tokenizer=parts.tokenizer, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_reads_the_images_of_a_prompt(name: str) -> None:
    parts = tiny_vision(name)
    processor = make(parts)
    prompt = processor.prompt(CONVERSATION, FILES)
    model = AutoModelForImageTextToText.from_config(parts.config)

    inputs = processor.join(prompt.images)
    positions = processor.positions(len(prompt.ids), prompt.spans)
    inputs["position_ids"] = torch.as_tensor(
        positions[:, None] if len(positions) > 1 else positions
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt.ids]), **inputs).logits

    assert logits.shape[:2] == (1, len(prompt.ids))
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["qwen2_vl", *slow("qwen2_5_vl", "qwen3_vl", "qwen3_5")])
def test_positions_equal_those_of_transformers(name: str) -> None:
    parts = tiny_vision(name)
    processor = make(parts)
    prompt = processor.prompt(CONVERSATION, FILES)
    grids = processor.join(prompt.images)["image_grid_thw"]
    title = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    model = load(f"{name}.modeling_{name}.{title.get(name, 'Qwen3_5')}Model")
    module = SimpleNamespace(config=parts.config)
    module.get_vision_position_ids = model.get_vision_position_ids.__get__(module)
    types = [[int(id == parts.config.image_token_id) for id in prompt.ids]]

    expected, _ = model.get_rope_index(
        module, torch.tensor([prompt.ids]), torch.tensor(types), image_grid_thw=grids
    )

    positions = processor.positions(len(prompt.ids), prompt.spans)
    assert np.array_equal(positions, expected[:, 0].numpy())
    assert positions.max() < len(prompt.ids) - 1


def test_a_prefix_has_the_positions_of_the_whole() -> None:
    processor = make(tiny_vision("qwen2_vl"))
    first = processor.prompt(CONVERSATION[:1], FILES)
    whole = processor.prompt(CONVERSATION, FILES)
    shared = len(first.ids) - len(processor.tokenizer.encode("<|im_start|>assistant\n"))

    assert whole.ids[:shared] == first.ids[:shared]
    assert whole.spans[:1] == first.spans
    assert np.array_equal(
        processor.positions(len(first.ids), first.spans)[:, :shared],
        processor.positions(len(whole.ids), whole.spans)[:, :shared],
    )


def test_an_image_is_the_same_in_any_company() -> None:
    processor = make(tiny_vision("qwen2_vl"))
    prompt = processor.prompt(CONVERSATION, FILES)
    alone = processor.process(IMAGES[0])

    assert torch.equal(prompt.images[0].tensors["pixel_values"], alone.tensors["pixel_values"])
    assert prompt.images[0].text == alone.text


def test_prompts_engine_and_trainer_share_the_pixels_of_an_image() -> None:
    processor = make(tiny_vision("qwen2_vl"))
    processed = processor.process(IMAGES[0])
    assert processor.process(IMAGES[0]) is processed
    assert processor.prompt(CONVERSATION, FILES).images[0] is processed
    with pytest.raises(ImageError, match="bytes are not those of the image"):
        processor.process(ImageFile(IMAGES[0].part, WIDE))

    assert processor.pixel_bytes > 0
    processor.forget_pixels()
    assert processor.pixel_bytes == 0
    assert processor.process(IMAGES[0]) is not processed


def test_the_smallest_image_has_tokens() -> None:
    processor = make(tiny_vision("qwen2_vl"))
    dot = image_file(png(1, 1), "image/png")
    prompt = processor.prompt([Message("user", (dot.part,))], {dot.part.sha256: dot})

    assert prompt.spans[0].length == np.prod(prompt.spans[0].grid) // 4 > 0


def test_vision_ids_are_those_of_images_and_their_boundaries() -> None:
    qwen = make(tiny_vision("qwen2_vl"))
    smol = make(tiny_vision("idefics3"))

    texts = {"<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"}
    assert qwen.vision_ids == set(qwen.tokenizer.convert_tokens_to_ids(sorted(texts)))
    assert smol.tokenizer.convert_tokens_to_ids("<row_2_col_3>") in smol.vision_ids
    assert smol.tokenizer.convert_tokens_to_ids("<|im_end|>") not in smol.vision_ids


def test_the_fingerprint_names_the_settings(tmp_path: Any) -> None:
    parts = tiny_vision("qwen2_vl")
    fingerprint = make(parts).fingerprint
    parts.image_processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(parts.config.to_dict()))

    assert load_processor(tmp_path, parts.config, parts.tokenizer).fingerprint == fingerprint
    parts.image_processor.size = {"shortest_edge": 64, "longest_edge": 2048}
    assert make(parts).fingerprint != fingerprint


def refused(
    messages: list[Message], error: type[Exception], files: dict[str, ImageFile] = FILES
) -> str:
    with pytest.raises(error) as failure:
        make(tiny_vision("qwen2_vl")).prompt(messages, files)
    return str(failure.value)


@pytest.mark.parametrize("name", [*QUICK, *slow(*(n for n in FAMILIES if n not in QUICK))])
def test_a_text_that_spells_a_placeholder_is_ordinary_text(name: str) -> None:
    processor = make(tiny_vision(name))
    for mark in (processor.family.placeholder, processor.family.feature):
        for messages in (
            [Message("user", f"Look: {mark}")],
            [Message("user", (TextPart(mark[:4]), TextPart(mark[4:])))],
            [Message("user", "?"), Message("assistant", f"A {mark}."), Message("user", "Which?")],
        ):
            ids = processor.prompt(messages, {}).ids

            assert not processor.vision_ids & set(ids)
            assert mark in processor.tokenizer.decode(ids)


def test_boundaries_in_a_text_are_ordinary_text() -> None:
    processor = make(tiny_vision("qwen2_vl"))
    said = "a <|vision_start|> b"
    ids = processor.prompt([Message("user", said)], {}).ids
    answer = ChatFormat(processor.tokenizer, processor=processor).completion(
        Message("assistant", said)
    )  # to train on, and the policy never samples such a token

    for tokens in (ids, answer):
        assert not processor.vision_ids & set(tokens)
        assert said in processor.tokenizer.decode(tokens)


def test_a_missing_or_wrong_image_is_refused() -> None:
    assert "is missing" in refused(CONVERSATION, ImageError, {})
    swapped = {digest: ImageFile(file.part, WIDE) for digest, file in FILES.items()}
    assert "bytes are not those of the image" in refused(CONVERSATION, ImageError, swapped)


def test_a_template_that_leaves_an_image_out_is_refused() -> None:
    parts = tiny_vision("qwen2_vl")
    parts.tokenizer.chat_template = parts.tokenizer.chat_template.replace("<|image_pad|>", "")

    with pytest.raises(ModelError, match=r"0 placeholders .* 2 images"):
        make(parts).prompt(CONVERSATION, FILES)


def test_an_image_of_an_impossible_shape_is_refused() -> None:
    thin = image_file(png(1, 500), "image/png")
    message = Message("user", (thin.part,))

    assert "1 x 500 pixels" in refused([message], ImageError, {thin.part.sha256: thin})


def test_a_model_of_an_unknown_family_is_refused() -> None:
    parts = tiny_vision("qwen2_vl")
    parts.config.model_type = "chameleon"

    with pytest.raises(ModelError, match="type chameleon can't be shown images"):
        make(parts)


def test_an_image_processor_of_another_model_is_refused() -> None:
    parts = tiny_vision("qwen2_vl")
    parts.image_processor.patch_size = 14

    with pytest.raises(ModelError, match="patches of 14 pixels"):
        make(parts)


def test_a_llava_with_another_layout_of_images_is_refused() -> None:
    parts = tiny_vision("llava")
    parts.config.vision_config.model_type = "pixtral"

    with pytest.raises(ModelError, match="tower of type pixtral"):
        make(parts)


def test_a_prompt_without_images_has_no_pixels() -> None:
    processor = make(tiny_vision("llava"))
    prompt: VisionPrompt = processor.prompt([Message("user", "Hello")], {})

    assert "Hello" in processor.tokenizer.decode(prompt.ids)
    assert not prompt.spans
    assert not processor.join(prompt.images)
    assert processor.positions(3, ()).tolist() == [[0, 1, 2]]
