"""The policy made on the spot: lossless tokenizers, a prefix-stable template, seeded weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentevo.config import ModelSection, TinyModel, VisionSection
from agentevo.environments.drawing import empty_cell, grid_png
from agentevo.errors import ModelError
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.tiny import make_tiny
from agentevo.models.tiny_tokenizer import CHARACTERS, TAGS, byte_tokenizer, word_tokenizer
from agentevo.models.token_rows import banned_tokens
from agentevo.types import Message, TextPart
from agentevo.types.images import image_file

CORPUS = (
    "You stand at P on a frozen lake.\nWalk to G; avoid O.\n",
    "Actions: Up, Down, Left, Right. Say <answer>Up</answer>",
    "fell! ünter",
)
SHAPE = TinyModel(hidden_size=32, num_layers=1, num_heads=2, context_length=64)
WORD = word_tokenizer(CORPUS, 64)
BYTE = byte_tokenizer(64)

known_text = st.lists(
    st.sampled_from([*CORPUS, *CHARACTERS, *TAGS, " Walk", "Walk", "lake", "unknownword", "ü"])
).map("".join)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@given(known_text)
def test_word_tokenizer_is_lossless_on_known_characters(text: str) -> None:
    ids = encode(WORD, text)
    assert WORD.decode(ids) == text
    assert WORD.unk_token_id not in ids


@given(st.text(st.sampled_from(CHARACTERS)))
def test_word_tokenizer_is_lossless_on_any_ascii_text(text: str) -> None:
    assert WORD.decode(encode(WORD, text)) == text


@given(st.text(st.characters(codec="utf-8")))
def test_byte_tokenizer_is_lossless_on_any_text(text: str) -> None:
    ids = encode(BYTE, text)
    assert BYTE.decode(ids) == text
    if not any(tag in text for tag in TAGS) and "<|" not in text:
        assert len(ids) == len(text.encode())


def test_words_symbols_digits_and_newlines_are_single_tokens() -> None:
    assert WORD.convert_ids_to_tokens(encode(WORD, "Walk to G;\n12")) == [
        "Walk",
        " to",
        " ",
        "G",
        ";",
        "\n",
        "1",
        "2",
    ]
    assert WORD.convert_ids_to_tokens(encode(WORD, "<answer>Up</answer>")) == [
        "<answer>",
        "Up",
        "</answer>",
    ]

    # each word of the corpus counts with and without a blank before it
    assert WORD.convert_ids_to_tokens(encode(WORD, "stand lake")) == ["stand", " lake"]


def test_an_unknown_word_falls_back_to_characters() -> None:
    assert WORD.convert_ids_to_tokens(encode(WORD, " Walks")) == [" ", "W", "a", "l", "k", "s"]


def test_a_character_outside_corpus_and_ascii_is_unk() -> None:
    assert WORD.unk_token_id in encode(WORD, "ß")
    assert WORD.unk_token_id not in encode(WORD, "ü")


def test_tags_survive_skipping_special_tokens() -> None:
    ids = encode(WORD, "<think>lake</think><answer>Up</answer><|end|>")
    assert WORD.decode(ids, skip_special_tokens=True) == "<think>lake</think><answer>Up</answer>"


def test_vocabulary_does_not_depend_on_the_order_of_texts() -> None:
    assert word_tokenizer(reversed(CORPUS), 64).get_vocab() == WORD.get_vocab()


@pytest.mark.parametrize("tokenizer", [WORD, BYTE], ids=["word", "byte"])
def test_template_is_prefix_stable(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": role, "content": f"{role} text"}
        for role in ("system", "user", "assistant", "user")
    ]
    wanted = (
        "<|system|>system text<|end|><|user|>user text<|end|><|assistant|>assistant "
        "text<|end|><|user|>user text<|end|>"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == wanted

    for cut in range(1, 5):
        prompt = tokenizer.apply_chat_template(
            messages[:cut], tokenize=False, add_generation_prompt=True
        )
        assert prompt.endswith("<|assistant|>")
        assert wanted.startswith(prompt.removesuffix("<|assistant|>"))

    assert tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize("tokenizer", [WORD, BYTE], ids=["word", "byte"])
def test_saved_tokenizer_encodes_the_same(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|user|>Walk to  G;\n\n12 Walks <answer>Up</answer> don't . , <|end|>"
    assert encode(again, text) == encode(tokenizer, text)
    assert again.decode(encode(again, text)) == text
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token, again.pad_token, again.unk_token, again.bos_token) == (
        "<|end|>",
        "<|pad|>",
        "<|unk|>",
        None,
    )
    assert again.model_max_length == 64


def weights(seed: int) -> torch.Tensor:
    model, _ = make_tiny(SHAPE, CORPUS, seed)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = weights(7)
    torch.manual_seed(2)
    random.seed(2)
    assert torch.equal(weights(7), first)
    assert not torch.equal(weights(8), first)


def test_making_a_policy_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    weights(3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["word", "byte"])
def test_model_fits_its_tokenizer(kind: str) -> None:
    model, tokenizer = make_tiny(SHAPE.model_copy(update={"tokenizer": kind}), CORPUS, 0)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == 64
    assert model.config.intermediate_size == 96  # 32 * 8/3 = 85.3, rounded up to a multiple of 32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id

    logits = model(torch.tensor([encode(tokenizer, "Walk to G")])).logits
    assert logits.shape[-1] == len(tokenizer)
    assert torch.isfinite(logits).all()


SEEING = TinyModel(hidden_size=32, num_layers=1, num_heads=2, context_length=64, vision=True)


@pytest.mark.slow
def test_a_policy_that_sees_reads_an_image_as_tokens() -> None:
    section = ModelSection(name="tiny", device="cpu", tiny=SEEING)
    loaded = load_model(section, corpus=lambda: CORPUS)
    again = load_model(section, corpus=lambda: CORPUS)
    weights = loaded.model.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in again.model.state_dict().items())

    assert loaded.processor is not None and again.processor is not None
    assert again.processor.fingerprint == loaded.processor.fingerprint
    picture = image_file(grid_png([empty_cell(16, (9, 99, 200))] * 6, 3), "image/png")
    files = {picture.part.sha256: picture}
    message = Message("user", (TextPart("Walk to G"), picture.part))
    prompt = loaded.processor.prompt([message], files)
    assert [(span.grid, span.length) for span in prompt.spans] == [((1, 4, 6), 6)]
    text = loaded.tokenizer.decode(prompt.ids)
    features = "<|image_pad|>" * 6
    assert text == f"<|user|>Walk to G<|vision_start|>{features}<|vision_end|><|end|><|assistant|>"
    assert set(banned_tokens(loaded.model)) == loaded.processor.vision_ids


def test_a_policy_that_sees_scales_images_to_the_limits_of_the_recipe() -> None:
    def read(**limits: int) -> LoadedModel:
        vision = VisionSection(**limits)
        section = ModelSection(name="tiny", device="cpu", tiny=SEEING, vision=vision)
        return load_model(section, corpus=lambda: CORPUS)

    picture = image_file(grid_png([empty_cell(16, (9, 99, 200))] * 6, 3), "image/png")
    processors = [read().processor, read(max_pixels=512).processor]
    lengths = [p.count_features(p.process(picture)) for p in processors if p is not None]
    assert lengths == [6, 1]
    with pytest.raises(ModelError, match=r"at least 256 and at most 128 pixels: set both"):
        read(max_pixels=128)


def test_a_policy_that_sees_turns_visibly_from_column_to_column() -> None:
    """Columns have the lowest frequencies, in radians a token."""
    section = ModelSection(name="tiny", device="cpu", tiny=SEEING)
    model = load_model(section, corpus=lambda: CORPUS).model
    assert model.model.language_model.rotary_emb.inv_freq.min() > 0.1


def test_the_template_of_a_policy_that_sees_writes_texts_alike() -> None:
    plain = byte_tokenizer(64)
    seeing = byte_tokenizer(64, sees=True)
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    options = {"tokenize": False, "tools": [{"name": "add"}]}
    expected = plain.apply_chat_template(messages, **options)
    assert seeing.apply_chat_template(messages, **options) == expected
