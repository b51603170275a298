"""A launch whose processes a Ray cluster owns."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from agentevo.errors import ConfigError
from agentevo.runs.launch.ray_owner import run_owner
from agentevo.runs.launch.targets import read_cluster
from agentevo.runs.launch.writer import write_launch
from agentevo.runtime.device_names import visible

STEPS = 40
SMALL = [
    "model.name=tiny", "rollout.staleness=1", "rollout.policy=mask", f"trainer.steps={STEPS}",
    "evaluation.tasks=4", "evaluation.every=0", "cold_start.episodes=0",
]  # fmt: skip


def written(tmp_path, **values):
    recipe = [*SMALL, f"run.dir={tmp_path / 'run'}"]
    return write_launch("coins", recipe, read_cluster("ray", values), tmp_path / "launch")


def test_a_folder_for_ray(tmp_path):
    made = written(tmp_path, engines=1, engine_nodes=1, samplers=1, cpus_per_node=4)
    assert "cpus_per_node: 4\n" in (made.folder / "ray.yaml").read_text()
    assert made.command[:3] == ["ray", "job", "submit"]
    assert made.command[-3:] == ["agentevo", "launch-own", f"{made.folder}/nodes.yaml"]
    (made.folder / "ray.yaml").write_text("cpus_per_node: 0")

    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"no ray\.yaml of"):
        run_owner(made.folder / "nodes.yaml")


def test_devices_are_those_that_the_cluster_gave(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible((0, 1))["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7")
    assert visible((0, 2))["CUDA_VISIBLE_DEVICES"] == "4,GPU-7"
    assert visible((5,))["CUDA_VISIBLE_DEVICES"] == "5"
    assert visible(()) == {}


@pytest.fixture
def cluster():
    """A head without room, and three nodes of one CPU each."""
    utils = pytest.importorskip("ray.cluster_utils")
    try:
        cluster = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    except Exception as error:  # noqa: BLE001 (whatever its start-up says)
        pytest.skip(f"Ray does not start on this machine now, which may be busy: {error}")

    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        yield cluster, nodes
    finally:
        cluster.shutdown()


class Owned:
    """`agentevo launch-own` in a process of its own."""

    def __init__(self, folder, address, run):
        self.log = folder / "own.log"
        self.run = run
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "agentevo",
                    "launch",
                    "own",
                    str(folder / "nodes.yaml"),
                    "--address",
                    address,
                ],
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def step(self):
        try:
            rows = (self.run / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return max((int(json.loads(row).get("step", 0)) for row in rows), default=0)

    def wait(self, condition, what, within_s=300):
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.log.read_text()}"
            assert self.process.poll() is None, f"{what}: {self.log.read_text()}"
            time.sleep(0.2)

    def started(self, number):
        """Processes of that node, oldest first."""
        return re.findall(rf"node {number}: on \S+ process (\d+)", self.log.read_text())


@pytest.mark.slow
def test_lost_processes_and_nodes_are_told_and_begun_again(cluster, tmp_path):
    import ray

    made, nodes = cluster
    folder = written(tmp_path, engines=1, engine_nodes=1, samplers=1).folder
    owned = Owned(folder, made.address, tmp_path / "run")
    try:
        owned.wait(lambda: owned.step() >= 1, "the run goes on")
        os.kill(int(owned.started(1)[0]), signal.SIGKILL)
        owned.wait(lambda: len(owned.started(1)) == 2, "its process is begun again")
        assert "node 1: ended with exit code 137; it is restarted" in owned.log.read_text()

        ray.init(address=made.address, log_to_driver=False)
        (group,) = ray.util.placement_group_table().values()
        place = group["bundles_to_node_id"][1]
        ray.shutdown()

        (node,) = [node for node in nodes if node.node_id == place]
        made.remove_node(node, allow_graceful=False)
        owned.wait(lambda: len(owned.started(1)) == 3, "its node is replaced")
        assert re.search(r"node 1: lost \(.+\)", owned.log.read_text())

        os.kill(int(owned.started(0)[0]), signal.SIGKILL)
        owned.wait(lambda: len(owned.started(0)) == 2, "the launch goes on where the run stands")
        assert "the trainer ended with exit code 137; 3 restarts are left" in owned.log.read_text()
        assert owned.process.wait(timeout=400) == 0, owned.log.read_text()
    finally:
        owned.process.kill()
        owned.process.wait()

    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == STEPS
