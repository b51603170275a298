"""`pip install agentevo`, without torch, is enough for whoever only asks an engine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import httpx
import pytest
from engine_process import EngineProcesses
from light_install import LightInstall
from openai import OpenAI
from served_run import wait_for

from agentevo import load_run
from agentevo.inference.serving.secret import RunSecret
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.runs.folder.run_folder import read_store


@pytest.fixture(scope="module")
def light(tmp_path_factory) -> LightInstall:
    return LightInstall(tmp_path_factory.mktemp("site-packages"))


@pytest.mark.slow
def test_what_computes_with_a_model_says_what_to_install(light, tmp_path):
    script = """if True:
        import importlib.util, sys
        import agentevo
        from agentevo.cli.main import main
        assert importlib.util.find_spec("torch") is None
        try:
            agentevo.train("coins")
        except agentevo.ConfigError as error:
            print(error)
        sys.exit(main(["train", "coins"]))
    """
    code, printed = light.output("-c", script, cwd=tmp_path)
    assert code == 2, printed
    assert printed.count("needs the package 'torch': pip install 'agentevo[train]'") == 2, printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_sampler_without_torch_samples_from_an_engine(light, run):
    def groups():
        return written(run.folder)

    with EngineProcesses(run.folder) as engines:
        engines.start("a")
        sampler = light.start("-m", "agentevo", "sample", str(run.folder / "config.yaml"))
        try:
            wait_for(groups, "a group is there")
        finally:
            sampler.send_signal(signal.SIGTERM)
            printed, _ = sampler.communicate(timeout=300)

    assert sampler.returncode == 0, printed

    (first, *_) = groups()
    assert first.status == "completed"


def written(folder):
    try:
        return read_store(folder, lambda store: store.summaries(split="train"))
    except Exception:  # noqa: BLE001 (there is no store yet)
        return []


@pytest.mark.soak
def test_a_gateway_without_torch_brings_attempts_that_a_trainer_trains_on(
    light, small_config, tmp_path
):
    config = small_config(
        tmp_path / "run",
        "rollout.policy=mask",
        "rollout.staleness=1",
        "trainer.steps=1",
        "trainer.groups_per_step=1",
        "trainer.minibatches=1",
        "trainer.group_size=2",
        "evaluation.every=0",
        "cold_start.episodes=0",
        "engine.kv_cache_gb=0.1",
        "model.tiny.context_length=512",
    )
    ensure_run_folder(config)
    recipe = str(config.run_dir / "config.yaml")

    key = RunSecret(config.run_dir / "gateway")
    trainer = subprocess.Popen([sys.executable, "-m", "agentevo", "learn", recipe])
    gateway = light.start("-u", "-m", "agentevo", "serve", "--gateway", recipe)
    try:
        with EngineProcesses(config.run_dir) as engines:
            engines.start("a")
            base = re.search(r"sessions at (http\S+)/sessions", _line(gateway, "sessions at"))[1]
            with httpx.Client(base_url=base, headers=key.header(), timeout=300) as http:
                wait_for(lambda: http.post("/sessions").status_code == 201, "an engine serves")
                rewards = [_play(http, reward) for reward in (1.0, 0.0)]
            assert trainer.wait(300) == 0
    finally:
        for process in (gateway, trainer):
            process.terminate()
        printed, _ = gateway.communicate(timeout=300)

    assert gateway.returncode == 0, printed
    assert "torch" not in printed

    trained = read_store(config.run_dir, lambda store: store.summaries(trained_step=1))
    assert [row.reward for row in trained] == rewards == [1.0, 0.0]
    assert load_run(config.run_dir).audit().ok


def _play(http: httpx.Client, reward: float) -> float:
    """One session of the group, by a client of OpenAI's API."""
    session = http.post("/sessions", json={"group": "g"}).json()
    messages = [{"role": "user", "content": "left or right ?"}]
    with OpenAI(base_url=session["base_url"], api_key=session["key"]) as client:
        client.chat.completions.create(model="policy", messages=messages)
    ended = http.post(f"/sessions/{session['id']}/end", json={"reward": reward}).json()
    assert ended["turns"] == 1
    return reward


def _line(process: subprocess.Popen[str], word: str) -> str:
    """The next line that has the word."""
    assert process.stdout is not None
    return next(line for line in process.stdout if word in line)
