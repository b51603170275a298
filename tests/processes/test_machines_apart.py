"""A run over machines that share no folder: the engine has a folder of its own, is reached by its
URL, and reads weights from an object store."""

import json
import secrets
import socket
import subprocess
import sys

import pytest

RECIPE = [
    "coins", "model.name=tiny", "rollout.staleness=1", "rollout.policy=mask", "trainer.steps=2",
    "evaluation.tasks=4", "evaluation.every=0", "cold_start.episodes=0",
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
        f"rollout.weights.url=file://{tmp_path / 'bucket'}",
        f"rollout.engine_urls=[http://127.0.0.1:{port}]",
    ]

    def start(*words):
        return subprocess.Popen([sys.executable, "-m", "agentevo", *words])

    there, here = f"run.dir={tmp_path / 'there'}", f"run.dir={tmp_path / 'here'}"
    engine = start("serve", *shared, there, "--port", str(port))
    sampler = start("sample", *shared, here)
    try:
        trainer = start("learn", *shared, here)
        assert trainer.wait(timeout=300) == 0
        assert sampler.wait(timeout=60) == 0
        assert engine.poll() is None
        engine.terminate()
        assert engine.wait(timeout=60) == 0
    finally:
        for process in (engine, sampler):
            process.kill()
    assert json.loads((tmp_path / "here" / "summary.json").read_text())["steps"] == 2
    assert not (tmp_path / "here" / "engines").exists()
    assert not (tmp_path / "there" / "weights").exists()
