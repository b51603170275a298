"""What goes in comes out, once, and what could not come out is refused."""

from __future__ import annotations

import asyncio
import math
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentevo.errors import StoreError
from agentevo.store import blobs, open_store
from agentevo.store.blobs import (
    pack_turns,
    unpack_extras,
    unpack_turns,
)
from agentevo.store.codec import encode_trajectories
from agentevo.types import (
    Constraint,
    Message,
    RemoteTurn,
    SamplingOverrides,
    Task,
    Trajectory,
    Turn,
)
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import image_file
from agentevo.types.routed_experts import RoutedExperts, join_experts, rows_of_turn
from examples import examples

Make = Callable[..., Trajectory]
IMAGES = [image_file(bytes([number]), "image/png") for number in range(2)]

float32 = st.floats(width=32, allow_nan=False)
finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
int32 = st.integers(-(2**31), 2**31 - 1)
messages = st.lists(
    st.builds(
        Message, role=st.sampled_from(["system", "user", "assistant", "tool"]), content=st.text()
    ),
    max_size=3,
)
overrides = st.none() | st.builds(
    SamplingOverrides,
    temperature=st.none() | st.floats(0, 4),
    top_k=st.integers(0, 50),
    min_p=st.none() | st.floats(0, 0.5),
)
constraints = st.none() | st.builds(
    Constraint, grammar=st.text(), end_ids=st.tuples(int32), masks=st.text()
)


@st.composite
def routings(draw: st.DrawFn, tokens: int) -> RoutedExperts:
    experts = draw(st.sampled_from([1, 4, 256, 257, 2**15]))
    shape = tokens, draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    return RoutedExperts.of(np.random.default_rng(seed).integers(experts, size=shape), experts)


@st.composite
def image_spans(draw: st.DrawFn, tokens: int) -> tuple[ImageSpan, ...]:
    spans = []
    start = 0
    for number in range(draw(st.integers(0, 2))):
        if start < tokens:
            offset = draw(st.integers(start, tokens - 1))
            start = draw(st.integers(offset + 1, tokens))
            grid = draw(st.sampled_from([(start - offset,), (1, 2, 2)]))
            spans.append(ImageSpan(offset, start - offset, grid, IMAGES[number].part.sha256))
    return tuple(spans)


@st.composite
def turn_lists(draw: st.DrawFn) -> list[Turn]:
    turns = []
    for index in range(draw(st.integers(0, 4))):
        tokens = draw(st.lists(st.tuples(int32, float32, int32), max_size=6))
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        prompt_ids = draw(st.lists(int32, max_size=6))
        images = draw(image_spans(len(prompt_ids)))
        computed = rows_of_turn(len(prompt_ids), len(tokens), is_root=parent is None)
        turns.append(
            Turn(
                index=index,
                parent=parent,
                prompt_ids=prompt_ids,
                routed_experts=draw(st.none() | routings(computed)),
                completion_ids=[token for token, _, _ in tokens],
                logprobs=[logprob for _, logprob, _ in tokens],
                versions=[version for _, _, version in tokens],
                teacher_logprobs=draw(
                    st.none() | st.lists(finite32, min_size=len(tokens), max_size=len(tokens))
                ),
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                temperature=draw(finite),
                seed=draw(st.integers(-(2**70), 2**70)),
                reward=draw(finite),
                messages=draw(messages),
                overrides=draw(overrides),
                tools=draw(st.sampled_from(["", '[{"type": "function"}]'])),
                constraint=draw(constraints),
                images=images,
                processor=draw(st.text(min_size=1)) if images else "",
            )
        )

    return turns


remote_turns = st.builds(
    RemoteTurn,
    index=st.integers(0, 3),
    parent=st.none() | st.integers(0, 2),
    model=st.text(),
    messages=messages,
    tools=st.text(),
    seed=st.integers(0, 2**63 - 1),
    prompt_tokens=st.integers(0, 2**40),
    cost=st.floats(0, 1e6),
)
trajectories = st.builds(
    Trajectory,
    id=st.text(),
    task_id=st.text(),
    group_id=st.text(),
    attempt=st.integers(0, 2**40),
    turns=turn_lists(),
    remote_turns=st.lists(remote_turns, max_size=2),
    files=st.dictionaries(st.sampled_from(["a", "b/c.txt", "ü"]), st.binary(), max_size=2),
    reward=finite,
    reward_parts=st.dictionaries(st.text(), finite, max_size=3),
    success=st.booleans(),
    status=st.sampled_from(["completed", "failed"]),
    error=st.none() | st.text(),
    truncated=st.booleans(),
    metrics=st.dictionaries(st.text(), finite, max_size=3),
    started_at=finite,
    duration_s=finite,
)


@pytest.mark.slow
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(trajectory=trajectories)
def test_a_trajectory_comes_back_equal(trajectory: Trajectory, url: str) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            await store.rewind(0)
            await store.put_images(IMAGES)
            await store.write_trajectories([trajectory], split="train", step=3)
            back = await store.trajectory(trajectory.id)
            assert back == trajectory
            assert await store.write_trajectories([back], split="train", step=3) == 0, (
                "the copy that was read counts as the same content"
            )

    asyncio.run(scenario())


def stored_and_read(turn: Turn) -> Turn:
    trajectory = Trajectory(id="a", task_id="t", group_id="g", turns=[turn])
    (encoded,) = encode_trajectories([trajectory], "train", 1)
    (back,) = unpack_turns(encoded.data)
    return back


@given(
    st.lists(
        st.floats(allow_nan=False, allow_infinity=False, min_value=-3e38, max_value=3e38),
        max_size=8,
    )
)
def test_logprobs_are_rounded_to_float32_and_no_further(values: list[float]) -> None:
    rounded = [struct.unpack("<f", struct.pack("<f", value))[0] for value in values]
    assert stored_and_read(saying(values)).logprobs.tolist() == rounded


def saying(logprobs: list[float]) -> Turn:
    return Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2] * len(logprobs),
        logprobs=logprobs,
        versions=[0] * len(logprobs),
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"prompt_ids": [2**31]},
            OverflowError,
            "prompt_ids of turn 0: 2147483648 is not a valid 32-bit",
        ),
        (
            {"prompt_ids": [1.5]},
            TypeError,
            "prompt_ids of turn 0: 1.5 is not a valid 32-bit integer",
        ),
        ({"logprobs": [-1e300]}, OverflowError, "does not fit in a float32"),
        ({"logprobs": [None]}, TypeError, "logprobs of turn 0: None is not a valid number"),
    ],
)
def test_a_turn_holds_only_what_its_arrays_can(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        msgspec.structs.replace(saying([0.0]), **changes)


def test_non_finite_logprobs_are_kept_as_they_are() -> None:
    back = stored_and_read(saying([math.inf, -math.inf, math.nan])).logprobs
    assert back[:2].tolist() == [math.inf, -math.inf] and math.isnan(back[2])


def test_a_task_comes_back_equal(url: str) -> None:
    task = Task(
        id="ü",
        environment="coins",
        seed=2**63 + 1,
        query="q\0",
        answer={"a": [1, None, 2.5]},
        scorer="exact",
        metadata={"k": ["v"]},
    )

    async def scenario() -> None:
        async with await open_store(url) as store:
            assert await store.add_tasks([task]) == 1
            assert await store.task("ü") == task
            assert await store.add_tasks([task, task]) == 0

            with pytest.raises(StoreError, match="other content"):
                await store.add_tasks([Task(id="new"), msgspec.structs.replace(task, seed=1)])
            assert (await store.counts())["tasks/queued"] == 1, "a refused call adds nothing"
            with pytest.raises(StoreError, match="no task 'nobody'"):
                await store.task("nobody")

    asyncio.run(scenario())


def test_writing_again_is_a_no_op_and_other_content_is_refused(
    url: str, make_trajectory: Make
) -> None:
    a = make_trajectory("a")
    b = make_trajectory("b")

    async def scenario() -> None:
        async with await open_store(url) as store:
            assert await store.write_trajectories([a, a], split="train", step=1) == 1
            assert await store.write_trajectories([a, b], split="train", step=1) == 1

            later = msgspec.structs.replace(
                a, started_at=9.0, duration_s=9.0, timings={"step/mean": 0.5}
            )
            assert await store.write_trajectories([later], split="train", step=1) == 0, (
                "timings are not content"
            )
            assert (await store.trajectory("a")).started_at == a.started_at

            timed = msgspec.structs.replace(make_trajectory("timed"), timings={"step/mean": 0.5})
            await store.write_trajectories([timed], split="eval", step=1)
            assert (await store.trajectory("timed")).timings == {"step/mean": 0.5}

            said = RemoteTurn(index=0, model="m", messages=[])
            turned = msgspec.structs.replace(a.turns[1], completion_ids=[7, 9])
            for other, split, step in [
                (msgspec.structs.replace(a, reward=0.5), "train", 1),
                (msgspec.structs.replace(a, reward_parts={"environment": 1.0}), "train", 1),
                (msgspec.structs.replace(a, turns=[a.turns[0], turned]), "train", 1),
                (msgspec.structs.replace(a, remote_turns=[said]), "train", 1),
                (msgspec.structs.replace(a, files={"a.txt": b""}), "train", 1),
                (a, "eval", 1),
                (a, "train", 2),
            ]:
                with pytest.raises(StoreError, match="'a' is already stored with other content"):
                    await store.write_trajectories(
                        [make_trajectory("c"), other], split=split, step=step
                    )  # type: ignore[arg-type]

            assert len(await store.summaries()) == 3, "a refused call writes nothing"
            assert await store.write_trajectories([], split="train", step=1) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": math.nan}, "reward is nan"),
        ({"metrics": {"num_actions": math.inf}}, "num_actions is inf"),
        ({"reward_parts": {"format": math.inf}}, "reward_parts/format is inf"),
        (
            {"metrics": {"reward_parts/format": 1.0}},
            "the metric 'reward_parts/format' has a name that is reserved for parts of the",
        ),
        ({"metrics": {"timings/step": 1.0}}, "the metric 'timings/step' has a name that is"),
        ({"timings": {"step": math.nan}}, "timings/step is nan"),
        ({"status": "lost"}, "status 'lost' is unknown"),
        ({"error": "\ud800"}, "surrogates"),
        ({"turns": [{"index": 1}]}, "position 0 has index 1"),
        ({"turns": [{"parent": 0}]}, "has parent 0"),
        ({"turns": [{"logprobs": [0.0]}]}, "one of each per token"),
        ({"turns": [{"finish_reason": "tired"}]}, "unknown finish_reason 'tired'"),
        ({"turns": [{"reward": math.inf}]}, "both must be finite"),
    ],
)
def test_what_could_not_be_read_back_is_refused(
    url: str, make_trajectory: Make, changes: dict[str, Any], message: str
) -> None:
    good = make_trajectory("good")
    if "turns" in changes:
        changes = {"turns": [msgspec.structs.replace(good.turns[0], **changes["turns"][0])]}

    async def scenario() -> None:
        async with await open_store(url) as store:
            with pytest.raises(StoreError, match=f"'bad' can't be stored: .*{message}"):
                await store.write_trajectories(
                    [good, make_trajectory("bad", **changes)], split="train", step=1
                )
            assert await store.summaries() == []

    asyncio.run(scenario())


@pytest.mark.slow
def test_filters_select_and_order(url: str, make_trajectory: Make) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            many = [
                make_trajectory(f"t{i}", task_id=f"task{i % 3}", group_id=f"g{i % 2}", num_turns=1)
                for i in range(150)
            ]
            await store.write_trajectories(many, split="train", step=1)
            failed = make_trajectory("f", status="failed", error="the tool hung", num_turns=0)
            await store.write_trajectories(
                [failed, make_trajectory("e", task_id="task1")], split="eval", step=2
            )
            await store.reserve(["t3", "t5"], 7)

            async def ids(**filters: Any) -> list[str]:
                streamed = [stored.trajectory.id async for stored in store.trajectories(**filters)]
                assert streamed == [summary.id for summary in await store.summaries(**filters)]
                return streamed

            everything = [trajectory.id for trajectory in many] + ["f", "e"]
            assert await ids() == everything
            assert await ids(newest_first=True) == everything[::-1]
            assert await ids(newest_first=True, limit=70) == everything[:-71:-1]
            assert await ids(limit=64) == everything[:64]
            assert await ids(limit=0) == []
            assert await ids(step=2) == ["f", "e"]
            assert await ids(split="eval", status=None) == ["f", "e"]
            assert await ids(status="failed") == ["f"]
            assert await ids(state="reserved") == await ids(trained_step=7) == ["t3", "t5"]
            assert await ids(task_id="task1", split="train") == everything[1:150:3]
            assert await ids(group_id="g1", limit=2) == ["t1", "t3"]
            assert await ids(step=99) == []

            for wrong in ({"split": "test"}, {"status": "ok"}, {"state": "done"}, {"limit": -1}):
                with pytest.raises(StoreError, match="trajectories: "):
                    await ids(**wrong)

            summary = (await store.summaries(status="failed"))[0]
            assert (summary.error, summary.state, summary.step, summary.split) == (
                "the tool hung",
                "failed",
                2,
                "eval",
            )
            assert (await store.summaries(limit=1))[0].num_completion_tokens == 2

            with pytest.raises(StoreError, match="no trajectory 'nobody'"):
                await store.trajectory("nobody")

    asyncio.run(scenario())


def test_a_stream_leaves_out_what_is_written_meanwhile(url: str, make_trajectory: Make) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            await store.write_trajectories(
                [make_trajectory(f"a{i}", num_turns=0) for i in range(65)], split="train", step=1
            )
            seen = []
            async for stored in store.trajectories():
                if not seen:
                    await store.write_trajectories([make_trajectory("late")], split="train", step=1)
                seen.append(stored.trajectory.id)

            assert seen == [f"a{i}" for i in range(65)]

    asyncio.run(scenario())


def test_counts_name_every_state(
    url: str, make_trajectory: Make, make_task: Callable[..., Task], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            empty = await store.counts()
            assert set(empty.values()) == {0} and {
                "tasks/leased",
                "trajectories/train/ready",
                "turns",
                "steps",
            } < set(empty)

            await store.add_tasks([make_task("x"), make_task("y")])
            await store.lease_task("w", lease_s=60)
            await store.write_trajectories(
                [make_trajectory(name, num_turns=3) for name in "abc"], split="train", step=1
            )
            await store.write_trajectories([make_trajectory("e")], split="eval", step=1)
            await store.drop(["c"], "stale")
            await store.reserve(["a"], 1)
            await store.commit_step(1, {})
            counts = await store.counts()
            assert {key: value for key, value in counts.items() if value} == {
                "tasks/queued": 1,
                "tasks/leased": 1,
                "trajectories/train/committed": 1,
                "trajectories/train/ready": 1,
                "trajectories/train/dropped": 1,
                "trajectories/eval/ready": 1,
                "turns": 11,
                "steps": 1,
            }

    asyncio.run(scenario())


def test_routed_experts_are_stored_with_their_turns_or_refused(make_trajectory):
    """They count as content; a record that is not of the turn's tokens is never written; one that
    was cut is never read."""
    (plain,) = encode_trajectories([make_trajectory("a", num_turns=1)], "train", 1)
    rows = RoutedExperts.of(np.arange(8).reshape(4, 2, 1), 8)
    (turn,) = make_trajectory("a", num_turns=1).turns
    told = msgspec.structs.replace(turn, routed_experts=rows)
    (encoded,) = encode_trajectories([make_trajectory("a", turns=[told])], "train", 1)
    assert encoded.digest != plain.digest
    assert unpack_turns(encoded.data) == [told]

    for wrong in (rows.within(0, 3), join_experts([rows, rows])):
        misfit = msgspec.structs.replace(turn, routed_experts=wrong)
        with pytest.raises(StoreError, match=r"routed experts of . tokens, and 4 were computed"):
            encode_trajectories([make_trajectory("a", turns=[misfit])], "train", 1)

    parts = msgspec.msgpack.decode(encoded.data[1:])
    shapes, data = msgspec.msgpack.decode(zlib.decompress(parts[-1]))
    for broken in ([shapes, data[:-1]], [[*shapes, None], data], [[[2, 1, 3, 4]], data]):
        packed = zlib.compress(msgspec.msgpack.encode(broken))
        blob = encoded.data[:1] + msgspec.msgpack.encode([*parts[:-1], packed])
        with pytest.raises(StoreError, match="tokens of a trajectory can't be read"):
            unpack_turns(blob)


def test_tokens_of_another_format_are_refused() -> None:
    good = pack_turns([])
    assert unpack_turns(good) == []
    for bad in (b"", b"\x02" + good[1:], good[:-3], good[:1] + b"\x92\x01\x02"):
        with pytest.raises(StoreError, match="tokens of a trajectory can't be read"):
            unpack_turns(bad)


@pytest.mark.parametrize("place", range(5))
def test_a_part_that_unpacks_to_gigabytes_is_refused(place, monkeypatch) -> None:
    """Two megabytes of zlib may stand for two gigabytes."""
    room = 2**20
    monkeypatch.setattr(blobs, "MAX_PART_BYTES", room)
    monkeypatch.setattr(blobs, "MAX_ROUTED_BYTES", room)
    unpack = unpack_turns if place in (0, 4) else unpack_extras
    parts = msgspec.msgpack.decode(pack_turns([], "[]", {"a": b"b"}, {"a": "b"})[1:])
    parts.append(zlib.compress(msgspec.msgpack.encode([[], b""])))
    good = pack_turns([])[:1] + msgspec.msgpack.encode(parts)
    unpack(good)

    number = [0, 2, 3, 4, 5][place]
    packer = zlib.compressobj(9)
    parts[number] = packer.compress(bytes(16 * room)) + packer.flush()

    def peak_of_unpacking() -> int:
        tracemalloc.start()
        try:
            with pytest.raises(StoreError, match="can't be read"):
                unpack(good[:1] + msgspec.msgpack.encode(parts))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_of_unpacking() < 2.5 * room


def test_rows_are_read_by_their_numbers_in_the_order_of_writing(url, make_trajectory):
    async def scenario() -> None:
        async with await open_store(url) as store:
            names = [f"t{i}" for i in range(5)]
            await store.write_trajectories(map(make_trajectory, names), split="train", step=1)
            rows = await store.written(range(1, 2**62), limit=3)
            assert [row.trajectory.id for _, row in rows] == names[:3]
            assert all(row.trajectory.turns for _, row in rows)

            last = rows[-1][0]
            more = await store.written_summaries(range(last + 1, 2**62), limit=9)
            assert [row.id for _, row in more] == names[3:]
            assert [
                row.id for _, row in await store.written_summaries(range(last, last + 1), limit=9)
            ] == ["t2"]

            numbers = [number for number, _ in (*rows, *more)]
            assert numbers == sorted(set(numbers))
            assert await store.written(range(more[-1][0] + 1, 2**62), limit=9) == []

            for step in (1, 2, 3):
                await store.commit_step(step, {})

            assert [one.step for one in await store.steps(after=1, limit=1)] == [2]
            assert [one.step for one in await store.steps(limit=2)] == [1, 2]
            assert await store.steps(limit=0) == []

    asyncio.run(scenario())
