"""A trajectory's turns as one compressed blob.

    blob     = 0x01, msgpack([zlib(msgpack([heads, *columns])), noise, *more])
    more     = remote, files, texts, routed, teacher: up to the last of them that there is
    heads    = for each turn [parent, prompt tokens, completion tokens, finish_reason, temperature,
               seed, reward, messages as JSON], and overrides, tools, constraint,
               penalties, images ([offset, length, grid, digest] each) and processor where it has
               any
    columns  = prompt_ids, completion_ids, logprobs and versions: each of all turns, one after the
               other, little-endian int32 (log-probs: float32), as byte planes: the lowest byte of
               every number, then the second, ...
    noise    = the two lowest planes of the log-probs, which nothing compresses; `logprobs` has the
               others
    remote   = zlib(what remote models said, as JSON), where there is any; empty before files
    files    = zlib(msgpack(the files that were kept, by path)), if there are any; empty before
               texts
    texts    = zlib(msgpack(the digests of named texts, by name)), if there are any; empty before
               routed
    routed   = zlib(msgpack([shapes, bytes])), where routers were recorded: for each turn [layers,
               top_k, experts, tokens] or nothing, and the numbers of experts of all turns, layer by
               layer, the low bytes of two before the high ones, by Huffman codes alone; empty
               before teacher
    teacher  = zlib(msgpack([scored, planes])), where a teacher gave log-probs: for each turn
               whether it did, and the float32 of the scored turns' completions as byte planes

A trajectory has one blob, not one for each turn and column. So it is one row, and runs of values
continue from turn to turn. The planes are compressed by zlib at level 1. On 4,096 tokens of prose
and code in SmolLM2's vocabulary, half of them with log-probs, it leaves 0.41 of the bytes (without
planes 0.44; level 6: 0.40; zstd level 3: 0.41 without planes, 0.42 with). Its speed is 144 MB/s
(level 6: 97, zstd: 425), which is 4,400 such trajectories a second on one core, a fifth more if the
noise is kept out of it. That is fast enough, so zstd is not worth a dependency. Numbers of experts
hardly repeat. With a different popularity of each of 128 experts in 48 layers, 8 chosen, Huffman
codes leave 0.78 of the bytes. zlib's matches leave 0.83, at a third of the speed.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgspec
import numpy as np

from agentevo.errors import StoreError
from agentevo.types import (
    Constraint,
    Message,
    RemoteTurn,
    SamplingOverrides,
    Turn,
)
from agentevo.types.image_span import ImageSpan
from agentevo.types.penalties import Penalties
from agentevo.types.routed_experts import RoutedExperts
from agentevo.types.turn_columns import TURN_COLUMNS

_VERSION = b"\x01"
_LEVEL = 1
_HEAD = ("finish_reason", "temperature", "seed", "reward", "messages")
_OPTIONS = ("overrides", "tools", "constraint", "penalties", "images", "processor")
_MSGPACK = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder()
_MESSAGES = msgspec.json.Decoder(list[Message])
_REMOTE = msgspec.json.Decoder(list[RemoteTurn])
_FILES = msgspec.msgpack.Decoder(dict[str, bytes])
_TEXTS = msgspec.msgpack.Decoder(dict[str, str])
MAX_PART_BYTES = 2**28
"""The maximum number of unpacked bytes of a part other than experts: 16 million tokens."""
MAX_ROUTED_BYTES = 2**30
_DECODE_ERRORS = (zlib.error, ValueError, TypeError, msgspec.MsgspecError)


def to_bytes(column: Sequence[float]) -> bytes:
    """A turn's column as little-endian bytes: int32, and float32 for log-probs."""
    values = cast("array[Any]", column)
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def from_bytes(typecode: str, data: bytes) -> array[Any]:
    """The inverse of `to_bytes`, for "i" and "f"."""
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def pack_turns(
    turns: Sequence[Mapping[str, Any]],
    remote: str = "",
    files: Mapping[str, bytes] = MappingProxyType({}),
    texts: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Turns in the codec's form: a mapping of Turn's fields with packed columns, `seed` in decimal,
    `messages` as JSON text, and `routed_experts` and `teacher_logprobs` if there are any. `remote`:
    turns of remote models as JSON text. `files`: contents by path. `texts`: digests by name."""
    heads = [
        [
            turn["parent"],
            len(turn["prompt_ids"]) // 4,
            len(turn["completion_ids"]) // 4,
            *(turn[name] for name in _HEAD),
            *_options(turn),
        ]
        for turn in turns
    ]
    columns = {name: _planes(b"".join(turn[name] for turn in turns)) for name in TURN_COLUMNS}
    half = len(columns["logprobs"]) // 2
    noise = columns["logprobs"][:half]
    columns["logprobs"] = columns["logprobs"][half:]
    packed = zlib.compress(_MSGPACK.encode([heads, *columns.values()]), _LEVEL)
    extra_parts = [
        zlib.compress(part, _LEVEL) if content else b""
        for content, part in (
            (remote, remote.encode()),
            (files, _MSGPACK.encode(dict(files))),
            (texts, _MSGPACK.encode(dict(texts))),
        )
    ]
    extra_parts.append(_pack_routed([turn.get("routed_experts") for turn in turns]))
    extra_parts.append(_pack_teacher([turn.get("teacher_logprobs") for turn in turns]))
    while extra_parts and not extra_parts[-1]:
        extra_parts.pop()

    return _VERSION + _MSGPACK.encode([packed, noise, *extra_parts])


def _options(turn: Mapping[str, Any]) -> list[Any]:
    """The optional fields, up to the last one that this turn has. Most turns have none."""
    options = [turn.get(name) for name in _OPTIONS]
    while options and options[-1] is None:
        options.pop()
    return options


def unpack_turns(blob: bytes) -> list[Turn]:
    """Raises StoreError for bytes that are not from pack_turns."""
    try:
        packed, noise, *extra_parts = _parts(blob)
        heads, prompt_ids, completion_ids, logprobs, versions = _DECODER.decode(
            _unpack(packed, MAX_PART_BYTES)
        )
        routed_part, teacher_part = [*extra_parts[3:], b"", b""][:2]
        routed = _unpack_routed(routed_part, len(heads)) if routed_part else [None] * len(heads)
        teacher = _unpack_teacher(teacher_part, [head[2] for head in heads])
    except _DECODE_ERRORS as error:
        raise _unreadable(error) from error

    columns = (prompt_ids, completion_ids, noise + logprobs, versions)
    numbers = {
        name: from_bytes(code, _from_planes(data))
        for (name, code), data in zip(TURN_COLUMNS.items(), columns, strict=True)
    }
    turns = []
    prompt = 0
    completion = 0
    for index, (
        parent,
        num_prompt,
        num_completion,
        finish_reason,
        temperature,
        seed,
        reward,
        messages,
        *options,
    ) in enumerate(heads):
        given = dict(zip(_OPTIONS, options, strict=False))
        new = slice(completion, completion + num_completion)
        turn = Turn(
            index=index,
            parent=parent,
            prompt_ids=numbers["prompt_ids"][prompt : prompt + num_prompt],
            completion_ids=numbers["completion_ids"][new],
            logprobs=numbers["logprobs"][new],
            versions=numbers["versions"][new],
            finish_reason=finish_reason,
            temperature=temperature,
            seed=int(seed),
            reward=reward,
            messages=_MESSAGES.decode(messages),
            overrides=msgspec.convert(given.get("overrides"), SamplingOverrides | None),
            tools=given.get("tools") or "",
            constraint=msgspec.convert(given.get("constraint"), Constraint | None),
            penalties=msgspec.convert(given.get("penalties"), Penalties | None),
            images=tuple(
                ImageSpan(offset, length, tuple(grid), digest)
                for offset, length, grid, digest in given.get("images") or ()
            ),
            processor=given.get("processor") or "",
            routed_experts=routed[index],
            teacher_logprobs=teacher[index],
        )
        turns.append(turn)
        prompt = prompt + num_prompt
        completion = new.stop

    return turns


def unpack_extras(blob: bytes) -> tuple[list[RemoteTurn], dict[str, bytes], dict[str, str]]:
    """The turns of remote models, the stored files, and the digests of named texts. Raises
    StoreError for bytes that are not from pack_turns."""
    try:
        _, _, *extra_parts = _parts(blob)
        remote, files, texts = (
            _unpack(part, MAX_PART_BYTES) if part else b""
            for part in [*extra_parts, b"", b"", b""][:3]
        )
        return (
            _REMOTE.decode(remote) if remote else [],
            _FILES.decode(files) if files else {},
            _TEXTS.decode(texts) if texts else {},
        )
    except _DECODE_ERRORS as error:
        raise _unreadable(error) from error


def _pack_routed(turns: Sequence[RoutedExperts | None]) -> bytes:
    """The recorded experts as bytes. Empty if no turn has any."""
    if all(routed is None for routed in turns):
        return b""

    shapes = [
        None
        if routed is None
        else [routed.layers, routed.top_k, routed.num_experts, routed.num_tokens]
        for routed in turns
    ]
    data = b"".join(_by_layer(routed) for routed in turns if routed is not None)
    packer = zlib.compressobj(_LEVEL, strategy=zlib.Z_HUFFMAN_ONLY)
    return packer.compress(_MSGPACK.encode([shapes, data])) + packer.flush()


def _by_layer(routed: RoutedExperts) -> bytes:
    """The bytes of each layer, and of each of its numbers, the low bytes first."""
    numbers = routed.array()
    width = numbers.itemsize
    bytes_of = numbers.view(np.uint8).reshape(*numbers.shape, width)
    return bytes_of.transpose(1, 3, 0, 2).tobytes()


def _unpack_routed(part: bytes, num_turns: int) -> list[RoutedExperts | None]:
    """Raises the errors in _DECODE_ERRORS."""
    shapes, data = _DECODER.decode(_unpack(part, MAX_ROUTED_BYTES))
    routed: list[RoutedExperts | None] = []
    start = 0
    for shape in shapes:
        if shape is None:
            routed.append(None)
            continue

        layers, top_k, num_experts, tokens = shape
        width = 1 if num_experts <= 256 else 2
        stop = start + tokens * layers * top_k * width
        planes = np.frombuffer(data[start:stop], dtype=np.uint8)
        rows = planes.reshape(layers, width, tokens, top_k).transpose(2, 0, 3, 1)
        routed.append(RoutedExperts(layers, top_k, num_experts, rows.tobytes()))
        start = stop

    if len(routed) != num_turns or start != len(data):
        raise ValueError(f"it has routed experts of {len(routed)} turns, but {num_turns} turns")

    return routed


def _pack_teacher(turns: Sequence[bytes | None]) -> bytes:
    """The teacher's log-probs as bytes. Empty if no turn has any."""
    scored = [column is not None for column in turns]
    if not any(scored):
        return b""

    planes = _planes(b"".join(column for column in turns if column is not None))
    return zlib.compress(_MSGPACK.encode([scored, planes]), _LEVEL)


def _unpack_teacher(part: bytes, sizes: Sequence[int]) -> list[array[Any] | None]:
    """The teacher's log-probs of each turn. `sizes`: the number of completion tokens of each.
    Raises the errors in _DECODE_ERRORS."""
    if not part:
        return [None] * len(sizes)

    scored, planes = _DECODER.decode(_unpack(part, MAX_PART_BYTES))
    numbers = from_bytes("f", _from_planes(planes))
    columns: list[array[Any] | None] = []
    start = 0
    for is_scored, size in zip(scored, sizes, strict=True):
        columns.append(numbers[start : start + size] if is_scored else None)
        start += size if is_scored else 0

    if start != len(numbers):
        raise ValueError(f"it has {len(numbers)} log-probs of a teacher for {start} tokens")

    return columns


def _parts(blob: bytes) -> list[bytes]:
    if blob[:1] != _VERSION:
        raise ValueError(f"its format is {blob[:1]!r}")
    parts: list[bytes] = _DECODER.decode(memoryview(blob)[1:])
    return parts


def _unpack(part: bytes, largest: int) -> bytes:
    """Limits the size, because a megabyte of a maliciously damaged part may unpack to a
    gigabyte."""
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(part, largest)
    if unpacking.eof:
        return data
    raise ValueError(
        f"a part of it has more than {largest:,} bytes"
        if unpacking.unconsumed_tail
        else "a part of it is cut off"
    )


def _unreadable(error: Exception) -> StoreError:
    return StoreError(
        f"the tokens of a trajectory can't be read: {error}; was the store written by a newer "
        "AgentEvo?"
    )


def _planes(data: bytes) -> bytes:
    return data[0::4] + data[1::4] + data[2::4] + data[3::4]


def _from_planes(planes: bytes) -> bytes:
    n = len(planes) // 4
    data = bytearray(len(planes))
    for byte in range(4):
        data[byte::4] = planes[byte * n : (byte + 1) * n]
    return bytes(data)
