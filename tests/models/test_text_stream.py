"""Text in pieces while tokens come: the pieces add up to the text of the whole completion, however
its tokens are cut, and each comes as soon as it is certain."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from chat_templates import HERMES, tokenizer_with
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentevo.errors import ModelError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.chat.text_stream import CONTEXT, WINDOW, TextStream, before_stop
from agentevo.models.tiny_tokenizer import byte_tokenizer, word_tokenizer
from examples import examples

WORDS = ["a", "b", "no", "n't", "s", ".", "'", "world", "é", "語", "😀", "\n", "<", "�"]
SPACED = ["▁", "▁▁", *WORDS, *(f"▁{word}" for word in WORDS)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
END = "<|end|>"


def fast(model, decoder, *, clean_up: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=clean_up
    )


def numbered(tokens) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def byte_level() -> PreTrainedTokenizerFast:
    """Tokens of several bytes, which begin and end within characters."""
    rng = random.Random(0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = "".join(WORDS).encode() * 3
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((whole, _),) = encoded.pre_tokenize_str(texts.decode())
    starts = [rng.randrange(len(whole)) for _ in range(150)]
    pieces = [whole[start : start + rng.randint(2, 5)] for start in starts]
    model = models.BPE(vocab=numbered([*letters, *pieces]), merges=[])
    return fast(model, decoders.ByteLevel())


def sentencepiece(*last) -> PreTrainedTokenizerFast:
    """Llama 2, and without `last` Gemma: what has no token is written in bytes."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    model = models.BPE(vocab=numbered([*SPACED, *BYTES]), merges=[], byte_fallback=True)
    return fast(model, decoder)


def unigram(*, clean_up: bool = False) -> PreTrainedTokenizerFast:
    model = models.Unigram([(token, -1.0) for token in dict.fromkeys(SPACED)], unk_id=0)
    return fast(model, decoders.Metaspace(), clean_up=clean_up)


def wordpiece(*, clean_up: bool = False) -> PreTrainedTokenizerFast:
    tokens = [*WORDS, *(f"##{word}" for word in WORDS)]
    model = models.WordPiece(vocab=numbered(tokens), unk_token="a")
    return fast(model, decoders.WordPiece(), clean_up=clean_up)


def with_suffix() -> PreTrainedTokenizerFast:
    tokens = [*WORDS, *(f"{word}</w>" for word in WORDS)]
    return fast(models.BPE(vocab=numbered(tokens), merges=[]), decoders.BPEDecoder())


TOKENIZERS = {
    "tiny bytes": byte_tokenizer(512),
    "tiny words": word_tokenizer(["You stand at P, on a lake: walk!"], 512),
    "hermes": tokenizer_with(HERMES),
    "byte level": byte_level(),
    "llama 2": sentencepiece(decoders.Strip(" ", 1, 0)),
    "gemma": sentencepiece(),
    "unigram": unigram(),
    "unigram, cleaned up": unigram(clean_up=True),
    "word piece": wordpiece(),
    "word piece, cleaned up": wordpiece(clean_up=True),
    "word ends": with_suffix(),
    "no decoder": fast(models.BPE(vocab=numbered(WORDS), merges=[]), None),
}


def _letter_of(byte: int) -> str:
    """The character that stands for a byte in tokens of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [one for one in range(256) if one not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


TINY_BYTES = TOKENIZERS["tiny bytes"].convert_tokens_to_ids([_letter_of(b) for b in range(256)])
"""The id of each byte."""


def text_of(tokenizer, ids, stop_strings=()) -> str:
    ids = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
    return before_stop(tokenizer.decode(ids, skip_special_tokens=False), stop_strings)


def stream_of(tokenizer, stop_strings=()) -> TextStream:
    return TextStream(
        tokenizer,
        end_ids=[tokenizer.eos_token_id],
        stop_strings=stop_strings,
        decode=lambda ids: text_of(tokenizer, list(ids), stop_strings),
    )


def pieces_of(stream: TextStream, ids: list[int], cuts: list[int]) -> list[str]:
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [stream.add(ids[start:end]) for start, end in pairwise(places)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_the_pieces_add_up_to_the_text(name, data) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = st.integers(0, len(tokenizer) + 2)  # the last have no token
    run = st.tuples(tokens, st.integers(1, 30)).map(lambda pair: [pair[0]] * pair[1])
    parts = data.draw(st.lists(st.one_of(tokens.map(lambda token: [token]), run), max_size=40))
    ids = [token for part in parts for token in part]
    text = text_of(tokenizer, ids)
    stops = []
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, max(0, len(text) - 1)))
        size = data.draw(st.integers(1, 6))
        stops.append((text[start : start + size] or "x") + data.draw(st.sampled_from(["", "#"])))

    stream = stream_of(tokenizer, stops)
    pieces = pieces_of(stream, ids, data.draw(st.lists(st.integers(0, 10**6), max_size=60)))
    whole = "".join([*pieces, stream.finish()])
    assert whole == text_of(tokenizer, ids, stops)
    assert not any(stop in whole for stop in stops)


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=80), st.lists(st.integers(0, 1000), max_size=80))
@example(b"\xe2\x82", [1])
@example(b"\xf0\x9f\x98\x80" * 9, list(range(40)))
@example(b"\x80" * 60, list(range(60)))
def test_any_bytes_come_as_they_decode_at_once(written, cuts) -> None:
    stream = stream_of(TOKENIZERS["tiny bytes"])
    pieces = pieces_of(stream, [TINY_BYTES[byte] for byte in written], cuts)
    assert "".join([*pieces, stream.finish()]) == written.decode("utf-8", "replace")


@pytest.mark.parametrize("name", ["tiny bytes", "tiny words", "byte level", "llama 2", "gemma"])
def test_a_piece_comes_with_the_token_that_makes_it_certain(name) -> None:
    tokenizer = TOKENIZERS[name]
    rng = random.Random(1)
    stream = stream_of(TOKENIZERS[name])
    told = ""
    ids: list[int] = []
    for _ in range(200):
        ids.append(rng.randrange(len(tokenizer)))
        told += stream.add(ids[-1:])
        token = tokenizer.convert_ids_to_tokens(ids[-1])
        if token != END and not token.startswith("<0x"):
            behind = text_of(tokenizer, ids).removeprefix(told)
            assert behind in ("", "\N{REPLACEMENT CHARACTER}")


def test_a_character_of_several_tokens_comes_whole() -> None:
    tokenizer = TOKENIZERS["tiny bytes"]
    stream = stream_of(tokenizer)
    ids = tokenizer.encode("a😀é", add_special_tokens=False)
    assert [stream.add([token]) for token in ids] == ["a", "", "", "", "😀", "", "é"]
    assert stream.finish() == ""


def test_a_run_of_sentencepiece_bytes_waits_for_its_end() -> None:
    """One byte more may make all of the run undecodable."""
    tokenizer = TOKENIZERS["llama 2"]
    euro = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    bad, word = tokenizer.convert_tokens_to_ids(["<0xFF>", "▁world"])
    for ids, pieces in (
        ([*euro, word], ["", "", "", "€ world"]),
        ([*euro, bad, word], ["", "", "", "", "\N{REPLACEMENT CHARACTER}" * 4 + " world"]),
    ):
        stream = stream_of(tokenizer)
        assert [stream.add([token]) for token in ids] == pieces
        assert stream.finish() == ""


@pytest.mark.parametrize("name", ["unigram, cleaned up", "word piece, cleaned up"])
def test_text_that_is_cleaned_up_afterwards_comes_at_the_end(name) -> None:
    """A dot may take away the space before it, wherever that came from."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.convert_tokens_to_ids(["a", "▁" if "unigram" in name else "'", "."])
    stream = stream_of(tokenizer)
    assert [stream.add([token]) for token in ids] == ["", "", ""]
    assert stream.finish() == text_of(tokenizer, ids) == ("a." if "unigram" in name else "a '.")


def test_what_may_begin_a_stop_string_waits() -> None:
    tokenizer = TOKENIZERS["tiny bytes"]
    stream = stream_of(tokenizer, ["</call>", "call>!"])
    letters = tokenizer.encode("a<b</call>", add_special_tokens=False)
    pieces = [stream.add([token]) for token in letters]
    assert pieces == ["a", "", "<b", *[""] * 7]
    assert stream.finish() == ""

    cut_off = stream_of(tokenizer, ["</call>"])
    assert "".join(cut_off.add([token]) for token in letters[:-1]) == "a<b"
    assert cut_off.finish() == "</call", "the limit came first"


def test_the_token_that_ends_the_completion_is_no_text_and_elsewhere_it_is() -> None:
    tokenizer = TOKENIZERS["tiny bytes"]
    end = tokenizer.eos_token_id
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    stream = stream_of(tokenizer)
    assert [stream.add([token]) for token in (letter, end, letter, end)] == ["a", "", END + "a", ""]
    assert stream.finish() == ""


@pytest.mark.parametrize("name", ["tiny bytes", "byte level", "llama 2", "unigram, cleaned up"])
@pytest.mark.parametrize("kind", ["any tokens", "one token", "no character", "bytes"])
def test_the_cost_is_linear_in_the_length(name, kind, monkeypatch) -> None:
    tokenizer = TOKENIZERS[name]
    size = 2000
    rng = random.Random(2)
    undecodable = [t for t in range(len(tokenizer)) if tokenizer.decode([t]).startswith("�")]
    bytes_ = [t for t in range(len(tokenizer)) if "0x" in tokenizer.convert_ids_to_tokens(t)]
    ids = {
        "any tokens": [rng.randrange(len(tokenizer)) for _ in range(size)],
        "one token": [rng.randrange(len(tokenizer))] * size,
        "no character": [rng.choice(undecodable) for _ in range(size)],
        "bytes": [rng.choice(bytes_ or undecodable) for _ in range(size)],
    }[kind]

    lengths: list[int] = []
    decode = tokenizer.decode

    def counted(tokens, **options):
        lengths.append(len(tokens))
        return decode(tokens, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = stream_of(tokenizer, ["</call>", "n't"])
    for token in ids:
        stream.add([token])

    stream.finish()
    assert sum(lengths) <= size * (WINDOW + CONTEXT + 3)


def test_a_tokenizer_that_decodes_otherwise_in_other_company_is_found_out() -> None:
    tokenizer = TOKENIZERS["tiny bytes"]
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    stream = TextStream(tokenizer, end_ids=[], stop_strings=[], decode=lambda ids: "b" * len(ids))
    stream.add([letter])
    with pytest.raises(ModelError, match="decodes tokens differently one by one"):
        stream.finish()


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(512), tokenizer_with(HERMES)])
def test_a_chat_format_streams_what_its_text_says(tokenizer) -> None:
    chat = ChatFormat(tokenizer)
    ids = [*tokenizer.encode("Go left. </s> Stop", add_special_tokens=False), chat.end_of_turn_id]
    for stops, text in (((), "Go left. </s> Stop"), (("</s>", "Stop"), "Go left. ")):
        stream = chat.text_stream(stops)
        pieces = [stream.add([token]) for token in ids]
        assert "".join([*pieces, stream.finish()]) == chat.text(ids, stops) == text
        assert pieces[:3] == ["G", "o", " "]


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(1800)  # the first test may download
def test_smollm2_streams_what_it_says(smollm2_folder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    chat = ChatFormat(tokenizer)
    rng = random.Random(3)
    texts = ["Ein Satz: naïve 語言 😀👩‍👩‍👧!\n\n  x   7 n't", "x" * 50]
    written = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    drawn = [[rng.randrange(len(tokenizer)) for _ in range(60)] for _ in range(100)]
    for ids in [*written, *drawn]:
        stream = chat.text_stream()
        pieces = [stream.add([token]) for token in [*ids, chat.end_of_turn_id]]
        assert "".join([*pieces, stream.finish()]) == chat.text([*ids, chat.end_of_turn_id])
