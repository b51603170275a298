"""Commands that answer from what is installed or lies in a run's folder; the ones that train are
tested with the orchestration."""

import asyncio
import gzip
import json
import re
from pathlib import Path

import pytest
import typer
import yaml

import agentevo as package
from agentevo.cli import listings
from agentevo.cli.main import app
from agentevo.cli.packages import package_modules
from agentevo.config import build_config, to_yaml
from agentevo.store import open_store
from agentevo.types import Message, Task, Trajectory, Turn


def test_version(agentevo):
    assert agentevo("--version") == (0, f"agentevo {package.__version__}\n", "")


def test_help_names_every_command(agentevo):
    out = agentevo("--help").out
    assert all(
        f"\n  {name} " in out
        for name in [
            "train",
            "eval",
            "report",
            "audit",
            "store",
            "sandbox",
            "doctor",
            "list",
            "models",
            "config",
            "trajectories",
        ]
    )


def test_a_newcomer_can_read_the_whole_list(agentevo):
    def count(command):
        if command.hidden:
            return 0
        return sum(map(count, getattr(command, "commands", {}).values())) or 1

    first = re.search(r"Start here:\n((?:  .*\n)+)", agentevo("--help").out)
    assert re.findall(r"^  (\w+)", first[1], re.M) == ["train", "eval", "serve", "ui", "list"]
    assert count(typer.main.get_command(app)) <= 32


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "learn"])
def test_a_dry_run_prints_the_resolved_config_and_creates_nothing(command, agentevo):
    code, out, err = agentevo(command, "small.yaml", "trainer.steps=3", "--dry-run")
    assert (code, err) == (0, "")
    tree = yaml.safe_load(out)
    assert tree["trainer"]["steps"] == 3
    assert tree["run"]["name"] == "small"
    assert [path.name for path in Path().iterdir()] == ["small.yaml"]
    assert agentevo("config", "small.yaml", "trainer.steps=3").out == out


def test_an_algorithm_is_explained_by_its_name_alone(agentevo):
    named = agentevo("config", "turn_ppo")
    assert named.code == 0 and "Source:" in named.out
    assert named.out == agentevo("config", "algorithm.turn_ppo").out


@pytest.mark.slow
def test_another_preset_than_the_recipes_is_warned_of_on_stderr(agentevo):
    words = ["frozen_lake", "algorithm.name=gspo"]
    code, out, err = agentevo("train", *words, "--dry-run")
    assert (code, yaml.safe_load(out)["algorithm"]["clip_high"]) == (0, 0.28)
    assert "warning:   algorithm.clip_high=0.28" in err
    assert "add: algorithm.clip_high=0.0004" in err
    assert agentevo("config", *words).err == err
    assert agentevo("config", "frozen_lake").err == ""


def test_explain_says_meaning_type_default_and_unit(agentevo):
    out = agentevo("config", "sampling.max_new_tokens").out
    assert re.search(r"^sampling\.max_new_tokens\n  Maximum length", out)
    assert "type     whole number, at least 1\n  default  64\n  unit     tokens" in out


def test_show_changed_prints_what_is_set_alone(agentevo):
    out = agentevo("config", "small.yaml", "trainer.steps=3", "--changed").out
    assert yaml.safe_load(out)["trainer"] == {"steps": 3}
    assert "store" not in yaml.safe_load(out)


@pytest.mark.slow
def test_explain_lists_a_section_and_all_sections(agentevo):
    assert "\n  trainer.group_size\n      Attempts per task" in agentevo("config", "trainer").out
    assert re.search(
        r"environment\.max_actions \(.*frozen_lake.*\)\n",
        agentevo("config", "environment").out,
    )
    overview = agentevo("config").out
    assert re.search(r"^trainer +\w", overview, re.MULTILINE)
    assert len(re.findall(r"^  \w+\.[\w.]+  ", overview, re.MULTILINE)) == 15


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("environments", "coins"),
        ("environments", "frozen_lake"),
        ("algorithms", "grpo"),
        ("models", "smollm2-135m-instruct"),
        ("models", "tiny"),
        ("engines", "torch"),
        ("stores", "sqlite"),
        ("tools", "calculator"),
        ("tools", "search"),
    ],
)
def test_lists_say_what_each_name_is(agentevo, kind, name):
    code, out, _ = agentevo("list", kind)
    assert code == 0
    assert re.search(rf"^{name} +\S.*\S$", out, re.MULTILINE)


def test_the_list_of_models_shows_how_each_is_computed(agentevo):
    out = agentevo("list", "models").out
    assert re.search(r"^tiny +tree  created", out, re.MULTILINE)
    assert re.search(r"^ORG/NAME +tree  .*\bqwen3\b", out, re.MULTILINE)
    assert re.search(r"^ORG/NAME +rows  .*\bqwen3_next\b", out, re.MULTILINE)


def test_a_list_has_what_a_recipe_imports(agentevo, tmp_path):
    (tmp_path / "shouts.py").write_text(
        "import agentevo\n\n@agentevo.tool('listed_shout')\n"
        "def shout(word: str) -> str:\n    'Says it loudly.'\n"
    )
    (tmp_path / "recipe.yaml").write_text("import: [./shouts.py]\n")
    code, out, _ = agentevo("list", "tools", "--recipe", str(tmp_path / "recipe.yaml"))
    assert code == 0 and re.search("^listed_shout +Says it loudly", out, re.MULTILINE)
    assert agentevo("list", "tools", "--recipe", str(tmp_path / "none.yaml")).code == 2


def test_the_entries_of_agent_tools_are_explained(agentevo):
    code, out, _ = agentevo("config", "agent.tools")
    assert code == 0 and "Section" not in out
    assert "agent.tools.type (mcp)\n      One MCP server" in out

    out = agentevo("config", "agent.tools.start_timeout_s").out
    assert out.startswith("agent.tools.start_timeout_s (with agent.tools.type=mcp, mcp_file)\n")
    assert "\n\nagent.tools.start_timeout_s (with agent.tools.type=mcp_manager)\n" in out


@pytest.mark.slow
def test_list_alone_says_what_can_be_listed(agentevo):
    code, out, err = agentevo("list")
    assert (code, err) == (0, "")

    rows = re.findall(r"^(\w+) +(\S.*\S)$", out, re.MULTILINE)
    assert len(rows) == len(out.splitlines())
    assert [kind for kind, _ in rows] == [
        kind for module in (listings, *package_modules("listings")) for kind in module.LISTS
    ]

    help_text = agentevo("list", "--help").out
    for kind, meaning in rows:
        assert len(meaning) > 20
        assert kind in help_text
        assert agentevo("list", kind).code == 0


def trajectory(number: int, reward: float, *, status: str = "completed") -> Trajectory:
    turn = Turn(
        index=0,
        prompt_ids=[1, 2],
        completion_ids=[3, 4],
        logprobs=[-0.5, -0.25],
        versions=[0, 0],
        finish_reason="stop",
        messages=[Message("user", f"question {number}"), Message("assistant", "answer")],
    )
    error = "it broke" if status == "failed" else None
    return Trajectory(
        id=f"t{number}-0",
        task_id=f"t{number}",
        group_id=f"t{number}",
        turns=[turn],
        reward=reward,
        status=status,
        error=error,
        files={"out/a.txt": b"1"} if status == "failed" else {},
    )


@pytest.fixture
def run_dir() -> Path:
    """A run whose store holds four attempts; t4 broke."""
    run = Path("runs/small")
    run.mkdir(parents=True)
    config = build_config(
        {"environment": {"type": "coins"}, "model": {"name": "tiny"}, "run": {"name": "small"}}
    )
    (run / "config.yaml").write_text(to_yaml(config))
    attempts = [
        trajectory(1, 0.5),
        trajectory(2, 1.0),
        trajectory(3, 0.25),
        trajectory(4, 0.0, status="failed"),
    ]

    async def fill() -> None:
        async with await open_store(f"sqlite:///{run / 'store.sqlite'}") as store:
            await store.add_tasks(Task(id=f"t{number}") for number in range(1, 5))
            await store.write_trajectories(attempts, split="train", step=1)

    asyncio.run(fill())
    return run


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--best"], "t2-0"),
        (["--worst"], "t3-0"),
        (["--last"], "t3-0"),
        ([], "t3-0"),
        (["t1-0"], "t1-0"),
        (["t4"], "t4-0"),
    ],
)
def test_show_prints_the_chosen_trajectory(agentevo, run_dir, words, shown):
    code, out, err = agentevo("trajectories", "show", str(run_dir), *words)
    assert (code, err) == (0, "")
    assert f"trajectory {shown}" in out
    assert f"question {shown[1]}" in out
    assert "-0.25" in out


def test_show_writes_the_files_of_a_trajectory(agentevo, run_dir):
    code, out, _ = agentevo("trajectories", "show", str(run_dir), "t4", "--files", "new/t4")
    assert code == 0 and "out/a.txt, 1 bytes" in out and "1 file written to new/t4" in out
    assert Path("new/t4/out/a.txt").read_bytes() == b"1"
    code, _, err = agentevo("trajectories", "show", str(run_dir), "t4", "--files", "new/t4")
    assert (code, "new/t4: is there already" in err) == (2, True)
    exported = agentevo("trajectories", "export", str(run_dir), "all.jsonl")
    assert exported[0] == 0 and '"files":{"out/a.txt":"MQ=="}' in Path("all.jsonl").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [("nix", "no trajectory is called 'nix'"), ("t", "4 ids begin with 't'")],
)
def test_show_refuses_an_id_that_fits_none_or_several(agentevo, run_dir, words, expected):
    code, _, err = agentevo("trajectories", "show", str(run_dir), words)
    assert code == 2
    assert expected in err


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_export_writes_one_trajectory_a_line(agentevo, run_dir, name):
    code, out, _ = agentevo("trajectories", "export", str(run_dir), name)
    assert (code, out) == (0, f"4 trajectories written to {name}\n")
    with gzip.open(name) if name.endswith("gz") else open(name, "rb") as file:
        lines = [json.loads(line) for line in file]
    assert [line["id"] for line in lines] == ["t1-0", "t2-0", "t3-0", "t4-0"]
    assert lines[0]["turns"][0]["completion_ids"] == [3, 4]


def test_export_replaces_a_file_only_where_that_is_asked_for(agentevo, run_dir):
    Path("mine.jsonl").write_text("precious\n")
    of_run = ["trajectories", "export", str(run_dir)]
    of_store = ["store", str(run_dir), "export"]
    for words in (
        of_run,
        [*of_run, "--sft"],
        [*of_run, "--pairs"],
        [*of_run, "--annotations", "sft"],
        of_store,
    ):
        code, _, err = agentevo(*words[:3], "mine.jsonl", *words[3:])
        assert (code, err) == (
            2,
            "error: mine.jsonl is there already: give another file, or replace it with "
            "--overwrite\n",
        )

    assert Path("mine.jsonl").read_text() == "precious\n"
    assert agentevo(*of_run, "mine.jsonl", "--overwrite").code == 0

    trajectories = Path("mine.jsonl").read_text()
    assert trajectories.count("\n") == 4
    assert agentevo(*of_store, "mine.jsonl", "--overwrite").code == 0
    assert Path("mine.jsonl").read_text() != trajectories


def test_export_to_another_kind_of_file_is_refused(agentevo, run_dir):
    code, _, err = agentevo("trajectories", "export", str(run_dir), "out.csv")
    assert (code, err) == (
        2,
        "error: can't export to out.csv: the name must end in .jsonl or .jsonl.gz\n",
    )
    assert not Path("out.csv").exists()


def test_report_of_an_interrupted_run(agentevo, run_dir):
    code, out, _ = agentevo("report", str(run_dir))
    assert (code, out) == (0, f"{run_dir}/report.html\n")
    assert "t2-0" in (run_dir / "report.html").read_text()


MINE = """
from typing import Literal
from pydantic import Field
import agentevo

class Options(agentevo.EnvironmentConfig):
    type: Literal["explained_lamp"] = "explained_lamp"
    num_lamps: int = Field(default=3, ge=1)
    \"\"\"Lamps in the room.\"\"\"

@agentevo.environment("explained_lamp")
class Lamp(agentevo.EpisodicEnvironment):
    Config = Options
    instructions = "Say on."
    def start(self, seed): pass
    def observe(self): return "dark"
    def act(self, action): return agentevo.ActionResult(reward=1.0, terminated=True)

class Praise(agentevo.RewardConfig):
    loudness: float = 0.5
    \"\"\"How loudly it praises.\"\"\"

@agentevo.reward("explained_praise")
class Praising:
    Config = Praise
    def __init__(self, config): pass
    async def score(self, trajectory, task): return 1.0
"""


@pytest.mark.slow
def test_the_options_of_ones_own_classes_are_explained(agentevo):
    Path("lamp_of_mine.py").write_text(MINE)
    Path("lamp_of_mine.yaml").write_text(
        "import: [./lamp_of_mine.py]\nenvironment: {type: explained_lamp}\n"
    )
    for key, meaning, chooser in (
        ("environment.num_lamps", "Lamps in the room.", "environment.type=explained_lamp"),
        ("rewards.loudness", "How loudly it praises.", "rewards.name=explained_praise"),
    ):
        code, out, err = agentevo("config", key, "--recipe", "lamp_of_mine.yaml")
        assert (code, err) == (0, "")
        assert out.startswith(f"{key} (with {chooser})\n  {meaning}\n")

    code, _, err = agentevo("config", "environment", "--recipe", "nowhere.yaml")
    assert code == 2 and "recipe nowhere.yaml: no such file" in err


@pytest.mark.slow
def test_sft_dry_run_and_refusals(agentevo):
    Path("chats.yaml").write_text(
        "data: {train: chats.jsonl}\nmodel: {name: tiny, tiny: {tokenizer: byte}}\n"
    )
    for more in ([], ["--dry-run"]):
        code, out, err = agentevo("sft", "chats.yaml", *more)
        assert code == 2 and "data.train: chats.jsonl does not exist" in err

    Path("chats.jsonl").write_text("{}\n")
    code, _, err = agentevo("sft", "chats.yaml", "--dry-run")
    assert code == 2 and "no usable row to train on" in err

    Path("chats.jsonl").write_text('{"instruction": "2 + 2?", "output": "4"}\n')
    code, out, err = agentevo("sft", "chats.yaml", "sft.epochs=3", "--dry-run")
    assert code == 0 and "error" not in err

    tree = yaml.safe_load(out)
    assert (
        tree["sft"]["epochs"] == 3
        and tree["data"]["train"] == [str(Path("chats.jsonl").resolve())]
        and tree["environment"] is None
    )

    code, out, err = agentevo("sft", "small.yaml")
    assert code == 2 and "there is no training data" in err

    code, out, err = agentevo("sft", "chats.yaml", "model.tiny.tokenizer=word")
    assert code == 2 and "set it to byte" in err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_sft_of_a_file_by_command(agentevo):
    Path("chats.yaml").write_text(
        "data: {train: chats.jsonl}\nmodel: {name: tiny, tiny: {tokenizer: byte, num_layers: 1}}\n"
    )
    row = {"instruction": "say", "output": "ok"}
    Path("chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for _ in range(4)) + "{torn\n")

    code, out, err = agentevo("sft", "chats.yaml", "tracking.tensorboard=false", "run.threads=1")
    assert code == 0, err
    assert "train: 4 of 5 rows are used" in out
    assert "train: 1 left out, not JSON: " in out and "chats.jsonl:5" in out
    assert "held-out conversations at step 1: loss" in out
    assert "step 1/1 | loss" in out and "dropped" not in out

    code, out, err = agentevo("eval", "runs/chats")
    assert code == 2 and "this run has none" in err
