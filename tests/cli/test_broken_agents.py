"""An agent that can't work is said so at once, with its traceback and an exit code, by every
command that plays it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from byte_policy import byte_policy

from agentevo.config import build_config
from agentevo.errors import AttemptsFailedError
from agentevo.runs.folder.chain import is_given_up
from agentevo.runs.folder.run_folder import read_store
from agentevo.runs.processes.learn import learn

AGENTS = """
from pathlib import Path

import agentevo

@agentevo.agent("raises")
async def raises(task, policy):
    raise ValueError("the key is missing")

@agentevo.agent("misspells")
async def misspells(task, policy):
    await policy.generate([{"role": "user", "text": task.query}])

@agentevo.agent("asks_wrongly")
async def asks_wrongly(task, policy):
    await policy.generate([agentevo.Message("user", task.query)], max_tokens=3)

@agentevo.agent("answers_text")
async def answers_text(task, policy):
    return (await policy.generate([agentevo.Message("user", task.query)])).text

@agentevo.agent("silent")
async def silent(task, policy):
    await policy.generate([agentevo.Message("user", task.query)])

@agentevo.agent("late")
async def late(task, policy):
    await policy.generate([agentevo.Message("user", task.query)])
    if "greedy" not in policy.name and not Path("mended").exists():
        raise ValueError("only when trained")
    return 0.5

@agentevo.agent("early")
async def early(task, policy):
    await policy.generate([agentevo.Message("user", task.query)])
    if not Path("mended").exists():
        raise ValueError("before anything is trained")
    return 0.5
"""
RECIPE = {
    "import": ["agents.py"],
    "agent": {"type": "raises"},
    "tasks": "tasks.jsonl",
    "model": byte_policy(),
    "sampling": {"max_new_tokens": 2},
    "trainer": {"steps": 2, "groups_per_step": 2, "group_size": 2},
    "evaluation": {"tasks": 2, "samples": 0},
    "tracking": {"tensorboard": False, "report": False},
}
WRONG = {
    "raises": "ValueError: the key is missing",
    "misspells": "BadRequestError: message 1 has 'text'",
    "asks_wrongly": "got an unexpected keyword argument 'max_tokens'",
    "answers_text": "the agent returned a str: return a number",
    "silent": "the agent returned no reward, and no scorer decides",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """One for all tests: a file's agents are registered once in a process."""
    place = tmp_path_factory.mktemp("broken")
    (place / "agents.py").write_text(AGENTS)
    (place / "tasks.jsonl").write_text("".join(f'{{"query": "q{n}"}}\n' for n in range(10)))
    (place / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return place


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_a_run_whose_whole_first_evaluation_failed_ends_with_the_reason(agentevo, kind):
    code, out, err = agentevo("train", "recipe.yaml", f"agent.type={kind}", f"run.dir=runs/{kind}")
    assert code == 1
    assert "error: the first evaluation: 2 of 2 failed: 2 " in err and WRONG[kind] in err
    assert err.rstrip().endswith(
        "start again in the same folder by the same command, or with `agentevo train "
        f"runs/{kind}/config.yaml`, with --resume or without"
    )
    assert "held-out" not in out and out.count(WRONG[kind]) <= 2, "told as it happens, and no more"

    if kind != "silent":
        assert "agents.py" in out, "at once, and where from"
        assert "agents.py" in err and kind in err
        assert "src/agentevo" not in out + err, "places in AgentEvo"


@pytest.mark.slow
def test_a_run_whose_whole_first_step_failed_ends_with_the_reason(agentevo):
    code, out, err = agentevo("train", "recipe.yaml", "agent.type=late", "run.dir=runs/late")
    assert code == 1
    assert "error: the first step: 4 of 4 failed: 4 ValueError: only when trained" in err
    assert out.count("Traceback") == 1, "of one kind one traceback"


@pytest.fixture
def mended(place) -> Iterator[Callable[[], None]]:
    """Mends the agents `early` and `late` until the test ends."""
    yield (place / "mended").touch
    (place / "mended").unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "resume"), [("early", ()), ("early", ["--resume"]), ("late", ())])
def test_once_it_is_mended_the_same_command_begins_the_run_again(
    agentevo, place, mended, kind, resume
):
    """In the same folder, by the command that the message gives too, also where that run had
    replaced another; an attempt that failed before is not taken for one of the new run."""
    words = ["train", "recipe.yaml", f"agent.type={kind}", f"run.dir=runs/mended-{kind}"]
    code, _, err = agentevo(*words, "run.overwrite=true")
    assert code == 1 and "nothing was trained" in err

    mended()
    words = words if not resume else re.findall("`agentevo (.*?)`", err)[0].split()
    assert agentevo(*words, *resume).code == 0

    folder = place / "runs" / f"mended-{kind}"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["eval"]["failed"]["before"] == 0.0
    assert agentevo("audit", str(folder)).code == 0

    code, _, err = agentevo(*words)
    assert code == 2 and "holds a run already" in err, "one that has trained keeps its folder"


@pytest.mark.slow
def test_what_is_mended_in_the_recipe_counts_too(agentevo, mended):
    words = ["train", "recipe.yaml", "run.dir=runs/another"]
    assert agentevo(*words, "agent.type=silent").code == 1
    mended()
    assert agentevo(*words, "agent.type=early", "trainer.steps=1", "--resume").code == 0


@pytest.mark.slow
def test_a_trainer_beside_samplers_begins_again_too(quiet_view, place, mended, tmp_path):
    """`learn` keeps the folder, which samplers use, and forgets the failed attempts."""
    config = build_config(
        RECIPE | {"import": [str(place / "agents.py")], "tasks": str(place / "tasks.jsonl")},
        ["agent.type=early", f"run.dir={tmp_path / 'run'}", "rollout.staleness=1"],
    )
    with pytest.raises(AttemptsFailedError, match=r"`agentevo learn .*config\.yaml`"):
        learn(config, view=quiet_view())

    mended()
    with pytest.raises(KeyboardInterrupt):
        learn(config, view=quiet_view(phase=("sampling", "step 1")))

    counts = read_store(config.run_dir, lambda store: store.counts())
    assert counts["trajectories/eval/ready"] == 2 and counts["trajectories/eval/failed"] == 0
    assert counts["tasks/queued"] == 0, "nobody samples what is evaluated"
    assert not is_given_up(config.run_dir)


@pytest.mark.parametrize("command", ["eval", "doctor"])
def test_other_commands_end_with_an_exit_code_too(agentevo, command):
    code, out, err = agentevo(command, "recipe.yaml")
    assert code == 1
    assert "ValueError: the key is missing" in (err if command == "eval" else out)
    assert "Traceback" in err


@pytest.mark.slow
def test_what_graded_numbers_mean_stands_under_them(agentevo):
    out = agentevo("eval", "recipe.yaml", "agent.type=late").out
    assert "success: a reward of 1 or more, or what Outcome(success=...) says" in out
    scored = "rewards=[{name: contains, weight: 1}]"
    out = agentevo("eval", "recipe.yaml", "agent.type=silent", scored).out
    assert "success: a score of 1 or more by contains, unless it says otherwise" in out


@pytest.mark.slow
def test_eval_of_a_run_with_an_agent_function_names_the_python_way(agentevo):
    import agentevo as package

    async def play(task, policy):
        return float(len((await policy.generate([package.Message("user", "a")])).text) % 2)

    package.train(
        play,
        [{"query": f"q{n}"} for n in range(10)],
        **{key: RECIPE[key] for key in ("model", "sampling", "trainer", "evaluation", "tracking")},
        run={"dir": "runs/function"},
    )
    code, _, err = agentevo("eval", "runs/function")
    assert code == 2
    assert "agentevo.load_run(folder, agent=...)" in err
