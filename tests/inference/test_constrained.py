"""Completions under a grammar: what is drawn, the log-probs that are recorded, and what the others
beside them get."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
import torch
from constrained import CALL, END, FACT, alone, complete, json_grammar, params, tiny_policy
from engine_door import a_door

from agentevo.config import EngineSection
from agentevo.errors import GrammarError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute import linear
from agentevo.models.grammar import Grammars, unpack_mask
from agentevo.types import Constraint

PROMPT = list(range(40, 60))


def engine(**section) -> TorchEngine:
    loaded = tiny_policy()
    return TorchEngine(loaded.model, loaded.tokenizer, EngineSection(**section))


REQUESTS = [
    ([*PROMPT, 60 + seed], params(grammar, seed, temperature=temperature))
    for seed, (grammar, temperature) in enumerate(
        [(FACT, 1.0), ("", 1.0), (CALL, 0.7), (FACT, 0.0), ("", 0.0), (CALL, 3.0)]
    )
]


@pytest.mark.slow
def test_what_is_drawn_is_of_the_grammar_and_its_log_probs_are_those_of_the_allowed_tokens():
    loaded = tiny_policy()
    tokenizer = loaded.tokenizer
    grammars = Grammars.of(loaded.model, loaded.tokenizer)
    model = alone()
    for (prompt, asked), completion in zip(REQUESTS, complete(engine(), REQUESTS), strict=True):
        text = tokenizer.decode(completion.ids)
        if asked.grammar == FACT and completion.finish_reason == "stop":
            said = json.loads(text.removesuffix("<|end|>"))
            assert 0 <= said["n"] <= 99 and said["s"] in ("hot", "no")
        elif asked.grammar == CALL:
            assert re.match(r"<((left|right),?)*", text), text

        assert bool(completion.masks) == bool(asked.grammar)
        if not asked.grammar or not asked.temperature:
            continue

        constraint = Constraint(grammar=asked.grammar, end_ids=(END,), masks=completion.masks)
        masks = grammars.masks_of(constraint, completion.ids)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion.ids])).logits[0]

        for place, token in enumerate(completion.ids):
            row = logits[len(prompt) + place - 1].double() / asked.temperature
            kept = torch.from_numpy(unpack_mask(masks.table[masks.rows[place]], len(row)))
            logprob = row[token] - row[kept].logsumexp(0)
            assert completion.logprobs[place] == pytest.approx(float(logprob), abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not linear.available(), reason="another library multiplies here")
def test_company_changes_nothing_for_anybody():
    together = complete(engine(batch_invariant=True), REQUESTS)
    alone = [complete(engine(), [request])[0] for request in REQUESTS]
    assert together == alone


@pytest.mark.slow
def test_new_weights_in_mid_answer_leave_the_grammar_where_it_is():
    async def interrupted():
        one = engine()
        asked = asyncio.ensure_future(one.generate(PROMPT, params(FACT, 3), deadline_s=300))
        while not one.scheduler.running or len(one.scheduler.running[0].ids) < len(PROMPT) + 4:
            await asyncio.sleep(0)
        await one.publish(1, in_flight="continue")
        return await asked

    again = asyncio.run(interrupted())
    (once,) = complete(engine(), [(PROMPT, params(FACT, 3))])
    assert again.ids == once.ids and again.masks == once.masks
    assert len(set(again.versions)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("start: nothing", "can't be followed"),
        ("start: %json {", "can't be followed"),
        (f'start: "{"x" * 100_001}"', "the limit is 100000"),
    ],
)
def test_a_wrong_grammar_is_refused_and_its_neighbours_go_on(grammar, why):
    async def both():
        one = engine()
        return await asyncio.gather(
            one.generate(PROMPT, params(grammar), deadline_s=300),
            one.generate(PROMPT, params(FACT), deadline_s=300),
            return_exceptions=True,
        )

    refused, fine = asyncio.run(both())
    assert isinstance(refused, GrammarError) and why in str(refused)
    assert fine == complete(engine(), [(PROMPT, params(FACT))])[0]


@pytest.mark.slow
def test_a_grammar_that_becomes_too_complex_ends_its_own_request():
    keys = {f"p{n}": {} for n in range(600)}
    grammar = json_grammar(type="object", properties=keys, additionalProperties=False)

    async def both():
        one = engine()
        return await asyncio.gather(
            one.generate(PROMPT, params(grammar), deadline_s=300),
            one.generate(PROMPT, params(FACT), deadline_s=300),
            return_exceptions=True,
        )

    refused, fine = asyncio.run(both())
    assert isinstance(refused, GrammarError) and "allows no continuation" in str(refused)
    assert fine.masks


def test_without_a_token_that_ends_its_texts_a_grammar_is_refused():
    with pytest.raises(GrammarError, match="stop_token_ids"):
        complete(engine(), [(PROMPT, params(FACT, stop_token_ids=()))])


def test_the_event_loop_goes_on_while_a_grammar_is_compiled(monkeypatch):
    """The compilation waits for the event loop here: it could never end on it."""
    import threading

    one = engine()
    reached = threading.Event()
    begin = Grammars.begin

    def slow(self, *args):
        assert reached.wait(300)
        return begin(self, *args)

    monkeypatch.setattr(Grammars, "begin", slow)

    async def work():
        constrained = asyncio.ensure_future(one.generate(PROMPT, params(FACT), deadline_s=300))
        plain = await one.generate(PROMPT, params("", max_new_tokens=4), deadline_s=300)
        reached.set()
        return plain, await constrained

    plain, constrained = asyncio.run(work())
    assert len(plain.ids) == 4 and constrained.masks


@pytest.mark.slow
def test_over_the_wire_it_is_the_same(tmp_path):
    """Another process's engine differs in nothing but that messages lie between."""
    local = complete(engine(), REQUESTS[:3])

    async def asked():
        async with a_door(tmp_path, engine=engine()) as door:
            client = await door.client()
            try:
                completions = [
                    await client.generate(prompt, one, None, 60.0, None)
                    for prompt, one in REQUESTS[:3]
                ]
                with pytest.raises(GrammarError, match="can't be followed"):
                    await client.generate(PROMPT, params("start: nothing"), None, 60.0, None)
            finally:
                await client.close()

        return completions

    remote = asyncio.run(asked())
    assert [(one.ids, one.masks) for one in remote] == [(one.ids, one.masks) for one in local]
    assert [one.logprobs for one in remote] == [one.logprobs for one in local]
