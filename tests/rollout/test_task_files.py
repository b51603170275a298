"""Tasks in other systems' forms: read as they are, written and read again without a loss, and what
can't be said is named with its line."""

import json
import re
from datetime import date
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.agents.task_agent import check_agent_names
from agentevo.agents.tools.corpus import read_corpus
from agentevo.cli.main import main
from agentevo.config.tasks import TaskFields
from agentevo.data import RowError
from agentevo.data.task_forms import plain_row, row_of
from agentevo.errors import ConfigError
from agentevo.rewards import make_reward
from agentevo.rewards.reward import call_function, reward_config
from agentevo.rollout.given_tasks import task_of
from agentevo.rollout.task_files import write_rows, write_split
from agentevo.types import QUERY_MESSAGES, Message, Task, Trajectory, Turn

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "18"},
    "extra_info": {"index": 3, "split": "train"},
    "agent_name": "tool_agent",
}


def lines(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
        encoding="utf-8",
    )
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_of_other_systems_are_tasks_as_they_are():
    verl = task_of(VERL, TaskFields())
    assert (verl.query, verl.answer, verl.scorer) == ("q", "18", None)
    assert verl.metadata[QUERY_MESSAGES] == VERL["prompt"]
    assert (verl.metadata["agent_name"], verl.metadata["data_source"]) == (
        "tool_agent",
        "openai/gsm8k",
    )

    searched = VERL | {"reward_model": {"style": "rule", "ground_truth": {"target": ["a", "b"]}}}
    assert task_of(searched, TaskFields()).answer == ["a", "b"]

    search_r1 = VERL | {"question": "raw", "query": "raw", "answer": "raw", "ground_truth": "raw"}
    assert task_of(search_r1, TaskFields()).query == "q"
    assert task_of(search_r1, TaskFields()).answer == "18"
    assert task_of(search_r1, TaskFields()).metadata["question"] == "raw"

    both = {"task": "book a flight", "query": "raw"}
    assert task_of(both, TaskFields(), "art").query == "book a flight"

    art = task_of({"task": "book a flight", "difficulty": 2}, TaskFields())
    assert (art.query, art.metadata) == ("book a flight", {"difficulty": 2})

    agentrl = {"id": 7, "query": "q", "scorer": "math", "answer": "4", "answer_schema": "boxed"}
    task = task_of(agentrl, TaskFields())
    assert (task.id, task.scorer, task.metadata) == ("7", "math", {"answer_schema": "boxed"})

    named = task_of({"task": "t", "ask": "q"}, TaskFields(query="ask"))
    assert (named.query, named.metadata) == ("q", {"task": "t"})
    for several in (["math", "format"], " math , format"):
        assert task_of({"query": "q", "scorer": several}, TaskFields()).scorer == "math,format"

    null = task_of({"query": None, "question": "q", "answer": None, "solution": 4}, TaskFields())
    assert (null.query, null.answer) == ("q", 4)
    assert task_of(row_of(null, "agentevo"), TaskFields()).answer == 4


def test_an_answer_is_what_the_store_holds():
    """Parquet has dates and decimals, which the store has as texts."""
    values = [date(2020, 1, 2), Decimal("1.50"), (1, 2)]
    task = task_of({"query": "q", "answer": values}, TaskFields())
    assert task.answer == ["2020-01-02", "1.50", [1, 2]]
    assert msgspec.json.decode(msgspec.json.encode(task), type=Task) == task


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"query": "q", "answer_schema": "no tag"}, "answer_schema: 'no tag' is not a place"),
        ({"query": "q", "answer_schema": 3}, "answer_schema: '3' is not a place"),
        ({"query": "q", "answer_schema": "regex:("}, "not a regular expression"),
        ({"query": "q", "scorer": ","}, "the scorer is ','"),
        ({"query": "q", "scorer": "math,"}, "the scorer is 'math,'"),
        ({"query": "q", "scorer": "math, math"}, "a list of different ones"),
        ({"query": "q", "agent_name": ["x"]}, "the agent_name is ['x']"),
        ({"query": "q", "agent_name": " "}, "the agent_name is ' '"),
        ({"query": "q", "scorer": [3]}, "the scorer is [3]"),
        ({"query": "q", "scorer": []}, "the scorer is []"),
    ],
)
def test_what_no_run_could_follow_is_a_bad_row(row, problem):
    with pytest.raises(RowError, match=re.escape(problem)):
        task_of(row, TaskFields())


@pytest.mark.parametrize(
    ("form", "problem"), [("verl", "no prompt"), ("art", "no task"), ("agentrl", "no query")]
)
def test_a_row_of_another_form_says_what_it_lacks(form, problem):
    with pytest.raises(RowError, match=problem):
        plain_row({"text": "q"}, form)
    with pytest.raises(RowError, match="no reward_model"):
        plain_row({"prompt": []}, "verl")


VALUES = st.text(max_size=5) | st.integers(-9, 9) | st.lists(st.text(max_size=3), min_size=1)
TASKS = st.builds(
    Task,
    id=st.text("abc-7", min_size=1, max_size=5),
    query=st.text(min_size=1, max_size=9).filter(str.strip),
    answer=st.none() | st.text(max_size=5) | st.lists(st.text(max_size=3), min_size=1),
    scorer=st.sampled_from([None, "math", "em,f1"]),
    metadata=st.dictionaries(st.sampled_from(["level", "agent_name", "data_source"]), VALUES).map(
        lambda given: {key: str(value) or "x" for key, value in given.items()}
    ),
)


@given(TASKS, st.sampled_from(["agentevo", "agentrl", "verl"]))
def test_a_task_that_is_written_and_read_again_is_the_same(task, form):
    if form == "agentrl" and isinstance(task.answer, list):
        with pytest.raises(RowError, match=r"a list of \d+ right answers"):
            row_of(task, form)
        return

    row = json.loads(json.dumps(row_of(task, form)))
    again = task_of(row, TaskFields())
    assert (again.id, again.query, again.scorer) == (task.id, task.query, task.scorer)
    assert again.answer == task.answer

    for key, value in task.metadata.items():
        assert again.metadata[key] == value


@pytest.mark.parametrize(
    ("form", "key"), [("verl", "prompt"), ("agentevo", "answer"), ("agentrl", "query")]
)
def test_metadata_never_takes_the_place_of_a_column(form, key):
    with pytest.raises(RowError, match=f"has the key {key} in its metadata"):
        row_of(Task(id="a", query="q", answer="1", metadata={key: "other"}), form)


def test_convert_names_each_bad_row_with_its_line(tmp_path, capsys):
    source = lines(
        tmp_path / "in.jsonl",
        {"id": "a", "query": "1?", "answer": "1"},
        "not json",
        {"id": "a", "query": "again"},
        {
            "id": "c",
            "query": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        },
        {"id": "d", "query": "2?", "answer_schema": "boxed", "scorer": "math"},
    )
    out = tmp_path / "out.jsonl"
    assert (
        main(["data", "convert", str(source), str(out), "--from", "agentrl", "--to", "agentrl"])
        == 0
    )
    assert read(out) == [
        {"query": "1?", "id": "a", "answer": "1", "scorer": "agentcpm", "answer_schema": "answer"},
        {"query": "2?", "id": "d", "scorer": "math", "answer_schema": "boxed"},
    ]

    bad = read(tmp_path / "out.jsonl.bad_rows.jsonl")
    assert [(row["where"], row["reason"]) for row in bad] == [
        (f"{source}:2", "not_json"),
        (f"{source}:3", "duplicate_task"),
        (f"{source}:4", "unknown_form"),
    ]

    told = capsys.readouterr()
    assert "2 tasks written" in told.out

    lines(source, {"id": "a", "ask": "1?"})
    assert main(["data", "convert", str(source), str(out)]) == 2
    assert "rename the column that has it to query" in capsys.readouterr().err


def test_verls_parquet_there_and_back(tmp_path):
    pytest.importorskip("pyarrow")
    rows = [{"id": f"t{n}", "query": f"{n}?", "answer": str(n), "level": n} for n in range(3)]
    source = lines(tmp_path / "in.jsonl", *rows)
    table = tmp_path / "verl.parquet"
    back = tmp_path / "back.jsonl"

    assert main(["data", "convert", str(source), str(table), "--to", "verl"]) == 0
    assert main(["data", "convert", str(table), str(back)]) == 0
    assert [{key: row[key] for key in rows[0]} for row in read(back)] == rows

    with pytest.raises(ConfigError, match=r"one type.*write JSONL"):
        write_rows([{"a": 1}, {"a": "x"}], tmp_path / "mixed.parquet")

    assert not (tmp_path / "mixed.parquet").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["convert", "IN", "OUT.jsonl", "--from", "trl"], "there are auto, agentevo"),
        (["convert", "IN", "OUT.jsonl", "--to", "art"], "--to art: there are agentevo, agentrl"),
        (["convert", "IN", "IN"], "is also the input"),
        (["convert", "IN", "OUT.txt"], "give a file named .jsonl, .jsonl.gz or .parquet"),
        (["convert", "IN", "OUT.jsonl", "--from", "art"], "nothing was written"),
        (["convert", "GONE.jsonl", "OUT.jsonl"], "does not exist"),
        (["prepare", "gsm9k", "FOLDER"], "there are gsm8k, nq, hotpotqa,"),
        (["prepare", "gsm8k", "FOLDER"], "needs --from SOURCE"),
        (["prepare", "gsm8k", "FOLDER", "trainer.steps=1"], "reads no recipe"),
        (["prepare", "coins", "FOLDER", "--from", "IN"], "leave out --from"),
        (["prepare", "coins", "FOLDER", "trainer.stps=1"], "did you mean trainer.steps?"),
        (["prepare", "coins", "IN"], "is a file"),
        (["prepare", "coins", "FOLDER", "cold_start.episodes=0"], "such as --demonstrations 200"),
        (["prepare", "nq", "FOLDER"], "needs --from SOURCE"),
        (["prepare", "reasoning_gym/chain_sum", "FOLDER", "--from", "IN"], "leave out --from"),
        (["prepare", "gsm8k", "FOLDER", "--from", "IN"], "nothing was written: too few tasks"),
    ],
)
def test_what_can_not_be_done_writes_nothing(tmp_path, capsys, monkeypatch, words, problem):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "IN.jsonl", {"query": "q"})
    words = ["IN.jsonl" if word == "IN" else word for word in words]
    assert main(["data", *words]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["IN.jsonl"]


def test_gsm8k_becomes_task_files(tmp_path, capsys):
    source = lines(
        tmp_path / "gsm8k.jsonl",
        *({"question": f"{n}?", "answer": f"so <<1+1=2>>\n#### 1,0{n}0"} for n in range(9)),
        {"question": "x", "answer": "no mark"},
    )
    out = tmp_path / "gsm8k"
    words = ["data", "prepare", "gsm8k", str(out), "--from", str(source), "--eval-share", "0.3"]
    assert main([*words, "--agent", "tool"]) == 2
    assert (
        "no agent plays tasks of that name: did you mean 'tool_agent'?" in capsys.readouterr().err
    )
    assert not out.exists()
    assert main([*words, "--agent", "tool_agent"]) == 0

    train = read(out / "train.jsonl")
    held_out = read(out / "eval.jsonl")
    assert [row["id"] for row in train + held_out] == [f"gsm8k-{n}" for n in range(9)]
    assert len(held_out) == 3

    task = task_of(train[4], TaskFields())
    assert (task.query, task.answer, task.scorer) == ("4?", "1040", "numeric")
    check_agent_names([task], "tool_agent")
    assert task.metadata["agent_name"] == "tool_agent" and "<<1+1=2>>" in task.metadata["solution"]
    assert read(out / "train.jsonl.bad_rows.jsonl")[0]["where"] == f"{source}:10"
    assert "9 tasks (3 of them held out" in capsys.readouterr().out


NQ_DOCUMENT = "<H1> Perth </H1> <P> Perth has two million people . </P>"
NQ_ROWS = {
    "nq_open": [
        {"question": "who wrote it", "answer": ["Ann Lee", "Lee"]},
        {"question": "where is it", "answer": ["Perth"]},
        {"question": "what is it", "answer": []},
    ],
    "flashrag": [
        {"id": "train_0", "question": "who wrote it", "golden_answers": ["Ann Lee", "Lee"]},
        {"id": "train_1", "question": "where is it", "golden_answers": ["Perth", "Perth"]},
        {"id": "train_2", "question": "", "golden_answers": ["x"]},
    ],
    "dpr": [
        {"question": "who wrote it", "answers": ["Ann Lee", "Lee"],
         "positive_ctxs": [{"title": "Ann", "text": "Ann Lee wrote it."}]},
        {"question": "where is it", "answers": ["Perth"],
         "positive_ctxs": [{"title": "Perth", "text": "A city."}],
         "negative_ctxs": [],
         "hard_negative_ctxs": [{"title": "Ann", "text": "Ann Lee wrote it."}]},
        {"question": "where is it", "answers": ["Perth"], "positive_ctxs": [{"title": "Perth"}]},
    ],
    "simplified": [
        {"question_text": "who wrote it", "document_text": "Ann Lee or Lee",
         "annotations": [{"yes_no_answer": "NONE", "short_answers": [
             {"start_token": 0, "end_token": 2}, {"start_token": 3, "end_token": 4}]}]},
        {"question_text": "where is it", "document_text": NQ_DOCUMENT,
         "annotations": [{"short_answers": [{"start_token": 1, "end_token": 2}]}]},
        {"question_text": "is it big", "document_text": NQ_DOCUMENT,
         "annotations": [{"yes_no_answer": "NONE", "short_answers": []}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", NQ_ROWS)
def test_natural_questions_are_read_in_each_published_form(form, tmp_path, capsys):
    source = lines(tmp_path / "nq.jsonl", *NQ_ROWS[form])
    out = tmp_path / "nq"
    words = ["data", "prepare", "nq", str(out), "--from", str(source), "--eval-share", "0.5"]
    assert main([*words, "--agent", "tool_agent"]) == 0
    (first,), (second,) = read(out / "train.jsonl"), read(out / "eval.jsonl")
    assert (first["query"], first["answer"]) == ("who wrote it", ["Ann Lee", "Lee"])
    assert (second["query"], second["answer"]) == ("where is it", "Perth")
    task = task_of(first, TaskFields())
    assert (task.id, task.scorer, task.metadata["data_source"]) == ("nq-0", "em", "nq")

    (bad,) = read(out / "train.jsonl.bad_rows.jsonl")
    assert bad["where"] == f"{source}:3"
    assert (out / "corpus.jsonl").exists() == (form == "dpr")
    if form == "dpr":
        titles = [row["title"] for row in read(out / "corpus.jsonl")]
        assert titles == ["Ann", "Perth"], "each passage once"
        assert "2 passages written to" in capsys.readouterr().err


HOTPOT = [
    {"_id": f"5a{n}", "question": f"{n}?", "answer": "yes", "type": "bridge", "level": "hard",
     "supporting_facts": [["Perth", 0], ["Perth", 1], ["Lima", 0]],
     "context": [["Perth", ["Perth is ", "a city."]], ["Lima", [f"Lima {n}."]]]}
    for n in range(3)
]  # fmt: skip


def of_the_hub(row):
    facts = list(zip(*row["supporting_facts"], strict=True))
    context = list(zip(*row["context"], strict=True))
    return row | {
        "id": row["_id"],
        "supporting_facts": {"title": list(facts[0]), "sent_id": list(facts[1])},
        "context": {"title": list(context[0]), "sentences": list(context[1])},
    }


@pytest.mark.parametrize("form", ["json", "hub.jsonl", "hub.parquet"])
def test_hotpotqa_becomes_tasks_and_a_corpus(form, tmp_path):
    source = tmp_path / f"hotpot.{form.rpartition('.')[2]}"
    if form == "json":
        source.write_text(json.dumps(HOTPOT), encoding="utf-8")
    elif form == "hub.jsonl":
        lines(source, *map(of_the_hub, HOTPOT))
    else:
        pytest.importorskip("pyarrow")
        write_rows(list(map(of_the_hub, HOTPOT)), source)

    out = tmp_path / "out"
    assert main(["data", "prepare", "hotpotqa", str(out), "--from", str(source)]) == 0
    rows = read(out / "train.jsonl")
    assert [row["query"] for row in rows] == ["0?", "1?", "2?"]
    metadata = task_of(rows[1], TaskFields()).metadata
    assert metadata == {
        "data_source": "hotpotqa",
        "type": "bridge",
        "level": "hard",
        "supporting_titles": ["Perth", "Lima"],
    }
    corpus = read(out / "corpus.jsonl")
    assert [row["text"] for row in corpus] == ["Perth is a city.", "Lima 0.", "Lima 1.", "Lima 2."]
    assert len(read_corpus(str(out / "corpus.jsonl"))) == 4


def test_a_split_leaves_something_to_train_on_and_no_older_one(tmp_path):
    tasks = [Task(id=str(n), query="q") for n in range(2)]
    assert write_split(tasks, 0.9, tmp_path) == 1
    assert [row["id"] for row in read(tmp_path / "train.jsonl")] == ["0"]
    assert [row["id"] for row in read(tmp_path / "eval.jsonl")] == ["1"]
    assert write_split(tasks, 0.0, tmp_path) == 0
    assert len(read(tmp_path / "train.jsonl")) == 2
    assert not (tmp_path / "eval.jsonl").exists()


def test_a_reasoning_gym_set_is_judged_by_its_own_score(tmp_path):
    pytest.importorskip("reasoning_gym")
    out = tmp_path / "sums"
    assert main(["data", "prepare", "reasoning_gym/chain_sum", str(out), "--count", "8"]) == 0

    rows = read(out / "train.jsonl")
    assert len(rows) == 7 and len(read(out / "eval.jsonl")) == 1

    task = task_of(rows[0], TaskFields())
    function = make_reward(reward_config("reasoning_gym")(name="reasoning_gym"))

    def score(text, task=task):
        turn = Turn(
            index=0,
            prompt_ids=[1],
            completion_ids=[2],
            logprobs=[-1.0],
            versions=[0],
            finish_reason="stop",
            messages=[Message("assistant", text)],
        )
        attempt = Trajectory(id="a", task_id="t", group_id="g", turns=[turn])
        return call_function(function, attempt, task, {}, {})()

    assert score(f"<answer>{task.answer}</answer>") == 1.0
    assert score("<answer>no number</answer>") < 1.0
    with pytest.raises(ValueError, match="not from reasoning-gym"):
        score("4", Task(id="t", query="q"))

    assert main(["data", "prepare", "reasoning_gym/chain_sums", str(out)]) == 2


def test_the_solvers_play_is_a_file_of_conversations(tmp_path, capsys):
    words = ["data", "prepare", "coins", str(tmp_path), "--demonstrations", "5"]
    assert main(words) == 0

    rows = read(tmp_path / "demonstrations.jsonl")
    assert len(rows) == 5
    assert {message["role"] for row in rows for message in row["messages"]} >= {
        "user",
        "assistant",
    }
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert "5 conversations written" in capsys.readouterr().out
