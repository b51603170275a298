"""Wrong words: one line a problem on stderr, exit code 2, nothing created."""

import sys
from pathlib import Path

import pytest

import agentevo as package
from agentevo.cli.main import main
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.runs.doctor import diagnostics


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["train", "small.yaml", "trainer.grop_size=4"],
            "override: trainer.grop_size: unknown key; did you mean trainer.group_size?",
        ),
        (
            ["train", "small.yaml", "trainer.steps=many"],
            "override: trainer.steps: got 'many'; needs a whole number, at least 0",
        ),
        (
            ["train", "small.yaml", "sampling.top_k=5"],
            "override: sampling.top_p, top_k and min_p truncate",
        ),
        (
            ["train", "small.yaml", "environment.type=coin"],
            "override: environment.type: got 'coin'; did you mean coins?",
        ),
        (
            ["train", "small.yaml", "trainer.steps"],
            "override 'trainer.steps': write it as key.subkey=value",
        ),
        (["train", "smal.yaml"], "recipe smal.yaml: no such file"),
        (["train", "nothing-like-it"], "no recipe is called 'nothing-like-it'"),
        (
            ["train", "small.yaml", "--resume", "run.overwrite=true"],
            "--resume continues the run",
        ),
        (
            ["train", "small.yaml", "--dry-run", "trainer.stps=1"],
            "override: trainer.stps: unknown key; did you mean trainer.steps?",
        ),
        (
            ["train", "small.yaml", "algorithm.name=gpro"],
            "override: algorithm.name: got 'gpro'; did you mean grpo?",
        ),
        (
            ["eval", "small.yaml", "evaluation.task=3"],
            "override: evaluation.task: unknown key; did you mean evaluation.tasks?",
        ),
        (["eval", "nothing-like-it"], "is called 'nothing-like-it': give a recipe (calculator, "),
        (["eval", "smollm2-135m-instuct"], "did you mean 'smollm2-135m-instruct'?"),
        (["eval", "tiny"], "a model alone has no tasks: give --tasks FILE"),
        (["eval", "nothing-like-it", "--rescore"], "there is no such folder: give a folder that"),
        (["doctor", "small.yaml", "trainer.stps=1"], "override: trainer.stps: unknown key"),
        (["config", "small.yaml", "trainer.stps=1"], "override: trainer.stps: unknown key"),
        (
            ["config", "trainer.stps"],
            "trainer.stps: unknown key; did you mean trainer.steps?",
        ),
        (["report", "runs/nix"], "runs/nix: is not the folder of a run"),
        (["trajectories", "show", "runs/nix"], "runs/nix: is not the folder of a run"),
        (
            ["trajectories", "export", "runs/nix", "out.jsonl"],
            "runs/nix: is not the folder of a run",
        ),
        (
            ["trajectories", "show", "runs/nix", "--best", "--last"],
            "trajectories show: give an ID or one of",
        ),
        (
            ["list", "environment"],
            "nothing is listed under 'environment': did you mean 'environments'?",
        ),
        (["models", "smollm2-135m-instrukt"], "did you mean 'smollm2-135m-instruct'?"),
    ],
)
def test_one_line_exit_code_2_and_nothing_created(agentevo, words, expected):
    code, out, err = agentevo(*words)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    assert expected in err
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "small.yaml", "rollout.staleness=1e26"], "rollout.staleness: got 1e+26"),
        (["train", "small.yaml", "trainer.group_size=1e26"], "trainer.group_size: got 1e+26"),
        (["train", "small.yaml", "trainer.group_size=9" + "9" * 20], "at most 1048576"),
        (["train", "small.yaml", "trainer.steps=???"], "??? is not a value: give one"),
        (["train", "small.yaml", "run.threads=1e8"], "at most 1024"),
        (["train", "small.yaml", "run.seed=" + "9" * 5000], "a whole number of 5000 characters"),
        (["train", "small.yaml", "trainer=" + "[" * 5000], "nested in more than 64 levels"),
        (["train", "small.yaml", ".".join("a" * 500) + "=1"], "a key of 999 characters"),
        (["train", "small.yaml", "run.name=" + "x" * 300], "has 300 bytes"),
        (["train", "small.yaml", "run.dir=small.yaml"], "small.yaml is a file: give another"),
        (["train", "small.yaml", "run.dir=/dev/null/x"], "/dev/null is not a folder"),
        (["train", "small.yaml", "run.dir=a\0b"], "has a NUL character"),
        (["train", "\udcff.yaml"], "is not UTF-8"),
        (["report", "x" * 300], "a name of 300 bytes"),
        (["serve", "small.yaml", "--port", "99999"], "less than or equal to 65535"),
        (["store", "postgresql://127.0.0.1:99999/x", "stats"], "a port is 1 to 65535"),
        (["store", "postgresql://h:port/x", "stats"], "is not the URL of a database"),
    ],
    ids=lambda value: str(value)[:60].encode("ascii", "replace").decode().replace("\0", "NUL"),
)
def test_what_no_machine_could_take_is_refused_alike(agentevo, words, expected):
    code, out, err = agentevo(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval", "out", "--rescore", "--limit", "3"], "--limit is for playing"),
        (["chat", "tiny", "--answer", "4"], "add --task"),
        (["chat", "tiny", "--task", "2 + 2?", "--system", "Add."], "agent.system_prompt"),
        (["chat", "tiny", "--task", "2 + 2?", "--step", "3"], "is not the folder of a run"),
        (["config", "trainer.steps", "--changed"], "--changed is for a recipe"),
        (["config", "trainer.steps", "trainer.steps=1"], "changes are for a recipe"),
        (["config", "small.yaml", "--recipe", "small.yaml"], "--recipe is for a key"),
        (["sft", "small.yaml", "--reward-model", "--resume"], "can't be resumed"),
        (["audit", "run", "--rebuild"], "--rebuild is for a replay"),
        (["audit", "run", "--replay", "a", "--dropped"], "--dropped checks records"),
        (["annotate", "run", "--agreement", "--pairs"], "--pairs is for labelling"),
        (["annotate", "run", "--passed-from", "1"], "--passed-from is for --agreement"),
        (["trajectories", "show", "run", "--step", "3"], "--step is for HTML pages"),
        (["trajectories", "show", "run", "--html", "--best"], "--best chooses one attempt"),
        (["trajectories", "export", "run", "o.jsonl", "--held-out"], "or --annotations"),
        (["store", "run", "tidy"], "store tidy: there are stats, migrate"),
        (["store", "run", "gc", "x.jsonl"], "leave out x.jsonl"),
        (["store", "run", "export"], "name the file"),
        (["store", "run", "stats", "--dropped"], "--dropped is for gc"),
        (["sandbox", "a.py", "--host", "0.0.0.0"], "--host is for a server"),
        (["data", "make", "--out", "o", "--worlds", "2", "notes.md"], "--worlds is for tool"),
        (["data", "make", "--out", "o", "--per-passage", "2", "npx"], "--per-passage is for doc"),
        (["tools", "inspect", "--prompt", "p", "small.yaml"], "--prompt is for a server"),
        (["tools", "inspect", "--dry-run", "small.yaml"], "add --test"),
        (["pipeline", ".", "--resume"], ". is a folder, whose progress is shown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_of_another_use_of_the_command_is_refused(agentevo, words, expected):
    code, out, err = agentevo(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["model={name: smollm, tiny: {hidden_size: 192, num_layers: 4, num_heads: 4}}"],
            "model 'smollm' is no local folder and no known model",
        ),
        (
            ["environment={type: reasoning_gym, dataset: chain_sum}"],
            "pip install 'agentevo[reasoning-gym]'",
        ),
        (["environment={type: gymnasium, id: NoSuchWorld-v0}"], "NoSuchWorld"),
    ],
)
def test_what_only_building_shows_is_told_before_anything_is_created(
    agentevo, monkeypatch, overrides, expected
):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    code, _, err = agentevo("train", "small.yaml", *overrides)
    assert (code, err.count("\n")) == (2, 1)
    assert expected in err
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]


def test_one_line_for_each_problem(agentevo):
    code, _, err = agentevo("train", "small.yaml", "trainer.stps=1", "model.dtype=float8")
    assert code == 2
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("trian", "train"), ("evl", "eval"), ("trajectory", "trajectories"), ("docter", "doctor")],
)
def test_a_mistyped_command_is_answered_with_the_nearest(agentevo, typo, meant):
    code, _, err = agentevo(typo)
    assert code == 2
    assert f"'{meant}'" in err


@pytest.mark.parametrize(
    "words", [["train"], ["train", "small.yaml", "--no-such-option"], ["config", "explian"]]
)
def test_usage_errors_exit_with_2(agentevo, words):
    assert agentevo(*words).code == 2


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (ConfigError("first\nsecond"), 2, "error: first\nerror: second\n"),
        (AgentEvoError("it broke"), 1, "error: it broke\n"),
        (KeyboardInterrupt(), 130, ""),  # "stopped cleanly" is for what can be resumed
    ],
)
def test_main_is_the_boundary(monkeypatch, capsys, error, code, expected):
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("agentevo.config.load_config", fail)
    assert main(["config", "small.yaml"]) == code
    assert capsys.readouterr().err == expected


def test_a_defect_is_not_dressed_up(monkeypatch):
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("agentevo.config.load_config", fail)
    with pytest.raises(ZeroDivisionError):
        main(["config", "small.yaml"])


@package.question_family("test_refused_sums")
class Sums:
    def __init__(self, largest=9): ...

    def prompt(self, rng):
        return "a sum"

    def read(self, text, prompt):
        return package.Question("1 + 1", "2")


SELF_PLAY = """\
tasks: {eval: held_out.jsonl, self_play: test_refused_sums}
rewards: [exact_match]
trainer: {groups_per_step: 4, group_size: 4}
"""


def test_a_folder_that_nobody_can_make_is_refused_without_a_traceback(agentevo):
    code, _, err = agentevo("train", "small.yaml", "run.dir=/proc/x/y")
    assert code == 2
    assert "/proc/x/y can't be made" in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("words", [["train", "--dry-run"], ["doctor"]], ids=" ".join)
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tasks.self_play.family=nope"], "tasks.self_play.family: no question_family is called"),
        (["tasks.self_play.options.smallest=5"], "can't be made with the options {'smallest': 5}"),
        (["algorithm={advantage: credit, credit: nope}"], "algorithm.credit: no credit is called"),
        (["agent={type: command, command: [no-such-program]}"], "agent.command: there is no prog"),
    ],
)
def test_names_that_need_no_model_are_refused_without_training(
    agentevo, monkeypatch, words, overrides, expected
):
    monkeypatch.setattr(diagnostics, "open_components", None)  # nothing is built for it
    Path("self_play.yaml").write_text(SELF_PLAY)
    Path("held_out.jsonl").write_text('{"query": "1 + 1", "answer": "2"}\n')
    command, *options = words
    code, out, err = agentevo(command, "self_play.yaml", *overrides, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


def test_a_dry_run_of_a_sweep_refuses_what_a_variant_names(agentevo):
    variants = "sweep: {seeds: [0], variants: {one: {}, two: {tasks.self_play.family: nope}}}\n"
    Path("self_play.yaml").write_text(SELF_PLAY + variants)
    Path("held_out.jsonl").write_text('{"query": "1 + 1", "answer": "2"}\n')
    code, out, err = agentevo("train", "self_play.yaml", "--dry-run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "two: tasks.self_play.family: no question_family is called" in err
