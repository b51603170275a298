"""Tasks out of files: every row is a task or is accounted for, and every process reads the same."""

import asyncio
import json

import pytest

from agentevo.agents.named_texts import Texts
from agentevo.agents.single_turn import SingleTurnAgent
from agentevo.config import build_config
from agentevo.config.agents import CodeAgentSection, SingleTurnSection
from agentevo.config.tasks import TaskFields, TasksSection
from agentevo.data import RowError
from agentevo.data.messages import messages_of
from agentevo.errors import ConfigError
from agentevo.rollout.given_tasks import check_and_report, check_same_tasks, read_tasks, task_of
from agentevo.rollout.task_source import TaskSource
from agentevo.types import Message


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count, first=0):
    return [{"question": f"{n}?", "answer": n, "level": n % 2} for n in range(first, first + count)]


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        (
            {"id": 7, "query": "q", "answer": ["a", "b"], "scorer": "numeric", "x": 1},
            {},
            ("7", "q", ["a", "b"], "numeric", {"x": 1}),
        ),
        ({"task_id": "t", "problem": "q", "solution": 3}, {}, ("t", "q", 3, None, {})),
        (
            {"id": "t", "query": "no", "ask": "q", "gold": "g"},
            {"query": "ask", "answer": "gold"},
            ("t", "q", "g", None, {"query": "no"}),
        ),
        (
            {"id": "t", "prompt": [{"role": "user", "content": "q"}]},
            {},
            ("t", "q", None, None, {"query_messages": [{"role": "user", "content": "q"}]}),
        ),
    ],
)
def test_a_row_is_a_task(row, fields, expected):
    task = task_of(row, TaskFields(**fields))
    assert (task.id, task.query, task.answer, task.scorer, task.metadata) == expected


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        ([1], {}, "a list: a task is an object"),
        ({"text": "q"}, {}, "no query: it has no key one of query, question, prompt"),
        ({"query": "q"}, {"answer": "gold"}, "no answer: it has no key gold"),
        ({"query": "  "}, {}, "the query is '  '"),
        ({"query": 3}, {}, "the query is 3"),
        ({"query": [{"content": "q"}]}, {}, "no chat messages (message 1 has the role None"),
        ({"query": [{"role": "assistant", "content": "q"}]}, {}, "must end with a message of the"),
        ({"query": "q", "scorer": 3}, {}, "the scorer is 3"),
        ({"query": "q", "id": [1]}, {}, "the id is [1]"),
    ],
)
def test_a_row_that_is_no_task_says_why(row, fields, expected):
    with pytest.raises(RowError) as caught:
        task_of(row, TaskFields(**fields))
    assert expected in str(caught.value)


class Asked:
    """A policy that remembers what it was asked."""

    texts = Texts()

    async def generate(self, messages):
        self.messages = messages


def asked(row):
    policy = Asked()
    agent = SingleTurnAgent(SingleTurnSection(type="single_turn"))
    asyncio.run(agent.run(task_of(row, TaskFields()), policy))
    return policy.messages


def test_a_rows_own_columns_are_never_the_query():
    told = [{"role": "user", "content": "What is 2 + 4?"}, {"role": "assistant", "content": "6"}]
    row = {"prompt": "What is 2 + 4?", "answer": "6", "messages": told}
    assert asked(row) == [Message("user", "What is 2 + 4?")]
    assert task_of(row, TaskFields()).metadata == {"messages": told}
    with pytest.raises(RowError, match="query_messages is reserved"):
        task_of({"query": "q", "query_messages": told}, TaskFields())


def test_a_query_may_be_a_chat_in_openais_form():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    assert task_of({"query": chat}, TaskFields()).query == "Add."
    assert asked({"query": chat, "messages": []}) == messages_of(chat)


@pytest.mark.parametrize("key", ["query", "answer", "id", "scorer", "other", "\ud800"])
def test_half_of_a_surrogate_pair_is_a_bad_row(tmp_path, key):
    bad = {"query": "q"} | {key: "\ud800"}
    given = read_tasks(TasksSection(train=lines(tmp_path / "train.jsonl", *rows(2), bad)))
    assert given.digest and given.reports[0].counts() == {"not_utf8": 1}


def test_a_row_without_a_name_is_named_by_its_content():
    named = [task_of(row, TaskFields()).id for row in rows(3)]
    assert len(set(named)) == 3
    assert task_of({"answer": 0, "level": 0, "question": "0?"}, TaskFields()).id == named[0]


def test_every_row_is_used_or_accounted_for_and_none_is_in_both_halves(tmp_path):
    train = tmp_path / "train.jsonl"
    lines(train, *rows(5), {"bad": 1}, rows(1)[0])
    train.write_text(train.read_text() + "not json\n")

    held_out = lines(tmp_path / "eval.jsonl", *rows(3, first=4))
    given = read_tasks(TasksSection(train=str(train), eval=held_out))
    assert [len(given.train), len(given.held_out)] == [5, 2]
    assert [report.counts() for report in given.reports] == [
        {"unknown_form": 1, "duplicate_task": 1, "not_json": 1},
        {"duplicate_task": 1},
    ]
    assert not {task.id for task in given.train} & {task.id for task in given.held_out}

    with pytest.raises(ConfigError, match="allow_bad_rows is false"):
        read_tasks(TasksSection(train=str(train), allow_bad_rows=False))
    with pytest.raises(ConfigError, match=r"tasks\.train: no row is a task"):
        read_tasks(TasksSection(train=lines(tmp_path / "bad.jsonl", {"bad": 1})))


@pytest.mark.slow
def test_files_that_the_code_agent_could_not_be_given_are_a_bad_row(tmp_path):
    cells = [{"a/b.txt": "1"}, {"../x": ""}, ["a"], {"large": "x" * (9 * 2**20)}]
    path = lines(
        tmp_path / "t.jsonl", *[{"query": f"{n}?", "files": c} for n, c in enumerate(cells)]
    )
    section = TasksSection(train=path)
    given = read_tasks(section, CodeAgentSection())
    assert [task.query for task in given.train] == ["0?"]
    assert given.reports[0].counts() == {"unknown_form": 3}
    assert "'../x' is not relative to a folder" in given.reports[0].bad[0].detail
    assert len(read_tasks(section).train) == 4, "to others it is a column like any"


def config_of(folder, train, **sections):
    tree = {"tasks": train, "rewards": ["numeric"], "run": {"dir": str(folder)}, **sections}
    return build_config(tree)


def test_a_source_goes_round_the_files_tasks(tmp_path):
    train = lines(tmp_path / "train.jsonl", *rows(10))
    config = config_of(tmp_path / "run", train, trainer={"groups_per_step": 4})
    assert config.agent.type == "single_turn"

    source = TaskSource(config, None)
    other = TaskSource(config, None)
    assert len(source.held_out()) == 2

    for step in range(1, 5):
        assert source.train(step) == other.train(step)
        assert not set(map(id, source.train(step))) & set(map(id, source.held_out()))

    queued = source.tasks_to_queue(4)
    assert [source.as_agent_task(task).query for task in queued] == [
        task.query for task in source.train(4)
    ]


def test_a_run_remembers_its_tasks(tmp_path):
    train = lines(tmp_path / "train.jsonl", *rows(10), {"bad": 1})
    config = config_of(tmp_path / "run", train)
    (tmp_path / "run").mkdir()
    notes: list[str] = []
    check_and_report(config, read_tasks(config.tasks), notes.append)

    assert any("1 left out" in note for note in notes)
    assert len((tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()) == 1

    check_same_tasks(config, read_tasks(config.tasks))
    lines(tmp_path / "train.jsonl", *rows(9))
    with pytest.raises(ConfigError, match=r"began with 10 tasks .* they are others now"):
        check_same_tasks(config, read_tasks(config.tasks))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"environment": {"type": "coins"}}, "leave out either `tasks` or `environment`"),
        ({"agent": {"type": "environment"}}, "set agent.type=single_turn"),
    ],
)
def test_what_can_not_be_played_together_is_refused(tmp_path, sections, expected):
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, lines(tmp_path / "train.jsonl", *rows(3)), **sections)
    assert expected in str(caught.value)


def test_an_agent_of_your_own_needs_something_to_play():
    with pytest.raises(ConfigError, match=r"tasks.train: missing; agent.type=single_turn needs"):
        build_config({"agent": {"type": "single_turn"}})


@pytest.mark.parametrize(
    ("key", "value"), [("anwser", "4"), ("answer", None), ("answer", [])], ids=str
)
def test_rows_without_an_answer_among_others_are_named(key, value, tmp_path):
    source = lines(tmp_path / "a.jsonl", *rows(3), {"question": "2 + 2?", key: value})
    (report,) = read_tasks(TasksSection(train=[source])).reports
    assert report.lines()[1:] == [
        f"tasks.train: 1 of 4 rows have no answer, while the others have one: {source}:4"
    ]


def test_rows_that_all_lack_an_answer_are_not_remarked_upon(tmp_path):
    source = lines(tmp_path / "a.jsonl", {"question": "1?"}, {"question": "2?"})
    (report,) = read_tasks(TasksSection(train=[source])).reports
    assert len(report.lines()) == 1
