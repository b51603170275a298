"""A model proposes tasks for a server: what is tried and passes is kept, what does not is told."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from agentevo.agents.tool_servers.booking import GUESTS, BookingOffice
from agentevo.agents.tools.state_checks import SOLVED_BY_CALLS
from agentevo.config.tools import FunctionToolSection
from agentevo.errors import AgentEvoError
from agentevo.inference.remote_models.ledger import RemoteModelError
from agentevo.types import Task
from agentevo_evolve.task_making.calls import ToolWorld
from agentevo_evolve.task_making.exploration import explore_server
from agentevo_evolve.task_making.proposals import MAX_REPLY_CHARS, PER_PROMPT, read_proposals
from agentevo_evolve.task_making.scenario import is_held_out, steps_of
from agentevo_evolve.task_making.server_tasks import WantedTasks, _Maker, _without_loose_sources

WANTED = WantedTasks(train=10, held_out=10)
LOOKUP = {"tool": "find_rooms", "arguments": {"city": "Rome", "kind": "double"}}
FAMILY = {"tool": "find_rooms", "arguments": {"city": "Rome", "kind": "family"}}


class Model:
    """Answers with these texts in turn, and then with nothing of use."""

    def __init__(self, *texts):
        self.texts = list(texts)
        self.asked = []

    async def generate(self, messages, **options):
        self.asked.append([message["content"] for message in messages])
        text = self.texts.pop(0) if self.texts else "I can't."
        if isinstance(text, Exception):
            raise text
        return SimpleNamespace(text=text)


CALLING = '{"tasks": [{"task": "a", "difficulty": 1, "calls": [{"tool": "b", "arguments": N}]}]}'


def book(room, guest, nights):
    return {"tool": "book", "arguments": {"room": room, "guest": guest, "nights": nights}}


def task(text, *calls, answer=None, difficulty=2):
    return {"task": text, "difficulty": difficulty, "calls": list(calls), "answer": answer}


def reply(*tasks):
    return f"Sure:\n```json\n{json.dumps({'tasks': tasks})}\n```"


def written(*texts, wanted=WANTED):
    """What is made of these replies alone, and what the writer was asked."""
    model = Model(*texts)

    async def make():
        world = ToolWorld([FunctionToolSection(name="booking", options={"rooms": 9})])
        try:
            survey = await explore_server(world, seed=0)
            maker = _Maker(world, survey, wanted, frozenset(), (), lambda done: None)
            await maker.write(model)
            return maker._made
        finally:
            await world.close()

    return asyncio.run(make()), model.asked


@pytest.fixture(scope="module")
def rooms():
    """The only free double room and the only free family room in Rome, with their prices."""
    office = BookingOffice(Task(id="t", metadata={}), rooms=9)
    lines = [office.find_rooms("Rome", kind) for kind in ("double", "family")]
    assert not any("\n" in line for line in lines)
    return [[int(word) for word in line.split() if word.isdecimal()] for line in lines]


def guest_with_nights(room):
    """A guest with one booking, whose nights are not the number of this room."""
    office = BookingOffice(Task(id="t", metadata={}), rooms=9)
    for guest in GUESTS:
        words = office.find_bookings(guest).split()
        if words[-1] == "nights" and int(words[-2]) != room:
            return guest, int(words[-2])
    raise AssertionError("no guest has such a booking")


def test_what_its_calls_prove_becomes_a_task(rooms):
    (double, _), (family, price) = rooms
    guest, nights = guest_with_nights(family)
    same = task(
        f"Give Xan room {family} for as many nights as {guest} stays.",
        {"tool": "find_bookings", "arguments": {"guest": guest}},
        book(family, "Xan", nights),
    )
    found = task(
        "Zoe wants the cheapest double in Rome, for 3 nights.", LOOKUP, book(double, "Zoe", 3)
    )
    answered = task("What is a night in a family room in Rome?", FAMILY, answer=price, difficulty=1)
    idle = task(
        f"Room {family} is for Yan, 2 nights.", LOOKUP, book(family, "Yan", 2), difficulty=4
    )
    made, asked = written(reply(found, answered, idle, same))

    rows = {row["query"]: row for row in [*made.train, *made.held_out]}
    assert set(rows) == {each["task"] for each in (found, answered, idle, same)}
    assert all(row["written"] is True for row in rows.values())
    assert all(is_held_out(row["content"]) for row in made.held_out)
    assert not any(is_held_out(row["content"]) for row in made.train)

    row = rows[found["task"]]
    looked_up, booked = steps_of(row)
    assert looked_up.result and booked.found["room"].step == 0
    assert row["difficulty"] == 2 and row["scorer"] == "returned" and "answer" not in row
    assert any("Zoe" in json.dumps(check["arguments"]) for check in row["state_checks"])
    assert (rows[answered["task"]]["answer"], rows[answered["task"]]["difficulty"]) == (
        str(price),
        1,
    )
    assert [call["tool"] for call in rows[idle["task"]][SOLVED_BY_CALLS]] == ["book"]

    asked_first, booked = steps_of(rows[same["task"]])
    assert asked_first.tool == "find_bookings" and list(booked.found) == ["nights"]
    assert _without_loose_sources(booked).required_values["nights"] == nights  # variants tell it

    rules, data = asked[0]
    mark = data.splitlines()[0]
    assert mark.startswith("<<<") and mark[3:] in rules and data.endswith(f"{mark[3:]}>>>")
    assert '"find_rooms"' in data and f"room {double} for" in data
    assert made.account["written"] == {
        "tasks": 4,
        "prompts": len(asked),
        "reasons": made.written_reasons,
    }


def test_what_is_wrong_is_counted_and_told_once(rooms):
    (_, double_price), (family, price) = rooms
    wrong = {
        "its words name a tool": task(
            "Use find_rooms for Rome: a double.", LOOKUP, answer=double_price
        ),
        "its words leave out what has to be told": task(
            f"Yan in room {family}.", book(family, "Yan", 4)
        ),
        "its words say what is to be found": task(
            f"A family room in Rome is {price} a night, or is it?", FAMILY, answer=price
        ),
        "it calls a tool that it must not call": task(
            "Delete Rome.", {"tool": "rm", "arguments": {}}
        ),
        "a call is refused": task("Room 7 for Yan.", book("seven", "Yan", 1)),
        "its calls change nothing, and it has no answer": task(
            "Look for a double in Rome.", LOOKUP
        ),
        "its answer is no short part of the last result that it needs": task(
            "How many stars has a double in Rome?", LOOKUP, answer="five"
        ),
        "not in the form that is asked for": task("Book.", LOOKUP, difficulty=9),
        "there already": task(f"Let Yan have room {family} for 2 nights.", book(family, "Yan", 2)),
        "it has more than 4 calls": task("Look five times.", *[LOOKUP] * 5, answer=price),
    }
    good = task(f"Room {family} is for Yan, 2 nights.", book(family, "Yan", 2))
    first = list(wrong.values())[:PER_PROMPT]
    second = list(wrong.values())[PER_PROMPT:]
    made, asked = written(reply(good), reply(*first), "", "", "", reply(*second))

    assert len(made.train) + len(made.held_out) == 1
    reasons = dict(made.written_reasons)
    assert reasons.pop("no JSON object with a list under `tasks`") >= 3
    assert reasons == dict.fromkeys(wrong, 1)
    told = next(
        messages for messages in asked if len(messages) == 4 and first[0]["task"] in messages[2]
    )
    assert "-> its words name a tool: find_rooms" in told[3]
    assert "there is no room" not in told[3] and "-> a call is refused: book:" in told[3]
    assert all(len(messages) in (2, 4) for messages in asked)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{" * 100_000,
        "x" * (MAX_REPLY_CHARS + 1),
        '{"tasks": 3}',
        '{"tasks": [1, null, "a", []]}',
        '{"tasks": [{"task": "\\ud800", "difficulty": 1, "calls": [{"tool": "book"}]}]}',
        CALLING.replace("N", "[1]"),
        CALLING.replace("N", '{"n": NaN}'),
        CALLING.replace("N", '{"n": ' + "[" * 200 + "]" * 200 + "}"),
        CALLING.replace("N", '{"n": ' + "[" * 50_000 + "]" * 50_000 + "}"),
    ],
    ids=range(10),
)
def test_replies_of_any_kind_are_read(text):
    proposals, problems = read_proposals(text)
    assert not proposals and problems


def test_whole_proposals_of_a_reply_that_was_cut_off_count():
    whole = [task(f"Task {number}", LOOKUP) for number in range(3)]
    proposals, problems = read_proposals(json.dumps({"tasks": whole})[:-60])
    assert [each.task for each in proposals] == ["Task 0", "Task 1"] and not problems


def test_prompts_are_bounded_and_a_writer_that_is_away_is_told(rooms):
    made, asked = written(wanted=WantedTasks(train=8, held_out=2))
    assert len(asked) == made.num_prompts == 8 and not made.train
    assert made.written_reasons == {"no JSON object with a list under `tasks`": 8}

    with pytest.raises(AgentEvoError, match="answered nothing: it is away"):
        written(*[RemoteModelError("it is away")] * 9)

    made, _ = written("No.", *[RemoteModelError("it is away")] * 9)
    assert made.written_reasons["the model did not answer"] >= 1
