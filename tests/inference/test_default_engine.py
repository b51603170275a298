"""Which engine a run takes whose recipe names none."""

import pytest

from agentevo.cli import processes
from agentevo.config import load_config
from agentevo.errors import ConfigError
from agentevo.inference import default_engine
from agentevo.inference.default_engine import (
    choose_engine,
    embedded_for,
    engine_override,
    load_with_engine,
)
from agentevo.runtime import devices

MODEL = ["model.name=org/name"]


@pytest.mark.parametrize(
    ("device", "installed", "reason", "type_"),
    [
        ("cpu", ["vllm", "sglang"], "", "torch"),
        ("mps", ["vllm"], "", "torch"),
        ("cuda", [], "", "torch"),
        ("cuda", ["sglang"], "", "sglang"),
        ("cuda", ["sglang", "vllm"], "", "vllm"),
        ("cuda", ["vllm"], "engine.batch_invariant", "torch"),
    ],
)
def test_the_fastest_of_what_is_installed_is_taken_on_a_gpu(device, installed, reason, type_):
    choice = choose_engine(device, installed, reason)
    assert choice.type == type_ and choice.why
    assert reason in choice.why


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([], ""),
        (["model.name=tiny"], "model.name=tiny"),
        (["engine.batch_invariant=true"], "engine.batch_invariant"),
        (["rollout.staleness=1", "rollout.policy=mask"], "rollout.sharing=turns"),
        (["rollout.staleness=1", "rollout.policy=mask", "rollout.samplers=1"], ""),
        (["model.lora.rank=4"], ""),
        (["model.lora.rank=4", "model.lora.dora=true"], "model.lora"),
    ],
)
def test_what_the_embedded_engine_alone_does_keeps_it(words, key):
    assert embedded_for(load_config("coins", [*MODEL, *words])) == key


def test_a_run_on_a_gpu_says_which_engine_and_why(monkeypatch, tmp_path):
    said = []

    def override(*words, resume=False):
        config = load_config("coins", [*MODEL, f"run.dir={tmp_path}", *words])
        return engine_override([config], resume=resume, note=said.append)

    assert override() == [] and said == []  # here is a CPU

    monkeypatch.setattr(devices, "is_available", lambda kind: kind == "cuda")
    monkeypatch.setattr(default_engine, "find_spec", lambda name: name == "vllm" or None)
    assert override() == ["engine.type=vllm"]
    assert said[0].startswith("engine: vllm, made for GPUs, and installed")
    assert override("engine.type=torch") == override("model.device=cpu") == [] and len(said) == 1

    algorithm = load_config("coins", [*MODEL, "engine.type=vllm"]).algorithm
    assert algorithm.importance == "token_tis"

    monkeypatch.setattr(default_engine, "find_spec", lambda name: None)
    assert override() == [] and "pip install 'agentevo[vllm]'" in said[1]

    (tmp_path / "config.yaml").write_text("engine: {type: vllm}\n")
    assert override(resume=True) == ["engine.type=vllm"] and len(said) == 2


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a CUDA GPU and vLLM."""
    monkeypatch.setattr(devices, "is_available", lambda kind: kind == "cuda")
    has = {"vllm", "torch"}
    monkeypatch.setattr(default_engine, "find_spec", lambda name: name in has or None)
    return has


def test_processes_of_one_run_take_the_engine_that_the_first_has_recorded(gpu, tmp_path):
    said: list[str] = []
    words = [*MODEL, f"run.dir={tmp_path}", "rollout.staleness=1", "rollout.policy=mask"]

    def engine(*more, apart=True):
        def load(chosen):
            return load_config("coins", [*words, *more, *chosen])

        return load_with_engine(load, note=said.append, is_separate=apart).engine.type

    assert engine() == "vllm" and said[0].startswith("engine: vllm, made for GPUs")
    assert engine(apart=False) == "torch" and "rollout.sharing=turns needs" in said[1]
    assert engine("engine.type=torch") == engine("model.device=cpu") == "torch"
    assert engine("rollout.weights.url=s3://bucket/run") == "torch" and len(said) == 2

    gpu.discard("torch")
    assert engine() == "torch"
    gpu.add("torch")

    (tmp_path / "config.yaml").write_text("engine: {type: torch}\n")
    assert engine() == "torch"
    (tmp_path / "config.yaml").write_text("engine: {type: sglang}\n")
    assert engine() == "sglang" and len(said) == 2


@pytest.mark.parametrize("command", ["learn", "sample", "serve"])
def test_commands_that_are_started_apart_choose_alike(command, gpu, monkeypatch, tmp_path):
    def begin(config, **options):
        raise ConfigError(f"begins with {config.engine.type}")

    monkeypatch.setattr(f"agentevo.runs.processes.{command}.{command}", begin)
    with pytest.raises(ConfigError, match="begins with vllm"):
        getattr(processes, command)("coins", [*MODEL, f"run.dir={tmp_path}"])
