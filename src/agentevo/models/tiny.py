"""A policy made on the spot: a Llama of a few million parameters and a tokenizer for the texts at
hand.

Two tokenizers, both lossless (`decode(encode(text)) == text`) and both with `<think> </think>
<answer> </answer>` as single tokens:

    word   one token per word of the corpus (a blank before it belongs to it), per digit, symbol and
           newline; a word outside the corpus falls back to its characters. A character that is
           neither printable ASCII nor in the corpus becomes `<|unk|>`: that alone is lossy, and
           `ChatFormat` refuses it.
    byte   one token per byte of UTF-8: any text.

The chat template is prefix-stable: each message is `<|role|>content<|end|>`, and the generation
prompt is `<|assistant|>`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from agentevo.config import TinyModel

SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = ("\t", "\n", *map(chr, range(32, 127)))

WORDS = r" ?[A-Z]?[a-z]+|[\s\S]"
"""The pieces that the word tokenizer splits text into: a word with the blank before it, else a
single character."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('the tiny policy knows the roles system, user and assistant, not ' + "
    "message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_tiny(
    tiny: TinyModel, corpus: Iterable[str], seed: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A float32 Llama on the CPU with random weights, and its tokenizer.

    `corpus`: texts whose words get tokens of their own (not read for the byte tokenizer). Same
    shape, words and seed give the same weights, whatever else drew random numbers; no other
    generator is disturbed.
    """
    tokenizer = (
        word_tokenizer(corpus, tiny.context_length)
        if tiny.tokenizer == "word"
        else byte_tokenizer(tiny.context_length)
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=tiny.hidden_size,
        intermediate_size=math.ceil(tiny.hidden_size * 8 / 3 / 32) * 32,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_heads,
        max_position_embeddings=tiny.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        # Width^-0.5 suits small widths better than the usual 0.02: after 60 supervised steps on 5x5
        # mazes 73% right instead of 40%.
        initializer_range=tiny.hidden_size**-0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every GPU
        return LlamaForCausalLM(config), tokenizer


def word_tokenizer(corpus: Iterable[str], context_length: int) -> PreTrainedTokenizerFast:
    """One token per piece (`WORDS`) of the corpus, each word with and without a blank before it;
    the order of the texts does not matter."""
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    pieces: set[str] = set()
    for text in corpus:
        for token in (*SPECIAL_TOKENS, *TAGS):
            text = text.replace(token, "\n")  # cut out first, as in encoding
        pieces.update(piece for piece, _ in split.pre_tokenize_str(text))
    words = {piece.lstrip(" ") for piece in pieces if len(piece) > 1}
    pieces |= words | {f" {word}" for word in words}
    vocabulary = [*SPECIAL_TOKENS, *TAGS, *CHARACTERS, *sorted(pieces - set(CHARACTERS))]
    # BPE without merges: with ignore_merges a known piece is one token, and any other falls apart
    # into its characters.
    bpe = BPE(
        vocab={piece: index for index, piece in enumerate(vocabulary)},
        merges=[],
        unk_token="<|unk|>",
        ignore_merges=True,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return _finish(tokenizer, context_length)


def byte_tokenizer(context_length: int) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8."""
    vocabulary = [*SPECIAL_TOKENS, *TAGS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        BPE(vocab={piece: index for index, piece in enumerate(vocabulary)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, context_length)


def _finish(tokenizer: Tokenizer, context_length: int) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        bos_token=None,
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
