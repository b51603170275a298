"""Tasks from documents: what is asked for stands in a passage, a passage is on one side of the
split, and a model's questions are checked."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentevo.agents.tools.corpus import Passage
from agentevo.agents.tools.word_split import contains_words
from agentevo.cli.main import main
from agentevo.config import load_config
from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.inference.remote_models.ledger import RemoteModelError
from agentevo.models.files.resolve import fetch
from agentevo_evolve.task_making.document_files import MAX_PASSAGE_CHARS, read_documents
from agentevo_evolve.task_making.documents import (
    GAP,
    _gaps,
    check_made,
    search_query,
    tasks_from_gaps,
    tasks_from_model,
)
from agentevo_evolve.task_making.scenario import is_held_out

PASSAGES = [
    Passage(
        f"p{n}",
        f"Town {n}",
        f"The mayor of this town is called Ada {name} Berg since {1900 + n}. "
        f"It has {1000 + 7 * n} people who live in {n + 3} streets. Nothing else is known.",
    )
    for n, name in enumerate(f"Al{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(60))
]
COUNTS = {"train": 40, "held_out": 10, "per_passage": 2, "seed": 3}


@pytest.mark.slow
def test_a_gap_is_what_stands_in_the_passage_and_nowhere_else_in_the_sentence() -> None:
    made = tasks_from_gaps(PASSAGES, **COUNTS)
    assert (len(made.train), len(made.held_out)) == (40, 10)

    texts = {one.id: one.text for one in PASSAGES}
    for row in [*made.train, *made.held_out]:
        sentence = row["query"].partition("“")[2].partition("”")[0]
        assert sentence.count(GAP) == 1 and row["scorer"] == "contains"
        assert sentence.replace(GAP, row["answer"]) in texts[row["passage"]]
        assert not re.search(rf"(?<!\w){row['answer']}(?!\w)", sentence)

    assert tasks_from_gaps(PASSAGES, **COUNTS) == made
    assert tasks_from_gaps(PASSAGES, **COUNTS | {"seed": 4}) != made


CHINESE = (
    "长城是中国古代的军事防御工程，全长约21196千米。它在1987年被列入世界遗产名录！"
    "曹雪芹写的《红楼梦》是中国古典小说的代表作，共有120回。“这部书写于清代。”后来的人续写了它。"
)


@pytest.mark.slow
def test_documents_without_spaces_give_tasks() -> None:
    passages = [
        Passage(str(n), "", f"{CHINESE}第{n}号文件在这里记下了{n + 200}件事情。") for n in range(30)
    ]
    made = tasks_from_gaps(passages, train=40, held_out=8, per_passage=4, seed=0)
    rows = [*made.train, *made.held_out]
    assert len(rows) > 20
    for row in rows:
        passage = passages[int(row["passage"])].text
        whole = row["query"].partition("“")[2].rpartition("”")[0].replace(GAP, row["answer"])
        assert whole in passage and whole.endswith(("。", "！"))
        assert search_query(row["query"]) in passage

    answers = {answer for _, _, answer in _gaps(CHINESE)}
    assert answers == {"21196", "1987", "红楼梦", "120"}


@pytest.mark.parametrize(
    ("words", "text", "stands"),
    [
        ("北京", "首都在北京市。", True),
        ("38", "共有38辆", True),
        ("38", "共有138辆", False),
        ("Lima", "首都是Lima。", True),
        ("Lima", "Limassol lies there.", False),
        ("cat", "a cat, a dog", True),
        ("上海", "首都在北京市。", False),
    ],
)
def test_words_stand_in_a_text_as_whole_ones(words: str, text: str, stands: bool) -> None:
    assert contains_words(words, text) is stands


@pytest.mark.slow
def test_no_passage_is_on_both_sides_whatever_the_seed() -> None:
    sides = [
        {row["passage"] for seed in range(5) for row in getattr(made(seed), side)}
        for side in ("train", "held_out")
    ]
    assert not sides[0] & sides[1]


def made(seed: int) -> Any:
    return tasks_from_gaps(PASSAGES, train=200, held_out=200, per_passage=2, seed=seed)


def test_a_sentence_that_stands_on_both_sides_is_not_asked_for_nor_what_was_asked() -> None:
    shared = "The bridge over the river Aller was built by Karl Otto Holm in the year 1871."
    both = [Passage(one.id, "", f"{one.text} {shared}") for one in PASSAGES]
    found = tasks_from_gaps(both, train=400, held_out=400, per_passage=9, seed=0)
    rows = [*found.train, *found.held_out]
    assert rows and not [row for row in rows if "river Aller" in row["query"]]

    alone = [one for one in both if not is_held_out(found_content(one))]
    asked = tasks_from_gaps(alone, train=400, held_out=0, per_passage=9, seed=0)
    assert [row for row in asked.train if "river Aller" in row["query"]], "on one side it is"

    first = tasks_from_gaps(both, train=400, held_out=400, per_passage=1, seed=0)
    known = {row["query"] for row in first.train}
    again = tasks_from_gaps(
        both, train=400, held_out=0, per_passage=1, seed=0, earlier_questions=known
    )
    assert again.train and not {row["query"] for row in again.train} & known

    with pytest.raises(ConfigError, match="no task held out could be made"):
        check_made(again, 1)


@pytest.mark.parametrize("seed", range(4))
def test_nor_is_one_with_which_passages_of_different_titles_begin(seed: int) -> None:
    shared = "The main pump delivers 4711 litres at 38 bar with 12 valves, 7 motors and 95 seals."
    both = [
        Passage(f"d{n}#0", f"chapter {n}", f"{shared} Here is text {7 * n} of a chapter.")
        for n in range(12)
    ]
    found = tasks_from_gaps(both, train=60, held_out=20, per_passage=1, seed=seed)
    rows = [*found.train, *found.held_out]
    assert rows and not [row for row in rows if "main pump" in row["query"]]


def found_content(passage: Passage) -> str:
    return hashlib.sha256(passage.text.encode()).hexdigest()[:16]


def test_plain_texts_are_cut_at_paragraphs_and_sentences(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Head\n\n" + "Short. " * 400 + "\n\n" + "x" * 3000)
    passages = read_documents([tmp_path / "a.md"]).passages
    assert max(len(passage.text) for passage in passages) <= MAX_PASSAGE_CHARS
    assert "".join("".join(passage.text.split()) for passage in passages) == "".join(
        (tmp_path / "a.md").read_text().split()
    )

    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="it is empty"):
        read_documents([tmp_path / "empty.txt"])

    (tmp_path / "b").mkdir()
    (tmp_path / "b/a.md").write_text("Short.")
    names = [
        passage.id for passage in read_documents([tmp_path / "a.md", tmp_path / "b/a.md"]).passages
    ]
    assert names[-1] == "b/a.md#0" and len(set(names)) == len(names)


class Model:
    """Asks for the people of a town, and four questions that can't be taken."""

    section = RemoteModelSection(base_url="http://127.0.0.1:1", model="m")

    def __init__(self, *, fails: bool = False, after: int = 0) -> None:
        self.fails = fails
        self.after = after
        self.asked = list[str]()

    async def generate(self, messages: Any, **options: Any) -> Any:
        assert options["form"] is None

        self.asked.append(messages[1]["content"])
        if self.fails and len(self.asked) > self.after:
            raise RemoteModelError("nobody is there")

        passage = next(one for one in PASSAGES if one.text in self.asked[-1])
        people = passage.text.partition("It has ")[2].partition(" ")[0]
        pairs = [
            (f"How many people live in {passage.title}?", people),
            (f"What is known of {passage.title}?", "that it burnt down"),
            (f"Who is Ada in {passage.title}?", "Ada"),
            ("", people),
            ("x" * 2000 + "?", people),
            (f"The people of {passage.title}", people),
            (f"Since when, {passage.title}?", str(1900)),
            (f"Since when, {passage.title}?", "Ada"),
        ]
        listed = [{"question": question, "answer": answer} for question, answer in pairs]
        return SimpleNamespace(text=f"Here: {json.dumps({'questions': listed})}")


def test_a_models_questions_are_taken_where_their_answers_stand_in_the_passage() -> None:
    model: Any = Model()
    counts = COUNTS | {"per_passage": 8}
    found = asyncio.run(tasks_from_model(PASSAGES, model, **counts))
    for row in [*found.train, *found.held_out]:
        town = row["query"].removeprefix("How many people live in Town ").rstrip("?")
        assert row["answer"] == str(1000 + 7 * int(town)) and row["passage"] == f"p{town}"

    assert set(found.reasons) == {
        "an answer does not stand in the passage",
        "a question holds its answer",
        "a question or an answer is missing",
        "a question or an answer is too long",
        "a question has no question mark",
        "a question has two answers",
    }
    assert len(model.asked) <= len(PASSAGES)

    marks = {text.partition("<<<")[2].split("\n")[0] for text in model.asked}
    assert len(marks) == len(model.asked), "a passage can't know the mark that ends it"


def test_a_model_that_is_away_is_told_before_all_passages_are_asked() -> None:
    model: Any = Model(fails=True)
    with pytest.raises(AgentEvoError, match="the writer has answered nothing: nobody is there"):
        asyncio.run(tasks_from_model(PASSAGES, model, **COUNTS))
    assert len(model.asked) == 8
    few: Any = Model(fails=True)
    with pytest.raises(AgentEvoError, match="the writer has answered nothing"):
        asyncio.run(tasks_from_model(PASSAGES[:3], few, **COUNTS))


def test_a_model_that_goes_away_later_costs_the_questions_that_it_did_not_write() -> None:
    model: Any = Model(fails=True, after=16)
    found = asyncio.run(tasks_from_model(PASSAGES, model, **COUNTS | {"per_passage": 1}))
    assert 0 < len(found.train) + len(found.held_out) <= 16
    assert found.reasons == {"the model did not answer": len(model.asked) - 16}


@pytest.mark.slow
def test_the_folder_is_a_runs_tasks_and_its_search_tools_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "towns.jsonl"
    lines = [json.dumps({"id": p.id, "title": p.title, "text": p.text}) for p in PASSAGES]
    corpus.write_text("\n".join(lines) + "\n")
    out = tmp_path / "out"
    words = ["data", "make", str(corpus), "--out", str(out)]
    assert main([*words, "--train", "30", "--held-out", "5"]) == 0
    assert "30 to train on, 5 held out" in capsys.readouterr().out

    rows = [json.loads(line) for line in (out / "eval.jsonl").open()]
    assert all(is_held_out(row["content"]) for row in rows)

    search = {"name": "search", "options": {"corpus": str(out / "corpus.jsonl")}}
    recipe = tmp_path / "read.yaml"
    recipe.write_text(
        json.dumps(
            {
                "model": {"name": "tiny"},
                "agent": {"type": "tool_agent", "tools": [search]},
                "tasks": {"train": str(out / "train.jsonl"), "eval": str(out / "eval.jsonl")},
                "evaluation": {"tasks": 5},
            }
        )
    )
    assert load_config(recipe).tasks.train

    graded = tmp_path / "graded"
    few = ["sampling.max_new_tokens=4", "agent.max_turns=1", "model.tiny.tokenizer=byte"]
    few += ["model.tiny.context_length=8192", "model.tiny.hidden_size=16", "model.tiny.num_heads=2"]
    words_of_grade = ["data", "grade", str(out), str(recipe), "--out", str(graded), *few]
    assert main([*words_of_grade, "--attempts", "2"]) == 0
    assert len((graded / "reserve.jsonl").read_text().splitlines()) == 30
    assert (graded / "corpus.jsonl").read_text() == (out / "corpus.jsonl").read_text()
    assert main([*words, "--train", "30"]) == 2
    assert "exists already" in capsys.readouterr().err

    few = tmp_path / "few.txt"
    few.write_text("Nothing.")
    assert main(["data", "make", str(few), "--out", str(tmp_path / "no")]) == 2
    assert "no task to train on" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.soak
@pytest.mark.smollm2
@pytest.mark.timeout(1800)
def test_a_model_that_is_computed_here_writes_questions_in_the_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    fetch("smollm2-135m-instruct")
    for number, one in enumerate(PASSAGES[:6]):
        (tmp_path / f"{number}.txt").write_text(one.text)

    out = tmp_path / "out"
    words = ["data", "make", str(tmp_path), "--out", str(out), "--held-out", "0"]
    assert main([*words, "--writer", "smollm2-135m-instruct", "--per-passage", "1"]) == 0

    rows = [json.loads(line) for line in (out / "train.jsonl").open()]
    texts = {json.loads(line)["id"]: line for line in (out / "corpus.jsonl").open()}
    assert rows and all(row["answer"] in texts[row["passage"]] for row in rows)
    assert all(row["query"].endswith("?") for row in rows)

    account = json.loads((out / "made.json").read_text())
    assert len(rows) + sum(account["writer"].values()) <= 6
    assert "no JSON object with a list under `questions`" not in account["writer"]
    assert main([*words[:4], str(tmp_path / "no"), "--writer", "no-such-model"]) == 2
    assert "--writer: " in capsys.readouterr().err
