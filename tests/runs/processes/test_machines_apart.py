"""A run over machines that share no folder: the engine has a folder of its own, is reached by its
URL, and reads weights from an object store. When it has ended it goes on with more steps."""

import json
import secrets
import socket
import subprocess
import sys

import pytest
from served_run import wait_for

RECIPE = [
    "coins", "model.name=tiny", "rollout.staleness=1", "rollout.policy=mask", "trainer.steps=2",
    "evaluation.tasks=1", "evaluation.every=0", "cold_start.episodes=0",
    "trainer.groups_per_step=2", "trainer.group_size=2", "model.tiny.hidden_size=32",
    "tracking.tensorboard=false", "tracking.report=false",
    "rollout.engine_secret=${env:ENGINE_SECRET}",
]  # fmt: skip


@pytest.mark.slow
def test_an_engine_with_a_folder_of_its_own_serves_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_SECRET", secrets.token_hex(32))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    shared = [
        *RECIPE,
        f"store.url=sqlite:///{tmp_path / 'store.sqlite'}",
        f"rollout.weights.url=file://{tmp_path / 'bucket'}",
        f"rollout.engine_urls=[http://127.0.0.1:{port}]",
    ]

    def start(*words):
        return subprocess.Popen([sys.executable, "-m", "agentevo", *words])

    there, here, elsewhere = (
        f"run.dir={tmp_path / name}" for name in ("there", "here", "elsewhere")
    )
    engine = start("serve", *shared, there, "--port", str(port))
    sampler = start("sample", *shared, elsewhere)
    try:
        trainer = start("learn", *shared, here)
        assert trainer.wait(timeout=300) == 0
        assert sampler.wait(timeout=300) == 0
        assert json.loads((tmp_path / "here" / "summary.json").read_text())["steps"] == 2
        assert start("learn", *shared, here, "trainer.steps=3").wait(timeout=300) == 2

        trainer = start("learn", *shared, here, "trainer.steps=3", "--resume")
        wait_for(
            lambda: "steps: 3" in (tmp_path / "bucket" / "config.yaml").read_text(),
            "the run has three steps",
        )
        sampler = start("sample", *shared, elsewhere, "trainer.steps=3")

        assert trainer.wait(timeout=300) == 0
        assert sampler.wait(timeout=300) == 0
        assert engine.poll() is None

        engine.terminate()
        assert engine.wait(timeout=300) == 0
    finally:
        for process in (engine, sampler, trainer):
            process.kill()

    assert json.loads((tmp_path / "here" / "summary.json").read_text())["steps"] == 3
    assert not (tmp_path / "here" / "engines").exists()
    assert not (tmp_path / "there" / "weights").exists()
