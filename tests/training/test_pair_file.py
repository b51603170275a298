"""Answers from JSONL: what is trained, and what is refused, by file and line."""

from __future__ import annotations

import json

import pytest

from agentevo.errors import ConfigError
from agentevo.training.pair_file import pairs_of_lines, read_pair_file
from agentevo.types import Message

ASK = [{"role": "user", "content": "Take the left coin or the right one."}]
PAIR = {"prompt": ASK, "chosen": "left", "rejected": [{"role": "assistant", "content": "right"}]}
SINGLE = {"prompt": ASK, "completion": "left", "label": False}


@pytest.fixture
def written(tmp_path):
    def write(*lines) -> object:
        path = tmp_path / "pairs.jsonl"
        path.write_text(
            "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines),
            encoding="utf-8",
        )
        return path

    return write


ENDS_FOR_PEOPLE = "\u2028 \u2029 \x85 \x0b \x0c \x1c end"


def test_a_line_ends_with_a_line_feed_alone_and_a_file_may_begin_with_a_mark(tmp_path):
    """As other programs write files, and our own exports do."""
    path = tmp_path / "pairs.txt"
    rows = [{**PAIR, "chosen": ENDS_FOR_PEOPLE}, PAIR]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    first, second = read_pair_file(path, "dpo")
    assert first.chosen == [Message("assistant", ENDS_FOR_PEOPLE)]
    assert (first.where, second.where) == (f"{path}:1", f"{path}:3")

    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match=r"pairs.txt:1: is not UTF-8"):
        read_pair_file(path, "dpo")


def test_only_the_answer_is_trained(written, chat, loaded):
    talk = [
        *ASK,
        {"role": "assistant", "content": "left"},
        {"role": "user", "content": "You win. Go on."},
    ]
    answer = [
        {"role": "assistant", "content": "Up"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "Down"},
    ]
    lines = read_pair_file(
        written({"prompt": talk, "chosen": answer, "rejected": "right", "score": 3}), "dpo"
    )
    ((pair,),) = pairs_of_lines(lines, chat, "dpo", 512)

    def said(row) -> str:
        return loaded.tokenizer.decode(
            [token for token, m in zip(row.ids, row.loss_mask, strict=True) if m]
        )

    (chosen,) = pair.chosen.rows
    (rejected,) = pair.rejected.rows
    assert said(chosen) == "Up<|end|>Down<|end|>", "not the `left` of the prompt"
    assert said(rejected) == "right<|end|>"

    left = Message("assistant", "left")
    right = Message("assistant", "right")
    prompt = chat.first_prompt([Message("user", ASK[0]["content"])]) + chat.completion(left)
    prompt += chat.continuation([Message("user", "You win. Go on.")], ended_with_stop=True)
    assert rejected.ids.tolist() == prompt + chat.completion(right)
    assert chosen.group_id == rejected.group_id == pair.group_id


def test_single_answers_and_pairs_taken_apart(written, chat):
    lines = read_pair_file(written(SINGLE, "", SINGLE | {"label": True}, PAIR), "kto")
    groups = pairs_of_lines(lines, chat, "kto", 512)
    assert [
        [(p.chosen is not None, p.rejected is not None) for p in group] for group in groups
    ] == [
        [(False, True)],
        [(True, False)],
        [(True, False), (False, True)],
    ]
    assert [group[0].group_id.rpartition(":")[2] for group in groups] == ["1", "3", "4"], (
        "empty lines count"
    )

    imitated = pairs_of_lines(
        read_pair_file(written(SINGLE, SINGLE | {"label": True}, PAIR), "rft"), chat, "rft", 512
    )
    assert [len(group) for group in imitated] == [1, 1]
    assert all(pair.rejected is None for group in imitated for pair in group)


@pytest.mark.parametrize(
    ("line", "loss", "said"),
    [
        ("{not json", "dpo", r":2: is not JSON \(.*write one JSON object a line"),
        ("[1]", "dpo", ":2: is not a JSON object"),
        (
            {"chosen": "a", "rejected": "b"},
            "dpo",
            ":2: prompt is missing: a line has prompt, chosen and rejected, or",
        ),
        (
            PAIR | {"prompt": "hello"},
            "dpo",
            r":2: prompt is not a list of messages: give \[{.role.: .user.",
        ),
        (PAIR | {"prompt": []}, "dpo", ":2: prompt must end with a message that the"),
        (
            PAIR | {"prompt": [*ASK, {"role": "assistant", "content": "x"}]},
            "dpo",
            ":2: prompt must end with",
        ),
        (
            PAIR | {"prompt": [{"role": "robot", "content": "x"}]},
            "dpo",
            ":2: prompt: message 1 has the role 'robot': use system, user",
        ),
        (
            PAIR | {"prompt": [{"role": "user"}]},
            "dpo",
            ":2: prompt: message 1: content is missing: give a text",
        ),
        (PAIR | {"chosen": 3}, "dpo", ":2: chosen is not a list of messages: give .* or a text"),
        (
            PAIR | {"chosen": []},
            "dpo",
            ":2: chosen must begin and end with a message of role assistant",
        ),
        (
            PAIR | {"rejected": ASK},
            "dpo",
            ":2: rejected must begin and end with a message of role assistant",
        ),
        (PAIR | {"rejected": "left"}, "dpo", ":2: chosen and rejected are the same answer"),
        ({"prompt": ASK, "chosen": "left"}, "orpo", ":2: rejected is missing"),
        (
            SINGLE,
            "dpo",
            ":2: a single completion, but dpo compares two answers: give chosen and rejected, or "
            "train by kto",
        ),
        (SINGLE | {"label": "yes"}, "kto", ":2: label is 'yes': give true"),
        ({"prompt": ASK, "completion": "left"}, "kto", ":2: label is 'missing'"),
    ],
)
def test_a_wrong_line_is_named(line, loss, said, written):
    path = written(SINGLE | {"label": True} if loss in ("kto", "rft") else PAIR, line)
    with pytest.raises(ConfigError, match=said) as error:
        read_pair_file(path, loss)
    assert str(error.value).startswith(f"{path}:2: ")


def test_half_of_a_surrogate_pair_is_named_by_its_line(written):
    """JSON can write it, and no tokenizer takes it."""
    path = written(PAIR, {**PAIR, "chosen": "left \ud83d"})
    with pytest.raises(ConfigError, match=r"pairs.jsonl:2: .*half of a surrogate pair"):
        read_pair_file(path, "dpo")


def test_an_answer_with_a_message_that_is_not_trained_is_refused(written):
    context = {"role": "assistant", "content": "left", "train": False}
    assert read_pair_file(written({**PAIR, "prompt": [*ASK, context, *ASK]}), "dpo")
    for mark in ({"train": False}, {"weight": 0}, {"loss": False}, {"masked": True}):
        answer = [{"role": "assistant", "content": "left", **mark}]
        with pytest.raises(ConfigError, match=":1: chosen: message 1 is marked as one that is not"):
            read_pair_file(written({**PAIR, "chosen": answer}), "dpo")

    half = [{"role": "assistant", "content": "right", "weight": 0.5}]
    with pytest.raises(ConfigError, match=r":1: rejected: message 1 has weight 0.5"):
        read_pair_file(written({**PAIR, "rejected": half}), "dpo")


def test_no_file_no_lines_no_good_answers(tmp_path, written):
    with pytest.raises(
        ConfigError, match=r"data\.pairs: .*none\.jsonl: can't be read: No such file"
    ):
        read_pair_file(tmp_path / "none.jsonl", "dpo")

    with pytest.raises(ConfigError, match="has no lines"):
        read_pair_file(written("", " "), "dpo")
    with pytest.raises(ConfigError, match="no answer with label true"):
        read_pair_file(written(SINGLE), "rft")

    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary:1: is not UTF-8 \(byte 0"):
        read_pair_file(binary, "dpo")


def test_a_text_that_the_tokenizer_lacks_is_named_by_its_line(written, chat):
    path = written(PAIR, PAIR | {"chosen": "漢字"})
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:2: the tokenizer has no token for"):
        pairs_of_lines(read_pair_file(path, "dpo"), chat, "dpo", 512)


@pytest.mark.parametrize(
    ("length", "said"), [(600, r"\d+ tokens, and"), (2_000_000, r"\d+ characters, far more than")]
)
@pytest.mark.parametrize("key", ["prompt", "chosen", "rejected"])
def test_a_line_that_is_longer_than_the_limit_is_named(written, chat, key, length, said):
    long = "left " * length
    path = written(
        PAIR, PAIR | {key: [{"role": "user", "content": long}] if key == "prompt" else long}
    )
    which = "rejected" if key == "rejected" else "chosen"
    with pytest.raises(ConfigError, match=rf"pairs\.jsonl:2: prompt and {which} have {said}"):
        pairs_of_lines(read_pair_file(path, "dpo"), chat, "dpo", 512)
