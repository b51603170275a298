"""Remote models of a program's own loop are shown images: the run stores them with the attempts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from loop_server import served
from remote_server import RemoteServer, chat, gives
from seeing_chats import OTHER, SMALL, WIDE

import agentevo
from agentevo.data.images import data_url
from agentevo.errors import ConfigError
from agentevo.types import ImagePart, Message, TextPart
from agentevo.types.images import images_of_messages

TASK = {"id": "0", "query": "Say a.", "answer": "a"}
SECTIONS: dict[str, Any] = {
    "model": {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}},
    "sampling": {"max_new_tokens": 4},
    "algorithm": {"drop_zero_variance": False},
    "trainer": {"group_size": 2, "learning_rate": 1e-2},
    "tracking": {"report": False, "tensorboard": False},
}


@agentevo.rollout
async def described(task: Any, policy: Any) -> float:
    reply = await policy.generate([{"role": "user", "content": task.query}])
    teacher = policy.model("teacher")
    added = policy.add_image(SMALL.data)
    await teacher.generate([Message("user", (added, TextPart("What is it?")))])
    inline = {"type": "image_url", "image_url": {"url": data_url(OTHER, "x")}}
    await teacher.generate([{"role": "user", "content": [inline]}])
    return float(len(reply.text))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "server"])
def test_images_that_remote_models_are_shown_are_stored(where: str, tmp_path: Path) -> None:
    async def use(model: Any) -> None:
        (group,) = await agentevo.gather([described.group(model, TASK)])
        assert all(one.status == "completed" for one in group.trajectories)
        assert {image.part for image in group.images} == {SMALL.part, OTHER.part}

        first = group.trajectories[0]
        unknown = Message("user", (ImagePart(WIDE.part.sha256),))
        turn = msgspec.structs.replace(first.remote_turns[0], messages=[unknown])
        forged = msgspec.structs.replace(first, remote_turns=[turn])
        with pytest.raises(ConfigError, match=f"names the image {WIDE.part.sha256}, which neither"):
            await model.train([msgspec.structs.replace(group, trajectories=[forged])])

        assert (await model.train([group])).dropped == {}  # the refusal has not ended the run

    async def work(base_url: str) -> None:
        teacher = {"base_url": base_url, "model": "m", "sees_images": True}
        sections = SECTIONS | {"remote_models": {"teacher": teacher}}
        if where == "here":
            async with agentevo.open_model(tmp_path / "mine", **sections) as model:
                await use(model)
        else:
            async with (
                served(tmp_path) as (client, _, _),
                client.open_model("mine", **sections) as model,
            ):
                await use(model)

    with RemoteServer(gives(chat("right"))) as server:
        asyncio.run(work(server.base_url))

    run = agentevo.load_run(tmp_path / "mine")
    assert run.audit().ok
    turns = [turn for one in run.trajectories(state="committed") for turn in one.remote_turns]
    shown = {part.sha256 for part in images_of_messages(m for turn in turns for m in turn.messages)}
    assert shown == {SMALL.part.sha256, OTHER.part.sha256}
