"""What people say of attempts: the newest counts, nothing is lost, and what is exported is read by
the very functions with which `agentevo sft` and `agentevo train` begin."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentevo.cli.main import main
from agentevo.data import RowReport, read_conversations
from agentevo.errors import ConfigError
from agentevo.observability.pages.words import NONE, moment
from agentevo.runs.folder.annotation_export import GONE, HELD_OUT, SAME, TOOLS, export_annotations
from agentevo.runs.folder.annotations import (
    ANNOTATIONS,
    Annotation,
    Preference,
    agreement,
    annotate,
    calibration,
    read_annotations,
)
from agentevo.runs.folder.sft_export import answer_reader
from agentevo.store import open_store
from agentevo.training.pair_file import read_pair_file
from agentevo.types import Message, Trajectory, Turn


def turn(index: int, *messages: Message, **more: Any) -> Turn:
    ids = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [0.0], "versions": [0]}
    parent = index - 1 if index else None
    return Turn(**ids, index=index, parent=parent, messages=[*messages], **more)


def attempt(name: str, *said: str, query: str = "Which coin?", tools: str = "") -> Trajectory:
    turns = [
        turn(
            index,
            Message("user", query if index == 0 else "Go on."),
            Message("assistant", text),
            finish_reason="stop",
            tools=tools,
        )
        for index, text in enumerate(said)
    ]
    return Trajectory(id=name, task_id="t", group_id="t/g", turns=turns, reward=0.25)


ATTEMPTS = [
    attempt("a", "gold"),
    attempt("b", "iron"),
    attempt("c", "gold", "first", "last"),
    attempt("d", "gold", "first", "other"),
    attempt("e", "x", query="Another?"),
    attempt("tools", "x", tools='[{"type": "function", "function": {"name": "f"}}]'),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("# agentevo 1 train\nrun: {name: run}\n")

    async def work() -> None:
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}") as store:
            await store.write_trajectories(ATTEMPTS, split="train", step=1)

    asyncio.run(work())
    return folder


def exported(run: Path, form: Any, out: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    async def work() -> Any:
        async with await open_store(f"sqlite:///{run / 'store.sqlite'}") as store:
            found = read_annotations(run)
            return await export_annotations(store, found, out, form, answer_reader(None))

    count, left_out = asyncio.run(work())
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == count
    return rows, dict(left_out)


def test_the_newest_word_counts_and_every_word_stays(tmp_path: Path) -> None:
    annotate(tmp_path, Annotation(attempt="a", verdict="right", note="good"))
    annotate(tmp_path, Annotation(attempt="b", verdict="wrong", id="1"))
    annotate(tmp_path, Annotation(attempt="b", verdict="right", id="1"))  # sent twice
    annotate(tmp_path, Annotation(attempt="a", verdict="wrong"))
    annotate(tmp_path, Preference(better="a", worse="b"))
    annotate(tmp_path, Preference(better="b", worse="a"))

    with (tmp_path / ANNOTATIONS).open("a") as file:
        file.write('{"type": "attempt"}\n{"type": "pair", "better": 3}\nnothing\n')

    found = read_annotations(tmp_path)
    assert {name: one.verdict for name, one in found.attempts.items()} == {
        "a": "wrong",
        "b": "wrong",
    }
    assert [pair.better for pair in found.pairs.values()] == ["b"]
    assert len(found.history) == 5
    assert all(one.at > 1e9 for one in found.history)

    annotate(tmp_path, Annotation(attempt="a"))
    annotate(tmp_path, Preference(better="a", worse="b", equal=True))
    found = read_annotations(tmp_path)
    assert [*found.attempts] == ["b"]
    assert found.pairs == {}
    assert len(found.history) == 7


def test_a_damaged_file_costs_what_is_damaged(tmp_path: Path) -> None:
    half = r"\ud83d"
    huge = "9" * 400
    lines = [
        f'{{"type":"attempt","attempt":"a{half}","verdict":"right","parts":{{"p{half}":1.0}}}}',
        f'{{"type":"attempt","attempt":"b","verdict":"right","at":{huge}}}',
        r'{"type":"attempt","attempt":"c","note":"\ud83d\ude00","at":1e300}',
        '{"type":"attempt"',
    ]
    (tmp_path / "annotations.jsonl").write_text("\n".join(lines) + "\n")
    found = read_annotations(tmp_path).attempts
    assert set(found) == {"a?", "c"} and found["c"].note == "\N{GRINNING FACE}"
    assert moment(found["c"].at) == NONE

    (tmp_path / "annotations.jsonl").unlink()
    (tmp_path / "annotations.jsonl").mkdir()
    with pytest.raises(ConfigError, match="move it away"):
        read_annotations(tmp_path)


def test_kappa_is_cohens() -> None:
    # Cohen's own kind of example: p_o = 0.7, p_e = 0.5 * 0.6 + 0.5 * 0.4 = 0.5, kappa = 0.4
    said = [(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15
    found = agreement("success", said)
    assert found.counts == (20, 5, 10, 15)
    assert found.rate == pytest.approx(0.7)
    assert found.kappa == pytest.approx(0.4)

    low, high = found.interval or (0.0, 0.0)
    assert 0.55 < low < 0.6 < 0.7 < high < 0.82
    assert agreement("x", [(True, True)] * 3).kappa is None  # chance alone would agree, too
    assert agreement("x", []).rate is None


def test_calibration_compares_people_with_success_parts_and_rewards(tmp_path: Path) -> None:
    for name, verdict, success, judged in [
        ("a", "right", True, 0.9),
        ("b", "wrong", True, 0.2),
        ("c", "wrong", False, 0.7),
    ]:
        parts = {"judge": judged, "format": -0.1 if judged < 0.5 else 0.0, "em": 0.0}
        annotate(tmp_path, Annotation(attempt=name, verdict=verdict, success=success, parts=parts))

    annotate(tmp_path, Annotation(attempt="d", note="no verdict", success=True))
    annotate(tmp_path, Preference(better="a", worse="b", rewards=(0.0, 1.0)))
    rows = {row.judge: row for row in calibration(read_annotations(tmp_path))}
    assert rows["success"].counts == (1, 0, 1, 1)
    assert rows["judge ≥ 0.5"].counts == rows["format ≥ 0"].counts == (1, 0, 1, 1)
    assert rows["em ≥ 0.5"].counts == (0, 1, 0, 2), "0 throughout is no penalty"
    assert rows["reward, of two"].counts == (0, 1, 0, 0)


def test_right_and_edited_attempts_become_rows_that_sft_reads(run: Path, tmp_path: Path) -> None:
    annotate(run, Annotation(attempt="a", verdict="right"))
    annotate(run, Annotation(attempt="b", verdict="wrong"))
    annotate(run, Annotation(attempt="c", verdict="wrong", reply="better"))
    annotate(run, Annotation(attempt="gone", verdict="right"))
    rows, left_out = exported(run, "sft", tmp_path / "rows.jsonl")
    assert left_out == {GONE: 1}

    by_name = {row["trajectory_id"]: row["messages"] for row in rows}
    assert by_name.keys() == {"a", "c"}

    taught = [m for m in by_name["c"] if m["role"] == "assistant" and m.get("weight") != 0]
    assert [m["content"] for m in taught] == ["better"]

    report = RowReport("train")
    read = list(read_conversations(str(tmp_path / "rows.jsonl"), "auto", report))
    assert (len(read), report.bad) == (2, [])


def test_pairs_begin_where_two_conversations_part(run: Path, tmp_path: Path) -> None:
    annotate(run, Preference(better="a", worse="b"))
    annotate(run, Preference(better="d", worse="c"))
    annotate(run, Preference(better="a", worse="e"))
    annotate(run, Annotation(attempt="c", reply="better"))
    annotate(run, Annotation(attempt="a", reply="gold"))
    annotate(run, Annotation(attempt="tools", reply="y"))

    out = tmp_path / "pairs.jsonl"
    rows, left_out = exported(run, "pairs", out)
    assert left_out == {
        "the two conversations differ before the first answer": 1,
        SAME: 1,
        TOOLS: 1,
    }

    lines = read_pair_file(out, "dpo")
    found = sorted(
        (len(line.prompt), line.chosen[-1].text, line.rejected[-1].text)
        for line in lines
        if line.chosen and line.rejected
    )
    assert found == [(1, "gold", "iron"), (5, "better", "last"), (5, "other", "last")]
    assert len(rows) == 3


def test_labels_and_verdicts_are_exported(run: Path, tmp_path: Path) -> None:
    annotate(run, Annotation(attempt="a", verdict="right", note="fine", who="somebody"))
    annotate(run, Annotation(attempt="b", verdict="wrong"))
    exported(run, "labels", tmp_path / "labels.jsonl")
    lines = read_pair_file(tmp_path / "labels.jsonl", "kto")
    assert [(bool(line.chosen), bool(line.rejected)) for line in lines] == [
        (True, False),
        (False, True),
    ]

    rows, _ = exported(run, "judge", tmp_path / "judge.jsonl")
    assert [(row["label"], row["reward"]) for row in rows] == [(True, 0.25), (False, 0.25)]
    assert rows[0]["note"] == "fine"


@pytest.mark.slow
def test_attempts_at_held_out_tasks_are_no_training_data_unless_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        async with await open_store(f"sqlite:///{run / 'store.sqlite'}") as store:
            held_out = [attempt("held", "gold"), attempt("held too", "iron")]
            await store.write_trajectories(held_out, split="eval", step=1)

    asyncio.run(work())
    for name in ("a", "held"):
        annotate(run, Annotation(attempt=name, verdict="right", reply="edited"))

    annotate(run, Preference(better="held", worse="held too"))
    for form, left in (("sft", 1), ("labels", 1), ("pairs", 2)):
        rows, left_out = exported(run, form, tmp_path / "rows.jsonl")
        assert [row["trajectory_id"] for row in rows] == ["a"]
        assert left_out == {HELD_OUT: left}

    rows, left_out = exported(run, "judge", tmp_path / "judge.jsonl")
    assert ({row["trajectory_id"] for row in rows}, left_out) == ({"a", "held"}, {})

    out = tmp_path / "all.jsonl"
    assert (
        main(["trajectories", "export", str(run), str(out), "--annotations", "sft", "--held-out"])
        == 0
    )
    assert "2 rows written" in capsys.readouterr().out


def test_nothing_is_written_where_there_is_no_row(run: Path, tmp_path: Path) -> None:
    annotate(run, Annotation(attempt="gone", verdict="right"))
    out = tmp_path / "new" / "rows.jsonl"
    with pytest.raises(ConfigError, match="1 left out"):
        exported(run, "sft", out)
    assert not out.parent.exists()


def test_the_commands(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["annotate", str(run), "--agreement"]) == 0
    assert "no attempt is labelled yet" in capsys.readouterr().out

    annotate(run, Annotation(attempt="a", verdict="right", success=True))
    annotate(run, Annotation(attempt="b", verdict="wrong"))
    assert main(["annotate", str(run), "--agreement"]) == 0
    assert "success: 100% of 2 agree [34%, 100%], kappa 1.00" in capsys.readouterr().out

    out = tmp_path / "rows.jsonl"
    assert main(["trajectories", "export", str(run), str(out), "--annotations", "sft"]) == 0
    assert f"1 row written to {out}" in capsys.readouterr().out
    assert main(["trajectories", "export", str(run), str(out), "--annotations", "xml"]) == 2
    assert main(["trajectories", "export", str(tmp_path), str(out), "--annotations", "sft"]) == 2
