"""Long messages of remote models, a part at a time."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from agentevo.store import open_store
from agentevo.types import Message, RemoteTurn, Task, Trajectory

LONG = ["".join(f"{name}{number:06} " for number in range(10_000)) for name in "ab"]


async def fill(url: str) -> None:
    turns = [
        RemoteTurn(
            index=index,
            model="judge",
            messages=[Message("user", "which?"), Message("assistant", text)],
        )
        for index, text in enumerate(LONG)
    ]
    tried = Trajectory(
        id="t/a@1#0",
        task_id="t",
        group_id="t/a@1",
        attempt=0,
        turns=[],
        remote_turns=turns,
        reward=0.0,
        success=False,
        status="completed",
    )
    async with await open_store(url) as store:
        await store.add_tasks([Task(id="t", environment="world")], queue=False)
        await store.write_trajectories([tried], split="train", step=1)


def test_more_of_a_remote_message_is_of_that_message(
    tmp_path: Path, browse: Callable[..., Any]
) -> None:
    url = f"sqlite:///{tmp_path / 's.sqlite'}"

    async def visit() -> list[str]:
        await fill(url)
        texts = []
        async with browse(url) as client:

            async def get(path: str) -> str:
                ends = time.monotonic() + 300
                while True:
                    answer: httpx.Response = await client.get(path, headers={"hx-request": "true"})
                    if answer.status_code == 200 or time.monotonic() > ends:
                        assert answer.status_code == 200
                        return answer.text
                    await asyncio.sleep(0.1)  # the index is being made

            page = await get("/runs/s.sqlite/attempt?id=t%2Fa%401%230")
            while "Show more" not in page:
                await asyncio.sleep(0.1)
                page = await get("/runs/s.sqlite/attempt?id=t%2Fa%401%230")

            for link in re.findall(r'hx-get="([^"]*attempt/text[^"]*)"', page):
                text = ""
                while link:
                    more = await get(html.unescape(link))
                    text += re.findall(r"<pre>(.*?)</pre>", more, re.DOTALL)[0]
                    links = re.findall(r'hx-get="([^"]*)"', more)
                    link = links[0] if links else ""
                texts.append(text)

        return texts

    assert asyncio.run(asyncio.wait_for(visit(), 300)) == [text[6_000:] for text in LONG]
