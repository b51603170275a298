from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentevo.errors import ConfigError
from agentevo.observability import (
    MetricsLog,
    report,
    report_from_run,
    sample_trajectories,
    write_report,
)
from agentevo.observability.metrics import MetricsRow
from agentevo.observability.static_attempt import SHOWN_TOKENS
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store import StoredCall, open_store
from agentevo.types import Call, Message, Task, ToolCall, Trajectory, Turn

HOSTILE = "<script>alert('x')</script><img src=http://evil.example/a.png>"


def attempt(
    name: str, reward: float, *, task: str = "lake/1", tokens: int = 3, **changes: Any
) -> Trajectory:
    turn = Turn(
        index=0,
        prompt_ids=[1, 2],
        completion_ids=[(11, 3, 10)[index % 3] for index in range(tokens)],
        logprobs=[(-0.25, -4.0, -0.01)[index % 3] for index in range(tokens)],
        versions=[7] * tokens,
        finish_reason="stop",
        reward=reward,
        messages=[Message("user", HOSTILE)],
    )
    return Trajectory(
        id=name,
        task_id=task,
        group_id="g",
        turns=[turn],
        reward=reward,
        success=reward > 0.5,
        **changes,
    )


class Page(HTMLParser):
    """Tags, attributes and visible text; fails on tags that aren't closed."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.captions: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        where = self._open[-2:]
        if where[-1:] == ["style"]:
            self.styles.append(data)
        elif where[-1:] == ["script"] and "type" not in self.tags[-1][1]:
            self.scripts.append(data)
        elif where[-1:] != ["script"]:
            self.text += data

        if where == ["figcaption", "b"]:
            self.captions.append(data)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report has plots, which take longer than all else of it."""
    monkeypatch.setattr(report, "write_plots", lambda *_: [])


@pytest.mark.slow
def test_the_page_tells_the_whole_run(
    tmp_path: Path, rows: list[MetricsRow], summary: Mapping[str, Any], decode: Callable[[int], str]
) -> None:
    path = write_report(
        tmp_path,
        rows,
        summary,
        "trainer:\n  steps: 60\n",
        [("Best attempt", attempt("t", 0.9))],
        decode,
    )
    page = Page(path.read_text(encoding="utf-8"))
    for part in (
        "16% →", "70%", "success on 64 held-out tasks", "before the cold start it was 2%",
        "a random player reaches 6%", "an optimal player 78%", "5m12s", "118,204", "96,411",
        "70% at step 60", "15.6%", "step 33", "The gradient norm jumped",
        "3,840 came in", "dropped: zero-variance", "update_actor", "Best attempt", "steps: 60",
    ):  # fmt: skip
        assert part in page.text, part

    titles = [text for text in page.captions if text]
    assert titles[:3] == ["Success on held-out tasks", "Success in training", "Reward in training"]
    for one in ("Gradient norm before clipping", "Tokens of a completion", "Tokens a second"):
        assert one in titles

    assert sorted(file.name for file in tmp_path.iterdir()) == ["plots", "report.html"]
    assert len(list((tmp_path / "plots").iterdir())) == 4


def checked(text: str) -> Page:
    """The page, which asks for nothing and runs only what its policy names by digest."""
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"link", "iframe", "object", "base", "form", "img", "embed"}

    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "style", "srcdoc", "action"), (tag, name)
            if name == "href":
                assert (value or "").startswith("#")

    policy = next(
        attributes["content"] or ""
        for _, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for kind, programs in (("script", page.scripts), ("style", page.styles)):
        (program,) = programs
        digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy

    return page


@pytest.mark.usefixtures("without_pictures")
def test_the_page_asks_the_network_for_nothing_and_runs_nothing_that_a_run_says(
    tmp_path: Path, rows: list[MetricsRow], summary: Mapping[str, Any], decode: Callable[[int], str]
) -> None:
    hostile = {
        **summary,
        "name": HOSTILE,
        "environment": HOSTILE,
        "warnings": [HOSTILE, {"code": "x", "step": HOSTILE, "message": HOSTILE}],
    }
    broken = attempt(HOSTILE, 0.0, status="failed", error=HOSTILE)
    named: list[MetricsRow] = [
        {**row, HOSTILE: 1.0, f"reward_parts/{HOSTILE}/mean": 0.5} for row in rows
    ]
    text = write_report(
        tmp_path,
        named,
        hostile,
        HOSTILE,
        [(HOSTILE, broken)],
        lambda token: HOSTILE + decode(token),
    ).read_text(encoding="utf-8")
    assert checked(text).text.count(HOSTILE) >= 8  # shown as text, everywhere


def test_words_that_are_no_text_are_shown_as_what_they_are(tmp_path: Path) -> None:
    words = "\x1b[31mred \u202edesrever \ud83d half \x00 </style></script><!-- ]]>"
    message = Message("user", words + "x" * 5_000_000)
    hostile = attempt("t", 0.0)
    turn = msgspec.structs.replace(hostile.turns[0], messages=[message])
    hostile = msgspec.structs.replace(hostile, turns=[turn])
    rows: list[MetricsRow] = [{"step": 1, f"reward_parts/{words}/mean": 1.0}]
    text = write_report(tmp_path, rows, {"name": words}, words, [(words, hostile)]).read_text(
        encoding="utf-8"
    )
    page = checked(text)

    assert len(text) < 400_000, "a message of 5 MB is cut"
    assert "further characters" in page.text
    for raw in ("\x1b", "\u202e", "\x00"):
        assert raw not in text

    assert "␛[31mred ⟨RLO⟩desrever" in page.text


def test_tokens_carry_id_log_prob_and_version(tmp_path: Path, decode: Callable[[int], str]) -> None:
    text = write_report(tmp_path, [], {}, "", [("a", attempt("t", 0.9))], decode).read_text(
        encoding="utf-8"
    )
    spans = [attributes for _, attributes in Page(text).tags if "data-t" in attributes]
    assert [span["class"] for span in spans] == ["s1", "s4", ""]
    assert spans[0]["title"] == "id 11 · log-prob -0.2500 (78%) · weights of version 7"
    assert "é&amp;&lt;b&gt;" in text
    assert "↵\n" in text


def test_worlds_are_drawn_and_rewards_taken_apart(tmp_path: Path) -> None:
    played = attempt("t", 0.9, reward_parts={"format": 0.25, "judge": -0.5})
    turn = msgspec.structs.replace(
        played.turns[0],
        messages=[
            Message("user", "The lake:\nPFF\nFHF\nFFG"),
            Message("assistant", "", tool_calls=(ToolCall("look", '{"at": 3}', "c1"),)),
        ],
    )
    played = msgspec.structs.replace(played, turns=[turn])
    judged = Call(
        id="k",
        trajectory_id="t",
        kind="scorer",
        name="judge",
        started_at=5.0,
        ended_at=6.0,
        status="completed",
        attributes={"score": 0.5, "reason": "It went too far."},
    )
    calls = {"t": [StoredCall(call=judged, state="ended")]}
    written = write_report(tmp_path, [], {}, "", [("a", played)], None, calls)
    page = Page(written.read_text(encoding="utf-8"))
    kinds = [attributes.get("class") for tag, attributes in page.tags if tag == "i"]
    assert [kind for kind in kinds if kind in ("player", "floor", "hole", "goal")][:5] == [
        "player",
        "floor",
        "floor",
        "floor",
        "hole",
    ]

    for part in ("format", "0.25", "judge", "−0.5", "It went too far.", "look", '"at": 3'):
        assert part in page.text, part


def test_without_a_tokenizer_ids_are_shown_and_said_to_be(tmp_path: Path) -> None:
    page = Page(
        write_report(tmp_path, [], {}, "", [("a", attempt("t", 0.9))]).read_text(encoding="utf-8")
    )
    assert "11 3 10" in page.text
    assert "no tokenizer was available" in page.text


def test_a_very_long_attempt_is_cut_and_says_so(
    tmp_path: Path, decode: Callable[[int], str]
) -> None:
    text = write_report(
        tmp_path, [], {}, "", [("a", attempt("t", 0.9, tokens=SHOWN_TOKENS + 7))], decode
    ).read_text(encoding="utf-8")
    assert "… and 7 more tokens" in text
    assert sum("data-t" in attributes for _, attributes in Page(text).tags) == SHOWN_TOKENS


@pytest.mark.parametrize(("after", "told"), [(0.30, True), (0.60, False)])
def test_nobody_is_fooled_by_random_play(tmp_path: Path, after: float, told: bool) -> None:
    scores = {"eval": {"before": 0.02, "after": after, "n": 64, "random": 0.25, "optimal": 1.0}}
    text = Page(write_report(tmp_path, [], scores, "", []).read_text(encoding="utf-8")).text
    assert ("can't be distinguished from random play" in text) is told


def make_run(
    folder: Path,
    rows: list[MetricsRow],
    trajectories: list[tuple[Trajectory, str, int]],
    config: str = "run:\n  name: demo\n",
) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    with MetricsLog(folder / "metrics.jsonl") as log:
        for row in rows:
            log.log(
                int(row["step"] or 0),
                {
                    key: value
                    for key, value in row.items()
                    if key not in ("step", "time") and value is not None
                },
            )

    async def fill() -> None:
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}") as store:
            await store.add_tasks([Task(id="lake/1", environment="frozen_lake", answer=["gift"])])
            for trajectory, split, step in trajectories:
                await store.write_trajectories([trajectory], split=split, step=step)  # type: ignore[arg-type]

    asyncio.run(fill())


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_a_report_is_made_from_the_files_alone(
    tmp_path: Path, rows: list[MetricsRow], summary: Mapping[str, Any], decode: Callable[[int], str]
) -> None:
    folder = tmp_path / "run"
    early = [
        (attempt(f"e{index}", reward), "eval", 0) for index, reward in enumerate((0.0, 0.1, 0.9))
    ]
    late = [
        (attempt(f"l{index}", reward), "eval", 60) for index, reward in enumerate((0.2, 1.0, 0.8))
    ]

    train = [
        (attempt("trained", 1.0), "train", 60),
        (attempt("broken", 0.0, status="failed", error="server hung"), "train", 59),
    ]
    make_run(folder, rows, early + late + train)
    (folder / "summary.json").write_text(json.dumps(summary))
    path = report_from_run(folder, decode)
    text = Page(path.read_text(encoding="utf-8")).text
    assert path == folder / "report.html"

    captions = {
        "A typical attempt at step 0": "e1", "Best attempt at step 60": "l1",
        "A typical attempt at step 60": "l2",
        "Worst attempt at step 60": "l0", "Newest failed attempt (step 59)": "broken",
    }  # fmt: skip
    found = dict(
        re.findall(
            r"((?:A typical|Best|Worst|Newest failed) attempt "
            r"(?:at step \d+|\(step \d+\))).*?trajectory (\w+), task",
            text,
            re.DOTALL,
        )
    )
    assert found == captions
    assert text.count('expected answer: ["gift"]') == len(captions)
    assert "server hung" in text
    assert "16% →" in text


def test_a_report_can_be_made_inside_a_running_event_loop(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [], [(attempt("x", 1.0), "train", 1)])

    async def caller() -> Path:
        return report_from_run(tmp_path / "run")

    assert "trajectory x," in Page(asyncio.run(caller()).read_text(encoding="utf-8")).text


@pytest.mark.slow
def test_a_run_draws_its_report_beside_its_event_loop_and_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", [], [(attempt("x", 1.0), "train", 1)])
    said: list[str] = []

    class View:
        def phase(self, name: str) -> None:
            said.append(name)

        note = warn = said.append

    async def made() -> int:
        ticks = 0
        making = asyncio.create_task(report.report_at_end(tmp_path / "run", str, View()))
        while not making.done():
            ticks += 1
            await asyncio.sleep(0.001)
        await making
        return ticks

    assert run_coroutine(made()) > 3, "the loop goes on meanwhile"
    assert said[0] == "reporting" and "report.html" in said[-1]

    monkeypatch.setattr(report, "DEADLINE_S", 0.05)
    monkeypatch.setattr(report, "report_from_run", lambda *_: time.sleep(1.0))
    run_coroutine(made())
    assert "not ready within 0.05 s: `agentevo report" in said[-1]


@pytest.mark.usefixtures("without_pictures")
def test_the_evaluation_before_the_cold_start_has_a_line_of_its_own(
    tmp_path: Path, rows: list[MetricsRow]
) -> None:
    cold: MetricsRow = {"step": 0, "val-core/frozen_lake/success/greedy": 0.017}
    page = Page(write_report(tmp_path, [cold, *rows], {}, "", []).read_text(encoding="utf-8"))
    assert "before the cold start1.7%" in page.text
    assert "16% →" in page.text
    assert page.text.count("before the cold start") == 1


@pytest.mark.usefixtures("without_pictures")
def test_what_the_summary_does_not_know_yet_comes_from_the_rows(
    tmp_path: Path, rows: list[MetricsRow]
) -> None:
    unknown = {
        "eval": {"before": None, "after": None, "n": None, "random": None},
        "best": {"step": None, "value": None},
    }
    text = Page(write_report(tmp_path, rows, unknown, "", []).read_text(encoding="utf-8")).text
    assert "16% →" in text
    assert "a random player reaches 6%" in text


@pytest.mark.usefixtures("without_pictures")
def test_an_interrupted_run_without_summary_or_store_has_a_report_too(
    tmp_path: Path, rows: list[MetricsRow]
) -> None:
    folder = tmp_path / "run"
    make_run(folder, rows[:40], [])
    (folder / "store.sqlite").unlink()
    text = Page(report_from_run(folder).read_text(encoding="utf-8")).text
    assert "16% →" in text
    assert "Sample trajectories" not in text
    assert not (folder / "store.sqlite").exists()


def test_the_store_that_the_config_names_is_the_one_read(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    make_run(elsewhere, [], [(attempt("x", 1.0), "train", 1)])
    folder = tmp_path / "run"
    make_run(folder, [], [], config=f"store:\n  url: sqlite:///{elsewhere / 'store.sqlite'}\n")
    assert "trajectory x," in Page(report_from_run(folder).read_text(encoding="utf-8")).text


def test_a_folder_that_is_no_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        report_from_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_lone_attempt_is_shown_once(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [], [(attempt("only", 0.4), "train", 3)])

    async def pick() -> list[tuple[str, Trajectory]]:
        async with await open_store(
            f"sqlite:///{tmp_path / 'run' / 'store.sqlite'}", create=False
        ) as store:
            return await sample_trajectories(store)

    assert [(caption, found.id) for caption, found in asyncio.run(pick())] == [
        ("Best attempt at step 3", "only")
    ]
