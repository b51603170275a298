"""`agentevo data make`: a folder that appears whole, and words that are refused before a call."""

from __future__ import annotations

import json
import re

import pytest
from remote_server import RemoteServer, chat, gives

from agentevo.cli.main import main
from agentevo_evolve.task_making.files import made_rows

RECIPE = """
tasks: x.jsonl
agent: {type: tool_agent, tools: [{name: booking, options: {rooms: 9}}]}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.mark.slow
def test_a_folder_of_tasks_is_made_whole_and_made_again_nowhere(tmp_path, recipe, capsys):
    out = tmp_path / "hotel"
    words = ["data", "make", "--out", str(out), "--train", "12", "--held-out", "4"]
    more = ["--worlds", "8", "--demonstrations", "5", "--language", "de", recipe]
    assert main([*words, *more]) == 0

    told = capsys.readouterr().out
    assert "12 to train on, 4 held out" in told

    files = sorted(path.name for path in out.iterdir())
    assert files == ["demonstrations.jsonl", "eval.jsonl", "made.json", "train.jsonl"]

    rows = made_rows([str(out / "train.jsonl")])
    assert all(row["query"].startswith("Deine Aufgabe: ") for row in rows)
    assert len((out / "demonstrations.jsonl").read_text().splitlines()) == 5
    assert json.loads((out / "made.json").read_text())["train"] == 12
    assert main([*words, *more]) == 2
    assert "exists already" in capsys.readouterr().err

    harder = tmp_path / "harder"
    more = ["--worlds", "8", "--harder-than", str(out / "train.jsonl"), recipe]
    words = ["data", "make", "--out", str(harder), "--train", "3", "--held-out", "0"]
    assert main([*words, *more]) == 0
    assert all(row["variant_of"] for row in made_rows([str(harder / "train.jsonl")]))


@pytest.mark.slow
def test_a_model_proposes_tasks_and_walks_make_the_others(tmp_path, recipe, capsys):
    def answer(body, handler):
        prompts.append(body["messages"])
        for room in re.findall(r"room (\d+) for", body["messages"][-1]["content"]):
            call = {"tool": "book", "arguments": {"room": int(room), "guest": "Zoe", "nights": 2}}
            text = f"Zoe stays in room {room}, 2 nights."
            tasks = [{"task": text, "difficulty": 3, "calls": [call]}]
            gives(chat(f"Here: {json.dumps({'tasks': tasks})}"))(body, handler)
            return
        gives(chat("I can't."))(body, handler)

    prompts = []
    out = tmp_path / "hotel"
    words = ["data", "make", "--out", str(out), "--train", "6", "--held-out", "2", recipe]
    with RemoteServer(answer) as server:
        assert main([*words, "--writer", server.base_url, "--write-scenarios"]) == 0

    told = capsys.readouterr().out
    rows = made_rows([str(out / "train.jsonl"), str(out / "eval.jsonl")])
    written = [row for row in rows if row.get("written")]
    account = json.loads((out / "made.json").read_text())
    assert 0 < len(written) == account["written"]["tasks"] < 8 == len(rows)
    assert f"{len(written)} by the writer ({account['written']['prompts']} prompts" in told
    assert f"{8 - len(written)} from walks" in told
    assert all(row["query"].startswith("Zoe stays") and row["difficulty"] == 3 for row in written)

    num_reworded = 8 - len(written)  # each gets two prompts, none is taken
    assert len(prompts) == account["written"]["prompts"] + 2 * num_reworded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--difficulty", "9"], "--difficulty"),
        (["--difficulty", "x-²"], "--difficulty"),
        (["--language", "tlh"], "--language tlh: there are"),
        (["--persona", "angry"], "--persona angry: there are"),
        (["--kind", "x"], "--kind x"),
        (["--value", "city={a: 1}"], "--value city"),
        (["--harder-than", "RECIPE_DIR/other.jsonl"], "`agentevo data make` did not make"),
        (["--writer", "nowhere"], "--writer"),
        (["--write-scenarios"], "--write-scenarios needs a model that writes"),
        (
            ["--write-scenarios", "--writer", "http://127.0.0.1:9/v1", "--harder-than", "x.jsonl"],
            "leave it out",
        ),
    ],
)
def test_wrong_words_are_refused_and_nothing_is_written(tmp_path, recipe, capsys, words, message):
    (tmp_path / "other.jsonl").write_text('{"query": "q"}\n')
    words = [word.replace("RECIPE_DIR", str(tmp_path)) for word in words]
    out = tmp_path / "made"
    assert main(["data", "make", "--out", str(out), *words, recipe]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_server_that_is_away_is_told_and_nothing_is_written(tmp_path, capsys):
    pytest.importorskip("mcp")
    out = tmp_path / "made"
    assert main(["data", "make", "--out", str(out), "http://127.0.0.1:9/mcp"]) == 1
    assert "nothing listens there" in capsys.readouterr().err
    assert not out.exists()
    assert main(["data", "make", "--out", str(out), "no-such-program-anywhere"]) == 2
    assert not out.exists()


def test_only_a_folder_of_made_tasks_is_graded(tmp_path, capsys):
    assert main(["data", "grade", str(tmp_path), "x.yaml", "--out", str(tmp_path / "n")]) == 2
    assert "holds no tasks" in capsys.readouterr().err
