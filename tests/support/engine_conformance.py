"""What every engine promises (`inference/engine.py`), as checks that any engine can be put to.

`Case.of(factory, section)` (engine_case.py) makes an engine of a small Llama with wide random
weights, whose log-probs transformers computes for comparison. Each of `CHECKS` is a
coroutine function of a case:

    @pytest.mark.parametrize("check", CHECKS, ids=name_of)
    def test_conformance(case, check):
        case.run(check(case))

A check begins by `begin`, so that they may share an engine and come in any order. What an engine
need not have (scores, penalties, grammars) is right or refused, never wrong.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_case import (
    CONTEXT,
    PATIENCE_S,
    PLAIN,
    PROMPT,
    TOLERANCE,
    Case,
    drawn_or_refused,
    sampled,
    told,
)

from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    GrammarError,
    ListenerError,
    RequestTooLongError,
)
from agentevo.inference.engine import ScoringEngine, SleepingEngine, TokenScores
from agentevo.types.penalties import Penalties

Check = Callable[[Case], Coroutine[Any, Any, None]]


async def logprobs_are_those_of_the_distribution_drawn_from(case: Case) -> None:
    await case.begin()
    kinds = [
        sampled(),
        sampled(temperature=0.7),
        sampled(temperature=1.6, seed=8),
        sampled(top_k=7),
        sampled(top_p=0.8),
        sampled(temperature=0),
    ]
    prompts = [PROMPT[: 40 - 3 * place] for place in range(len(kinds))]
    found = await asyncio.gather(
        *(case.draw(kind, prompt) for kind, prompt in zip(kinds, prompts, strict=True))
    )
    for kind, prompt, one in zip(kinds, prompts, found, strict=True):
        assert len(one.ids) == 24 and one.finish_reason == "length"
        assert one.versions == [1] * 24
        assert case.difference(case.old, one, kind, prompt).max() < TOLERANCE, kind


async def filters_one_after_the_other_are_right_or_refused(case: Case) -> None:
    await case.begin()
    for kind, name in (
        (sampled(min_p=0.05), "min_p"),
        (sampled(temperature=1.5, top_p=0.8, min_p=0.1), "min_p"),
        (sampled(temperature=0.7, top_k=20, top_p=0.9), "top_p"),
    ):
        if (found := await drawn_or_refused(case, kind, name)) is not None:
            assert case.difference(case.old, found, kind).max() < TOLERANCE


async def a_seed_decides_the_tokens(case: Case) -> None:
    await case.begin()
    first, again, other = [await case.draw(sampled(seed=seed)) for seed in (3, 3, 4)]
    assert first.ids == again.ids != other.ids
    huge, negative = [await case.draw(sampled(seed=seed)) for seed in (2**64 - 1, -1)]
    assert len(huge.ids) == len(negative.ids) == 24


async def nothing_but_what_was_asked_for_ends_a_request(case: Case) -> None:
    """The end-of-text token of the model is one like others."""
    await case.begin(weights=case.flat)
    end = case.alone.config.eos_token_id
    wild = [sampled(max_new_tokens=160, seed=seed) for seed in range(6)]
    found = await asyncio.gather(*map(case.draw, wild))
    assert [len(one.ids) for one in found] == [160] * 6
    assert any(end in one.ids for one in found), "otherwise nothing was tried"


async def a_stop_token_ends_a_request_and_is_part_of_it(case: Case) -> None:
    await case.begin()
    whole = await case.draw()
    stop = whole.ids[9]
    found = await case.draw(sampled(stop_token_ids=(stop, 7)))
    first = min(whole.ids.index(token) for token in (stop, 7) if token in whole.ids)
    assert found.ids == whole.ids[: first + 1]
    assert found.finish_reason == "stop" and found.versions == [1] * (first + 1)
    assert case.difference(case.old, found).max() < TOLERANCE


async def a_stop_string_ends_a_request_with_the_token_that_completes_it(case: Case) -> None:
    await case.begin(weights=case.flat)
    wild = sampled(max_new_tokens=100)
    whole = await case.draw(wild)
    letters = [case.tokenizer.decode([token]) for token in whole.ids]
    place = next(i for i, letter in enumerate(letters) if i > 5 and letter.isalpha())
    found = await case.draw(msgspec.structs.replace(wild, stop_strings=("nowhere", letters[place])))
    assert found.ids == whole.ids[: letters.index(letters[place]) + 1]
    assert found.finish_reason == "stop"
    assert len(found.logprobs) == len(found.versions) == len(found.ids)
    assert case.difference(case.flat, found, wild).max() < TOLERANCE


async def a_listener_is_told_a_beginning_of_the_completion(case: Case) -> None:
    await case.begin()
    ids: list[int] = []
    logprobs: list[float] = []

    def listen(more: Sequence[int], theirs: Sequence[float]) -> None:
        ids.extend(more)
        logprobs.extend(theirs)

    for sampling in (PLAIN, sampled(stop_token_ids=((await case.draw()).ids[6],))):
        ids.clear()
        logprobs.clear()
        found = await case.draw(sampling, listen=listen)
        assert ids == found.ids[: len(ids)]
        assert logprobs == found.logprobs[: len(ids)]


async def a_listener_that_raises_ends_its_own_request(case: Case) -> None:
    await case.begin()
    calm = asyncio.ensure_future(case.draw())

    def fails(ids: Sequence[int], logprobs: Sequence[float]) -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ListenerError) as refusal:
        await case.draw(listen=fails)

    assert isinstance(refusal.value.__cause__, ZeroDivisionError)
    assert len((await calm).ids) == 24


async def a_deadline_ends_a_request_and_frees_it(case: Case) -> None:
    await case.begin()
    with pytest.raises(DeadlineExceededError):
        await case.draw(sampled(max_new_tokens=900), deadline_s=0.01)
    await _idle(case)
    assert len((await case.draw()).ids) == 24


async def cancelling_frees_a_request(case: Case) -> None:
    await case.begin()
    task = await told(case, 3, sampled(max_new_tokens=900))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _idle(case)


async def _idle(case: Case) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while case.engine.stats().get("engine/running", 0):
            await asyncio.sleep(0.01)


async def what_can_not_be_drawn_is_refused_alone(case: Case) -> None:
    await case.begin()
    vocabulary = case.alone.config.vocab_size
    for prompt, sampling, reason in (
        ([], PLAIN, "empty"),
        ([5, vocabulary], PLAIN, f"token {vocabulary}"),
        ([5, -1], PLAIN, "token -1"),
        (PROMPT, sampled(temperature=math.nan), "temperature"),
        (PROMPT, sampled(max_new_tokens=0), "max_new_tokens"),
        (PROMPT, sampled(top_p=0.0), "top_p"),
    ):
        with pytest.raises(EngineError, match=reason):
            await case.draw(sampling, prompt)

    for prompt, sampling in ((PROMPT, sampled(max_new_tokens=CONTEXT)), (PROMPT * 40, PLAIN)):
        with pytest.raises(RequestTooLongError):
            await case.draw(sampling, prompt)

    with pytest.raises(EngineError, match="deadline"):
        await case.draw(deadline_s=math.nan)

    assert case.difference(case.old, await case.draw()).max() < TOLERANCE


async def a_conversation_goes_on_with_the_same_numbers(case: Case) -> None:
    """Whether or not its keys and values were kept, and after it has been forgotten."""
    await case.begin()
    prompt = list(PROMPT)
    for turn in range(3):
        found = await case.draw(sampled(seed=turn), prompt, session="talk")
        assert case.difference(case.old, found, PLAIN, prompt).max() < TOLERANCE
        prompt += [*found.ids, 11, 12, 13]

    await case.engine.release("talk")
    await case.engine.release("never heard of")
    await case.engine.forget_cache()
    found = await case.draw(PLAIN, prompt, session="talk")
    assert case.difference(case.old, found, PLAIN, prompt).max() < TOLERANCE


async def prompts_that_no_step_can_take_together_are_drawn_from(case: Case) -> None:
    """Cut into pieces or one after the other, beside others that are drawn already."""
    await case.begin()
    draw = np.random.default_rng(3)
    prompts = [[int(token) for token in draw.integers(10, 250, 900)] for _ in range(6)]
    found = await asyncio.gather(*(case.draw(PLAIN, prompt) for prompt in prompts))
    for prompt, one in zip(prompts, found, strict=True):
        assert case.difference(case.old, one, PLAIN, prompt).max() < TOLERANCE


async def alternatives_are_the_likeliest_of_that_distribution(case: Case) -> None:
    await case.begin()
    for sampling in (
        sampled(top_logprobs=5),
        sampled(top_logprobs=5, temperature=0.7, top_k=3),
        sampled(top_logprobs=3, temperature=0),
    ):
        found = await case.draw(sampling)
        rows = case.logprobs(case.old, PROMPT, found.ids, sampling)
        for place, (row, told_) in enumerate(zip(rows, found.top_logprobs, strict=True)):
            kept = int(np.isfinite(row).sum())
            assert len(told_) == min(sampling.top_logprobs, kept)
            wanted = np.sort(row)[::-1][: len(told_)]
            assert np.abs(wanted - [logp for _, logp in told_]).max() < TOLERANCE
            assert np.abs(row[[t for t, _ in told_]] - wanted).max() < TOLERANCE
            if sampling.temperature == 0:
                assert told_ == [(found.ids[place], 0.0)]

    assert (await case.draw()).top_logprobs == []


async def penalties_are_right_or_refused(case: Case) -> None:
    await case.begin()
    for given in (
        Penalties(presence=1.5),
        Penalties(frequency=0.7),
        Penalties(repetition=1.8),
        Penalties(logit_bias=((17, 6.0), (40, -100.0))),
        Penalties(presence=-0.5, frequency=0.3, repetition=0.7, logit_bias=((17, 5.0),)),
    ):
        sampling = sampled(penalties=given, max_new_tokens=40, temperature=0.8)
        if (found := await drawn_or_refused(case, sampling, "penalties")) is not None:
            assert case.difference(case.old, found, sampling).max() < TOLERANCE, given


async def a_grammar_is_followed_or_refused(case: Case) -> None:
    await case.begin()
    end = case.alone.config.eos_token_id
    sampling = sampled(grammar='start: "yes" | "no"', stop_token_ids=(end,))
    try:
        found = await case.draw(sampling)
    except GrammarError:
        assert len((await case.draw()).ids) == 24
        return

    assert case.tokenizer.decode(found.ids[:-1]) in ("yes", "no")
    assert found.masks


async def scored_or_refused(
    scoring: Awaitable[TokenScores], temperature: float
) -> TokenScores | None:
    """Other temperatures than 1 may be refused."""
    (found,) = await asyncio.gather(scoring, return_exceptions=True)
    if temperature != 1 and isinstance(found, EngineError) and "temperature" in str(found):
        return None
    assert isinstance(found, TokenScores), found
    return found


async def scores_are_those_of_the_model(case: Case) -> None:
    if not isinstance(case.engine, ScoringEngine):
        return

    await case.begin()
    ids = [int(token) for token in np.random.default_rng(2).integers(10, 250, 30)]
    drawn = await case.draw()

    for temperature in (1.0, 0.7):
        scoring = case.engine.score(PROMPT, ids, temperature=temperature, deadline_s=PATIENCE_S)
        if (found := await scored_or_refused(scoring, temperature)) is None:
            continue
        rows = case.logprobs(case.old, PROMPT, ids, sampled(temperature=temperature))
        assert found.version == 1
        assert np.abs(rows[np.arange(len(ids)), ids] - found.logprobs).max() < TOLERANCE

    again = await case.engine.score(PROMPT, drawn.ids, deadline_s=PATIENCE_S)
    assert np.abs(np.array(again.logprobs) - drawn.logprobs).max() < TOLERANCE
    for context, given, reason in (([], ids, "at least one"), (PROMPT, [5, 10**6], "token 1000")):
        with pytest.raises(EngineError, match=reason):
            await case.engine.score(context, given, deadline_s=PATIENCE_S)


async def finish_lets_running_requests_end_under_the_old_weights(case: Case) -> None:
    await case.begin()
    running = await told(case, 5, sampled(max_new_tokens=200))
    publishing = asyncio.ensure_future(
        case.engine.publish(2, case.new, in_flight="finish", deadline_s=PATIENCE_S)
    )

    await asyncio.sleep(0)
    later = asyncio.ensure_future(case.draw(sampled(seed=9)))
    await publishing
    first = await running
    second = await later

    assert first.versions == [1] * 200
    assert case.difference(case.old, first).max() < TOLERANCE
    for one in (second, await case.draw()):
        weights = {1: case.old, 2: case.new}[one.versions[0]]
        assert len(set(one.versions)) == 1
        assert case.difference(weights, one).max() < TOLERANCE

    assert one.versions == [2] * 24


async def continue_draws_what_follows_from_the_new_weights(case: Case) -> None:
    """The rest of a running request, over a context that the new weights have computed again; and
    requests whose prompt the old weights have computed."""
    await case.begin()
    running = await told(case, 5, sampled(max_new_tokens=400))
    await case.engine.publish(2, case.new, in_flight="continue", deadline_s=PATIENCE_S)
    assert case.engine.version == 2

    fresh = await case.draw(sampled(seed=9))
    found = await running
    assert sorted(found.versions) == found.versions and set(found.versions) == {1, 2}

    before = found.versions.count(1)
    assert 5 <= before < 400 and len(found.ids) == 400
    assert case.difference(case.old, found)[:before].max() < TOLERANCE
    assert case.difference(case.new, found)[before:].max() < TOLERANCE
    assert fresh.versions == [2] * 24
    assert case.difference(case.new, fresh).max() < TOLERANCE


async def weights_that_can_not_be_served_change_nothing(case: Case) -> None:
    await case.begin(4)
    name = next(name for name, one in case.new.items() if one.dim() == 2)
    poisoned = case.new[name].clone()
    poisoned[0, 0] = math.nan
    for weights, version, reason in (
        (case.new, 4, "not newer"),
        ({**case.new, name: poisoned}, 5, name),
        ({**case.new, name: case.new[name][1:]}, 5, "shape"),
        ({one: tensor for one, tensor in case.new.items() if one != name}, 5, "missing"),
        ({**case.new, "model.nobody.weight": poisoned}, 5, "unknown"),
    ):
        running = await told(case, 2, sampled(max_new_tokens=40))
        with pytest.raises(EngineError, match=reason):
            await case.engine.publish(version, weights, in_flight="continue", deadline_s=PATIENCE_S)
        assert case.engine.version == 4
        for found in (await running, await case.draw()):
            assert set(found.versions) == {4}
            assert case.difference(case.old, found).max() < TOLERANCE

    verified = await asyncio.to_thread(case.engine.verify, case.new)
    assert case.difference(case.old, await case.draw()).max() < TOLERANCE

    await case.engine.publish(5, verified, deadline_s=PATIENCE_S)
    assert case.difference(case.new, await case.draw()).max() < TOLERANCE


async def a_run_may_begin_again_at_a_lower_version(case: Case) -> None:
    await case.begin(7)
    await case.engine.begin(3, case.new, deadline_s=PATIENCE_S)
    found = await case.draw()
    assert case.engine.version == 3 and set(found.versions) == {3}
    assert case.difference(case.new, found).max() < TOLERANCE

    await case.engine.begin(2, deadline_s=PATIENCE_S)
    found = await case.draw()
    assert set(found.versions) == {2}
    assert case.difference(case.new, found).max() < TOLERANCE


async def requests_that_come_during_sleep_wait(case: Case) -> None:
    if not isinstance(case.engine, SleepingEngine):
        return

    await case.begin()
    running = await told(case, 3, sampled(max_new_tokens=200))
    await case.engine.sleep(in_flight="continue", deadline_s=PATIENCE_S)
    waiting = asyncio.ensure_future(case.draw())
    await asyncio.sleep(0.2)
    assert case.engine.asleep and not waiting.done() and not running.done()

    await case.engine.wake()
    for found in (await running, await waiting):
        assert case.difference(case.old, found).max() < TOLERANCE

    assert case.engine.slept_s > 0


async def counters_count(case: Case) -> None:
    await case.begin()
    before = case.engine.stats()
    await case.draw()
    await case.engine.publish(2, case.new, deadline_s=PATIENCE_S)

    with pytest.raises(EngineError):
        await case.engine.publish(2, case.new, deadline_s=PATIENCE_S)

    after = case.engine.stats()
    grown = {name: after[name] - before[name] for name in before}
    assert grown["engine/generated_tokens"] == 24
    assert (grown["engine/publishes"], grown["engine/refused_publishes"]) == (1, 1)

    case.engine.check()


CHECKS: list[Check] = [
    logprobs_are_those_of_the_distribution_drawn_from,
    filters_one_after_the_other_are_right_or_refused,
    a_seed_decides_the_tokens,
    nothing_but_what_was_asked_for_ends_a_request,
    a_stop_token_ends_a_request_and_is_part_of_it,
    a_stop_string_ends_a_request_with_the_token_that_completes_it,
    a_listener_is_told_a_beginning_of_the_completion,
    a_listener_that_raises_ends_its_own_request,
    a_deadline_ends_a_request_and_frees_it,
    cancelling_frees_a_request,
    what_can_not_be_drawn_is_refused_alone,
    a_conversation_goes_on_with_the_same_numbers,
    prompts_that_no_step_can_take_together_are_drawn_from,
    alternatives_are_the_likeliest_of_that_distribution,
    penalties_are_right_or_refused,
    a_grammar_is_followed_or_refused,
    scores_are_those_of_the_model,
    finish_lets_running_requests_end_under_the_old_weights,
    continue_draws_what_follows_from_the_new_weights,
    weights_that_can_not_be_served_change_nothing,
    a_run_may_begin_again_at_a_lower_version,
    requests_that_come_during_sleep_wait,
    counters_count,
]


ADAPTER_CHECKS: list[Check] = [
    logprobs_are_those_of_the_distribution_drawn_from,
    scores_are_those_of_the_model,
    finish_lets_running_requests_end_under_the_old_weights,
    continue_draws_what_follows_from_the_new_weights,
    weights_that_can_not_be_served_change_nothing,
    a_run_may_begin_again_at_a_lower_version,
]
"""Of a model with an adapter (`Case.of(..., rank=4)`), whose base is not trained."""


def name_of(check: Check) -> str:
    return check.__name__
