"""The policy handle: token-exact over many turns, and a history that was edited branches."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from agentevo.agents import Policy
from agentevo.errors import (
    BadRequestError,
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    ModelError,
    RequestTooLongError,
)
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.training.batching.samples import trajectory_rows
from agentevo.types import Message, SamplingOverrides, SamplingParams, Trajectory

USER = Message("user", "Take the left coin or the right one.")
MORE = Message("user", "Go on.")
OTHER = Message("user", "You lose.")


@pytest.fixture
def scripted(loaded, chat, scripted_engine):
    """`scripted(says, **options)` -> engine that says so, and a policy on it."""

    def make(says, **options):
        engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, says)
        settings = {"name": "a", "seed": 5, "context_length": 256, "timeout_s": 300.0} | options
        sampling = SamplingParams(max_new_tokens=20, temperature=0.7)
        return engine, Policy(Conversation(engine, chat, sampling, **settings))

    return make


def run(work):
    return asyncio.run(work)


def as_trajectory(policy: Policy) -> Trajectory:
    return Trajectory(id="a", task_id="t", group_id="g", turns=policy.turns)


def test_each_turn_extends_the_very_ids_of_the_one_before(loaded, chat, scripted):
    engine, policy = scripted(["left", "right", "Up"])

    async def talk():
        messages = [USER]
        for _ in range(3):
            reply = await policy.generate(messages)
            messages = [*messages, reply.message, MORE]
        return reply

    assert run(talk()).turn == 2

    turns = policy.turns
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [turn.index for turn in turns] == [0, 1, 2]

    trajectory = as_trajectory(policy)
    for turn, (prompt, sampling, session) in zip(turns, engine.requests, strict=True):
        assert trajectory.context_ids(turn.index) == prompt
        assert (sampling.seed, sampling.temperature, session) == (turn.seed, 0.7, "a")
        assert turn.versions.tolist() == [3] * len(turn.completion_ids)

    said = (
        "<|user|>Take the left coin or the right "
        "one.<|end|><|assistant|>left<|end|><|user|>Go on.<|end|><|assistant|>right<|end|>"
    )
    assert (
        loaded.tokenizer.decode(engine.requests[-1][0])
        == f"{said}<|user|>Go on.<|end|><|assistant|>"
    )
    assert len({turn.seed for turn in turns}) == 3


@pytest.mark.slow
def test_with_a_real_engine_a_sample_is_what_the_engine_saw(loaded, chat):
    """A random policy says what no tokenizer would ever say; still every id is trained as it was
    drawn."""
    engine = TorchEngine(loaded.model, loaded.tokenizer)
    seen = []
    generate = engine.generate

    async def watched(prompt, sampling, **options):
        completion = await generate(prompt, sampling, **options)
        seen.append(prompt + completion.ids)
        return completion

    engine.generate = watched  # type: ignore[method-assign]
    sampling = SamplingParams(max_new_tokens=7, stop_token_ids=chat.end_ids)
    policy = Policy(
        Conversation(engine, chat, sampling, name="a", seed=1, context_length=256, timeout_s=300)
    )

    async def talk():
        messages = [USER]
        for _ in range(5):
            reply = await policy.generate(messages)
            messages = [*messages, reply.message, MORE]

    run(talk())
    ((_, sample, _),) = trajectory_rows(as_trajectory(policy))
    assert sample.ids.tolist() == seen[-1]
    assert sample.num_trained == sum(len(turn.completion_ids) for turn in policy.turns)
    assert sample.logprobs[sample.loss_mask].tolist() == [
        lp for turn in policy.turns for lp in turn.logprobs
    ]

    reencoded = loaded.tokenizer.encode(
        loaded.tokenizer.decode(sample.ids), add_special_tokens=False
    )
    assert reencoded != sample.ids.tolist(), (
        "the test means something only if encoding again would have given other ids"
    )


@pytest.mark.parametrize(
    ("edit", "parent", "begins_anew"),
    [
        (lambda said: [*said, MORE], 1, False),
        (lambda said: [*said[:3], OTHER], 0, False),
        (lambda said: said[:3], 0, False),
        (lambda said: [USER, OTHER], None, True),
        (
            lambda said: [USER, Message("assistant", "what it never said"), *said[2:], MORE],
            None,
            True,
        ),
        (lambda said: [OTHER, *said[1:], MORE], None, True),
        (lambda said: said[:1], None, True),
    ],
    ids=[
        "extended",
        "other-second-question",
        "second-turn-again",
        "no-answer",
        "edited-answer",
        "edited-question",
        "first-turn-again",
    ],
)
def test_an_edited_history_branches_where_it_was_edited(
    edit, parent, begins_anew, loaded, chat, scripted
):
    engine, policy = scripted(["left", "right", "Up"])

    async def talk():
        first = await policy.generate([USER])
        second = await policy.generate([USER, first.message, MORE])
        said = [USER, first.message, MORE, second.message]
        changed = edit(said) if edit(said)[-1].role == "user" else [*edit(said), MORE]
        await policy.generate(changed)
        return changed

    changed = run(talk())
    turn = policy.turns[2]
    assert turn.parent == parent
    assert as_trajectory(policy).context_ids(2) == engine.requests[2][0]

    rendered = (
        "".join(f"<|{message.role}|>{message.content}<|end|>" for message in changed)
        + "<|assistant|>"
    )
    assert loaded.tokenizer.decode(engine.requests[2][0]) == rendered
    if begins_anew:
        assert turn.prompt_ids.tolist() == engine.requests[2][0]

    samples = [sample for _, sample, _ in trajectory_rows(as_trajectory(policy))]
    assert (
        sum(sample.num_trained for sample in samples)
        == as_trajectory(policy).num_completion_tokens()
    ), "each token once"


def test_a_completion_that_was_cut_off_gets_its_end_from_the_next_prompt(loaded, chat, scripted):
    engine, policy = scripted(["left or...", "right"])

    async def talk():
        first = await policy.generate([USER])
        await policy.generate([USER, first.message, MORE])
        return first

    first = run(talk())
    assert (first.text, first.complete) == ("left or", False)
    assert policy.turns[1].prompt_ids[0] == chat.end_of_turn_id
    assert policy.turns[1].parent == 0
    assert loaded.tokenizer.decode(engine.requests[1][0]).count("<|end|>") == 3


def test_replies_say_what_was_said_without_the_end_of_turn(scripted):
    _, policy = scripted(["left"])
    reply = run(policy.generate([USER]))
    assert (reply.text, reply.complete, reply.turn, reply.message) == (
        "left",
        True,
        0,
        Message("assistant", "left"),
    )
    assert policy.turns[0].messages == [USER, Message("assistant", "left")]


def test_the_last_tokens_of_the_context_are_used_and_then_it_is_full(chat, scripted):
    prompt = len(chat.first_prompt([USER]))
    engine, policy = scripted(["left"], context_length=prompt + 3)
    run(policy.generate([USER]))
    assert engine.requests[0][1].max_new_tokens == 3

    _, policy = scripted(["left"], context_length=prompt)
    with pytest.raises(
        RequestTooLongError,
        match=f"conversation has {prompt} tokens, the model's context is {prompt}",
    ):
        run(policy.generate([USER]))

    assert policy.turns == []


def test_a_turn_that_failed_is_not_recorded_and_can_be_asked_again(scripted):
    engine, policy = scripted([DeadlineExceededError("late"), "left"])

    async def talk():
        with pytest.raises(DeadlineExceededError):
            await policy.generate([USER])
        return await policy.generate([USER])

    assert run(talk()).turn == 0
    assert [turn.index for turn in policy.turns] == [0]
    assert len(engine.requests) == 2


def test_turns_asked_at_the_same_time_are_told_apart(scripted):
    """An agent that searches asks for several continuations at once."""
    engine, policy = scripted(["left", "right", "Up", "Down"])

    async def talk():
        first = await policy.generate([USER])
        replies = await asyncio.gather(
            *(policy.generate([USER, first.message, MORE]) for _ in range(2))
        )
        last = await policy.generate([USER, first.message, MORE, replies[0].message, MORE])
        return [first, *replies, last]

    replies = run(talk())
    assert [turn.index for turn in policy.turns] == [0, 1, 2, 3]
    assert sorted(reply.turn for reply in replies) == [0, 1, 2, 3]
    assert [policy.turns[reply.turn].messages[-1].content for reply in replies] == [
        "left",
        "right",
        "Up",
        "Down",
    ]
    assert policy.turns[3].parent == replies[1].turn
    assert len({sampling.seed for _, sampling, _ in engine.requests}) == 4, (
        "equal questions, different draws"
    )


def test_seeds_follow_the_attempt(scripted):
    def seeds(seed: int) -> list[int]:
        engine, policy = scripted(["left", "left"], seed=seed)
        run(policy.generate([USER]))
        run(policy.generate([OTHER]))
        return [sampling.seed for _, sampling, _ in engine.requests]

    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))


def test_closing_frees_the_engines_memory_of_the_attempt(scripted):
    engine, policy = scripted([])
    run(policy.conversation.close())
    assert engine.released == ["a"]


def test_the_engines_failure_is_remembered_whatever_the_agent_does(scripted):
    async def swallow(policy, messages=(USER,)):
        with contextlib.suppress(Exception):
            await policy.generate(list(messages))

    _, policy = scripted(
        [RequestTooLongError("full"), "left", DeadlineExceededError("late"), EngineError("second")]
    )
    for expected in (None, None, "late", "late"):
        run(swallow(policy))
        assert (str(policy.conversation.broken) if policy.conversation.broken else None) == expected

    _, small = scripted([], context_length=4)
    run(swallow(small))
    assert small.conversation.broken is None, "a full context is the agent's own"


def test_a_request_that_is_broken_off_while_no_engine_lives_is_the_engines_failure(scripted):
    async def hang(*arguments, **more):
        begun.set()
        await asyncio.sleep(3600)

    async def break_off(policy):
        asked = asyncio.create_task(policy.generate([USER]))
        await begun.wait()
        asked.cancel()
        await asked

    for version, broken in ((3, False), (-1, True)):
        engine, policy = scripted([])
        engine.version = version
        engine.generate = hang
        begun = asyncio.Event()
        with pytest.raises(asyncio.CancelledError):
            run(break_off(policy))
        assert isinstance(policy.conversation.broken, EngineUnavailableError) == broken


def hold(engine) -> asyncio.Event:
    """The engine answers only while the event is set."""
    generate = engine.generate
    go = asyncio.Event()

    async def generate_when_set(*arguments, **options):
        await go.wait()
        return await generate(*arguments, **options)

    engine.generate = generate_when_set
    return go


def test_the_oldest_version_counts_requests_under_way(scripted):
    engine, policy = scripted(["left", "right"])
    go = hold(engine)

    async def talk():
        engine.version = 5
        assert policy.conversation.oldest_version is None

        asked = asyncio.create_task(policy.generate([USER]))
        await asyncio.sleep(0)
        engine.version = 8
        assert policy.conversation.oldest_version == 5, "its first tokens may be drawn already"

        go.set()
        await asked
        assert policy.conversation.oldest_version == 8, "they were not"

        engine.version = 9
        await policy.generate([OTHER])
        assert policy.conversation.oldest_version == 8

    run(talk())


def test_a_request_made_while_no_engine_was_known_has_no_version(scripted):
    engine, policy = scripted(["left", "right"])
    go = hold(engine)

    async def talk():
        engine.version = 5
        go.set()
        await policy.generate([USER])
        go.clear()
        engine.version = -1
        asked = asyncio.create_task(policy.generate([OTHER]))
        await asyncio.sleep(0)
        engine.version = 6
        assert policy.conversation.oldest_version == 5, "of the tokens that there are"

        go.set()
        await asked
        assert policy.conversation.oldest_version == 5

    run(talk())


def test_a_closed_policy_answers_no_more(scripted):
    engine, policy = scripted(["left"])
    run(policy.conversation.close())
    with pytest.raises(EngineError, match="the attempt a has ended"):
        run(policy.generate([USER]))
    assert engine.requests == [] and policy.conversation.broken is None


def test_dicts_and_messages_are_the_same_history(loaded, scripted):
    """OpenAI's form in, one or several replies out."""
    engine, policy = scripted(["left", "right", "Up"])

    async def talk():
        first = await policy.generate([{"role": "user", "content": USER.content}])
        said = {"role": "assistant", "content": first.text, "refusal": None}
        more = {"role": "user", "content": [{"type": "text", "text": MORE.content}]}
        return await policy.generate([USER, said, more], n=2, stop="\n", sampling={"top_p": 0.5})

    replies = run(talk())
    assert [(reply.turn, reply.text) for reply in replies] == [(1, "right"), (2, "Up")]
    assert [turn.parent for turn in policy.turns] == [None, 0, 0]
    assert [s.stop_strings for _, s, _ in engine.requests] == [(), ("\n",), ("\n",)]
    assert [s.top_p for _, s, _ in engine.requests] == [1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("hello", {}, "messages is a str"),
        ([["user", "hi"]], {}, "message 1 is a list"),
        ([USER, {"role": "robot", "content": "x"}], {}, "message 2 has the role 'robot'"),
        ([{"role": "user"}], {}, "message 1: content is missing"),
        ([{"role": "user", "content": "x", "tool_cals": [1]}], {}, "message 1 has 'tool_cals'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            {},
            "message 1, part 1 is a NoneType, not an image: give bytes",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}],
            {},
            "message 1, tool call 1 has no name",
        ),
        ([{"role": "user", "content": "x", "tool_call_id": "c"}], {}, "its role is user, not tool"),
        ([USER], {"tools": [{"name": "add"}]}, "tool 1 has no function with a name"),
        ([USER], {"sampling": {"temperatur": 1}}, "unknown field `temperatur`"),
        ([USER], {"sampling": {"top_p": 0}}, r"Expected `float` > 0.*top_p.*it takes temperature"),
        ([USER], {"n": 0}, "n is 0"),
        ([USER], {"stop": ""}, "stop_strings"),
    ],
)
def test_what_is_no_request_is_refused_before_the_engine_hears_of_it(
    prompt, options, said, scripted
):
    engine, policy = scripted(["left"])
    with pytest.raises(BadRequestError, match=said):
        run(policy.generate(prompt, **options))
    assert engine.requests == [] and policy.conversation.broken is None
    assert run(policy.generate([USER])).turn == 0


def test_an_image_is_refused_where_the_model_reads_text(scripted):
    image = {"type": "image", "sha256": "0" * 64, "media_type": "image/png"}
    engine, policy = scripted(["left"])
    with pytest.raises(ModelError, match="holds an image"):
        run(policy.generate([{"role": "user", "content": [image]}]))
    assert engine.requests == []


@pytest.mark.parametrize(
    "asked",
    [
        {"stop": "\ud800"},
        {"stop": ["end", "\ud800"]},
        {"sampling": {"temperature": float("inf")}},
        {"sampling": {"temperature": float("nan")}},
        {"sampling": {"temperature": -1}},
        {"sampling": {"temperature": 1e300}},
        {"sampling": SamplingOverrides(temperature=float("inf"))},
        {"sampling": {"min_p": float("nan")}},
        {"sampling": {"top_p": float("nan")}},
    ],
)
def test_sampling_that_no_engine_can_draw_by_is_the_callers_mistake(scripted, asked):
    engine, policy = scripted(["left"])
    with pytest.raises(BadRequestError, match="sampling of this call"):
        run(policy.generate([USER], **asked))
    assert not engine.requests and policy.conversation.broken is None
