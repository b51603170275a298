"""One machine of a launch: its processes, and how nodes hear of node 0."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from slow import soak

from agentevo.errors import ConfigError
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.runs.launch import node as node_module
from agentevo.runs.launch.node import HeartbeatReader, HeartbeatWriter, LostNodeError, run_node
from agentevo.runs.launch.targets import read_cluster
from agentevo.runs.launch.writer import write_launch
from agentevo.runtime.device_names import visible

SMALL = [
    "model.name=tiny", "rollout.staleness=1", "rollout.policy=mask", "trainer.steps=2",
    "evaluation.tasks=1", "cold_start.episodes=0", "model.tiny.hidden_size=32",
    "trainer.groups_per_step=2", "trainer.group_size=2",
    "tracking.tensorboard=false", "tracking.report=false",
]  # fmt: skip


def written(tmp_path, *overrides, **values):
    recipe = [*SMALL, f"run.dir={tmp_path / 'run'}", *overrides]
    return write_launch("coins", recipe, read_cluster("slurm", values), tmp_path / "launch").folder


def start(folder, rank, id="1"):
    words = ["launch-node", str(folder / "nodes.yaml"), "--rank", str(rank), "--id", id]
    return subprocess.Popen(
        [sys.executable, "-m", "agentevo", *words], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_a_reader_follows_the_writer_to_its_end(tmp_path):
    path = tmp_path / "run.launch" / "1.json"
    reader = HeartbeatReader(path)
    assert reader.poll() is None

    with HeartbeatWriter(path) as writer:
        deadline = time.monotonic() + 300
        while not path.is_file():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert reader.poll() is None
        writer.code = 7

    assert reader.poll() == 7


def test_a_heartbeat_that_stands_still_is_lost(tmp_path):
    path = tmp_path / "1.json"
    path.write_text(json.dumps({"count": 3}))
    reader = HeartbeatReader(path, lost_s=0.05)
    assert reader.poll() is None
    time.sleep(0.1)
    with pytest.raises(LostNodeError, match="same folder"):
        reader.poll()


def test_the_last_heartbeat_says_that_its_node_was_stopped_where_it_fails(tmp_path):
    path = tmp_path / "run.launch" / "1.json"
    with pytest.raises(RuntimeError), HeartbeatWriter(path):
        raise RuntimeError
    assert json.loads(path.read_text())["code"] == 143


def test_a_replaced_node_does_not_end_by_the_former_end(tmp_path):
    path = tmp_path / "1.json"
    path.write_text(json.dumps({"count": 3, "code": 143}))
    reader = HeartbeatReader(path)
    assert reader.poll() is None
    assert reader.poll() is None

    path.write_text(json.dumps({"count": 0}))
    assert reader.poll() is None

    path.write_text(json.dumps({"count": 3, "code": 143}))
    path.write_text(json.dumps({"count": 4, "code": 0}))
    assert reader.poll() == 0


def test_an_end_that_stays_is_believed(tmp_path):
    path = tmp_path / "1.json"
    path.write_text(json.dumps({"count": 3, "code": 0}))
    reader = HeartbeatReader(path, old_s=0.05)
    assert reader.poll() is None
    time.sleep(0.1)
    assert reader.poll() == 0


def test_devices_are_named_to_their_process_alone():
    assert visible((2, 3))["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert visible(()) == {}


@pytest.mark.parametrize(("rank", "id", "word"), [(5, "1", "--rank 5"), (0, "a/b", "--id")])
def test_wrong_words_are_refused(tmp_path, rank, id, word):
    folder = written(tmp_path)
    with pytest.raises(ConfigError, match=word):
        run_node(folder / "nodes.yaml", rank=rank, id=id)


def test_what_is_no_plan_is_refused(tmp_path):
    (tmp_path / "nodes.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="this is no"):
        run_node(tmp_path / "nodes.yaml", rank=0)


def test_a_node_waits_for_its_recipe_and_says_so(small_config, tmp_path, monkeypatch):
    """Not for ever: who is started after that says what differs."""
    ensure_run_folder(small_config(tmp_path / "run"))
    looks = iter([None] * 3 + [0])
    notes = []
    begun = []
    monkeypatch.setattr(node_module, "Children", lambda *given: begun.append(given) or Began())

    config = small_config(tmp_path / "run", "trainer.steps=7")
    arguments = ([], config, lambda: next(looks), lambda: False, notes.append)
    node_module._run_children(*arguments)

    assert notes == ["waiting for the trainer to use the new values of trainer.steps"]
    assert not begun

    monkeypatch.setattr(node_module, "RECIPE_S", 0.0)
    looks = iter([0])
    node_module._run_children(*arguments)
    assert begun


class Began(nullcontext):
    def check(self):
        pass


@pytest.mark.slow
def test_two_nodes_do_one_run_and_end_together(tmp_path):
    """The second node has the engines, and ends when the trainer of the first has."""
    folder = written(tmp_path, engines=2, engine_nodes=1, samplers=1)
    nodes = [start(folder, rank) for rank in (0, 1)]
    assert [node.wait(timeout=500) for node in nodes] == [0, 0]
    run = tmp_path / "run"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    names = sorted(path.name for path in (run / "logs").glob("*.log"))
    assert [name.partition("-")[0] for name in names] == [
        "engine",
        "engine",
        "sampler",
        "train.log",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(0, 1), *soak((1,))], ids=str)
def test_ranks_on_two_nodes_end_by_the_code_of_the_first(asked, tmp_path):
    """The trainer samples by itself, and ends after its step, whichever node is asked to end; the
    other rank is sent home, and its node says how the first one ended."""
    recipe = ("trainer.steps=400", "rollout.staleness=0", "evaluation.every=0")
    folder = written(tmp_path, *recipe, trainer_nodes=2)
    nodes = [start(folder, rank) for rank in (0, 1)]
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.is_file() and metrics.read_text().count("\n") > 1):
        assert time.monotonic() < deadline
        assert [node.poll() for node in nodes] == [None, None]
        time.sleep(0.2)

    for rank in asked:
        nodes[rank].send_signal(signal.SIGTERM)

    assert nodes[0].wait(timeout=300) == 143
    assert nodes[1].wait(timeout=300) == 143

    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    saved = max((tmp_path / "run" / "checkpoints").glob("step-*")).name
    assert int(saved.removeprefix("step-")) == steps[-1]


@pytest.mark.soak
def test_a_stopped_launch_goes_on_with_the_next(tmp_path):
    """Which may have more steps."""
    folder = written(tmp_path, "trainer.steps=400", engines=1, samplers=1)
    node = start(folder, 0)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.is_file() and metrics.read_text().count("\n") > 2):
        assert time.monotonic() < deadline
        assert node.poll() is None
        time.sleep(0.2)

    node.send_signal(signal.SIGTERM)
    assert node.wait(timeout=300) == 143

    beat = json.loads((Path(f"{tmp_path / 'run'}.launch") / "1.json").read_text())
    assert beat["code"] == 143

    steps = metrics.read_text().count("\n")
    folder = written(tmp_path, "trainer.steps=500", engines=1, samplers=1)
    node = start(folder, 0, id="2")
    deadline = time.monotonic() + 300
    while metrics.read_text().count("\n") <= steps:
        assert time.monotonic() < deadline
        assert node.poll() is None
        time.sleep(0.2)

    node.send_signal(signal.SIGTERM)
    assert node.wait(timeout=300) == 143
