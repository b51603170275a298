"""Context that the engine computes again goes to the experts that it told before, under the same
weights. Here every near tie goes the other way whenever something is computed again, so nothing
depends on how this processor sums."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from near_ties import ROUTER_WEIGHTS, nudged
from slow import soak
from transformers import PreTrainedModel

from agentevo.config import EngineSection
from agentevo.inference.embedded.requests import EngineRequest
from agentevo.inference.embedded.routing import TokenRows
from agentevo.inference.embedded.routing_memory import RoutingMemory
from agentevo.inference.embedded.scheduler import Sequence
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.compute.linear import drop_packed
from agentevo.models.compute.routers import RouterReplay, Routers, enable_routing
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.types import Completion, Sample, SamplingParams
from agentevo.types.routed_experts import RoutedExperts, join_experts

SHORT = list(range(5, 30))
LONG = [5 + (7 * n) % 80 for n in range(150)]
SESSION = "one"
Turn = tuple[list[int], Completion, list[RoutedExperts]]
"""The ids with the completion, the completion, and the rows told along its path."""


@pytest.fixture(scope="module", params=["qwen3-moe", *soak("mixtral")])
def bare(request, random_model):
    return random_model(request.param).model


class Rig:
    """An engine whose near ties `flip` turns, and a client that goes on from what it was told."""

    def __init__(self, bare, **settings) -> None:
        self.model = nudged(enable_routing(copy.deepcopy(bare)), 1.0)
        keys = {"routed_experts": True, "prefill_tokens": 16} | settings
        self.engine = TorchEngine(self.model, config=EngineSection(**keys))

    def flip(self, model: PreTrainedModel | None = None) -> None:
        """Same weights but for what is smaller than rounding in half precision."""
        model = model or self.model
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(ROUTER_WEIGHTS):
                    weight[1] = 2 * weight[0] - weight[1]
        drop_packed(model)

    async def ask(
        self,
        before: Turn | None,
        added: list[int],
        session: str | None = SESSION,
        seed: int = 3,
        version: int | None = None,
        tokens: int = 12,
    ) -> Turn:
        ids, _, rows = before or ([], None, [])
        start = max(len(ids) - 1, 0)
        self.params = SamplingParams(max_new_tokens=tokens, seed=seed, routed_from=start)
        found = await self.engine.generate(
            [*ids, *added], self.params, session=session, deadline_s=300, version=version
        )
        assert found.routed_experts is not None
        return [*ids, *added, *found.ids], found, [*rows, found.routed_experts]

    async def forget(self) -> None:
        await self.engine.forget_cache()
        self.flip()

    async def drawn(self, count: int) -> None:
        """Until so many tokens more are drawn."""
        wanted = self.engine.stats()["engine/generated_tokens"] + count
        while self.engine.stats()["engine/generated_tokens"] < wanted:
            await asyncio.sleep(0)

    def gap(self, turn: Turn) -> float:
        """Largest distance of the turn's log-probs from those of one pass under its record."""
        ids, found, rows = turn
        mask = [False] * (len(ids) - len(found.ids)) + [True] * len(found.ids)
        told = join_experts(rows)
        assert told.num_tokens == len(ids) - 1
        sample = msgspec.structs.replace(Sample.given("t", "g", ids, mask), routed_experts=told)
        batch = pack([sample], torch.device("cpu"))
        with torch.no_grad():
            logp, _ = token_logprobs(
                self.model, batch.with_routing(RouterReplay(batch.routed_experts))
            )
        return float(np.abs(batch.table(logp)[0].numpy() - found.logprobs).max())


def play(rig: Rig, talk: Callable[[Rig], Coroutine[Any, Any, list[Turn]]]) -> None:
    """Every turn of the talk stands on the experts that were told of its context."""
    turns = asyncio.run(talk(rig))
    assert max(map(rig.gap, turns)) < 1e-4


@pytest.mark.slow
def test_the_rig_can_tell(bare):
    """Without a session nothing is known, and what is told of the same ids does differ."""
    rig = Rig(bare)

    async def talk() -> Turn:
        first = await rig.ask(None, SHORT, session=None)
        rig.flip()
        return await rig.ask(first, [3, 4], session=None)

    assert rig.gap(asyncio.run(talk())) > 1e-2


@pytest.mark.slow
def test_a_session_whose_cache_is_dropped(bare):
    """Twice, the second time before the first context is whole again."""

    async def talk(rig: Rig) -> list[Turn]:
        first = await rig.ask(None, LONG)
        await rig.forget()
        second = await rig.ask(first, [3, 4])
        await rig.forget()
        return [first, second, await rig.ask(second, [9])]

    play(Rig(bare), talk)


@pytest.mark.slow
def test_a_session_that_goes_back_to_another_branch(bare):
    """What its cache has no more is known from the turns that were there; also the end of a prompt
    that is asked again."""

    async def talk(rig: Rig) -> list[Turn]:
        first = await rig.ask(None, LONG)
        second = await rig.ask(first, [3, 4])
        rig.flip()
        other = await rig.ask(first, [6])
        rig.flip()
        third = await rig.ask(second, [7, 8, 9])
        again = await rig.ask(second, [7, 8, 9], seed=4)
        return [first, second, other, third, again, await rig.ask(other, [4])]

    play(Rig(bare), talk)


@pytest.mark.slow
def test_a_session_whose_cache_others_took(bare):
    async def talk(rig: Rig) -> list[Turn]:
        first = await rig.ask(None, LONG)
        rig.flip()
        elsewhere = await rig.ask(None, [8, *LONG], session="another")
        rig.flip()
        more = await rig.ask(first, [3])
        return [first, elsewhere, more, await rig.ask(elsewhere, [3], session="another")]

    rig = Rig(bare, kv_cache_tokens=256)
    play(rig, talk)
    assert not rig.engine.stats()["engine/session_hit_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [True, *soak(False)])
def test_turns_that_were_broken_off_or_ran_at_the_same_time(bare, sharing):
    """One that nobody waits for takes its session's cache with it."""

    async def talk(rig: Rig) -> list[Turn]:
        first = await rig.ask(None, LONG)
        task = asyncio.ensure_future(rig.ask(first, [3, 4], tokens=40))
        await rig.drawn(2)
        task.cancel()
        await asyncio.wait([task])
        rig.flip()
        both = await asyncio.gather(*(rig.ask(first, [n], seed=n) for n in (5, 6, 7)))
        rig.flip()
        more = await asyncio.gather(*(rig.ask(turn, [9]) for turn in both))
        return [first, *both, *more]

    play(Rig(bare, prefix_sharing=sharing), talk)


@pytest.mark.slow
def test_the_same_prompt_twice_at_once_with_experts_that_differ(bare):
    """Whoever goes on from the turn that ended first finds the other one's cache, and uses it as
    far as both agree."""

    async def talk(rig: Rig) -> list[Turn]:
        task = asyncio.ensure_future(rig.ask(None, LONG, tokens=8))
        await rig.drawn(2)
        rig.flip()
        other = await rig.ask(None, LONG, seed=4, tokens=20)
        first = await task
        hits = rig.engine.stats()["engine/session_hit_tokens"]
        more = await rig.ask(first, [3])
        assert rig.engine.stats()["engine/session_hit_tokens"] - hits < len(LONG)
        return [first, other, more, await rig.ask(other, [4])]

    play(Rig(bare), talk)


@pytest.mark.slow
@pytest.mark.parametrize("session", [SESSION, *soak(None)])
def test_a_request_that_is_interrupted_and_goes_on_under_the_same_weights(bare, session):
    """By a cache that is dropped, twice, before its context was there again; by a sleep; and under
    a version that serves on beside a newer one."""

    async def talk(rig: Rig) -> list[Turn]:
        rig.engine.keep(1)
        task = asyncio.ensure_future(rig.ask(None, LONG, session=session, version=0, tokens=40))
        await rig.drawn(6)
        await rig.forget()
        steps = rig.engine.stats()["engine/steps"]
        while rig.engine.stats()["engine/steps"] < steps + 2:
            await asyncio.sleep(0)

        await rig.forget()
        await rig.drawn(6)
        await rig.engine.sleep(in_flight="continue", deadline_s=300)
        rig.flip()
        await rig.engine.wake()
        await rig.drawn(6)
        rig.engine.keep(1)
        kept = rig.engine._earlier.model_serving(0, 1)[1]
        await rig.engine.publish(
            1, {name: p * 1.5 for name, p in rig.model.named_parameters()}, in_flight="continue"
        )
        rig.flip(kept)

        found = await task
        assert set(found[1].versions) == {0}

        rig.model = kept
        return [found]

    play(Rig(bare), talk)


@pytest.mark.slow
def test_a_shared_prefix_that_is_computed_again(bare):
    """By those who know other experts of it than the newest one was computed with: conversations
    that began with it, some of which come back together."""

    async def talk(rig: Rig) -> list[Turn]:
        async def begin(names: str) -> list[Turn]:
            return await asyncio.gather(
                *(rig.ask(None, LONG, session=name, seed=ord(name)) for name in names)
            )

        first = await begin("ab")
        await rig.forget()

        second = await begin("cd")  # with experts of their own
        more = await asyncio.gather(
            *(rig.ask(turn, [3], session=name) for name, turn in zip("ab", first, strict=True))
        )
        await rig.forget()
        together = zip("acbd", [more[0], second[0], more[1], second[1]], strict=True)
        last = await asyncio.gather(*(rig.ask(turn, [4], session=name) for name, turn in together))
        await rig.forget()
        before = rig.engine.stats()["engine/prefix_hit_tokens"]
        alike = zip("ab", last[::2], strict=True)
        both = await asyncio.gather(*(rig.ask(turn, [5], session=name) for name, turn in alike))
        hits = rig.engine.stats()["engine/prefix_hit_tokens"] - before
        assert hits >= 2 * (len(LONG) - 1), "they know the same experts of what they share"
        return [*first, *second, *more, *last, *both]

    play(Rig(bare), talk)


@pytest.mark.slow
def test_new_weights_choose_for_themselves(bare):
    """A session's context, as where they meet it for the first time; what they chose is replayed
    from then on. So it is after a beginning under the same number."""
    rig = Rig(bare)

    async def talk(start: str) -> None:
        first = await rig.ask(None, LONG)
        if start == "publish":
            await rig.engine.publish(rig.engine.version + 1)
        else:
            await rig.engine.begin(rig.engine.version)

        rig.flip()
        assert rig.engine.stats()["engine/routing_bytes"] == 0

        second = await rig.ask(first, [3])
        fresh = await TorchEngine(rig.model, config=rig.engine.config).generate(
            second[0][: -len(second[1].ids)],
            msgspec.structs.replace(rig.params, routed_from=0),
            deadline_s=300,
        )
        assert fresh.ids == second[1].ids

        await rig.forget()
        third = await rig.ask(second, [4])
        # The rows of the first context are those of the weights before.
        own = [fresh.routed_experts, third[1].routed_experts]
        assert rig.gap((third[0], third[1], own)) < 1e-4 < rig.gap(third)

        await rig.engine.release(SESSION)
        assert rig.engine.stats()["engine/routing_bytes"] == 0

    for start in ("publish", "begin"):
        asyncio.run(talk(start))


def rows_of(seed: int, count: int, routing: RoutingMemory) -> TokenRows:
    rows = TokenRows(routing.weights(None))
    drawn = np.random.default_rng(seed).integers(0, 200, (count, 3, 2))
    rows.put(0, drawn.astype(np.uint8))
    return rows


def answered(ids: list[int], rows: TokenRows) -> Sequence:
    return Sequence(0, [*ids, 1], None, cached=len(ids), routed=rows)


def test_how_much_is_kept():
    """The oldest paths go first, a released session's at once, and one that another goes on from
    takes nothing."""
    serving = {1}
    routing = RoutingMemory(Routers(3, 2, 200), 3000, lambda version: version or max(serving))

    def known(session: str, ids: list[int], version: int | None = None) -> int:
        request = EngineRequest([*ids, 9], SamplingParams(), None, session, version)
        return routing.known(request).num_tokens

    ids = list(range(20))
    for n in range(40):
        routing.keep(f"s{n}", answered(ids, rows_of(n, 20, routing)))
        assert routing.num_bytes <= 3000

    kept = [n for n in range(40) if known(f"s{n}", ids)]
    assert kept == list(range(40 - len(kept), 40)) and 5 < len(kept) < 20
    assert known("s39", [*ids[:7], 50]) == 7 and not known("s39", [50])

    before = routing.num_bytes
    routing.release("s39")
    routing.release("never there")
    assert not known("s39", ids) and routing.num_bytes < before

    for n in range(40):
        routing.release(f"s{n}")
    assert routing.num_bytes == 0

    rows = rows_of(0, 40, routing)
    longer = list(range(40))
    for size in (20, 30, 40):
        routing.keep("one", answered(longer[:size], rows.beginning(size)))

    alone = routing.num_bytes
    routing.keep("one", answered(longer, rows_of(1, 40, routing)))  # told at the same time
    assert routing.num_bytes == 2 * alone < 3000 and known("one", longer) == 40

    serving.add(2)
    assert not known("one", longer) and known("one", longer, version=1) == 40

    routing.forget_outdated()
    assert known("one", longer, version=1) == 40

    routing.begin()
    assert routing.num_bytes == 0 and not known("one", longer, version=1)


def test_who_does_not_record_keeps_nothing(bare):
    engine = TorchEngine(enable_routing(copy.deepcopy(bare)))
    assert engine.scheduler.routing is None and "engine/routing_bytes" not in engine.stats()
