"""The recorded conversation: a tree of turns for any sequence of histories, edited, branched or at
the same time, in which nothing that the model said is encoded again."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from babbling import ASKED, CHATS, Babbling, Saying, conversation_on, trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentevo.errors import (
    BadRequestError,
    DeadlineExceededError,
    EngineError,
    RequestTooLongError,
)
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.runtime.seeds import derive_seed
from agentevo.types import (
    Message,
    SamplingOverrides,
    SamplingParams,
    ToolCall,
    Turn,
)

CHAT = CHATS["tiny"]


def turns_by_scanning(
    chat: ChatFormat, engine: Babbling, histories: list[list[Message]]
) -> list[Any]:
    """What must be recorded, found the slow way: every recorded history is compared as a whole."""
    conversations: dict[tuple[Message, ...], int] = {}
    contexts: list[list[int]] = []
    turns: list[Any] = []
    for call, messages in enumerate(histories):
        longest = len(messages) - (messages[-1].role != "assistant")
        sizes = [s for s in range(longest, 0, -1) if tuple(messages[:s]) in conversations]
        parent = conversations[tuple(messages[: sizes[0]])] if sizes else None
        new = messages[sizes[0] if sizes else 0 :]
        if parent is None:
            before = []
            added = chat.first_prompt(new)
        else:
            before = contexts[parent]
            ended = turns[parent][1][-1] in chat.end_ids
            added = chat.continuation(new, ended_with_stop=ended)

        sampling = SamplingParams(max_new_tokens=9, seed=derive_seed(5, "turn", call))
        completion = asyncio.run(engine.generate(before + added, sampling))
        said = Message("assistant", chat.text(completion.ids))
        turns.append((parent, completion.ids, added, sampling.seed, [*new, said]))
        contexts.append(before + added + completion.ids)
        conversations[(*messages, said)] = len(turns) - 1

    return turns


def next_history(
    rng: random.Random, turns: list[Turn], histories: list[list[Message]]
) -> list[Message]:
    """A history such as an agent sends: a new one, an old one taken further, or an edited one."""
    question = rng.choice(ASKED)
    if not turns or rng.random() < 0.15:
        return [question]

    turn = rng.choice(turns)
    history = [*histories[turn.index], turn.messages[-1], question]
    kind = rng.random()
    if kind < 0.45:
        return history
    if kind < 0.6:
        return history[:-1]  # without a word of its own
    if kind < 0.75:
        return histories[turn.index]  # the same question again

    place = rng.randrange(len(history) - 1)
    if kind < 0.9:  # an edit
        edited = Message(history[place].role, rng.choice(["x", "y"]))
        return [*history[:place], edited, *history[place + 1 :]]

    return [*history[:place], question] if place else [question]


@pytest.mark.parametrize("name", list(CHATS))
@given(seed=st.integers(0, 2**32))
def test_any_histories_make_the_same_tree_as_comparing_them_whole(name: str, seed: int) -> None:
    rng = random.Random(seed)
    engine = Babbling(CHATS[name])
    conversation = conversation_on(engine)
    histories: list[list[Message]] = []
    for _ in range(rng.randint(1, 9)):
        histories.append(next_history(rng, conversation.turns, histories))
        asyncio.run(conversation.complete(histories[-1]))

    recorded = [
        (turn.parent, list(turn.completion_ids), list(turn.prompt_ids), turn.seed, turn.messages)
        for turn in conversation.turns
    ]
    assert recorded == turns_by_scanning(CHATS[name], Babbling(CHATS[name]), histories)


@pytest.mark.parametrize("name", list(CHATS))
@given(seed=st.integers(0, 2**32))
def test_nothing_that_the_model_said_is_encoded_again(name: str, seed: int) -> None:
    """The invariant of types.py, and along each path the very ids that the engine drew."""
    rng = random.Random(seed)
    engine = Babbling(CHATS[name])
    conversation = conversation_on(engine)
    histories: list[list[Message]] = []
    for _ in range(rng.randint(2, 9)):
        histories.append(next_history(rng, conversation.turns, histories))
        asyncio.run(conversation.complete(histories[-1]))

    whole = trajectory(conversation)
    for turn, (prompt, _) in zip(conversation.turns, engine.requests, strict=True):
        assert whole.context_ids(turn.index) == prompt

        parent = turn.parent
        history = histories[turn.index]
        if parent is None:
            assert prompt == CHATS[name].first_prompt(history)
            continue

        before = whole.turns[parent]
        drawn = [*engine.requests[parent][0], *before.completion_ids]
        assert prompt[: len(drawn)] == drawn

        known = len(histories[parent]) + 1
        assert history[: known - 1] == histories[parent]
        assert history[known - 1] == before.messages[-1]
        assert turn.messages[:-1] == history[known:]


@given(seed=st.integers(0, 2**32))
def test_calls_that_overlap_are_numbered_as_they_end(seed: int) -> None:
    """Seeds follow the order of the calls, indices that of the answers, parents what was recorded
    when the call was made."""
    rng = random.Random(seed)
    engine = Babbling(CHAT, pauses=True)
    conversation = conversation_on(engine)
    ended: list[tuple[int, list[Turn]]] = []
    histories: dict[int, list[Message]] = {}
    known_at: dict[int, int] = {}

    async def call(number: int, history: list[Message], n: int) -> None:
        known_at[number] = len(conversation.turns)
        histories[number] = history
        ended.append((number, await conversation.complete(history, n=n)))

    async def talk() -> list[int]:
        counts = []
        running: list[asyncio.Task[None]] = []
        for number in range(rng.randint(2, 7)):
            turns = conversation.turns
            asked = [ASKED[0]]
            if turns and rng.random() < 0.7:
                turn = rng.choice(turns)
                before = next(n for n, done in ended if turn in done)
                asked = [*histories[before], turn.messages[-1], rng.choice(ASKED)]

            counts.append(rng.randint(1, 3))
            running.append(asyncio.create_task(call(number, asked, counts[-1])))
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)

        await asyncio.gather(*running)
        return counts

    counts = asyncio.run(talk())
    recorded = [turn for _, turns in ended for turn in turns]
    assert recorded == conversation.turns
    assert [turn.index for turn in recorded] == list(range(sum(counts)))

    first = 0
    for number, count in enumerate(counts):
        turns = next(turns for n, turns in ended if n == number)
        assert [turn.seed for turn in turns] == [
            derive_seed(5, "turn", request) for request in range(first, first + count)
        ]
        first += count
        assert len({turn.parent for turn in turns}) == 1
        parent = turns[0].parent
        assert parent is None or parent < known_at[number]
        assert (parent is None) == (len(histories[number]) == 1)

    prompts = {sampling.seed: prompt for prompt, sampling in engine.requests}
    whole = trajectory(conversation)
    assert all(whole.context_ids(turn.index) == prompts[turn.seed] for turn in recorded)


@pytest.mark.parametrize("name", list(CHATS))
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("is_empty", [True, False])
def test_an_answer_that_comes_back_last_is_gone_on_from(name, ended, is_empty) -> None:
    """Also where it was cut off, or says nothing."""
    chat = CHATS[name]
    said = [] if is_empty else [70, 71]
    answers = [[*said, chat.end_of_turn_id] if ended else [*said, 72], [73, chat.end_of_turn_id]]
    engine = Saying(chat, [*answers, answers[1]])
    conversation = conversation_on(engine)

    (first,) = asyncio.run(conversation.complete(ASKED[:1]))
    history = [ASKED[0], first.messages[-1]]
    (second,) = asyncio.run(conversation.complete(history))
    (third,) = asyncio.run(conversation.complete([*history, second.messages[-1], ASKED[1]]))

    assert [turn.parent for turn in (first, second, third)] == [None, 0, 1]
    assert second.messages == [second.messages[-1]]
    drawn = [*engine.requests[0][0], *answers[0]]
    assert engine.requests[1][0][: len(drawn)] == drawn
    if ended:
        text = chat.tokenizer.decode(answers[0][:-1])
        whole = chat.first_prompt([ASKED[0], Message("assistant", text)])
        header = chat.tokenizer.decode(engine.requests[1][0][len(drawn) :])
        assert chat.tokenizer.decode(whole).endswith(header), "as the template writes it"

    drift = conversation.drift
    assert drift.counts == {} and (drift.extended, drift.branched) == (2, 0)


def test_an_answer_that_comes_back_last_and_edited_is_counted() -> None:
    conversation = conversation_on(Babbling(CHAT))
    (first,) = asyncio.run(conversation.complete(ASKED[:1]))
    edited = Message("assistant", f"{first.messages[-1].text} and more")
    (second,) = asyncio.run(conversation.complete([ASKED[0], edited]))
    assert second.parent is None
    assert conversation.drift.counts == {"content_edited": 1}

    asyncio.run(conversation.complete([ASKED[1], edited]))
    assert conversation.drift.branched == 1, "nobody said anything there"


def test_several_answers_to_one_prompt() -> None:
    engine = Babbling(CHAT)
    conversation = conversation_on(engine)
    (first,) = asyncio.run(conversation.complete(ASKED[:1]))
    history = [ASKED[0], first.messages[-1], ASKED[1]]
    turns = asyncio.run(conversation.complete(history, n=3))
    assert [(turn.index, turn.parent) for turn in turns] == [(1, 0), (2, 0), (3, 0)]
    assert len({turn.seed for turn in turns}) == 3

    (last,) = asyncio.run(conversation.complete([*history, turns[1].messages[-1], ASKED[2]]))
    assert last.parent == 2
    with pytest.raises(BadRequestError, match="n is 0"):
        asyncio.run(conversation.complete(history, n=0))


def test_one_failure_of_several_records_none_and_ends_the_others() -> None:
    engine = Babbling(CHAT, pauses=True)
    conversation = conversation_on(engine)
    engine.failures = [None, DeadlineExceededError("late"), None, None, None]

    async def ask() -> None:
        with pytest.raises(DeadlineExceededError):
            await conversation.complete(ASKED[:1], n=5)

    asyncio.run(ask())
    assert conversation.turns == []
    assert isinstance(conversation.broken, DeadlineExceededError)
    assert conversation.oldest_version is None, "nothing is pending any more"

    (turn,) = asyncio.run(conversation.complete(ASKED[:1]))
    assert (turn.index, turn.seed) == (0, derive_seed(5, "turn", 5))


def test_token_ids_extend_the_longest_context_that_they_begin_with() -> None:
    engine = Babbling(CHAT)
    conversation = conversation_on(engine)
    (root,) = asyncio.run(conversation.complete([40, 41]))
    context = [40, 41, *root.completion_ids]
    (second,) = asyncio.run(conversation.complete([*context, 50]))
    (third,) = asyncio.run(conversation.complete([*context, 50, *second.completion_ids, 51]))
    (again,) = asyncio.run(conversation.complete(context))
    (other,) = asyncio.run(conversation.complete([*context, 60]))

    assert [turn.parent for turn in conversation.turns] == [None, 0, 1, None, 0]
    assert [list(turn.prompt_ids) for turn in (second, third, other)] == [[50], [51], [60]]
    assert list(again.prompt_ids) == context

    whole = trajectory(conversation)
    for turn, (prompt, _) in zip(conversation.turns, engine.requests, strict=True):
        assert whole.context_ids(turn.index) == prompt
    assert root.messages == [Message("assistant", CHAT.text(root.completion_ids))]

    for wrong in ([40, 10**6], [40, -1], [40, "a"]):
        with pytest.raises(BadRequestError, match="token 1 of the prompt"):
            asyncio.run(conversation.complete(wrong))  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**32))
def test_token_ids_make_the_same_tree_as_comparing_all_contexts(seed: int) -> None:
    rng = random.Random(seed)
    engine = Babbling(CHAT)
    conversation = conversation_on(engine)
    contexts: list[list[int]] = [[]]
    for _ in range(8):
        before = rng.choice(contexts)
        ids = before[: rng.randint(0, len(before))] if rng.random() < 0.3 else before
        ids = [*ids, *(rng.choice((40, 41)) for _ in range(rng.randint(0 if ids else 1, 2)))]
        parents = [n for n, context in enumerate(contexts) if len(context) < len(ids)]
        parents = [n for n in parents if ids[: len(contexts[n])] == contexts[n]]
        longest = max(parents, key=lambda n: (len(contexts[n]), n))
        (turn,) = asyncio.run(conversation.complete(ids))
        assert turn.parent == (longest - 1 if longest else None)
        assert list(turn.prompt_ids) == ids[len(contexts[longest]) :]

        contexts.append([*ids, *turn.completion_ids])


def test_a_call_changes_its_own_sampling_alone() -> None:
    engine = Babbling(CHAT)
    conversation = conversation_on(engine)
    overrides = SamplingOverrides(
        temperature=0.2, top_k=4, max_new_tokens=3, stop_strings=("\n",), seed=11
    )
    asyncio.run(conversation.complete(ASKED[:1], overrides=overrides, n=2))
    asyncio.run(conversation.complete(ASKED[:1]))
    (first, second, plain) = [sampling for _, sampling in engine.requests]
    assert (first.temperature, first.top_k, first.stop_strings) == (0.2, 4, ("\n",))
    assert (first.max_new_tokens, first.seed) == (3, 11)
    assert second.seed == derive_seed(11, "completion", 1)
    assert plain == SamplingParams(
        max_new_tokens=9, temperature=0.7, seed=derive_seed(5, "turn", 2)
    )
    assert [turn.temperature for turn in conversation.turns] == [0.2, 0.2, 0.7]

    changed = SamplingOverrides(temperature=0.2, top_k=4)
    assert [turn.overrides for turn in conversation.turns] == [changed, changed, None]


def test_a_call_with_the_recipes_distribution_is_trained() -> None:
    conversation = conversation_on(Babbling(CHAT))
    same = SamplingOverrides(temperature=0.7, top_p=1.0, max_new_tokens=3, stop_strings=("x",))
    (turn,) = asyncio.run(conversation.complete(ASKED[:1], overrides=same))
    assert turn.overrides is None


def test_an_answer_in_another_form_is_the_same_turn() -> None:
    engine = Babbling(CHATS["hermes"])
    conversation = conversation_on(engine)
    (turn,) = asyncio.run(conversation.complete(ASKED[:1]))
    parsed = Message("assistant", "", (ToolCall("add", "{}", "c1"),))
    result = Message("tool", "2", tool_call_id="c1")

    conversation.recognise(turn.index, parsed)
    for said in (parsed, turn.messages[-1]):
        (following,) = asyncio.run(conversation.complete([ASKED[0], said, result]))
        assert following.parent == turn.index
        assert trajectory(conversation).context_ids(following.index) == engine.requests[-1][0]
        (later,) = asyncio.run(
            conversation.complete([ASKED[0], parsed, result, following.messages[-1], ASKED[1]])
        )
        assert later.parent == following.index

    (of_ids,) = asyncio.run(conversation.complete([40]))
    with pytest.raises(BadRequestError, match="answered a prompt of token ids"):
        conversation.recognise(of_ids.index, parsed)


def test_other_tools_begin_anew() -> None:
    engine = Babbling(CHATS["hermes"])
    conversation = conversation_on(engine)
    tools = [{"type": "function", "function": {"name": "add"}}]
    (first,) = asyncio.run(conversation.complete(ASKED[:1], tools=tools))
    history = [ASKED[0], first.messages[-1], ASKED[1]]
    (same,) = asyncio.run(conversation.complete(history, tools=tools))
    (none,) = asyncio.run(conversation.complete(history))
    assert (same.parent, none.parent) == (0, None)
    assert "add" in CHATS["hermes"].tokenizer.decode(engine.requests[0][0])


def test_a_full_context_and_a_closed_conversation() -> None:
    engine = Babbling(CHAT)
    prompt = len(CHAT.first_prompt(ASKED[:1]))
    conversation = conversation_on(engine, context_length=prompt + 2)
    asyncio.run(conversation.complete(ASKED[:1]))
    assert engine.requests[0][1].max_new_tokens == 2

    full = conversation_on(engine, context_length=prompt)
    with pytest.raises(RequestTooLongError, match=f"has {prompt} tokens"):
        asyncio.run(full.complete(ASKED[:1]))

    asyncio.run(full.close())
    assert engine.released == ["a"] and full.broken is None
    with pytest.raises(EngineError, match="the attempt a has ended"):
        asyncio.run(conversation_closed(engine).complete(ASKED[:1]))


def conversation_closed(engine: Any) -> Conversation:
    conversation = conversation_on(engine)
    asyncio.run(conversation.close())
    return conversation
