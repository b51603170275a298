"""Pipelines of small programs: order, what is run again and what is not, kills, stops, budgets,
seeds. (Stages that train are in test_training.py.)"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentevo.errors import AgentEvoError, ConfigError
from agentevo.observability.sweep_view import SweepView
from agentevo_evolve.pipeline import StageChoice, build_pipeline, read_state, run_pipeline

DEADLINE_S = 300.0
ADD = (
    "import sys, pathlib, time; out, log, *words = sys.argv[1:];"
    "open(log, 'a').write(words[0] + chr(10));"
    "pathlib.Path(out, 'f').write_text(''.join("
    "pathlib.Path(w).read_text() if pathlib.Path(w).is_file() else w for w in words))"
)
"""Notes in a log that it ran, and puts its words, or what is in the files of these names, into the
file `f`."""


def program(log: Path, *words: str, code: str = ADD) -> dict[str, Any]:
    run = [sys.executable, "-c", code, "${stage.folder}", str(log), *words]
    return {"kind": "command", "options": {"run": run, "file": "f"}}


def chain(log: Path, middle: str = "b") -> dict[str, Any]:
    """c is made of b, b of a."""
    return {
        "c": program(log, "c", "${stages.b.file}"),
        "a": program(log, "a"),
        "b": program(log, middle, "${stages.a.file}"),
    }


def run(
    folder: Path,
    stages: dict[str, Any],
    *,
    resume: bool = False,
    choice: StageChoice | None = None,
    **keys: Any,
) -> str:
    """Runs it; what was shown."""
    stream = io.StringIO()
    tree = {"dir": str(folder), "held_out": None, "stages": stages, **keys}
    pipeline = build_pipeline(tree)
    view = SweepView("p", stream=stream, plain=True)
    run_pipeline(pipeline, resume=resume, choice=choice, view=view)
    return stream.getvalue()


def ran(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


@pytest.mark.slow
def test_a_stage_is_run_once_and_again_only_where_something_changed(tmp_path: Path):
    log = tmp_path / "log"
    folder = tmp_path / "p"
    run(folder, chain(log))

    assert ran(log) == ["a", "b", "c"]
    assert (folder / "stages/c/f").read_text() == "cba"

    state = read_state(folder)
    assert state.status == "finished"

    used = state.stages["c"].inputs[0]
    assert (used.stage, used.sha256) == ("b", state.stages["b"].outputs["file"].sha256)

    run(folder, chain(log), resume=True)
    assert ran(log) == ["a", "b", "c"]

    shown = run(folder, chain(log, "B"), resume=True)  # b changed, so c's input did
    assert ran(log)[3:] == ["B", "c"]
    assert "b: runs again: options.run was" in shown
    assert "c: runs again: input.b.file was" in shown

    (folder / "stages/b/f").write_text("by hand")
    shown = run(folder, chain(log, "B"), resume=True)
    assert ran(log)[5:] == ["c"]
    assert (folder / "stages/c/f").read_text() == "cby hand"

    (folder / "stages/a/f").unlink()  # the same again gives the same: nobody else is run
    assert "a: runs again: its output is gone" in run(folder, chain(log, "B"), resume=True)
    assert ran(log)[6:] == ["a"]


@pytest.mark.slow
def test_only_from_and_skip(tmp_path: Path):
    log = tmp_path / "log"
    folder = tmp_path / "p"
    run(folder, chain(log), choice=StageChoice(only=("a",)))

    assert ran(log) == ["a"]
    assert read_state(folder).stages["b"].status == "waiting"

    run(folder, chain(log), resume=True)
    run(folder, chain(log), resume=True, choice=StageChoice(start="b"))
    assert ran(log) == ["a", "b", "c", "b", "c"]

    fresh = tmp_path / "q"
    stages = chain(log) | {"c": program(log, "C", "${stages.b.file|stages.a.file}")}
    run(fresh, stages, choice=StageChoice(skip=("b",)))
    assert ran(log)[5:] == ["a", "C"]

    with pytest.raises(ConfigError, match="did you mean a"):
        run(folder, chain(log), resume=True, choice=StageChoice(only=("aa",)))


@pytest.mark.slow
def test_a_failed_stage_ends_what_follows_and_no_other_and_is_tried_again(tmp_path: Path):
    log = tmp_path / "log"
    folder = tmp_path / "p"
    stages = chain(log) | {"d": program(log, "d")}
    stages["b"] = program(log, "b", code="print('no such luck'); raise SystemExit(3)")
    with pytest.raises(AgentEvoError, match=r"1 stage failed(.|\n)*exit code 3(.|\n)*no such luck"):
        run(folder, stages)
    assert ran(log) == ["a", "d"]

    state = read_state(folder)
    assert (state.status, state.stages["b"].status) == ("failed", "failed")
    assert state.stages["c"].why == "waits for b"

    stages["b"] = program(log, "b", "${stages.a.file}")
    run(folder, stages, resume=True)
    assert ran(log) == ["a", "d", "b", "c"]

    nothing = {"a": program(log, "x", code="pass")}
    with pytest.raises(AgentEvoError, match="without the output"):
        run(tmp_path / "q", nothing)
    with pytest.raises(AgentEvoError, match="can't be started"):
        run(tmp_path / "r", {"a": {"kind": "command", "options": {"run": ["/nonexistent"]}}})


@pytest.mark.slow
def test_rounds_build_on_one_another_and_conditions_leave_stages_out(tmp_path: Path):
    log = tmp_path / "log"
    folder = tmp_path / "p"
    stages = {
        "grow": {"repeat": 3, **program(log, "r${round}", "${previous.file|seed}")},
        "never": {"when": "${stages.grow.rows} > 5", **program(log, "never")},
        "end": program(log, "end", "${stages.grow.file}"),
    }
    with pytest.raises(AgentEvoError, match=r"grow\.3 has no rows"):
        run(folder, stages)
    assert (folder / "stages/end/f").read_text() == "endr3r2r1seed"

    del stages["never"]
    stages["end"]["when"] = "${round} > 3"
    with pytest.raises(ConfigError, match="only a repeated stage has rounds"):
        run(folder, stages, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["KeyboardInterrupt", "SystemExit(1)"])
def test_a_budget_of_time_stops_and_more_of_it_goes_on(tmp_path: Path, end: str):
    """A stage that ends with code 1 because it was asked to stop has not failed."""
    log = tmp_path / "log"
    folder = tmp_path / "p"
    wait = f"""
import time
try:
    time.sleep(0.5)
except KeyboardInterrupt:
    raise {end}
"""
    slow = program(log, "a", code=f"{wait}{ADD}")
    stages = {"a": slow, "b": program(log, "b", "${stages.a.file}")}
    shown = run(folder, stages, budget={"hours": 1e-6})
    assert "hours of the budget are used" in shown
    assert read_state(folder).status == "over budget"
    assert "b" not in ran(log)

    run(folder, stages, resume=True, budget={"hours": 1})
    assert ran(log) == ["a", "b"]


def test_each_seed_has_a_folder_and_a_folder_has_one_pipeline(tmp_path: Path):
    log = tmp_path / "log"
    folder = tmp_path / "p"
    run(folder, {"a": program(log, "a")}, seeds=[3, 5], parallel=2)

    assert ran(log) == ["a", "a"]
    assert [read_state(folder / f"seed-{n}").seed for n in (3, 5)] == [3, 5]
    assert "Means over 2 seeds (3, 5)" in (folder / "table.md").read_text()
    assert "report of" in (folder / "report.html").read_text()

    with pytest.raises(ConfigError, match="already holds a pipeline"):
        run(folder, {"a": program(log, "a")})
    with pytest.raises(ConfigError, match="was started with seeds"):
        run(folder, {"a": program(log, "a")}, resume=True)
    with pytest.raises(ConfigError, match="no pipeline to resume"):
        run(tmp_path / "none", {"a": program(log, "a")}, resume=True)

    (folder / "seed-3/pipeline.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        run(folder, {"a": program(log, "a")}, resume=True, seeds=[3, 5])


MAIN = """
import sys, yaml
from agentevo_evolve.pipeline import build_pipeline, run_pipeline
tree = yaml.safe_load(open(sys.argv[1]))
run_pipeline(build_pipeline(tree), resume=len(sys.argv) > 2)
"""


@pytest.mark.slow
def test_after_kills_at_any_moment_every_stage_has_been_run_to_its_end_once(tmp_path: Path):
    """The runner is killed again and again; a stage that it leaves behind ends by itself."""
    import yaml

    log = tmp_path / "log"
    folder = tmp_path / "p"
    stages = {"s": {"repeat": 4, **program(log, "s${round}", "${previous.file|x}")}}
    file = tmp_path / "tree.yaml"
    file.write_text(yaml.safe_dump({"dir": str(folder), "held_out": None, "stages": stages}))

    began = time.monotonic()
    kills = 0
    more = list[str]()
    while time.monotonic() - began < DEADLINE_S:
        words = [sys.executable, "-c", MAIN, str(file), *more]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        before = len(ran(log))
        while process.poll() is None and len(ran(log)) == before:
            time.sleep(0.02)

        time.sleep(0.05 * (kills % 3))  # in a program, at its end, between two
        if kills < 3 and process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1

        _, said = process.communicate(timeout=DEADLINE_S)
        more = ["--resume"]
        if process.returncode == 0:
            break
        assert process.returncode < 0 or b"under way" in said, said.decode()

        time.sleep(0.2)

    assert kills
    assert (folder / "stages/s.4/f").read_text() == "s4s3s2s1x"
    assert ran(log) == [f"s{n}" for n in range(1, 5)]
