"""The examples of frameworks: what their page says, and each of them with its real package."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentevo
from agentevo.agents.agent import FunctionAgent
from agentevo.models.tool_calls import parser_named

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "frameworks"
sys.path.insert(0, str(FOLDER))

import table  # noqa: E402
from cold_start import demonstrations, open_box  # noqa: E402
from hunt import Hunt, make_tasks  # noqa: E402

sys.path.remove(str(FOLDER))

EXAMPLES = {example.name: example for example in table.EXAMPLES}
PAGE = (ROOT / "docs" / "gateway.md").read_text()


@pytest.mark.parametrize("example", table.EXAMPLES, ids=EXAMPLES)
def test_an_example_changes_two_lines_at_most_and_its_page_shows_them(example):
    text = (FOLDER / f"{example.file}.py").read_text()
    changed = re.findall(r"^ *(.*# changed)$", text, re.MULTILINE)
    assert len(changed) <= 2
    assert all(line in PAGE for line in changed)
    assert f"`{example.file}.py`" in PAGE
    assert "from learn import learn" in text


def test_every_package_of_an_environment_is_pinned():
    files = sorted((FOLDER / "requirements").glob("*.txt"))
    assert {file.stem for file in files} >= {
        example.group
        for example in table.EXAMPLES
        if not (FOLDER / example.group / "package.json").exists()
    }
    for file in files:
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[\w.\-\[\],]+==[\w.]+", line) for line in lines), file


def test_a_hunt_is_won_by_following_its_notes():
    for row in make_tasks(50, seed=3):
        hunt = Hunt(agentevo.Task(**_fields(row)))
        colour = row["query"].split()[3]
        said = ""
        for _ in row["boxes"]:
            said = hunt.open_box(colour)
            colour = said.split()[-2] if said.startswith("A note") else ""

        assert said == f"You find a {row['answer']}."
        assert hunt.reward(row["answer"].upper() + " ") == 1.0
        assert hunt.reward(said) == 0.0 and hunt.open_box("no colour") == "The box is empty."


def _fields(row):
    return {
        **{name: row[name] for name in ("id", "query", "answer")},
        "metadata": {"boxes": row["boxes"], "treasure": row["treasure"]},
    }


def test_the_table_has_a_line_for_each_result(tmp_path):
    name = next(iter(EXAMPLES))
    (tmp_path / name).mkdir()
    (tmp_path / name / "result.json").write_text(
        json.dumps({"before": 0.25, "after": 1.0, "steps": 4, "minutes": 2.0})
    )
    lines = table.table(tmp_path).splitlines()
    assert len(lines) == 3
    assert lines[2].endswith("| 25% | 100% | +75 | 4 | 2.0 |")


def test_an_example_without_a_new_result_keeps_its_line_of_the_page(tmp_path):
    stands = PAGE.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert table.table(tmp_path, stands) == stands


def test_the_pages_table_has_every_example_and_a_gain_of_20_points():
    rows = PAGE.split(table.BEGIN)[1].split(table.END)[0].strip().splitlines()[2:]
    gains = {row.split("|")[1].strip(): int(row.split("|")[6]) for row in rows}
    assert gains.keys() == {example.title for example in table.EXAMPLES}
    assert all(gain >= 20 for gain in gains.values())


def test_where_a_framework_retells_earlier_answers_the_teachers_newest_alone_is_taught():
    async def agent(task, policy):
        asked = [{"role": "user", "content": task.query}]
        await policy.generate(asked)
        retold = [
            {"role": "assistant", "content": "A box was opened."},
            {"role": "user", "content": "You find a pearl."},
        ]
        await policy.generate([*asked, *retold])
        return 0.0

    rows = asyncio.run(demonstrations(FunctionAgent(agent), 1, opens=open_box, says=str))
    taught = [
        [message["content"] for message in row["messages"] if _is_taught(message)] for row in rows
    ]
    assert [len(one) for one in taught] == [1, 1]
    assert taught[1] == ["pearl"]


def _is_taught(message):
    return message["role"] == "assistant" and message.get("weight", 1) == 1


def _prepared(example) -> str:
    try:
        return table.python_of(example)
    except table.NotInstalledError as error:
        pytest.skip(f"its packages can't be installed here: {error}")


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("example", table.EXAMPLES, ids=EXAMPLES)
def test_an_example_trains_with_its_real_package(example, tmp_path):
    """A short one. The framework's own history extends the recorded tokens, unless the table says
    that it does not, and its tool is called."""
    _prepared(example)
    table.train(example, tmp_path, "--steps", "1", "--conversations", "512", "--held-out", "4")
    run = agentevo.load_run(
        tmp_path / example.name / "run",
        agent=lambda task, policy: 0.0,
        tasks=make_tasks(1200, seed=0),
    )
    attempts = run.trajectories(split="train")
    assert attempts and all(attempt.status == "completed" for attempt in attempts)

    longest = max(attempts, key=lambda one: len(one.turns))
    assert len(longest.turns) >= 2
    for one in attempts:
        assert one.turns[0].parent is None
        if example.extends and not example.asks_again:
            extends = all(turn.parent is not None for turn in one.turns[1:])
            is_counted = any(name.startswith("drift/") for name in one.metrics)
            assert extends or (example.drops_words and is_counted)

    if example.extends:
        parents = [[turn.parent for turn in attempt.turns] for attempt in attempts]
        assert any(
            parent == [None, *range(len(parent) - 1)] for parent in parents if len(parent) > 1
        )

    said = [turn.messages[-1].text for attempt in attempts for turn in attempt.turns]
    assert any(parser_named("hermes").parse(text).tool_calls for text in said)


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_langchains_model_and_agent_with_the_real_package():
    python = _prepared(next(one for one in table.EXAMPLES if one.group == "langgraph"))
    tests = "tests/integrations/test_langchain.py"
    words = [python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", tests]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
