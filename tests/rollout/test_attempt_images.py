"""The images of attempts: those of the task are there before the agent runs, and those that an
attempt has shown are in the store with its trajectory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from seeing_chats import OTHER, SMALL, WIDE, SeeingEngine, seeing_chat
from tiny_vision import png

from agentevo.agents.agent import FunctionAgent
from agentevo.agents.single_turn import conversation_of
from agentevo.config import build_config
from agentevo.errors import ConfigError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.rollout.attempt_images import check_sees
from agentevo.rollout.given_tasks import TaskList, checked_tasks
from agentevo.rollout.sampler import Sampler
from agentevo.rollout.task_source import TaskSource
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store.opening import open_store
from agentevo.store.store import Store
from agentevo.types import ImagePart, Message, Outcome, Task, TextPart, Trajectory
from agentevo.types.images import images_of_task, images_of_trajectory

ROW = {"id": "see", "query": "<image>What is it?", "images": [SMALL.data]}
CONFIG = build_config({"run": {"seed": 4}}, needs_environment=False)


class Looker:
    """Shows the task's images, then two of its own in one message."""

    async def run(self, task: Task, policy: Any) -> Outcome:
        messages = conversation_of(task, system=None, instruction=None)
        reply = await policy.generate(messages)
        screens = policy.add_image(WIDE.data), policy.add_image(OTHER.data, "the screen")
        policy.add_image(png(9, 9))  # which no message shows
        look = Message("user", (*screens, TextPart("And now?")))
        await policy.generate([*messages, reply.message, look])
        return Outcome(reward=1.0, success=True)


def sample(
    tasks: list[Task], folder: Path, agent: Any = None, chat: ChatFormat | None = None, **given: Any
) -> tuple[list[Trajectory], dict[str, bytes], SeeingEngine]:
    """The stored trajectories, the stored images and the engine."""
    chat = seeing_chat() if chat is None else chat
    engine: Any = SeeingEngine(chat)

    async def work() -> tuple[list[Trajectory], dict[str, bytes], SeeingEngine]:
        async with await open_store(f"sqlite:///{folder / 'store'}") as store:
            sampler = Sampler(CONFIG, engine, chat, agent or Looker(), store, 4096, **given)
            await sampler.sample(
                tasks, attempts=2, temperature=0.8, split="train", step=1, label="train"
            )
            stored = [row async for row in store.trajectories(step=1)]
            images = [await store.image(name) for name in await store.image_digests()]
            trajectories = [row.trajectory for row in stored]
            return trajectories, {image.part.sha256: image.data for image in images}, engine

    return run_coroutine(work())


def test_an_attempt_with_images(tmp_path: Path) -> None:
    tasks = checked_tasks([ROW], "tasks")
    trajectories, stored, engine = sample(tasks, tmp_path, task_images=tasks.images)

    files = {file.part.sha256: file.data for file in (SMALL, WIDE, OTHER)}
    assert stored == files
    for trajectory in trajectories:
        assert trajectory.status == "completed", trajectory.error
        assert set(images_of_trajectory(trajectory)) == set(files)
    assert sorted(len(images) for images in engine.images) == [1, 1, 3, 3]


def test_the_store_has_the_images_of_a_queued_task(tmp_path: Path) -> None:
    """A sampler in another process reads the images of its task from the store."""
    tasks = checked_tasks([ROW], "tasks")

    async def queue() -> None:
        async with await open_store(f"sqlite:///{tmp_path / 'store'}") as store:
            await store.put_images(tasks.images.values())
            await store.add_tasks(tasks)

    run_coroutine(queue())
    trajectories, stored, _ = sample(list(tasks), tmp_path)
    assert [trajectory.status for trajectory in trajectories] == ["completed"] * 2
    assert len(stored) == 3


def test_text_alone_asks_the_store_for_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Talker:
        async def run(self, task: Task, policy: Any) -> float:
            await policy.generate([Message("user", task.query or "")])
            return 1.0

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("no image is asked for")

    monkeypatch.setattr(Store, "put_images", refuse)
    monkeypatch.setattr(Store, "image", refuse)
    agent = FunctionAgent(Talker().run)
    trajectories, _, _ = sample([Task(id="talk", query="Hi")], tmp_path, agent)
    assert [trajectory.status for trajectory in trajectories] == ["completed"] * 2


def test_an_agent_names_an_image_that_nobody_gave(tmp_path: Path) -> None:
    """The attempt fails, and the run goes on."""

    class Dreamer:
        async def run(self, task: Task, policy: Any) -> Outcome:
            await policy.generate([Message("user", (ImagePart("0" * 64, "image/png"),))])
            raise AssertionError("it was refused")

    trajectories, stored, _ = sample([Task(id="dream", query="?")], tmp_path, Dreamer())
    assert {trajectory.status for trajectory in trajectories} == {"failed"}
    assert "give its file with policy.add_image" in (trajectories[0].error or "")
    assert stored == {}


def test_tasks_with_images_need_a_model_that_sees(tmp_path: Path) -> None:
    tasks = checked_tasks([ROW], "tasks")
    with pytest.raises(ConfigError, match=r"reads text only: choose a model that sees"):
        sample(tasks, tmp_path, chat=ChatFormat(byte_tokenizer(512)), task_images=tasks.images)


@pytest.mark.parametrize(
    ("environment", "shows_images"),
    [
        ({"type": "frozen_lake"}, False),
        ({"type": "frozen_lake", "observation": "both"}, True),
        ({"type": "sokoban", "observation": "image"}, True),
        ({"type": "gymnasium", "id": "CartPole-v1", "observation": "image"}, True),
        ({"type": "openenv", "url": "http://127.0.0.1:1", "image_fields": ["screen"]}, True),
        ({"type": "browser", "url": "http://127.0.0.1:1", "observation": "screenshot"}, True),
        ({"type": "browser", "url": "http://127.0.0.1:1"}, False),
    ],
)
def test_environments_with_images_need_a_model_that_sees(
    environment: dict[str, Any], shows_images: bool
) -> None:
    config = build_config({"environment": environment})
    check_sees(config, {}, [seeing_chat()])
    blind = [ChatFormat(byte_tokenizer(512))]
    if not shows_images:
        check_sees(config, {}, blind)
        return

    with pytest.raises(ConfigError, match=r"environment: .* model.name=\S+ reads text only"):
        check_sees(config, {}, blind)

    refuses = build_config({"environment": environment, "engine": {"batch_invariant": True}})
    with pytest.raises(ConfigError, match=r"environment: .* engine.batch_invariant holds for text"):
        check_sees(refuses, {}, [seeing_chat()])

    hidden = build_config(
        {"environment": environment, "model": {"name": "folder", "vision": {"images": False}}}
    )
    with pytest.raises(ConfigError, match=r"model.vision.images=false .* remove that key"):
        check_sees(hidden, {}, blind)


def test_a_program_gives_tasks_with_images() -> None:
    tasks = checked_tasks([ROW, {"id": "read", "query": "text"}], "tasks")
    assert isinstance(tasks, TaskList) and images_of_task(tasks[0]) == [SMALL.part.sha256]
    source = TaskSource(CONFIG, checked_tasks(tasks, "again"))
    assert set(source.images) == {SMALL.part.sha256}


def test_a_policy_reads_images_of_messages(tmp_path: Path) -> None:
    """Parts in the forms of other libraries are images too, and each is kept once."""
    shown: list[int] = []

    class Client:
        async def run(self, task: Task, policy: Any) -> Outcome:
            part = {"type": "image", "image": WIDE.data}
            content = [part, {"type": "text", "text": "?"}, part]
            await policy.generate([{"role": "user", "content": content}])
            assert policy.add_image(WIDE.data) == WIDE.part
            shown.append(len(policy.images))
            return Outcome(reward=1.0, success=True)

    trajectories, stored, engine = sample([Task(id="t", query="?")], tmp_path, Client())
    assert trajectories[0].error is None and shown == [1, 1]
    assert stored == {WIDE.part.sha256: WIDE.data}
    assert [len(images) for images in engine.images] == [2, 2]
