from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import sqlite3
from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.cli.main import main
from agentevo.data.images import read_image
from agentevo.observability.trajectory_pages import page_name
from agentevo.store import open_store
from agentevo.types import Message, Task, TextPart, Trajectory, Turn
from agentevo.types.images import ImageFile

HOSTILE = "../../e\x1b[31m<script>alert(1)</script>\u202e/x"
Make = Callable[..., Path]


def attempt(name: str, words: str = "hello") -> Trajectory:
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2, 3],
        logprobs=[-0.5, -4.0],
        versions=[0, 0],
        finish_reason="stop",
        messages=[Message("user", "PFF\nFHG"), Message("assistant", words)],
    )
    return Trajectory(id=name, task_id="t", group_id="g", turns=[turn], reward=0.5)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make([(attempt, split, step), ...])`: the folder of a run whose store has these."""

    def made(rows: list[tuple[Trajectory, str, int]], images: Sequence[ImageFile] = ()) -> Path:
        folder = tmp_path / "lake"
        folder.mkdir()
        (folder / "config.yaml").write_text("run:\n  name: lake\n")

        async def fill() -> None:
            async with await open_store(f"sqlite:///{folder / 'store.sqlite'}") as store:
                await store.add_tasks([Task(id="t", environment="x", answer="<7>")])
                await store.put_images(images)
                for one, split, step in rows:
                    await store.write_trajectories([one], split=split, step=step)  # type: ignore[arg-type]

        asyncio.run(fill())
        return folder

    return made


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_every_fourth_step_and_the_last_one_have_pages(make: Make, capsys) -> None:
    rows = [(attempt(f"s{step}-{n}"), "train", step) for step in range(1, 8) for n in range(3)]
    rows += [(attempt(f"e5-{n}"), "eval", 5) for n in range(3)]
    run = make([*rows, (attempt("d"), "doctor", 5)])
    assert main(["trajectories", "show", str(run), "--html", "--per-step", "4"]) == 0

    out = run / "trajectories_html"
    assert f"10 pages written: {out / 'index.html'}" in capsys.readouterr().out
    assert files(out) == sorted(
        ["index.html"]
        + [f"step_{step}/trajectory_s{step}-{n}.html" for step in (1, 7) for n in range(3)]
        + [f"step_5/trajectory_{name}.html" for name in ("s5-0", "s5-1", "e5-0", "e5-1")]
    )

    index = (out / "index.html").read_text(encoding="utf-8")
    links = [unquote(unescape(link)) for link in re.findall(r'href="(step_[^"]*)"', index)]
    assert sorted(links) == [name for name in files(out) if name != "index.html"]

    page = (out / "step_5" / "trajectory_s5-1.html").read_text(encoding="utf-8")
    for part in ('href="trajectory_s5-0.html"', 'href="trajectory_e5-0.html"', 'class="world"'):
        assert part in page
    assert "expected answer: &lt;7&gt;" in page

    assert main(["trajectories", "show", str(run), "--html", "--step", "6"]) == 0, "its own folder"
    assert files(out) == ["index.html", *(f"step_6/trajectory_s6-{n}.html" for n in range(3))]


def test_a_page_has_the_images_of_its_attempt(make: Make) -> None:
    seen = read_image(np.full((4, 6, 3), 200, np.uint8), "a screen")
    lost = read_image(np.zeros((4, 6, 3), np.uint8), "a screen")
    turn = attempt("s").turns[0]
    shown = Message("user", (TextPart("Look:"), seen.part, lost.part))
    turn = msgspec.structs.replace(turn, messages=[shown, *turn.messages[1:]])
    run = make([(msgspec.structs.replace(attempt("s"), turns=[turn]), "train", 1)], [seen, lost])
    with sqlite3.connect(run / "store.sqlite") as rows:
        rows.execute("DELETE FROM images WHERE id = ?", [lost.part.sha256])

    assert main(["trajectories", "show", str(run), "--html"]) == 0
    page = (run / "trajectories_html/step_1/trajectory_s.html").read_text(encoding="utf-8")
    assert f'src="data:image/png;base64,{base64.b64encode(seen.data).decode()}"' in page
    assert f"SHA-256 {lost.part.sha256[:16]}…: not on this page" in page


def test_hostile_ids_and_words_are_names_and_text(make: Make, tmp_path: Path) -> None:
    run = make(
        [(attempt(HOSTILE, HOSTILE), "train", 1), (attempt("A", "x" * 5_000_000), "train", 1)]
    )
    out = tmp_path / "out"
    assert main(["trajectories", "show", str(run), "--html", "--out", str(out)]) == 0
    assert [path for path in tmp_path.iterdir() if path.name not in ("lake", "out")] == []

    names = [name for name in files(out) if name != "index.html"]
    assert len(names) == 2 and all(re.fullmatch(r"step_1/[a-z0-9._-]+", name) for name in names)
    for name in files(out):
        text = (out / name).read_text(encoding="utf-8")
        assert len(text) < 400_000
        assert "<script>alert" not in text and "\x1b" not in text and "\u202e" not in text
        (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in unescape(text)


@pytest.mark.slow
@given(st.lists(st.text(max_size=300), unique=True, max_size=5))
def test_no_two_ids_share_a_file_on_any_file_system(ids: list[str]) -> None:
    names = [page_name(one) for one in ids]
    assert len({name.lower() for name in names}) == len(ids)
    assert all(re.fullmatch(r"trajectory_[a-z0-9._-]{1,90}\.html", name) for name in names)


def test_folders_with_other_things_and_wrong_steps_are_refused(
    make: Make, tmp_path: Path, capsys
) -> None:
    run = make([(attempt("a"), "train", 1)])
    out = tmp_path / "mine"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    command = ["trajectories", "show", str(run), "--html", "--out", str(out)]
    assert main(command) == 2
    assert "letter.txt: give another folder, or --overwrite" in capsys.readouterr().err
    assert files(out) == ["letter.txt"]
    assert main([*command, "--overwrite"]) == 0
    assert files(out) == ["index.html", "letter.txt", "step_1/trajectory_a.html"]
    assert main(["trajectories", "show", str(run), "--html", "--step", "9"]) == 2
    assert "no trajectory of step 9" in capsys.readouterr().err
    assert not (run / "trajectories_html").exists()

    (tmp_path / "else").mkdir()
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "step_1").symlink_to(tmp_path / "else", target_is_directory=True)

    assert main([*command[:-1], str(linked), "--overwrite"]) == 2
    assert "step_1 is a link" in capsys.readouterr().err
    assert files(tmp_path / "else") == []


def test_a_row_that_can_not_be_read_leaves_no_pages(make: Make, capsys) -> None:
    run = make([(attempt(f"s1-{n}"), "train", 1) for n in range(3)])
    with sqlite3.connect(run / "store.sqlite") as rows:
        rows.execute("UPDATE trajectories SET metrics = '{' WHERE id = 's1-2'")

    assert main(["trajectories", "show", str(run), "--html"]) != 0
    assert not (run / "trajectories_html").exists()
