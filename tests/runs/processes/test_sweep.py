"""Sweeps of real runs, each a process of its own: what they leave, how they go on, what they
refuse, and one member's failure."""

from __future__ import annotations

import io
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from agentevo.config.sweep import Sweep, load_sweep
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.sweep_view import SweepView
from agentevo.runs.folder.chain import HeadFile
from agentevo.runs.folder.result_table import make_rows, read_results
from agentevo.runs.processes.run_group import last_lines, why_failed
from agentevo.runs.processes.sweep import run_sweep

RECIPE = """
environment: {type: coins}
model: {name: tiny, tiny: {hidden_size: 32, num_layers: 1, num_heads: 2}}
trainer: {steps: 1, group_size: 2, groups_per_step: 2}
evaluation: {tasks: 2, samples: 0, every: 0}
cold_start: {episodes: 0}
sampling: {max_new_tokens: 3}
tracking: {report: false, tensorboard: false}
sweep:
  seeds: [0, 1]
  parallel: 2
  variants:
    plain: {algorithm.name: grpo}
    leave: {algorithm.name: rloo}
"""


def sweep_in(folder: Path, *overrides: str) -> Sweep:
    recipe = folder.parent / "small.yaml"
    recipe.write_text(RECIPE)
    sweep = load_sweep(recipe, [f"run.dir={folder}", *overrides])
    assert sweep is not None
    return sweep


def quiet() -> tuple[SweepView, io.StringIO]:
    stream = io.StringIO()
    return SweepView("small", stream=stream, plain=True), stream


def snapshot(folder: Path) -> dict[str, int]:
    """Files, relative to the folder, and when they were written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def runs_in(folder: Path) -> dict[str, int]:
    """The part of `snapshot` that is in the folders of the runs."""
    return {
        path: stamp for path, stamp in snapshot(folder).items() if "-0/" in path or "-1/" in path
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, str, str]:
    """A finished sweep of four runs: its folder, the table, what was shown."""
    folder = tmp_path_factory.mktemp("sweeps") / "small"
    view, stream = quiet()
    table = run_sweep(sweep_in(folder), view=view)
    return folder, table, stream.getvalue()


@pytest.mark.slow
def test_each_member_is_a_run_of_its_own(whole):
    folder, _, shown = whole
    for name, seed, algorithm in [
        ("plain-0", 0, "grpo"),
        ("plain-1", 1, "grpo"),
        ("leave-0", 0, "rloo"),
        ("leave-1", 1, "rloo"),
    ]:
        config = yaml.safe_load((folder / name / "config.yaml").read_text())
        assert (config["run"]["seed"], config["algorithm"]["name"], config["run"]["threads"]) == (
            seed,
            algorithm,
            1,
        )
        assert json.loads((folder / name / "summary.json").read_text())["steps"] == 1
        assert "step 1/1" in (folder / "logs" / f"{name}.log").read_text()
        assert f"{name}: started\n" in shown

    assert "(4 of 4)" in shown


@pytest.mark.slow
def test_the_table_is_that_of_the_runs(whole):
    folder, table, _ = whole
    assert table == (folder / "table.md").read_text()

    rows = json.loads((folder / "table.json").read_text())
    assert [(row["run"], [run["seed"] for run in row["runs"]]) for row in rows] == [
        ("plain", [0, 1]),
        ("leave", [0, 1]),
    ]
    for row in rows:
        after = [
            json.loads((folder / f"{row['run']}-{seed}" / "summary.json").read_text())["eval"][
                "after"
            ]
            for seed in (0, 1)
        ]
        assert row["after"] == pytest.approx(
            {"mean": sum(after) / 2, "std": statistics.stdev(after)}
        )

    assert [line.split(" | ")[0] for line in table.splitlines()[2:4]] == ["| plain", "| leave"]


@pytest.mark.slow
def test_a_finished_sweep_goes_on_with_what_is_missing_only(whole):
    folder, _, _ = whole
    before = runs_in(folder)
    view, stream = quiet()
    run_sweep(sweep_in(folder, "sweep.only=plain", "sweep.seeds=[0,1]"), resume=True, view=view)
    assert "2 runs, 2 of them finished already" in stream.getvalue()
    assert runs_in(folder) == before != {}
    assert len(make_rows(read_results([folder]))) == 2, "the table is of everything in the folder"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "resume", "expected"),
    [
        ([], False, "holds a sweep already: continue it with --resume"),
        (
            ["trainer.learning_rate=0.5"],
            True,
            "plain-0 was run with trainer.learning_rate=1e-05 and not 0.5: delete that folder",
        ),
        (["environment={type: gymnasium, id: NoSuchWorld-v0}"], True, "plain: "),
        (["sweep.table=nowhere/README.md"], True, "its folder does not exist"),
    ],
)
def test_what_can_not_be_is_refused_and_nothing_changes(whole, overrides, resume, expected):
    folder, _, _ = whole
    before = snapshot(folder)
    with pytest.raises(ConfigError, match=expected.replace(".", r"\.")):
        run_sweep(sweep_in(folder, *overrides), resume=resume, view=quiet()[0])
    assert snapshot(folder) == before


@pytest.mark.slow
def test_folders_that_are_no_sweep_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no sweep to resume"):
        run_sweep(sweep_in(tmp_path / "s"), resume=True, view=quiet()[0])

    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="not empty and is not a sweep"):
        run_sweep(sweep_in(tmp_path / "s", "run.overwrite=true"), view=quiet()[0])

    (tmp_path / "s" / "config.yaml").touch()
    with pytest.raises(ConfigError, match="holds a run already: give another"):
        run_sweep(sweep_in(tmp_path / "s"), view=quiet()[0])

    assert (tmp_path / "s" / "thesis.txt").exists()


@pytest.mark.slow
def test_a_member_that_fails_is_told_with_its_reason_and_resume_tries_it_again(tmp_path):
    folder = tmp_path / "sweep"
    page = tmp_path / "page.md"
    page.write_text("Ours:\n<!-- table -->\nold\n<!-- /table -->\nEnd.\n")
    run_sweep(sweep_in(folder, "sweep.seeds=[0]", "sweep.only=leave"), view=quiet()[0])
    thesis = folder / "plain-0" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.touch()

    sweep = sweep_in(folder, "sweep.seeds=[0,1]", "sweep.only=plain", f"sweep.table={page}")
    view, stream = quiet()
    with pytest.raises(AgentEvoError) as caught:
        run_sweep(sweep, resume=True, view=view)

    lines = str(caught.value).splitlines()
    assert lines[0].startswith("1 of 2 runs failed")
    assert lines[1].startswith("plain-0: failed with exit code 2: ") and len(lines) == 2
    assert "plain-0 is not empty and is not a run" in lines[1] and "plain-0.log)" in lines[1]
    assert "plain-1: success" in stream.getvalue(), "the others go on"
    assert [result.folder.name for result in read_results([folder])] == ["plain-1", "leave-0"]
    assert "old" in page.read_text(), "a page gets whole tables only"

    thesis.unlink()
    run_sweep(sweep, resume=True, view=quiet()[0])
    assert [result.folder.name for result in read_results([folder])] == [
        "plain-0",
        "plain-1",
        "leave-0",
    ]
    assert (
        page.read_text()
        == f"Ours:\n<!-- table -->\n{(folder / 'table.md').read_text()}<!-- /table -->\nEnd.\n"
    )


@pytest.mark.slow
def test_ctrl_c_stops_the_runs_after_their_step_and_resume_goes_on_from_there(tmp_path):
    folder = tmp_path / "sweep"
    long = ["sweep.seeds=[0,1]", "sweep.only=plain", "sweep.parallel=1", "trainer.steps=100000"]
    sweep_in(folder)
    words = [
        sys.executable,
        "-m",
        "agentevo",
        "train",
        str(tmp_path / "small.yaml"),
        f"run.dir={folder}",
        *long,
    ]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    log = folder / "logs" / "plain-0.log"
    deadline = time.monotonic() + 300
    while not (log.is_file() and "step      3/" in log.read_text()):
        assert time.monotonic() < deadline, process.poll()
        time.sleep(0.1)

    with pytest.raises(ConfigError, match="runs of this sweep are under way"):
        run_sweep(sweep_in(folder, *long), resume=True, view=quiet()[0])

    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "plain-0: stopped" in out
    assert not (folder / "plain-1").exists()

    stopped_at = json.loads((folder / "plain-0" / "summary.json").read_text())["steps"]
    assert stopped_at >= 3

    # As if that many steps had been asked for: a changed trainer.steps is refused.
    config = (folder / "plain-0" / "config.yaml").read_text()
    HeadFile(folder / "plain-0").write_file(
        "config.yaml", config.replace("steps: 100000", f"steps: {stopped_at + 1}")
    )
    view, stream = quiet()
    run_sweep(
        sweep_in(folder, *long[1:-1], "sweep.seeds=[0]", f"trainer.steps={stopped_at + 1}"),
        resume=True,
        view=view,
    )

    assert "plain-0: resumed" in stream.getvalue()
    assert f"resuming after step {stopped_at} " in log.read_text()


FIRST_STEP = "error: the first step: 2 of 2 failed\nerror: nothing was trained\n"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (FIRST_STEP, "the first step: 2 of 2 failed"),
        ("step 1\n\n" + FIRST_STEP + "\n  a leaked semaphore\n", "the first step: 2 of 2 failed"),
        ("error: of the life before\nstep 2\n" + FIRST_STEP, "the first step: 2 of 2 failed"),
        ("error: b\n" + "error:   File x\n" * 3000, "b"),
    ],
)
def test_the_error_that_a_command_ended_with_is_one_line(tmp_path, log, reason):
    file = tmp_path / "rl.log"
    file.write_text(log)
    assert why_failed("rl", "failed", file) == f"rl: failed: {reason} (all of it: {file})"


def test_a_command_that_said_no_error_is_told_by_the_end_of_its_log(tmp_path):
    file = tmp_path / "rl.log"
    for begin in ("", "error: of the life before\n"):
        file.write_text(begin + "".join(f"step {number}\n" for number in range(20)))
        lines = why_failed("rl", "killed by signal 9", file).splitlines()
        assert lines[0] == f"rl: killed by signal 9; the end of {file}:"
        assert lines[1:] == [f"    step {number}" for number in range(12, 20)]

    file.write_text("")
    assert why_failed("rl", "killed", file) == f"rl: killed; the end of {file}:"
    assert last_lines(file, 1) == ""
