"""Other people's models, over real HTTP: they play by the agents that a policy plays by, their
attempts are counted, judged, kept and gone on with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import openai
import pytest
from remote_server import RemoteServer, chat, fails, gives

import agentevo
from agentevo.cli.main import main
from agentevo.config import tools as tool_config
from agentevo.config.agents import agents
from agentevo.errors import ConfigError
from agentevo.rewards.reward import reward, rewards
from agentevo.runs.evaluation.results import ResultsFolder
from agentevo.types import ImagePart, TextPart

TASKS = [
    {"id": "one", "query": "1 + 1", "answer": "2"},
    {"id": "two", "query": "2 + 3", "answer": "5"},
    {"id": "three", "query": "3 + 4", "answer": "8"},
]


def adds(body, handler):
    """Knows sums, and calls the tool `add` where it is told of one."""
    if body is None:
        return gives({"data": [{"id": "adder"}]})(body, handler)

    last = body["messages"][-1]
    if last["role"] == "tool":
        return gives(chat(last["content"], usage=(20, 2)))(body, handler)

    a, b = re.match(r"(\d+) \+ (\d+)", last["content"]).groups()
    if body.get("tools"):
        function = {"name": "add", "arguments": json.dumps({"a": int(a), "b": int(b)})}
        calls = [{"type": "function", "id": "x1", "function": function}]
        return gives(chat(None, tool_calls=calls, usage=(15, 8)))(body, handler)

    return gives(chat(str(int(a) + int(b)), usage=(10, 4)))(body, handler)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TASKS))
    return tmp_path


@pytest.fixture
def add_tool():
    @agentevo.tool("add")
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    yield
    tool_config.tools._items.pop("add")


def evaluated(*words, code=0):
    assert main(["eval", *words]) == code
    return words


def lines_of(out="out"):
    """In the order of the tasks: they end in any."""
    names = [row["id"] for row in TASKS]
    lines = map(json.loads, Path(out, "results.jsonl").read_text().splitlines())
    return sorted(lines, key=lambda line: (names.index(line["task"]), line["attempt"]))


@pytest.mark.slow
def test_a_server_is_asked_each_task_and_judged(folder, capsys):
    with RemoteServer(adds) as server:
        evaluated(server.base_url, "--tasks", "tasks.jsonl", "--out", "out", "rewards=[numeric]")
        asked = [body for body in server.received if body]

    summary = json.loads((folder / "out/summary.json").read_text())
    (model,) = summary["models"]
    assert (model["attempts"], model["failed"]) == (3, 0)
    assert model["pass_at"]["1"]["value"] == pytest.approx(2 / 3), "the third answer is not right"
    assert model["tokens"] == 4
    assert {(body["model"], body["temperature"]) for body in asked} == {("adder", 0.0)}
    assert [line["answer"] for line in lines_of()] == ["2", "5", "7"]
    assert "66.7%" in capsys.readouterr().out


def test_what_is_measured_is_said_before_it_is_played(folder, capsys, monkeypatch):
    async def stopped(*args, **options):
        raise ConfigError("stopped")

    monkeypatch.setattr("agentevo.runs.evaluation.evaluate.play", stopped)
    with RemoteServer(adds) as server:
        evaluated(
            server.base_url,
            "--tasks",
            "tasks.jsonl",
            "rewards=[numeric]",
            "--limit",
            "1",
            code=2,
        )

    told = capsys.readouterr()
    assert told.out.startswith("1 task, 1 attempt each, greedy, at most 512 tokens a turn")
    assert told.err.startswith("--tasks: 3 of 3 rows are used")


@pytest.mark.slow
def test_the_tool_agent_plays_with_its_calls(folder, add_tool):
    tools = ["agent.type=tool_agent", "agent.tools=[add]", "rewards=[{name: numeric}, tool_use]"]
    with RemoteServer(adds) as server:
        evaluated(server.base_url, "--tasks", "tasks.jsonl", "-k", "2", "--out", "out", *tools)
        first, second = [body for body in server.received if body][:2]

    assert {line["turns"] for line in lines_of()} == {2}
    assert {line["tokens"] for line in lines_of()} == {10}
    assert {line["parts"]["tool_use"] for line in lines_of()} == {1.0}
    assert first["temperature"] == 1.0, "several attempts are drawn"
    assert first["seed"] != second["seed"]

    kept = ResultsFolder(folder / "out").trajectories().values()
    one = next(t for t in kept if t.task_id == "one")
    assert [m.role for turn in one.turns for m in turn.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert all(not turn.completion_ids for turn in one.turns), "nobody knows its tokens"


@pytest.mark.slow
def test_a_client_at_the_gateway_gets_the_remote_model(folder):
    @agentevo.agent("by_client")
    def by_client(task):
        answer = openai.OpenAI().chat.completions.create(
            model="gpt-whatever", messages=[{"role": "user", "content": task.query}]
        )
        return float(answer.choices[0].message.content == task.answer)

    try:
        with RemoteServer(adds) as server:
            words = ["--tasks", "tasks.jsonl", "--out", "out", "agent.type=by_client"]
            evaluated(server.base_url, *words)
    finally:
        agents._items.pop("by_client")

    assert [line["reward"] for line in lines_of()] == [1.0, 1.0, 0.0]
    assert {(line["turns"], line["tokens"]) for line in lines_of()} == {(1, 4)}


@pytest.mark.slow
def test_failed_attempts_are_no_zeros_and_can_be_played_again(folder, capsys):
    with RemoteServer(adds) as server:
        models = f"remote_models.far={{base_url: '{server.base_url}', model: adder, max_tries: 1}}"
        words = ["far", models, "--tasks", "tasks.jsonl", "--out", "out", "rewards=[numeric]"]

        # the list of models, then one answer that is an error
        server.answers = [adds, fails(400, "no"), adds]
        evaluated(*words)
        failed = [line for line in lines_of() if line["status"] == "failed"]
        assert len(failed) == 1 and failed[0]["reward"] is None and "no" in failed[0]["error"]

        summary = json.loads((folder / "out/summary.json").read_text())["models"][0]
        assert (summary["failed"], summary["pass_at"]["1"]["tasks"]) == (1, 2)

        before = len(server.received)
        evaluated(*words, "--resume")
        assert len(server.received) == before + 1, "the list alone is asked for: all was played"

        evaluated(*words, "--retry-failed")
        assert len(server.received) == before + 3, "and now the one that had failed"

    assert json.loads((folder / "out/summary.json").read_text())["models"][0]["failed"] == 0


def test_all_failed_is_an_error_and_kept(folder, capsys):
    with RemoteServer(fails(400, "no credit")) as server:
        models = f"remote_models.far={{base_url: '{server.base_url}', model: adder, max_tries: 1}}"
        evaluated(
            "far", models, "--tasks", "tasks.jsonl", "--out", "out", "rewards=[numeric]", code=1
        )
    assert "error: far: 3 of 3 failed" in capsys.readouterr().err
    assert (folder / "out/summary.json").exists()


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on(folder):
    with RemoteServer(adds) as server:
        words = [f"{server.base_url}#adder", "--tasks", "tasks.jsonl", "-k", "2", "--out", "out"]
        evaluated(*words, "rewards=[numeric]")
        log = folder / "out/results.jsonl"
        log.write_bytes(log.read_bytes()[:-20])  # as a killed process leaves it
        server.received.clear()
        evaluated(*words, "rewards=[numeric]", "--resume")
        assert len([body for body in server.received if body]) == 2, "one task, both attempts"

    attempts = ResultsFolder(folder / "out").attempts().values()
    assert len(attempts) == 6


@pytest.mark.slow
def test_two_models_meet_the_same_tasks_with_the_same_seeds(folder, capsys):
    with RemoteServer(adds) as good, RemoteServer(gives(chat("9"))) as bad:
        bad.answers = [gives({"data": [{"id": "niner"}]}), gives(chat("9"))]
        words = [bad.base_url, "--against", good.base_url, "--tasks", "tasks.jsonl"]
        evaluated(*words, "-k", "2", "rewards=[numeric]", "--json")
        seeds = [sorted(body["seed"] for body in server.received if body) for server in (good, bad)]

    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 6

    summary = json.loads(capsys.readouterr().out)
    (difference,) = summary["differences"]
    assert difference["pass_at"]["1"]["value"] == pytest.approx(2 / 3)
    assert difference["pass_at"]["1"]["tasks"] == 3


@pytest.mark.slow
def test_kept_attempts_are_scored_again_without_playing(folder, capsys):
    with RemoteServer(adds) as server:
        evaluated(server.base_url, "--tasks", "tasks.jsonl", "--out", "out", "rewards=[numeric]")
        asked = len(server.received)
        words = ["rewards=[{name: length, max_length: 3, unit: tokens, margin: 1}]"]
        assert main(["eval", "out", "--rescore", *words, "--out", "again"]) == 0
        assert len(server.received) == asked

    assert [line["reward"] for line in lines_of("again")] == [-1.0] * 3, "4 tokens, by the server"
    assert [line["reward"] for line in lines_of()] == [1.0, 1.0, 0.0], "the first stay"
    assert main(["eval", "again", "--rescore", "rewards=[exact_match]"]) == 0
    assert "66.7%" in capsys.readouterr().out

    for wrong, why in (
        ([], "give rewards=[NAME]"),
        (["rewards=[returned]"], "which is not stored"),
        (["rewards=[math]", "--out", "again"], "already"),
    ):
        assert main(["eval", "out", "--rescore", *wrong]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.slow
def test_rewards_that_see_images_do_not_score_kept_attempts_without_them(folder, capsys):
    with RemoteServer(adds) as server:
        evaluated(server.base_url, "--tasks", "tasks.jsonl", "--out", "out", "rewards=[numeric]")

    log = folder / "out/trajectories.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    shown = msgspec.to_builtins([ImagePart("0" * 64), TextPart("1 + 2 = ?")])
    lines[0]["trajectory"]["remote_turns"][0]["messages"][0]["content"] = shown
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @reward("looks_at_images")
    def looks_at_images(completion, images):
        return float(len(images))

    try:
        assert main(["eval", "out", "--rescore", "rewards=[looks_at_images]"]) == 2
        assert "which the folder of an evaluation does not keep" in capsys.readouterr().err
    finally:
        rewards._items.pop("looks_at_images")
    assert main(["eval", "out", "--rescore", "rewards=[exact_match]"]) == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["{url}#other"], "serves no 'other': it has 'adder'"),
        (["http://127.0.0.1:9/v1#m"], "can't be reached"),
        (
            ["nothing-like-it"],
            "no recipe, run or model is called 'nothing-like-it': give a recipe (calculator, ",
        ),
        (["{url}", "--tasks", "nowhere.jsonl"], "does not exist"),
        (["{url}", "-k", "0"], "give 1 to"),
        (["{url}", "-k", "2", "--temperature", "0"], "all the same"),
        (["{url}", "--top-p", "2"], "sampling.top_p"),
        (["{url}", "--against", "{url}"], "already in the evaluation"),
        (["{url}", "--resume"], "--out FOLDER"),
        (["{url}", "rewards=[]"], "nothing judges the task"),
        (["{url}", "rewards=[rlpr]"], "needs the policy's engine"),
        (
            ["{url}", "agents={a: {}, b: {}}", "agent.type=command", "agent.command=[sh]"],
            "several agents at once",
        ),
    ],
)
def test_what_can_not_be_measured_is_refused_before_anything_is_made(folder, capsys, words, why):
    before = set(folder.iterdir())
    with RemoteServer(adds) as server:
        words = [word.replace("{url}", server.base_url) for word in words]
        more = [] if "--tasks" in words else ["--tasks", "tasks.jsonl"]
        out = [] if "--resume" in words else ["--out", "out"]
        is_judged = any(word.startswith("rewards=") for word in words)
        rewards = [] if is_judged else ["rewards=[numeric]"]
        assert main(["eval", *words, *more, *out, *rewards]) == 2

    assert why in capsys.readouterr().err
    assert set(folder.iterdir()) == before


@pytest.mark.slow
def test_a_program_measures_what_the_command_does(folder):
    (folder / "leveled.jsonl").write_text(
        "".join(
            json.dumps(row | {"level": {"of": number % 2}}) + "\n"
            for number, row in enumerate(TASKS)
        )
    )
    with RemoteServer(adds) as server:
        target = f"{server.url}#adder"
        words = ["eval", target, "--tasks", "leveled.jsonl", "rewards=[numeric]"]
        assert main([*words, "--by", "level.of", "--out", "told"]) == 0

        found = agentevo.evaluate(
            target, tasks="leveled.jsonl", rewards=["numeric"], by="level.of", out="out"
        )
        told = json.loads(Path("told/summary.json").read_text())
        assert json.loads(Path("out/summary.json").read_text()) == found

        for one in (found, told):
            one["models"][0].pop("seconds")
        assert found == told

        by_level = found["models"][0]["by_part"]["level.of"]
        assert {name: own["pass_at"]["1"]["value"] for name, own in by_level.items()} == {
            "0": 0.5,
            "1": 1.0,
        }

        again = agentevo.evaluate(target, tasks=TASKS, rewards=[adds_right], limit=2)
        assert again["models"][0]["pass_at"]["1"]["value"] == 1.0 and again["tasks"] == ["given"]
        with pytest.raises(ConfigError, match=r"--by size: no task has that key: they have level"):
            agentevo.evaluate(target, tasks="leveled.jsonl", rewards=["numeric"], by=["size"])

    with pytest.raises(ConfigError, match="tasks is 5: give a file"):
        agentevo.evaluate("coins", tasks=5)
    with pytest.raises(ConfigError, match="give a recipe, the folder of a run"):
        agentevo.evaluate(None)


def adds_right(completion, answer):
    return float(completion == answer)
