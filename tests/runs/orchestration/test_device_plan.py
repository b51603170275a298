"""Which devices the trainer and the engines of `agentevo train` have."""

import pytest

from agentevo.config import EngineSection
from agentevo.errors import ConfigError
from agentevo.runs.orchestration import supervisor
from agentevo.runs.orchestration.supervisor import (
    devices_per_engine,
    plan_devices,
    sampling_children,
)


@pytest.mark.parametrize(
    ("count", "ranks", "engines", "per_engine", "plan"),
    [
        (1, 1, 1, 1, "devices: trainer: 0; engine-0: 0 (shared with it)"),
        (2, 1, 1, 1, "devices: trainer: 0; engine-0: 1"),
        (4, 1, 3, 1, "devices: trainer: 0; engine-0: 1; engine-1: 2; engine-2: 3"),
        (8, 2, 3, 2, "devices: trainer: 0, 1; engine-0: 2, 3; engine-1: 4, 5; engine-2: 6, 7"),
        (2, 2, 1, 1, "devices: trainer: 0, 1; engine-0: 1 (shared with it)"),
    ],
)
def test_each_engine_has_devices_of_its_own_behind_the_trainers(
    count, ranks, engines, per_engine, plan
):
    made = plan_devices(count, ranks, engines, per_engine)
    assert str(made) == plan
    assert len(made.engines) == engines and {len(engine) for engine in made.engines} == {per_engine}


@pytest.mark.parametrize(
    ("count", "ranks", "engines", "per_engine", "remedy"),
    [
        (1, 1, 2, 1, "set rollout.engines=1 with one device, which then shares the trainer's"),
        (1, 1, 1, 2, "set rollout.engines=1 with one device"),
        (4, 1, 4, 1, "set rollout.engines=3,"),
        (8, 4, 3, 2, "set rollout.engines=2,"),
        (2, 4, 1, 1, "start at most 2 ranks of the trainer"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(count, ranks, engines, per_engine, remedy):
    with pytest.raises(ConfigError, match=f"this machine has {count}: {remedy}"):
        plan_devices(count, ranks, engines, per_engine)


def test_an_engine_has_as_many_devices_as_its_options_say():
    for section, count in (
        ({}, 1),
        ({"type": "vllm", "options": {"tensor_parallel_size": 4}}, 4),
        ({"type": "sglang", "options": {"args": ["--tp-size", "2"]}}, 2),
    ):
        assert devices_per_engine(EngineSection(**section)) == count


def test_each_engine_of_a_run_sees_its_own_devices_alone(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "plan_of", lambda config: plan_devices(4, 1, 2, 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    notes = []
    config = small_config(tmp_path / "run", "rollout.samplers=1", "rollout.engines=2")
    children = sampling_children(config, notes.append)._children
    assert notes == ["devices: trainer: 0; engine-0: 1; engine-1: 2"]
    seen = {child.name: child.environment.get("CUDA_VISIBLE_DEVICES") for child in children}
    assert seen == {"engine-0": "5", "engine-1": "6", "sampler-0": None}
