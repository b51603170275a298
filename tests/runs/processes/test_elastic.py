"""Engines and samplers of machines that share no folder join a run under way, and leave it."""

import json
import os
import re
import secrets
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from agentevo.cli.main import main

pytestmark = pytest.mark.slow
STEPS = 30
RECIPE = [
    "coins", "model.name=tiny", "model.tiny.hidden_size=32",
    "rollout.staleness=2", "rollout.policy=mask",
    f"trainer.steps={STEPS}", "evaluation.tasks=1", "evaluation.every=0", "cold_start.episodes=0",
    "trainer.groups_per_step=2", "trainer.group_size=2",
    "rollout.lease_s=5", "engine.timeout_s=20",
    "rollout.engine_secret=${env:ENGINE_SECRET}",
    "tracking.tensorboard=false", "tracking.report=false",
]  # fmt: skip


class Run:
    """Each process has a folder of its own; they meet in the store and under weights.url."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = {}
        self.overrides = [
            f"store.url=sqlite:///{folder / 'store.sqlite'}",
            f"rollout.weights.url=file://{folder / 'bucket'}",
        ]

    def start(self, name, command, *more, overrides=()):
        words = [command, *RECIPE, *self.overrides, *overrides, f"run.dir={self.folder / name}"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "agentevo", *words, *more], stdout=log, stderr=log
            )
        return self.processes[name]

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def step(self):
        try:
            rows = (self.folder / "trainer" / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return max((int(json.loads(row).get("step", 0)) for row in rows), default=0)

    def wait(self, condition, what, within_s=300):
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.logs()}"
            assert self.processes["trainer"].poll() is None, f"{what}: {self.logs()}"
            time.sleep(0.1)

    def stop_trainer(self):
        """With the store's write lock in our hands, which a stopped trainer would keep from all."""
        store = sqlite3.connect(self.folder / "store.sqlite", timeout=300, isolation_level=None)
        store.execute("BEGIN IMMEDIATE")
        self.processes["trainer"].send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.processes["trainer"].pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), self.logs()
        store.close()

    def resume_trainer(self):
        self.processes["trainer"].send_signal(signal.SIGCONT)

    def logs(self):
        return "\n".join(f"--- {name}\n{self.log(name)[-2000:]}" for name in self.processes)

    def serving(self, name):
        return "serving version" in self.log(name)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_SECRET", secrets.token_hex(32))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    run = Run(tmp_path)
    try:
        yield run
    finally:
        for process in run.processes.values():
            process.kill()
            process.wait()


def test_engines_and_samplers_join_and_leave(run, capsys):
    """Of the engines one leaves in order and one is killed, and so of the samplers; those that have
    come meanwhile go on."""
    trainer = run.start("trainer", "learn")
    first = run.start("first", "serve", "--tls")
    leaving = run.start("leaving", "sample")
    killed = run.start("killed", "sample")
    run.wait(lambda: run.step() >= 2, "the first engine serves")

    run.stop_trainer()  # the run does not end while they start
    second = run.start("second", "serve", "--tls")
    newcomer = run.start("newcomer", "sample")
    run.wait(lambda: run.serving("second") and "sampling for" in run.log("newcomer"), "they join")
    first.send_signal(signal.SIGTERM)
    leaving.send_signal(signal.SIGTERM)
    killed.send_signal(signal.SIGKILL)
    assert first.wait(timeout=300) == 0 and leaving.wait(timeout=300) == 0, run.logs()

    run.resume_trainer()
    before = run.step()
    run.wait(lambda: run.step() >= before + 2, "the second engine and the newcomer alone")

    run.stop_trainer()
    run.start("third", "serve", "--tls")
    run.wait(lambda: run.serving("third"), "the third engine joins")
    second.send_signal(signal.SIGKILL)
    assert run.step() < STEPS

    run.resume_trainer()
    assert trainer.wait(timeout=300) == 0, run.logs()
    assert newcomer.wait(timeout=300) == 0, run.logs()
    assert int(re.search(r"stopped after (\d+) group", run.log("newcomer"))[1]) > 0

    left = {path.name.rpartition("-")[0] for path in (run.folder / "bucket/engines").iterdir()}
    assert len(left) == 2, "the one that was killed and the one that serves"
    assert main(["audit", str(run.folder / "trainer")]) == 0, capsys.readouterr().out


def test_a_machine_with_another_recipe_is_refused(run):
    run.start("trainer", "learn")
    run.wait(lambda: (run.folder / "bucket" / "config.yaml").is_file(), "the run is known")
    other = run.start("other", "sample", overrides=["sampling.temperature=0.5"])
    assert other.wait(timeout=300) == 2
    assert "is a run with sampling.temperature=1.0 and not 0.5" in run.log("other")
    assert not (run.folder / "other").exists() or not os.listdir(run.folder / "other")
