"""A replay gives the record again, whichever versions drew it, and finds what was changed in it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from slow import soak

from agentevo.api.run import Run, train
from agentevo.cli.main import main
from agentevo.config import RunConfig, build_config
from agentevo.errors import CheckpointError, StoreError
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.runs.audit import stored_weights as rebuild_module
from agentevo.runs.audit.replay import TrajectoryReplay, replay, versions_of
from agentevo.runs.audit.resampling import EXACT, request_uniforms, resample
from agentevo.runs.audit.stored_weights import StoredVersions, load_version
from agentevo.runs.folder.creation import write_config
from agentevo.runs.folder.run_folder import run_config
from agentevo.runs.orchestration.components import open_components
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store import open_store
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import SamplingParams, Trajectory, Turn

pytestmark = pytest.mark.slow

TRAINED = (
    "checkpoint.every=1",
    "checkpoint.keep_last=9",
    "evaluation.every=0",
    "evaluation.samples=0",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_config, quiet_view) -> Run:
    """Four steps, the weights that each left are kept; those of the cold start, version 0, are
    not."""
    return train(small_config(tmp_path_factory.mktemp("runs") / "run", *TRAINED), view=quiet_view())


MIXED: dict[str, Any] = {
    "environment": {"type": "frozen_lake", "slippery": True, "view": "words", "max_actions": 3},
    "model": {"name": "tiny", "tiny": {"hidden_size": 32, "num_layers": 2, "num_heads": 2}},
    "agent": {"format": "answer", "max_turns": 3},
    "sampling": {"max_new_tokens": 12, "top_p": 0.95, "temperature": 0.8},
    "trainer": {"steps": 0, "groups_per_step": 3, "group_size": 3},
    "evaluation": {"tasks": 2},
    "run": {"seed": 3, "threads": 1},
}


async def sample_while_publishing(config: RunConfig) -> None:
    """Weights change under running requests: versions 1, 2, ... come every few engine steps."""
    async with open_components(config) as parts:
        checkpoints = Checkpoints(config.run_dir / "checkpoints", 99)
        work = asyncio.create_task(
            parts.sampler.sample(
                parts.tasks.train(1),
                attempts=3,
                temperature=0.8,
                split="train",
                step=1,
                label="train",
                baseline=True,
            )
        )
        version = 0
        generator = torch.Generator().manual_seed(1)
        while not work.done():
            for _ in range(9):
                await asyncio.sleep(0)

            if parts.engine.scheduler.running and version < 6:
                version += 1
                weights = {
                    n: p + 0.05 * torch.randn(p.shape, generator=generator)
                    for n, p in parts.model.named_parameters()
                }
                await parts.engine.publish(version, weights, in_flight="continue")
                checkpoints.save(version, parts.model, parts.tokenizer, {}, {}, None)
            else:
                await asyncio.sleep(0.001)

        await work


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> RunConfig:
    """A run's folder with trajectories whose tokens come from several versions, as in-flight
    updates leave them."""
    config = build_config(
        MIXED, [f"run.dir={tmp_path_factory.mktemp('mixed') / 'run'}", "checkpoint.keep_last=99"]
    )
    write_config(config)
    run_coroutine(sample_while_publishing(config))
    return config


def read(config: RunConfig) -> dict[str, Trajectory]:
    return {t.id: t for t in Run(config).trajectories()}


def replayed(config: RunConfig, trajectory_id: str, **options: Any) -> TrajectoryReplay:
    (found,) = run_coroutine(replay(config, trajectory_id, **options))
    return found


def changed(config: RunConfig, tmp_path: Path, trajectory: Trajectory) -> RunConfig:
    """The same run, whose store holds another trajectory under that id."""
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"

    async def write() -> None:
        async with (
            await open_store(config.store_url, create=False) as store,
            await open_store(url) as other,
        ):
            await other.add_tasks([await store.task(trajectory.task_id)])
            await other.write_trajectories([trajectory], split="train", step=1)

    run_coroutine(write())
    return config.model_copy(update={"store": config.store.model_copy(update={"url": url})})


def with_turn(trajectory: Trajectory, index: int, **changes: Any) -> Trajectory:
    turns = [
        msgspec.structs.replace(turn, **changes) if turn.index == index else turn
        for turn in trajectory.turns
    ]
    return msgspec.structs.replace(trajectory, turns=turns)


def test_the_random_numbers_are_the_engine_s():
    numbers = np.random.Generator(np.random.Philox(key=7))
    assert request_uniforms(7, 5).tolist() == [float(numbers.random()) for _ in range(5)]


def test_every_trajectory_of_a_run_comes_again_token_for_token(run):
    assert len(run.trajectories(state="committed")) > 12, "the weights have changed"

    found = run.replays(1000)
    stored = [t for t in run.trajectories(split="train") if versions_of(t) != [0]]
    assert len(found) == len(stored) == 36
    assert [one.line() for one in found if not one.same] == []
    assert sum(one.tokens for one in found) == sum(t.num_completion_tokens() for t in stored)
    assert sum(one.ties for one in found) <= 1

    rewards = {t.id: t.reward for t in stored}
    assert {one.trajectory: one.replayed_reward for one in found} == rewards
    assert {version for one in found for version in one.versions} == {1, 2, 3}


def test_greedy_attempts_come_again_too(run):
    greedy = next(t for t in run.trajectories(split="eval", step=4) if "/greedy@" in t.id)
    found = run.replay(greedy.id)
    assert found.same, found.line()
    assert found.turns == len(greedy.turns)


def test_tokens_of_one_turn_drawn_by_several_versions_come_again(mixed):
    stored = read(mixed)
    several = [t for t in stored.values() if any(len(set(turn.versions)) > 1 for turn in t.turns)]
    assert len(several) >= 3, "the weights changed in the middle of completions"
    assert len({version for t in several for version in versions_of(t)}) >= 3

    replays = {one.trajectory: one for one in Run(mixed).replays(1000)}
    assert {trajectory.id for trajectory in several} <= replays.keys() == stored.keys()
    for trajectory in stored.values():
        found = replays[trajectory.id]
        assert found.same, found.line()
        assert found.tokens == trajectory.num_completion_tokens()
        assert found.replayed_reward == trajectory.reward


def test_weights_that_are_gone_are_trained_again(run, tmp_path):
    """From the checkpoint before them, or from the very beginning, cold start and all."""
    for kept in (1, 0):
        folder = tmp_path / f"kept-{kept}"
        shutil.copytree(run.dir, folder)
        for step in range(kept + 1, 5):
            shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")

        if not kept:
            shutil.rmtree(folder / "checkpoints")

        left = Run(run_config(folder))
        trajectory = next(t for t in left.trajectories(split="train", step=4) if t.turns)
        with pytest.raises(CheckpointError, match="rebuild them with --rebuild"):
            left.replay(trajectory.id)

        found = left.replay(trajectory.id, rebuild=True)
        assert found.same, found.line()
        assert found.versions == [3]


def test_weights_are_trained_again_one_version_after_the_other(run, tmp_path, monkeypatch):
    """None is kept for longer than it is looked at."""
    folder = tmp_path / "run"
    shutil.copytree(run.dir, folder)
    shutil.rmtree(folder / "checkpoints")
    done = []
    replay_step = rebuild_module.replay_step

    async def counted(trainer: Any, store: Any, step: Any) -> Any:
        done.append(step.step)
        return await replay_step(trainer, store, step)

    monkeypatch.setattr(rebuild_module, "replay_step", counted)

    async def work() -> None:
        async with aclosing(rebuild_module.rebuild(run_config(folder), {3, 1})) as rebuilt:
            for version in (1, 3):
                weights = await anext(rebuilt)
                assert done == list(range(1, version + 1))
                saved = load_file(
                    run.dir / "checkpoints" / f"step-{version:06d}" / "model.safetensors"
                )
                assert len(saved.keys() & weights.keys()) > 5

                for name in saved.keys() & weights.keys():
                    torch.testing.assert_close(weights[name], saved[name], atol=1e-5, rtol=0.0)

            assert await anext(rebuilt, None) is None

    run_coroutine(work())
    found = Run(run_config(folder)).replays(12, rebuild=True)
    assert [one.line() for one in found if not one.same] == []
    assert len({version for one in found for version in one.versions}) >= 3


def test_weights_that_were_published_to_engines_are_found(mixed, tmp_path):
    published = WeightsFolder(tmp_path / "run" / "weights")
    config = mixed.model_copy(
        update={"run": mixed.run.model_copy(update={"dir": tmp_path / "run"})}
    )
    config = config.model_copy(
        update={"store": config.store.model_copy(update={"url": mixed.store_url})}
    )

    trajectory = max(read(mixed).values(), key=lambda t: len(versions_of(t)))
    for version in [one for one in versions_of(trajectory) if one]:
        published.write(
            version,
            load_version(mixed, StoredVersions(mixed).weights_of(version), version).model,
            keep=99,
        )

    versions = StoredVersions(config)
    assert versions.available_versions() == sorted({0, *versions_of(trajectory)})
    assert all(
        not isinstance(versions.weights_of(version), Path) for version in versions_of(trajectory)
    )
    assert replayed(config, trajectory.id).same

    last = max(versions_of(trajectory))
    (published.path(last) / "weights.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="torn"):
        replayed(config, trajectory.id)


def test_a_whole_run_is_proven_from_its_store(run):
    found = run.audit()
    plans = [violation for violation in found.violations if "has no plan" in violation.what]
    assert len(plans) in (0, 4), "all of its records have one, or none"
    assert len(found.violations) == len(plans)
    if not plans:
        assert found.trained == len(run.trajectories(state="committed")) > 12
        assert set(found.ages) == {0}


def victim(config: RunConfig) -> tuple[Trajectory, Turn, int]:
    """A trajectory with a turn of two versions, that turn, and a position in its middle."""
    for trajectory in read(config).values():
        for turn in trajectory.turns:
            if (
                len(set(turn.versions)) > 1
                and turn.temperature > 0
                and len(turn.completion_ids) > 4
            ):
                return trajectory, turn, 3

    raise AssertionError("no such trajectory")


def test_a_changed_token_is_found_with_its_place_and_both_probabilities(mixed, tmp_path):
    trajectory, turn, position = victim(mixed)
    ids = list(turn.completion_ids)
    token = ids[position] = next(one for one in range(20, 60) if abs(one - ids[position]) > 1)
    found = replayed(
        changed(mixed, tmp_path, with_turn(trajectory, turn.index, completion_ids=ids)),
        trajectory.id,
    )
    assert not found.same and found.difference is not None

    where = found.difference
    assert (where.kind, where.turn, where.position, where.version) == (
        "token",
        turn.index,
        position,
        turn.versions[position],
    )
    assert (where.token, where.drawn) == (token, turn.completion_ids[position])
    assert where.drawn_probability == pytest.approx(np.exp(turn.logprobs[position]), rel=1e-3)
    assert (
        where.probability is not None
        and 0 <= where.probability < 1
        and f"has {token}" in where.what
    )


def test_a_changed_version_is_found(mixed, tmp_path):
    trajectory, turn, _ = victim(mixed)
    first = turn.versions[0]
    position = next(i for i, version in enumerate(turn.versions) if version != first)
    found = replayed(
        changed(
            mixed,
            tmp_path,
            with_turn(trajectory, turn.index, versions=[first] * len(turn.versions)),
        ),
        trajectory.id,
    )
    assert found.difference is not None
    assert (found.difference.turn, found.difference.position >= position) == (turn.index, True)


def test_a_changed_log_prob_is_found(mixed, tmp_path):
    trajectory, turn, position = victim(mixed)
    logprobs = list(turn.logprobs)
    logprobs[position] -= 0.01
    found = replayed(
        changed(mixed, tmp_path, with_turn(trajectory, turn.index, logprobs=logprobs)),
        trajectory.id,
    )
    assert found.difference is not None
    assert (found.difference.kind, found.difference.turn, found.difference.position) == (
        "logprob",
        turn.index,
        position,
    )


def test_a_changed_seed_is_found(mixed, tmp_path):
    trajectory, turn, _ = victim(mixed)
    found = replayed(
        changed(mixed, tmp_path, with_turn(trajectory, turn.index, seed=turn.seed + 1)),
        trajectory.id,
    )
    assert not found.same


def test_a_changed_prompt_is_found(mixed, tmp_path):
    trajectory = next(t for t in read(mixed).values() if len(t.turns) > 1)
    turn = trajectory.turns[1]
    prompt = [*turn.prompt_ids[:-1], turn.prompt_ids[-1] + 1]
    found = replayed(
        changed(mixed, tmp_path, with_turn(trajectory, 1, prompt_ids=prompt)), trajectory.id
    )
    assert found.difference is not None

    place = len(trajectory.context_ids(1)) - 1
    assert (found.difference.kind, found.difference.turn, found.difference.position) == (
        "prompt",
        1,
        place,
    )


def test_a_shortened_completion_is_found(mixed, tmp_path):
    trajectory = next(t for t in read(mixed).values() if t.turns[0].finish_reason == "length")
    turn = trajectory.turns[0]
    short = {
        name: list(getattr(turn, name))[:-1] for name in ("completion_ids", "logprobs", "versions")
    }
    found = replayed(changed(mixed, tmp_path, with_turn(trajectory, 0, **short)), trajectory.id)
    assert found.difference is not None
    assert (found.difference.kind, found.difference.turn, found.difference.position) == (
        "end",
        0,
        len(turn.completion_ids) - 1,
    )


@pytest.mark.parametrize("what", ["reward", "turn", "fewer"])
def test_changed_rewards_and_missing_turns_are_found(mixed, tmp_path, what):
    trajectory = next(t for t in read(mixed).values() if len(t.turns) > 1)
    if what == "reward":
        other = msgspec.structs.replace(trajectory, reward=trajectory.reward + 0.5)
    elif what == "turn":
        other = with_turn(trajectory, 0, reward=trajectory.turns[0].reward + 0.5)
    else:
        other = msgspec.structs.replace(trajectory, turns=trajectory.turns[:1])

    found = replayed(changed(mixed, tmp_path, other), trajectory.id)
    assert found.difference is not None
    assert found.difference.kind == ("end" if what == "fewer" else "reward")


def test_what_broke_off_is_the_same_as_far_as_it_goes(mixed, tmp_path):
    trajectory = next(t for t in read(mixed).values() if len(t.turns) > 1)
    cut = msgspec.structs.replace(
        trajectory,
        turns=trajectory.turns[:1],
        status="failed",
        error="EngineError: gone",
        reward=0.0,
    )
    found = replayed(changed(mixed, tmp_path, cut), trajectory.id)
    assert found.same, found.line()
    assert (found.turns, found.replayed_reward) == (1, None)


def test_tokens_of_an_engine_with_another_rule_are_not_called_different(mixed, tmp_path):
    trajectory, turn, position = victim(mixed)
    logprobs = [*turn.logprobs]
    logprobs[position] -= 1.0
    altered = with_turn(trajectory, turn.index, logprobs=logprobs)
    config = changed(mixed, tmp_path, altered)
    assert not replayed(config, trajectory.id).same

    engine = config.engine.model_copy(update={"type": "vllm"})
    found = replayed(config.model_copy(update={"engine": engine}), trajectory.id)
    assert found.same and found.played and found.turns == len(trajectory.turns)
    assert "tokens can't be sampled again (the engine 'vllm' recorded the run" in found.line()
    assert "DIFFERS" not in found.line()


def test_a_tie_within_rounding_is_no_difference(mixed):
    """The weights a little off, by what rounding does; then by more."""
    trajectory, turn, _ = victim(mixed)
    version = turn.versions[0]
    loaded = load_version(mixed, StoredVersions(mixed).weights_of(version), version)
    section = mixed.sampling
    filters = SamplingParams(top_p=section.top_p)
    assert resample(trajectory, version, loaded, filters).differences == []

    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1 + 1e-6)
    assert resample(trajectory, version, loaded, filters).differences == []
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.02)

    assert resample(trajectory, version, loaded, filters).differences != []
    assert EXACT.logprob <= 1e-3


def test_weights_that_are_gone_are_named_with_those_at_hand(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run.dir, folder)
    for step in (1, 2, 3):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")

    few = Run(run_config(folder))
    late = next(t for t in few.trajectories(split="train") if versions_of(t) == [1])
    with pytest.raises(
        CheckpointError, match=r"no longer has the weights of version 1 \(available: 4\)"
    ):
        few.replay(late.id)

    with pytest.raises(CheckpointError, match="weights for none of its"):
        few.replays(3)
    with pytest.raises(StoreError, match="no trajectory 'nobody'"):
        run.replay("nobody")


def test_the_command(run, capsys, mixed, tmp_path):
    name = run.trajectories(split="train")[-1].id
    assert main(["audit", str(run.dir), "--replay", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: same (")
    assert main(["audit", str(run.dir), "--replay-random", "3", "--json"]) == 0

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3 and all(line["difference"] is None for line in lines)
    assert main(["audit", str(run.dir), "--rebuild"]) == 2

    trajectory, turn, position = victim(mixed)
    logprobs = [
        *turn.logprobs[:position],
        turn.logprobs[position] - 1.0,
        *turn.logprobs[position + 1 :],
    ]
    config = changed(mixed, tmp_path, with_turn(trajectory, turn.index, logprobs=logprobs))
    write_config(
        config.model_copy(update={"run": config.run.model_copy(update={"dir": tmp_path / "copy"})})
    )
    (tmp_path / "copy" / "checkpoints").symlink_to(mixed.run_dir / "checkpoints")
    capsys.readouterr()

    assert main(["audit", str(tmp_path / "copy"), "--replay", trajectory.id]) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("column", ["metrics", *soak("group_id", "error")])
def test_a_row_that_was_changed_is_named_where_no_replay_can_make_it_again(mixed, tmp_path, column):
    """Which is then all that differs."""
    trajectory = next(t for t in read(mixed).values() if t.status == "completed")
    config = changed(mixed, tmp_path, trajectory)
    assert replayed(config, trajectory.id).same

    store = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
    value = "'{\"num_actions\": 99.0}'" if column == "metrics" else "'other'"
    store.execute(f"UPDATE trajectories SET {column} = {value}")
    store.close()
    found = replayed(config, trajectory.id).difference
    assert found.kind == "record" and "its row is not what was written" in found.what


def test_another_finish_reason_or_truncation_is_a_difference(mixed, tmp_path):
    trajectory = next(t for t in read(mixed).values() if t.status == "completed")
    reason = {"stop": "length", "length": "stop"}[trajectory.turns[0].finish_reason]
    altered = with_turn(trajectory, 0, finish_reason=reason)
    found = replayed(changed(mixed, tmp_path / "a", altered), trajectory.id).difference
    assert found.kind == "end" and f"the record says {reason}" in found.what

    altered = msgspec.structs.replace(trajectory, truncated=not trajectory.truncated)
    found = replayed(changed(mixed, tmp_path / "b", altered), trajectory.id).difference
    assert found.kind == "reward" and "truncated" in found.what
