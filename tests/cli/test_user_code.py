"""Agents, environments and rewards of other people plug in, by entry point and by `import`: whole
runs from the command line, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from byte_policy import byte_policy
from slow import soak

PLUGIN = """
import random
import agentevo

@agentevo.agent("plug_agent")
async def ask(task, policy):
    if task.environment is not None:
        assert (task.environment, task.query) == ("plug_lamp", None)
    await policy.generate([agentevo.Message("user", task.query or "on or off?")])
    return random.Random(policy.name).random() if task.environment else None

@agentevo.reward("plug_reward")
def letters(completion, task):
    return {"length": len(completion) / 100, "marked": float(task.metadata["n"])}

@agentevo.environment("plug_lamp")
class Lamp(agentevo.EpisodicEnvironment):
    instructions = "Say on."
    def start(self, seed): self.seed = seed
    def observe(self): return "dark"
    def act(self, action): return agentevo.ActionResult(reward=len(action) / 10, terminated=True)
"""
COMMON = {
    "model": byte_policy(),
    "sampling": {"max_new_tokens": 4},
    "trainer": {"steps": 3, "groups_per_step": 2, "group_size": 3},
    "evaluation": {"tasks": 1, "every": 0, "samples": 0},
    "checkpoint": {"every": 1},
    "tracking": {"tensorboard": False, "report": False},
}
WHOLE = {
    "agent and reward": {
        "agent": {"type": "plug_agent"},
        "tasks": "tasks.jsonl",
        "rewards": ["plug_reward"],
    },
    "agent on an environment": {
        "agent": {"type": "plug_agent"},
        "environment": {"type": "plug_lamp"},
    },
    "environment": {"environment": {"type": "plug_lamp"}, "agent": {"format": "plain"}},
}


def start(folder, *words, path=()):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    places = [*map(str, path), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    return subprocess.Popen(
        [sys.executable, "-m", "agentevo", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    text, _ = process.communicate(timeout=500)
    assert process.returncode == 0, text
    return text


def plug_in(folder, how):
    """Where Python must look, and what the recipe imports."""
    name = "plug_by_entry_point" if how == "entry point" else "plug_by_import"
    code = folder / "code"
    code.mkdir()
    (code / f"{name}.py").write_text(PLUGIN)

    if how == "import":
        return (), {"import": [f"code/{name}.py"]}

    info = code / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = {
        "agents": ("plug_agent", "ask"),
        "rewards": ("plug_reward", "letters"),
        "environments": ("plug_lamp", "Lamp"),
    }
    (info / "entry_points.txt").write_text(
        "".join(
            f"[agentevo.{group}]\n{point} = {name}:{item}\n"
            for group, (point, item) in groups.items()
        )
    )

    return (code,), {}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["entry point", *soak("import")])
@pytest.mark.parametrize(
    "what", ["agent and reward", "environment", *soak("agent on an environment")]
)
def test_a_whole_run_killed_and_resumed(tmp_path, what, how):
    path, keys = plug_in(tmp_path, how)
    rows = [json.dumps({"id": f"t{n}", "query": "x" * n, "n": n}) for n in range(1, 7)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**COMMON, **WHOLE[what], **keys}))

    run = tmp_path / "runs" / "recipe"
    first = start(tmp_path, "train", "recipe.yaml", path=path)
    deadline = time.monotonic() + 300
    while first.poll() is None and not list(run.glob("checkpoints/*/state.json")):
        assert time.monotonic() < deadline
        time.sleep(0.02)

    first.send_signal(signal.SIGKILL)
    first.communicate()
    finish(start(tmp_path, "train", "recipe.yaml", "--resume", path=path))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert "everything agrees with the records" in finish(
        start(tmp_path.parent, "audit", str(run), path=path)
    )

    finish(start(tmp_path.parent, "eval", str(run), path=path))
