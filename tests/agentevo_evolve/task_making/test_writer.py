"""A model that says tasks in its own words: what is wrong with them is not taken."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from agentevo.errors import AgentEvoError
from agentevo.inference.remote_models.ledger import RemoteModelError
from agentevo_evolve.task_making.scenario import Scenario, ScenarioStep, ValueSource
from agentevo_evolve.task_making.writer import reword_tasks

STEPS = [
    ScenarioStep(tool="find_rooms", arguments={"city": "Rome"}, result="room 412"),
    ScenarioStep(
        tool="book",
        arguments={"room": 412, "guest": "Ada"},
        found={"room": ValueSource(step=0, name="room")},
    ),
]
ROW = Scenario(steps=STEPS, world=0, answer="Done").row(
    "draft", language="de", persona="polite", worlds=1
)
TOOLS = ["find_rooms", "book"]


class Model:
    """Answers with these texts in turn."""

    def __init__(self, *texts):
        self.texts = list(texts)
        self.asked = []

    async def generate(self, messages, **options):
        self.asked.append(messages[0]["content"])
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        return SimpleNamespace(text=text)


def written(*texts):
    model = Model(*texts)
    rows, reasons = asyncio.run(reword_tasks([ROW], model, TOOLS, seed=0))
    return rows[0]["query"], reasons, model.asked


GOOD = json.dumps({"task": "Ada braucht ein Zimmer in Rome."})


def test_a_good_text_is_taken_wherever_its_json_stands():
    query, reasons, asked = written(f"Sure! Here it is:\n```json\n{GOOD}\n```")
    assert (query, reasons) == ("Ada braucht ein Zimmer in Rome.", {})
    assert '["Rome", "Ada"]' in asked[0] and "412" not in asked[0]
    assert "code de" in asked[0] and "polite" in asked[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no json", "no JSON object"),
        ('{"task": "Ein Zimmer in Rome"}', "it leaves out a value"),
        ('{"task": "Ada: find_rooms in Rome"}', "it names a tool"),
        ('{"task": "Ada will Book a room in Rome"}', "it names a tool"),
        ('{"task": "Ada, room 412 in Rome"}', "it says what is to be found"),
        (json.dumps({"task": "Ada Rome " + "x" * 3000}), "longer than"),
    ],
)
def test_a_bad_text_is_told_what_is_wrong_and_then_the_draft_stands(text, reason):
    query, reasons, asked = written(text, GOOD)
    assert query == "Ada braucht ein Zimmer in Rome."
    assert list(reasons) == [next(key for key in reasons if key.startswith(reason))]
    assert "was not taken" in asked[1]
    query, reasons, _ = written(text, text)
    assert query == "draft" and list(reasons.values()) == [2]


def test_a_writer_that_is_away_is_told_and_nothing_is_taken_for_its_words():
    with pytest.raises(AgentEvoError, match="answered nothing: it is away"):
        written(RemoteModelError("it is away"))
