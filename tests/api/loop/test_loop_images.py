"""A program's own loop shows images: the run gets each image of an attempt once, and stores those
that were shown."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from judged_attempts import ASKED, TASK, attempt, turn
from seeing_chats import OTHER, SMALL, WIDE, SeeingEngine, seeing_conversation

from agentevo.agents.policy import Policy
from agentevo.api.loop import records
from agentevo.api.loop import service as loop_service
from agentevo.api.loop.attempts import Attempts
from agentevo.api.loop.contents import Sealer
from agentevo.api.loop.conversation import RemoteAttempt, RemotePolicy
from agentevo.api.loop.encoding import decode, encode
from agentevo.api.loop.rollout import _MadeAttempt, _task_of, rollout
from agentevo.api.loop.routes import MAX_BODY
from agentevo.data.images import LIMITS
from agentevo.data.message_images import ImageCollector
from agentevo.errors import BadRequestError, ImageError
from agentevo.rewards.reward import reward, reward_config, rewards
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import ImagePart, Message, TextPart
from agentevo.types.images import ImageFile, image_file, images_of_task


class Wire:
    """A connection to attempts, over which all requests travel as JSON."""

    remote_agents: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self.conversation, self.engine = seeing_conversation()
        self.stored: list[ImageFile] = []
        self.sent: list[list[str]] = []

        async def put(images: list[ImageFile]) -> None:
            self.stored += images

        self.attempts = Attempts(
            lambda new, name: Policy(self.conversation),
            Sealer("secret"),
            limit=2,
            timeout_s=60.0,
            put_images=put,
        )

    async def generate(
        self, opened: records.OpenedService, ask: records.ServiceRequest
    ) -> records.Answers:
        came = decode(encode(ask), records.ServiceRequest)
        self.sent.append([image.part.sha256 for image in came.images])
        answers = await self.attempts.generate(opened.handle, came)
        return decode(encode(answers), records.Answers)

    async def end(self, opened: records.OpenedService) -> records.EndedAttempts:
        return await self.attempts.end(opened.handle)


def played(work: Any) -> tuple[Wire, RemotePolicy]:
    """Runs `work(policy)` in an attempt."""

    async def play() -> tuple[Wire, RemotePolicy]:
        wire = Wire()
        new = records.NewAttempt(task_id="t", group_id="t/train@1", number=0)
        opened = await wire.attempts.open(new, has_session=False, within_s=10.0)
        connection: Any = wire
        policy = RemotePolicy(RemoteAttempt(connection, opened))
        try:
            await work(policy)
            await policy.close()
        finally:
            await wire.attempts.close()
        return wire, policy

    return asyncio.run(play())


def test_each_image_is_sent_once() -> None:
    async def work(policy: RemotePolicy) -> None:
        assert policy.sees_images
        screen = policy.add_image(SMALL.data)
        policy.add_image(OTHER.data)  # which no message shows
        messages = [Message("user", (screen, TextPart("What is it?")))]
        reply = await policy.generate(messages)
        look = Message("user", (policy.add_image(WIDE.data), screen))
        await policy.generate([*messages, reply.message, look])

    wire, policy = played(work)
    assert wire.sent == [[SMALL.part.sha256], [WIDE.part.sha256]]
    assert [len(images) for images in wire.engine.images] == [1, 3]
    assert {image.part.sha256 for image in wire.stored} == {
        SMALL.part.sha256, WIDE.part.sha256
    }  # fmt: skip
    assert [len(turn.images) for turn in policy.conversation.turns] == [1, 2]
    assert isinstance(wire.engine, SeeingEngine)


def test_the_largest_images_fit_into_a_request() -> None:
    largest = image_file(bytes(LIMITS.max_bytes), "image/bmp")
    words = [Message("user", "x" * 2**20)]
    ask = records.ServiceRequest(id="1", messages=words, images=[largest] * 3)
    assert len(encode(ask)) <= MAX_BODY


def test_a_missing_image_is_not_sent() -> None:
    async def work(policy: RemotePolicy) -> None:
        with pytest.raises(ImageError, match=r"give its file with policy.add_image"):
            await policy.generate([Message("user", (ImagePart("0" * 64),))])

    assert played(work)[0].sent == []


def test_bytes_under_another_name_are_refused() -> None:
    async def work(policy: RemotePolicy) -> None:
        policy.conversation.images.add(ImageFile(SMALL.part, WIDE.data))
        with pytest.raises(BadRequestError, match="and was sent as"):
            await policy.generate([Message("user", (SMALL.part,))])

    wire, _ = played(work)
    assert wire.engine.prompts == [] and wire.stored == []


def test_a_row_with_an_image_is_a_task() -> None:
    images = ImageCollector()
    task = _task_of({"id": "1", "query": "<image>What?", "images": [SMALL.data]}, images)
    assert images_of_task(task) == list(images.files) == [SMALL.part.sha256]


class Model:
    """A model whose attempts are scored by one reward, without a run."""

    def __init__(self, kind: str) -> None:
        self.rewards = (reward_config(kind)(name=kind),)
        self.state = SimpleNamespace(trained_agents=())


def test_rewards_of_a_loop_get_the_images_of_its_attempts() -> None:
    @reward("bytes_of_the_image")
    def bytes_of_the_image(images: Mapping[str, ImageFile]) -> float:
        return float(len(images[SMALL.part.sha256].data))

    shows = attempt("a", turn(0, ASKED, Message("tool", (SMALL.part,)), Message("assistant", "x")))
    made = _MadeAttempt([shows], {}, {"a"}, {SMALL.part.sha256: SMALL})
    model: Any = Model("bytes_of_the_image")
    try:
        (scored,) = asyncio.run(rollout(lambda task, policy: None)._score(model, TASK, [made]))
    finally:
        rewards._items.pop("bytes_of_the_image")
    assert scored.reward == len(SMALL.data), scored.error


def test_nothing_comes_between_the_check_of_groups_and_their_submission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store may be slow to take the images. Another submission of the same groups would then
    pass the check too, and both would be trained."""
    events: list[str] = []

    async def put(store: Any, images: list[ImageFile]) -> None:
        events.append(f"put {len(images)}")

    async def check(groups: Any) -> None:
        events.append("check")

    monkeypatch.setattr(loop_service, "put_images", put)
    monkeypatch.setattr(loop_service, "submission_id", lambda groups: "one")
    monkeypatch.setattr(loop_service, "check_groups", lambda groups, sealer: None)
    submissions = SimpleNamespace(
        num_under_way=0, submit=lambda submission: events.append("submit")
    )
    service: Any = SimpleNamespace(
        _has=lambda name: False,
        _sealer=None,
        _step=0,
        _submissions=submissions,
        _parts=SimpleNamespace(store=None),
        _check_new=check,
        config=SimpleNamespace(trainer=SimpleNamespace(steps=3)),
    )
    group: Any = SimpleNamespace(id="g", task=TASK, members=[], images=[SMALL])

    run_coroutine(loop_service.LoopService.submit(service, [group]))

    assert events == ["put 1", "check", "submit"]
