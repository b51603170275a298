"""`decode_json` has one exception for whatever is not the record, so that no caller forgets one."""

from __future__ import annotations

import msgspec
import pytest

from agentevo.runtime.decoding import decode_json


class Record(msgspec.Struct):
    name: str
    tree: list[object] | None = None


def test_a_record_is_read():
    assert decode_json(b'{"name": "a", "tree": [1]}', Record) == Record("a", [1])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"name": 3}', "Expected `str`"),
        (b'{"name": "\xff"}', "not UTF-8"),
        ('{"name": "\udc80"}', "not UTF-8"),
        (b'{"name": "a", "tree": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"unknown": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_other_contents_have_one_exception(content, words):
    with pytest.raises(msgspec.DecodeError, match=words):
        decode_json(content, Record)
