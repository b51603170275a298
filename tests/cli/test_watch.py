"""`agentevo top` of the attempts of a run, on a run that plays meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from agentevo.store import open_store
from agentevo.store.call_log import AttemptCalls, call_log


def play(url: str, playing: threading.Event, end: threading.Event, name: str) -> None:
    async def scenario() -> None:
        async with await open_store(url), call_log(url) as log:
            calls = AttemptCalls(log, name)
            with calls.attempt("Player"):
                with calls.call("tool", "over", results=2):
                    pass
                async with calls.call("tool", "search"):
                    playing.set()
                    await asyncio.to_thread(end.wait, 60)

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_runs_is_seen_and_then_how_it_ended(agentevo, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    playing = threading.Event()
    end = threading.Event()
    url = f"sqlite:///{folder / 'store.sqlite'}"
    player = threading.Thread(target=play, args=(url, playing, end, "task/train@1#0"))
    player.start()
    try:
        assert playing.wait(300)
        for _ in range(300):
            out = agentevo("top", str(folder), "--once").out
            if "tool search" in out:
                break
            end.wait(0.1)

        assert "task/train@1#0" in out and "tool search" in out, out
    finally:
        end.set()
        player.join()

    assert "tool search" not in agentevo("top", str(folder), "--once").out


@pytest.mark.parametrize("every", ["often", "nan", "inf", "-1", "1e9", "9" * 5000])
def test_what_no_clock_can_wait_is_refused_in_one_line(agentevo, tmp_path: Path, every) -> None:
    code, _, err = agentevo("top", str(tmp_path), f"--every={every}")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "give seconds, from 0 to 86,400 (a day)" in err
