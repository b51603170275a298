"""What clients do to a history: what they only write otherwise goes on from the recorded turn,
token for token; what they edit branches, and is counted by its class."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from babbling import ASKED, CHATS, Babbling, conversation_on, trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentevo.agents.agent import FunctionAgent
from agentevo.agents.policy import Policy
from agentevo.inference.conversations import history as history_module
from agentevo.inference.conversations.equivalence import canonical_arguments, key_of
from agentevo.rollout.group import GroupAttempt
from agentevo.runs.orchestration.step_metrics import rollout_metrics
from agentevo.training.batching.samples import trajectory_rows
from agentevo.types import Message, Outcome, Task, TextPart, ToolCall, Turn

CHAT = CHATS["hermes"]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
replace = msgspec.structs.replace


Way = Callable[[list[Message], random.Random], list[Message]]


class Client:
    """A client of a door: it gets answers in the door's form, and keeps the history itself."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = Babbling(CHAT)
        self.conversation = conversation_on(self.engine, context_length=10**6)
        self.messages = [Message("system", "Be brief."), Message("user", "Go.")]
        self.answers: list[int | None] = [None, None]
        """For each message the turn that said it."""
        self.way: Way = lambda messages, rng: messages
        """How it writes what it sends."""

    def ask(self, messages: list[Message] | None = None, tools: Any = None) -> Turn:
        """Asks with its history, or with what it makes of it."""
        (turn,) = asyncio.run(self.conversation.complete(messages or self.messages, tools=tools))
        return turn

    def go_on(self) -> Turn:
        """Asks, keeps the answer, and adds what comes next."""
        turn = self.ask(self.way(self.messages, random.Random(0)))
        answer = self._passed_on(turn.index)
        self.conversation.recognise(turn.index, answer)
        self.messages += [answer, *self._next(answer, turn.index)]
        self.answers += [turn.index] + [None] * (len(self.messages) - len(self.answers) - 1)
        return turn

    def _passed_on(self, number: int) -> Message:
        reasoning = self.rng.choice([None, f"hm\n{number}"])
        content = f" Answer {number}.\n" if self.rng.random() < 0.5 else ""
        calls = tuple(
            ToolCall("add", f'{{"b": [1, {{"c": "é"}}], "a": {number}}}', f"call_{number}_{k}")
            for k in range(self.rng.randrange(3) if content else 2)
        )
        return Message("assistant", content, calls, reasoning=reasoning)

    def _next(self, answer: Message, number: int) -> list[Message]:
        results = [
            Message("tool", f"result {call.id}", tool_call_id=call.id, name="add")
            for call in answer.tool_calls
        ]
        asks = not results or self.rng.random() < 0.3
        return results + [Message("user", f"And {number}?")] * asks


def rewritten(message: Message, rng: random.Random) -> Message:
    def again(arguments: str) -> str:
        value = json.loads(arguments)
        value = dict(rng.sample(list(value.items()), len(value)))
        return json.dumps(
            value, indent=rng.choice([None, 2]), ensure_ascii=rng.random() < 0.5
        ).replace("\\u00e9", rng.choice(["\\u00e9", "\\u00E9"]))

    calls = tuple(replace(call, arguments=again(call.arguments)) for call in message.tool_calls)
    return replace(message, tool_calls=calls)


def moved(message: Message) -> Message:
    if message.reasoning is None:
        return message
    content = f"<think>\n{message.reasoning}\n</think>\n\n{message.text.strip()}"
    return replace(message, content=content, reasoning=None)


def with_ids(messages: list[Message], new: Callable[[str], str]) -> list[Message]:
    """The same messages; every id of a call is another one, in the call and in its result."""
    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=new(call.id)) for call in message.tool_calls),
            tool_call_id=new(message.tool_call_id) or None if message.tool_call_id else None,
        )
        for message in messages
    ]


def each(change: Callable[[Message], Message]) -> Way:
    return lambda messages, rng: [
        change(message) if message.role == "assistant" else message for message in messages
    ]


WAYS: dict[str, Way] = {
    "arguments": lambda messages, rng: [rewritten(message, rng) for message in messages],
    "whitespace": each(lambda message: replace(message, content=message.text.strip())),
    "reasoning dropped": each(lambda message: replace(message, reasoning=None)),
    "reasoning moved": each(moved),
    "ids dropped": lambda messages, rng: with_ids(messages, lambda _: ""),
    "ids made anew": lambda messages, rng: with_ids(messages, lambda old: f"new {old}"),
    "name dropped": lambda messages, rng: [replace(message, name=None) for message in messages],
    "parts": lambda messages, rng: [
        replace(message, content=(TextPart(message.text),)) for message in messages
    ],
}
"""How a client may write a history that it means."""


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
def test_what_a_client_writes_otherwise_goes_on_from_the_recorded_turn(seed: int) -> None:
    client = Client(seed)
    for _ in range(client.rng.randint(2, 5)):
        client.go_on()
        meant = [turn for turn in client.answers if turn is not None]

        messages = client.messages
        for way in client.rng.sample(list(WAYS), client.rng.randint(0, 3)):
            messages = WAYS[way](messages, client.rng)

        turn = client.ask(messages)
        assert turn.parent == meant[-1]

        whole = trajectory(client.conversation)
        assert whole.context_ids(turn.index) == client.engine.requests[-1][0]

    drift = client.conversation.drift
    assert all(kind.startswith("joined/") for kind in drift.counts)
    assert drift.merge_rate == 1 and drift.branched == 0
    assert ("merge_rate" in drift.metrics()) == bool(drift.counts)
    assert drift.first.keys() == drift.counts.keys()


def edited(kind: str, client: Client) -> tuple[list[Message], int] | None:
    """The client's history, edited so, and the number of the first message that differs; None where
    it has nothing to edit so."""
    rng = client.rng
    messages = list(client.messages)
    last = max(n for n, turn in enumerate(client.answers) if turn is not None)
    wanted = {
        "system_changed": lambda n, m: m.role == "system",
        "user_edited": lambda n, m: m.role == "user" and n < last,
        "tool_result_edited": lambda n, m: m.role == "tool" and n < last,
        "content_edited": lambda n, m: m.role == "assistant",
        "tool_calls_edited": lambda n, m: bool(m.tool_calls),
        "reasoning_edited": lambda n, m: m.reasoning is not None,
        "messages_dropped": lambda n, m: 0 < n < last,
        "order_changed": lambda n, m: n + 1 < last,
        "other": lambda n, m: 0 < n < last,
    }[kind]
    places = [n for n, message in enumerate(messages) if wanted(n, message)]
    if not places:
        return None

    place = rng.choice(places)
    message = messages[place]
    if kind == "messages_dropped":
        del messages[place : rng.randint(place + 1, last)]
    elif kind == "order_changed":
        other = rng.randrange(place + 1, last)
        messages[place], messages[other] = messages[other], messages[place]
    elif kind == "other":
        messages.insert(place, Message("user", "By the way."))
    elif kind == "tool_calls_edited":
        first, *more = message.tool_calls
        first = replace(first, arguments=first.arguments.replace("[1,", "[2,"))
        messages[place] = replace(message, tool_calls=(first, *more))
    elif kind == "reasoning_edited":
        messages[place] = replace(message, reasoning="something else")
    else:
        messages[place] = replace(message, content=message.text[:-3] + "!")

    return messages, place


EDITS = (
    "system_changed", "user_edited", "tool_result_edited", "content_edited", "tool_calls_edited",
    "reasoning_edited", "messages_dropped", "order_changed", "other",
)  # fmt: skip


@pytest.mark.parametrize("kind", EDITS)
@given(seed=st.integers(0, 2**32))
def test_what_a_client_edits_branches_and_is_counted(kind: str, seed: int) -> None:
    client = Client(seed)
    for _ in range(client.rng.randint(1, 4)):
        client.go_on()

    change = edited(kind, client)
    if change is None:
        return

    messages, place = change
    if client.rng.random() < 0.5:  # what is written otherwise as well hides no edit
        messages = WAYS["ids made anew"](messages, client.rng)

    turn = client.ask(messages)
    before = [n for n in client.answers[:place] if n is not None]
    assert turn.parent == (before[-1] if before else None)

    drift = client.conversation.drift
    branches = {name: n for name, n in drift.counts.items() if not name.startswith("joined/")}
    assert branches == {kind: 1}
    assert drift.branched == 1 and drift.merge_rate == drift.extended / (drift.extended + 1)
    assert drift.first[kind].message == place + 1
    assert drift.metrics()[f"drift/{kind}"] == 1

    again = client.ask([*messages, turn.messages[-1], Message("user", "Go on.")])
    assert again.parent == turn.index, "the branch goes on like any other"
    assert drift.branched == 1


@given(seed=st.integers(0, 2**32))
def test_branches_that_are_meant_are_no_drift(seed: int) -> None:
    """Several answers, other questions after a recorded history, the same question again, and
    examples in the prompt."""
    rng = random.Random(seed)
    engine = Babbling(CHAT)
    conversation = conversation_on(engine, context_length=10**6)
    example = [Message("user", "1+1?"), Message("assistant", "2")]
    histories = [[*example * rng.randrange(2), ASKED[0]]]
    for _ in range(8):
        asked = rng.choice(histories)
        for turn in asyncio.run(conversation.complete(asked, n=rng.randint(1, 2))):
            said = [*asked, turn.messages[-1]]
            histories += [[*said, rng.choice(ASKED)], [*said, *example, ASKED[0]]]

    assert conversation.drift.counts == {} and conversation.metrics() == {}
    assert conversation.drift.merge_rate in (None, 1.0)


RECORDED = '{"a": 1.0, "b": [1, {"c": 12345678901234567890}], "d": "x", "e": true}'
LOSSES = {
    "JavaScript's numbers": '{"a":1,"b":[1,{"c":12345678901234567000}],"d":"x","e":true}',
    "a key dropped": '{"b":[1,{"c":12345678901234567890}],"a":1.0,"d":"x"}',
    "an inner key dropped": '{"a":1.0,"b":[1,{}],"d":"x","e":true}',
    "a default": '{"a":1.0,"b":[1,{"c":12345678901234567890}],"d":"x","e":true,"f":null}',
}
CHANGES = {
    "another number": RECORDED.replace("1.0", "2"),
    "another text": RECORDED.replace('"x"', '"y"'),
    "a number for true": RECORDED.replace("true", "1"),
    "a list cut": RECORDED.replace('[1, {"c": 12345678901234567890}]', "[1]"),
    "a new key": RECORDED.replace("{", '{"g": 1, ', 1),
    "no JSON": RECORDED[:-1],
}


@pytest.mark.parametrize("arguments", list(LOSSES.values()), ids=list(LOSSES))
def test_a_call_that_comes_back_with_its_id_is_the_recorded_one(arguments: str) -> None:
    client, history = called_once()
    named = replace(history[2], tool_calls=(ToolCall("add", arguments, "c1"),))
    turn = client.ask([*history[:2], named, *history[3:]])
    assert turn.parent == 0
    assert client.conversation.drift.counts == {"joined/arguments_rewritten": 1}

    other = replace(history[2], tool_calls=(ToolCall("add", arguments, "new"),))
    assert client.ask([*history[:2], other, *history[3:]]).parent is None, "it may be another call"


@pytest.mark.parametrize("arguments", list(CHANGES.values()), ids=list(CHANGES))
def test_a_call_that_was_edited_is_another_one_whatever_its_id(arguments: str) -> None:
    client, history = called_once()
    edited = replace(history[2], tool_calls=(ToolCall("add", arguments, "c1"),))
    assert client.ask([*history[:2], edited, *history[3:]]).parent is None
    assert client.conversation.drift.counts == {"tool_calls_edited": 1}


def called_once() -> tuple[Client, list[Message]]:
    """A client after one answer with a call, and its history with the result."""
    client = Client(0)
    turn = client.ask()
    said = Message("assistant", "", (ToolCall("add", RECORDED, "c1"),))
    client.conversation.recognise(turn.index, said)
    result = Message("tool", "2", tool_call_id="c1", name="add")
    return client, [*client.messages, said, result]


def test_other_tools_are_counted() -> None:
    client = Client(3)
    client.go_on()
    assert client.ask(tools=TOOLS).parent is None
    assert client.conversation.drift.counts == {"tools_changed": 1}


def test_an_agent_that_edits_what_it_got_from_the_policy_branches_and_is_counted() -> None:
    """Without a client between, a history is what it says: nothing is undone."""
    engine = Babbling(CHAT)
    conversation = conversation_on(engine)
    (turn,) = asyncio.run(conversation.complete(ASKED[:1]))
    said = turn.messages[-1]
    for content, kind in ((f"{said.text} ", "whitespace_stripped"), ("no", "content_edited")):
        history = [ASKED[0], replace(said, content=content), ASKED[1]]
        (other,) = asyncio.run(conversation.complete(history))
        assert other.parent is None
        assert conversation.drift.counts[kind] == 1

    assert conversation.drift.merge_rate == 0


def said_twice(client: Client, first: Message, second: Message) -> list[Message]:
    """Two answers to one request, as they were passed on; the request."""
    turns = asyncio.run(client.conversation.complete(client.messages, n=2))
    for turn, message in zip(turns, (first, second), strict=True):
        client.conversation.recognise(turn.index, message)
    return list(client.messages)


def test_of_equivalent_answers_the_exact_one_wins_then_the_named_one_then_the_newest() -> None:
    def call(name: str, arguments: str = "{}") -> Message:
        return Message("assistant", "", (ToolCall("add", arguments, name),))

    question = Message("user", "Well?")
    exact = Client(0)
    asked = said_twice(exact, call("a"), call("b"))
    assert exact.ask([*asked, call("a"), question]).parent == 0
    assert exact.ask([*asked, call("b"), question]).parent == 1
    assert exact.ask([*asked, call("a", "{ }"), question]).parent == 0, "named by its id"
    assert exact.ask([*asked, call("b", "{ }"), question]).parent == 1
    assert exact.ask([*asked, call(""), question]).parent == 1, "the newest"

    result = Message("tool", "2", tool_call_id="a")
    assert exact.ask([*asked, call(""), result]).parent == 0, "named by its result"

    spaces = Client(1)
    asked = said_twice(spaces, Message("assistant", " yes"), Message("assistant", "yes "))
    assert spaces.ask([*asked, Message("assistant", " yes"), question]).parent == 0
    assert spaces.ask([*asked, Message("assistant", "yes"), question]).parent == 1


def test_the_answer_that_leads_furthest_wins() -> None:
    """A later answer that says the same takes nothing from a history that went on."""
    client = Client(2)
    yes = Message("assistant", "yes")
    first = client.ask()
    client.conversation.recognise(first.index, Message("assistant", " yes"))
    history = [*client.messages, yes, Message("user", "Sure?")]
    second = client.ask(history)
    client.conversation.recognise(second.index, Message("assistant", "I am."))
    again = client.ask()
    client.conversation.recognise(again.index, yes)
    third = client.ask([*history, Message("assistant", "I am."), Message("user", "Fine.")])
    assert (second.parent, again.parent, third.parent) == (first.index, None, second.index)
    assert client.ask(history).parent == again.index


def test_an_answer_that_nobody_received_is_not_recorded() -> None:
    client = Client(4)
    conversation = client.conversation
    client.go_on()
    lost = client.ask()
    conversation.discard(lost.index)
    client.go_on()
    client.go_on()
    turns = conversation.turns_to_record({0: 1.0, 1: 5.0, 2: 2.0})
    assert [(turn.index, turn.parent, turn.reward) for turn in turns] == [
        (0, None, 1.0), (1, 0, 2.0), (2, 1, 0.0),
    ]  # fmt: skip
    assert lost.seed not in {turn.seed for turn in turns}
    assert conversation.metrics()["num_undelivered"] == 1

    whole = trajectory(conversation)
    assert [turn.index for turn in conversation.turns] == [0, 1, 2, 3], "indices do not move"

    kept = replace(whole, turns=turns)
    assert kept.context_ids(2) == whole.context_ids(3)


def test_the_trajectory_holds_and_trains_what_was_received_and_says_what_drifted() -> None:
    engine = Babbling(CHAT)
    conversation = conversation_on(engine)

    async def agent(task: Task, policy: Policy) -> Outcome:
        lost = await policy.generate(ASKED[:1])
        conversation.discard(lost.turn)
        reply = await policy.generate(ASKED[:1])
        conversation.recognise(reply.turn, Message("assistant", " yes "))
        last = await policy.generate([ASKED[0], Message("assistant", "yes"), ASKED[1]])
        return Outcome(reward=1.0, turn_rewards={last.turn: 0.5}, metrics={"own": 2.0})

    attempt = GroupAttempt(
        FunctionAgent(agent), Task(id="t"), Policy(conversation), name="a", limit_s=300
    )
    (played,) = asyncio.run(attempt.run(task_id="t", group_id="g", number=0))
    assert played.status == "completed", played.error
    assert [(turn.parent, turn.reward) for turn in played.turns] == [(None, 0.0), (0, 0.5)]

    (row,) = trajectory_rows(played)
    assert list(row.sample.ids) == [*played.context_ids(1), *played.turns[1].completion_ids]
    assert played.metrics == {
        "own": 2.0,
        "drift/joined/whitespace_stripped": 1.0,
        "merge_rate": 1.0,
        "num_undelivered": 1.0,
    }

    metrics = rollout_metrics([played, replace(played, id="b", metrics={})], {})
    assert metrics["agent/drift/joined/whitespace_stripped"] == 0.5
    assert metrics["agent/merge_rate"] == 1.0, "nothing drifted where the metric is missing"


def test_a_list_of_rewards_is_for_the_turns_that_were_received() -> None:
    conversation = conversation_on(Babbling(CHAT))

    async def agent(task: Task, policy: Policy) -> list[float]:
        first = await policy.generate(ASKED[:1])
        lost = await policy.generate([ASKED[0], first.message, ASKED[1]])
        conversation.discard(lost.turn)
        await policy.generate([ASKED[0], first.message, ASKED[1]])
        return [1.0, 2.0]

    attempt = GroupAttempt(
        FunctionAgent(agent), Task(id="t"), Policy(conversation), name="a", limit_s=300
    )
    (played,) = asyncio.run(attempt.run(task_id="t", group_id="g", number=0))
    assert played.status == "completed", played.error
    assert [turn.reward for turn in played.turns] == [1.0, 2.0]


def test_examples_whose_ids_are_made_anew_for_every_request() -> None:
    """They are no answers of the policy; the history that begins with them goes on all the same."""
    client = Client(10)
    call = Message("assistant", "", (ToolCall("add", "{}", "x"),))
    client.messages[1:1] = [Message("user", "1+1?"), call, Message("tool", "2", tool_call_id="x")]
    client.answers[1:1] = [None] * 3
    client.go_on()
    turn = client.ask(with_ids(client.messages, lambda old: old if "_" in old else "y"))
    assert turn.parent == 0
    assert client.conversation.drift.counts == {"joined/call_ids_changed": 2}


def test_an_answer_that_somebody_goes_on_from_was_received() -> None:
    client = Client(5)
    conversation = client.conversation
    conversation.discard(client.go_on().index)
    client.go_on()
    assert len(conversation.turns_to_record({})) == 2
    assert "num_undelivered" not in conversation.metrics()


def test_after_a_retry_the_received_answer_is_gone_on_from() -> None:
    """Both say the same; the one that nobody received came last."""
    client = Client(6)
    yes = Message("assistant", "yes")
    received = client.ask()
    lost = client.ask()
    for turn in (received, lost):
        client.conversation.recognise(turn.index, yes)

    client.conversation.discard(lost.index)
    turn = client.ask([*client.messages, yes, Message("user", "Sure?")])
    assert turn.parent == received.index


def test_the_first_place_of_a_class() -> None:
    client = Client(7)
    client.go_on()
    messages = list(client.messages)
    messages[1] = Message("user", "Go!")
    client.ask(messages)
    place = client.conversation.drift.first["user_edited"]
    assert place == (2, "user: Go.", "user: Go!")


def test_a_long_message_is_shown_where_it_differs() -> None:
    client = Client(8)
    client.go_on()
    answer = next(n for n, turn in enumerate(client.answers) if turn == 0)
    long = Message("assistant", "x" * 1000 + "one\n")
    client.conversation.recognise(0, long)
    client.ask([*client.messages[:answer], replace(long, content="x" * 1000 + "two"), ASKED[0]])
    place = client.conversation.drift.first["content_edited"]
    assert place.recorded.startswith("...xxx") and place.recorded.endswith("one\\n")
    assert place.came.endswith("xtwo") and len(place.came) < 200


@pytest.mark.parametrize(
    ("written", "came"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
        ('{"a": "\\u00e9\\/"}', '{"a": "é/"}'),
        ("", "{}"),
        ('{"a": 1.50}', '{"a": 1.5}'),
        ('{"a": {"c": [1, null], "b": true}}', '{"a": {"b": true, "c": [1,null]}}'),
        ("not JSON ", "not JSON"),
    ],
)
def test_arguments_that_mean_the_same(written: str, came: str) -> None:
    assert canonical_arguments(written) == canonical_arguments(came)


@pytest.mark.parametrize(
    ("written", "came"),
    [
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": "1"}', '{"a": 1}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": null}', "{}"),
        ('{"a": NaN}', '{"a": null}'),
        ('{"a": 1e999}', '{"a": 1e998}'),
        ("[" * 100_000, "[" * 100_001),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "8" * 5000 + "}"),
    ],
)
def test_arguments_that_do_not(written: str, came: str) -> None:
    assert canonical_arguments(written) != canonical_arguments(came)


@pytest.mark.parametrize("way", [None, "arguments", "ids made anew"])
def test_a_request_costs_no_more_than_its_messages(way: str | None, monkeypatch: Any) -> None:
    """Keys are made of messages that came otherwise than before, and only once of each."""
    made: list[Message] = []

    def counted(message: Message, place: int) -> Any:
        made.append(message)
        return key_of(message, place)

    monkeypatch.setattr(history_module, "key_of", counted)
    client = Client(9)
    costs = []

    if way is not None:
        client.way = WAYS[way]

    for _ in range(30):
        made.clear()
        client.go_on()
        costs.append(len(made))

    assert max(costs[-3:]) <= (8 if way != "ids made anew" else 3 * len(client.messages))
