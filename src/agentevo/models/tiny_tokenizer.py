"""Creates tokenizers for the texts of a run, for the tiny policy (tiny.py).

Both are lossless (`decode(encode(text)) == text`), and both have `<think> </think> <answer>
</answer>` as single tokens:

    word   one token per word of the corpus (a blank before it belongs to it), per digit, symbol and
           newline; a word outside the corpus is encoded as its characters. A character that is
           neither printable ASCII nor in the corpus becomes `<|unk|>`. Only this is lossy, and
           `ChatFormat` refuses it.
    byte   one token per byte of UTF-8: any text.

The chat template is prefix-stable: each message is `<|role|>content<|end|>`, and the generation
prompt is `<|assistant|>`. Tools, calls and their results are written as Hermes and Qwen write them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from agentevo.config import TinyModel

SPECIAL_TOKENS = ("<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Further special tokens of a policy that sees."""
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = ("\t", "\n", *map(chr, range(32, 127)))

WORDS = r" ?[A-Z]?[a-z]+|[\s\S]"
"""The pieces that the word tokenizer splits text into: a word with the preceding blank, or a single
character."""

CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '<|system|>' + (tools | tojson) + '<|end|>' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{- '<|user|><tool_response>' + message['content'] + '</tool_response><|end|>' -}}"
    "{%- elif message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('the tiny policy knows the roles system, user, assistant and tool, not ' "
    "+ message['role']) -}}"
    "{%- else -%}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    '{{- \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- (call.function.arguments if call.function.arguments is string"
    " else call.function.arguments | tojson) + '}</tool_call>' -}}"
    "{%- endfor -%}{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

VISION_TEMPLATE = (
    "{%- macro show(content) -%}"
    "{%- if content is string -%}{{- content -}}{%- else -%}"
    "{%- for part in content or [] -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image'"
    " else part['text'] -}}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
) + CHAT_TEMPLATE.replace("(message['content'] or '')", "show(message['content'])").replace(
    "message['content'] + '</tool_response>", "show(message['content']) + '</tool_response>"
)
"""Likewise, with images among the parts of a message."""


def tiny_tokenizer(tiny: TinyModel, corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """The section's tokenizer. `corpus`: see `word_tokenizer`; the byte tokenizer does not use
    it."""
    if tiny.tokenizer == "word":
        return word_tokenizer(corpus, tiny.context_length, sees=tiny.vision)
    return byte_tokenizer(tiny.context_length, sees=tiny.vision)


def word_tokenizer(
    corpus: Iterable[str], context_length: int, *, sees: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per piece (`WORDS`) of the corpus, and each word with and without
    a preceding blank. The order of the texts does not matter. `sees`: with IMAGE_TOKENS."""
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    pieces: set[str] = set()
    for text in corpus:
        for token in (*_special(sees), *TAGS):
            text = text.replace(token, "\n")  # removed first, as in encoding
        pieces.update(piece for piece, _ in split.pre_tokenize_str(text))

    words = {piece.lstrip(" ") for piece in pieces if len(piece) > 1}
    pieces |= words | {f" {word}" for word in words}
    vocabulary = [*_special(sees), *TAGS, *CHARACTERS, *sorted(pieces - set(CHARACTERS))]
    # BPE without merges: with ignore_merges, a known piece is one token, and other pieces are split
    # into characters.
    bpe = BPE(
        vocab={piece: index for index, piece in enumerate(vocabulary)},
        merges=[],
        unk_token="<|unk|>",
        ignore_merges=True,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return _finish(tokenizer, context_length, sees)


def byte_tokenizer(context_length: int, *, sees: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte of UTF-8. `sees`: with IMAGE_TOKENS."""
    vocabulary = [*_special(sees), *TAGS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        BPE(vocab={piece: index for index, piece in enumerate(vocabulary)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, context_length, sees)


def _special(sees: bool) -> tuple[str, ...]:
    return SPECIAL_TOKENS + IMAGE_TOKENS if sees else SPECIAL_TOKENS


def _finish(tokenizer: Tokenizer, context_length: int, sees: bool) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in _special(sees)]
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
        chat_template=VISION_TEMPLATE if sees else CHAT_TEMPLATE,
    )
