"""Weights that an engine refuses, or can't take yet, are tried again."""

from __future__ import annotations

import asyncio
import copy

from served_run import PROMPT, until

from agentevo.config import EngineSection
from agentevo.errors import EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.runs.processes.serve import VersionFollower
from agentevo.types import SamplingParams


class Watched(TorchEngine):
    """Counts how often weights are verified."""

    verified = 0

    def verify(self, weights):
        self.verified += 1
        return super().verify(weights)


def test_refused_weights_are_tried_again_when_they_change_and_told_once(run):
    engine = Watched(copy.deepcopy(run.model))
    asyncio.run(engine.begin(-1))
    notes: list[str] = []
    follower = VersionFollower(run.weights, engine, "continue", deadline_s=300, note=notes.append)

    async def look(times: int = 1) -> list[bool]:
        return [await follower.look() for _ in range(times)]

    assert asyncio.run(look(3)) == [True, False, False]
    assert (engine.version, engine.verified) == (0, 1), "what is served already is not read again"

    unfit = copy.deepcopy(run.model)
    unfit.get_input_embeddings().weight.data.fill_(float("nan"))
    sha256 = run.weights.write(1, unfit, keep=3)

    assert asyncio.run(look(5)) == [False] * 5
    assert (engine.version, engine.verified) == (0, 2)
    assert (
        len(notes) == 2
        and "version 0 continues to serve: weights refused" in notes[1]
        and "NaN" in notes[1]
    )
    assert run.weights.write(1, unfit, keep=3) == sha256
    assert asyncio.run(look(3)) == [False] * 3
    assert engine.verified == 3, "they were written again, so they were looked at again"
    assert len(notes) == 2, "with the same outcome, of which nothing more is to be said"

    run.write(1)
    assert asyncio.run(look(2)) == [True, False]
    assert (engine.version, follower.stats()["engine/refused_publishes"]) == (1, 2)
    assert notes[2:] == ["serving version 1"]

    (run.folder / "weights" / "latest.json").write_text("{")
    assert asyncio.run(look(3)) == [False] * 3
    assert len(notes) == 4 and "latest.json can't be read" in notes[3]


def test_refused_weights_are_tried_again_after_a_while_though_they_look_the_same(run, monkeypatch):
    """What failed may have been the reading: a disk or a network with a bad moment."""
    engine = TorchEngine(copy.deepcopy(run.model))
    asyncio.run(engine.begin(-1))
    follower = VersionFollower(
        run.weights, engine, "continue", deadline_s=300, note=lambda line: None
    )
    real = WeightsFolder.read

    def bad(self, version, **options):
        raise EngineError("a bad moment")

    monkeypatch.setattr(WeightsFolder, "read", bad)
    assert not asyncio.run(follower.look())

    monkeypatch.setattr(WeightsFolder, "read", real)
    assert not asyncio.run(follower.look()), "not at once"

    monkeypatch.setattr("agentevo.runs.processes.serve.AGAIN_S", 0.0)
    assert asyncio.run(follower.look())
    assert engine.version == 0


def test_weights_that_can_not_be_swapped_in_yet_are_tried_again(run):
    engine = TorchEngine(copy.deepcopy(run.model), config=EngineSection(kv_cache_gb=0.1))
    run.write(1)
    notes: list[str] = []
    follower = VersionFollower(run.weights, engine, "finish", deadline_s=0.05, note=notes.append)

    async def work():
        long = asyncio.create_task(
            engine.generate(PROMPT, SamplingParams(max_new_tokens=480), deadline_s=300)
        )
        await until(lambda: engine.stats()["engine/generated_tokens"] > 0)
        assert not await follower.look() and not long.done()
        long.cancel()
        await until(lambda: engine.stats()["engine/running"] == 0)
        assert await follower.look()

    asyncio.run(work())
    assert engine.version == 1
    assert notes == [
        "publish: requests were still running after 0.05 s; the old weights keep serving",
        "serving version 1",
    ]
