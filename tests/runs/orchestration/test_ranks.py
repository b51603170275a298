"""Runs under torchrun: what several processes train, and that a failure ends all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from slow import soak

from agentevo.config import load_config
from agentevo.errors import ConfigError
from agentevo.models.compute.linear import FastLinear
from agentevo.runs.folder.control import Action, answer_to, ask, read_session
from agentevo.runs.orchestration import components
from agentevo.runs.orchestration.checks import check_processes, load_checked
from agentevo.training.token_numbers import largest_moves, name_of

SMALL = [
    "model.name=tiny",
    "model.tiny.hidden_size=48",
    "cold_start.episodes=0",
    "evaluation.tasks=1",
    "evaluation.samples=0",
    "tracking.tensorboard=false",
    "tracking.report=false",
    "trainer.groups_per_step=2",
    "trainer.group_size=4",
    "trainer.steps=2",
]
STAGES = ["trainer.parallel.pipeline=2"]


def launch(
    folder: Path, processes: int, *words: str, command: str = "train", **environment: str
) -> subprocess.Popen[str]:
    """A command in that many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    started = [sys.executable, *(launcher if processes > 1 else ()), "-m", "agentevo", command]
    return subprocess.Popen(
        [*started, "coins", f"run.dir={folder}", *SMALL, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def launched(
    folder: Path, processes: int, *words: str, command: str = "train", **environment: str
) -> tuple[int, str]:
    """Its exit code and output."""
    with launch(folder, processes, *words, command=command, **environment) as running:
        try:
            said = running.communicate(timeout=500)[0]
        finally:
            running.kill()
        return running.returncode, said


def rows(folder: Path, key: str) -> dict[int, float]:
    """Step -> a metric."""
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r[key] for r in found if key in r}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Gradient norms of three steps by one process."""
    folder = tmp_path_factory.mktemp("single") / "run"
    code, said = launched(folder, 1, "trainer.steps=3")
    assert code == 0, said
    return Single(folder)


class Single:
    """What a run is to be equal to."""

    def __init__(self, folder: Path) -> None:
        norms = rows(folder, "actor/grad_norm")
        assert len(norms) > 1
        self.norms = pytest.approx(norms, rel=1e-2)  # oneDNN's layers round differently
        self.work = rows(folder, "trainer/logical_flops")
        self.moves = pytest.approx(largest_moves(folder / name_of(2)), abs=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    ["shard=2", *soak("context=2", "pipeline=2", "tensor=2")],
)
def test_a_shared_run_is_one_processs_and_goes_on_in_one(size, single, tmp_path):
    """Two processes train two steps, one process a third."""
    code, said = launched(tmp_path / "run", 2, f"trainer.parallel.{size}")
    assert code == 0, said

    code, said = launched(tmp_path / "run", 1, "trainer.steps=3", "--resume")
    assert code == 0, said
    assert single.norms == rows(tmp_path / "run", "actor/grad_norm")
    assert single.work == rows(tmp_path / "run", "trainer/logical_flops")
    assert single.moves == largest_moves(tmp_path / "run" / name_of(2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", *soak("float32")])
def test_processes_with_fewer_passes_keep_pace(tmp_path, dtype):
    """Three attempts on two processes, each a pass of its own, with a cold start before and a
    critic beside them."""
    code, said = launched(
        tmp_path / "run", 2, "trainer.parallel.shard=2", "trainer.micro_batch_tokens=64",
        "trainer.groups_per_step=1", "trainer.group_size=3", "algorithm.name=ppo",
        f"critic.trunk={'own' if dtype == 'float32' else 'shared'}", f"model.dtype={dtype}",
        "critic.pretrain_steps=1", "cold_start.episodes=3", "memory.checkpointing=full",
    )  # fmt: skip
    assert code == 0, said
    assert rows(tmp_path / "run", "cold_start/loss_last")


@pytest.mark.slow
def test_conversations_are_trained_by_several(tmp_path):
    """What is held out is measured by all."""
    given = ["data.demonstrations=6", "data.eval_share=0.3", "sft.batch_conversations=2"]
    norms = []
    for processes, words in ((1, []), (2, ["trainer.parallel.shard=2"])):
        folder = tmp_path / f"sft-{processes}"
        code, said = launched(folder, processes, *given, *words, command="sft")
        assert code == 0, said
        norms.append((rows(folder, "actor/grad_norm"), rows(folder, "sft/eval/loss")))

    assert norms[1] == tuple(pytest.approx(column, rel=1e-3) for column in norms[0])


@pytest.mark.soak
def test_preferences_are_trained_by_several(tmp_path):
    """Pairs are made by the first."""
    words = ["algorithm.name=dpo", "algorithm.pairs=demonstrations", "trainer.parallel.tensor=2"]
    code, said = launched(tmp_path / "dpo", 2, *words)
    assert code == 0, said
    assert len(rows(tmp_path / "dpo", "preference/loss")) == 2


DYING = """
import os, signal
from agentevo.training.optimization import Optimization
from agentevo.training.trainer import Trainer

what, name, count = os.environ.get("DIES", "nothing none 0").split()
if what != "nothing" and os.environ.get("RANK") == "1":
    owner = Optimization if name == "backward" else Trainer
    plain, calls = getattr(owner, name), []

    def dying(self, *given, **options):
        calls.append(1)
        if len(calls) == int(count) and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == int(count):
            raise ValueError("words of its own")
        return plain(self, *given, **options)

    setattr(owner, name, dying)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "deaths"),
    [
        ("shard", ("raise step 1", "kill state_dict 1")),
        ("pipeline", ("kill backward 2",)),
        pytest.param("shard", ("kill prepare 1", "kill step 2"), marks=pytest.mark.soak),
        pytest.param("pipeline", ("raise backward 2",), marks=pytest.mark.soak),
    ],
)
def test_a_process_that_dies_ends_all_and_the_run_goes_on(key, deaths, single, tmp_path):
    """Killed while samples are prepared, in an update, while a checkpoint is saved; or one that
    raises; each time the run is resumed. The last of two stages dies while the first one waits for
    a gradient."""
    file = tmp_path / "dying.py"
    folder = tmp_path / "run"
    file.write_text(textwrap.dedent(DYING))
    words = [f"import=[{file}]", f"trainer.parallel.{key}=2", "trainer.steps=3"]
    words += ["trainer.micro_batch_tokens=64"] if key == "pipeline" else []
    for death in deaths:
        resumed = ["--resume"] if (folder / "config.yaml").is_file() else []
        started = time.monotonic()
        code, said = launched(folder, 2, *words, *resumed, DIES=death)
        assert code != 0, said
        assert time.monotonic() - started < 400, said  # and not as long as a collective waits

        if death.startswith("raise"):
            first = "process 1 of 2: ValueError: words of its own"
            others = "process 1 of 2 failed"
            assert first in said, said
            # The launcher may end the other process before that has said it.
            assert others not in said or said.index(first) < said.index(others), said
            assert "words of its own" in (folder / "logs" / "rank-1.log").read_text()
        else:
            assert "ended without an error message" in said, said

    code, said = launched(folder, 2, *words, "--resume")
    assert code == 0, said
    assert single.norms == rows(folder, "actor/grad_norm")


@pytest.mark.soak
def test_what_fails_on_the_first_process_ends_all(tmp_path):
    """A gradient that is not finite ends the run with the trainer's own words."""
    code, said = launched(
        tmp_path / "run", 2, "trainer.parallel.shard=2", "trainer.learning_rate=1e9"
    )
    assert code == 1
    assert "lower trainer.learning_rate" in said


@pytest.mark.slow
def test_the_first_process_is_asked_to_save_pause_go_on_and_stop_for_all(tmp_path):
    folder = tmp_path / "run"
    deadline = time.monotonic() + 400

    def until(find):
        while not (found := find()):
            assert time.monotonic() < deadline and running.poll() is None, said()
            time.sleep(0.1)
        return found

    def said() -> str:
        running.kill()
        return running.communicate()[0]

    def asked(do: Action) -> str:
        session = until(lambda: read_session(folder))
        ask(folder, do, id=f"request-{do}", session=session.id, who="a test")
        return until(lambda: answer_to(folder, f"request-{do}")).result

    with launch(folder, 2, "trainer.parallel.shard=2", "trainer.steps=900") as running:
        assert "checkpoint of step" in asked("save")
        assert "paused after step" in asked("pause")
        assert read_session(folder).is_paused
        assert asked("resume") == "the run continues"
        assert "stops after this step" in asked("stop")
        text = running.communicate(timeout=300)[0]  # the others end with it

    assert "stopped cleanly" in text  # its code is SIGTERM's, which the launcher calls a failure
    assert list((folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (["trainer.parallel.shard=2"], "1", "does not divide the 1 processes"),
        (["trainer.parallel.tensor=3"], "2", "is 3, which does not divide the 2 processes"),
        (["profile.enabled=true"], "2", "a profile .* 2 processes can't train on that"),
        (["trainer.parallel.pipeline=3"], "2", "pipeline=3 is 3, which does not divide the 2"),
    ],
)
def test_what_several_processes_can_not_do_is_refused(words, world, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError, match=message):
        check_processes(load_config("coins", [*SMALL, *words]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.parallel.context=3"], "context=3 does not divide the model's 4 attention"),
        (["trainer.parallel.tensor=3"], "tensor is not possible with 4 attention heads"),
        (["trainer.parallel.expert=2"], "has no experts that are stacked"),
        (["trainer.parallel.pipeline=5"], "pipeline=5 does not divide the model's . layers"),
    ],
)
def test_a_model_that_can_not_be_shared_so_is_refused_before_its_run_has_a_folder(words, message):
    config = load_config("coins", [*SMALL, *words])
    with pytest.raises(ConfigError, match=message):
        load_checked(config)


def test_what_is_cut_is_read_without_the_devices_memory(small_config, tmp_path, monkeypatch):
    """Where models compute on a GPU, the files of the weights are mapped on the CPU until each
    process has taken its part; none of the CPU's own layers are put in."""
    monkeypatch.setattr(components, "find", lambda name: torch.device("cuda"))
    config = small_config(tmp_path, "trainer.parallel.shard=2", "model.device=cuda")
    model = components.load_policy(config, for_part=True).model
    assert model.device.type == "cpu"
    assert not any(isinstance(module, FastLinear) for module in model.modules())
