"""`--dry-run` refuses what the run would refuse before it samples, and downloads and writes
nothing."""

import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

import pytest
from pictures import data_url, file_of, picture
from slow import slow, soak

from agentevo.data import rows
from agentevo.environments.coins import CoinsConfig, CoinsEnvironment
from agentevo.environments.environment import environments
from agentevo.models import checkpoint_manifest
from agentevo.models.files import resolve


class UnsolvedConfig(CoinsConfig):
    type: Literal["test_unsolved"] = "test_unsolved"


class Unsolved(CoinsEnvironment):
    Config = UnsolvedConfig

    def optimal_action(self):
        return None


UNSOLVED = """
environment: {type: test_unsolved}
model: {name: tiny}
cold_start: {episodes: 4}
"""
PLAIN = "environment: {type: coins}\nmodel: {name: tiny}\n"
ROWS = "tasks: {train: [rows.jsonl]}\nrewards: [contains]\nmodel: {name: tiny}\n"


@pytest.fixture(autouse=True)
def recipes(folder):
    Path("plain.yaml").write_text(PLAIN)
    Path("unsolved.yaml").write_text(UNSOLVED)
    environments.register("test_unsolved")(Unsolved)
    Path("rows.yaml").write_text(ROWS)
    Path("rows.jsonl").write_text('{"query": "2 + 2?", "answer": "4"}\n')


SAYS = [
    (["engine.type=vlm"], "no engine is called 'vlm': did you mean 'vllm'?"),
    (["engine.options.quantization=4bit"], "engine.options.quantization: the embedded engine"),
    (["engine.type=sglang", "engine.options.quantisation=4"], "engine.options.quantisation"),
    (["model.name=./nothing"], "there is no such folder"),
    (["model.name=smollm2-135m"], "did you mean 'smollm2-135m-instruct'?"),
    (["reward_model.name=./nothing"], "there is no such folder"),
    (["algorithm.reference_model=./nothing"], "there is no such folder"),
    (["trainer.optimizer_from=./nothing"], "trainer.optimizer_from: nothing/state.json"),
    (["agent.type=nobody"], "nobody"),
    (["rows.yaml", "tasks.train=[nothing.jsonl]"], "nothing.jsonl"),
    (["rows.yaml", "rewards=[contain]"], "contain"),
    (["tracing.backend=nowhere"], "tracing"),
    (["rollout.transport=folder"], "rollout.transport=folder is for engines in other processes"),
    (["memory.offload_optimizer=true"], "memory.offload_optimizer"),
    (
        ["rows.yaml", "agent.type=code_agent", "agent.sandbox.type=bubblewrapp"],
        "did you mean 'bubblewrap'?",
    ),
    (["unsolved.yaml"], "environment Unsolved has no solver, which cold_start.episodes asks"),
]


def with_recipe(words):
    return words if words[0].endswith(".yaml") else ["plain.yaml", *words]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", *soak("learn")])
@pytest.mark.parametrize(("words", "said"), SAYS, ids=lambda value: str(value)[:40])
def test_a_dry_run_refuses_what_the_run_refuses_with_the_same_words(
    command, words, said, agentevo, folder, monkeypatch
):
    def begin(*_, **__):
        raise AssertionError("the run has begun")

    monkeypatch.setattr("agentevo.runs.orchestration.run.run_training", begin)
    monkeypatch.setattr("agentevo.runs.processes.learn.run_training", begin)
    if command == "learn" and words[0].startswith("rollout.transport"):
        words, said = ["rollout.transport=copy"], "does not reach engines in other processes"

    before = sorted(folder.rglob("*"))
    code, _, run_says = agentevo(command, *with_recipe(words))
    assert code == 2 and said in run_says, run_says
    code, out, err = agentevo(command, *with_recipe(words), "--dry-run")
    assert (code, out, err) == (2, "", run_says)
    assert sorted(folder.rglob("*")) == before


MISSING = [
    (["engine.type=vllm"], "vllm", "pip install 'agentevo[vllm]'"),
    (["engine.type=sglang"], "sglang", "pip install sglang"),
    (["tracking.backends=[wandb]"], "wandb", "pip install wandb"),
    (["memory.optimizer=adamw_8bit"], "torchao", "pip install 'agentevo[8bit]'"),
    (["model.name=org/name", "model.lora.rank=4"], "peft", "pip install 'agentevo[lora]'"),
    (
        ["model.name=org/name", "model.lora.rank=4", "model.lora.quantize=4bit"],
        "bitsandbytes",
        "pip install 'agentevo[qlora]'",
    ),
    (
        ["rows.yaml", "agent.type=tool_agent",
         "agent.tools=[{type: mcp, name: far, url: https://localhost:1/mcp}]"],
        "mcp",
        "pip install 'agentevo[mcp]'",
    ),
    (["store.url=postgresql://me@localhost/x"], "asyncpg", "pip install 'agentevo[postgresql]'"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("words", "package", "line"), MISSING, ids=lambda value: str(value)[:30])
def test_a_dry_run_names_the_line_that_installs_what_is_missing(
    words, package, line, agentevo, monkeypatch
):
    class NotInstalled(PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            return

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for module in ("vllm.arguments", "sglang.options"):
        monkeypatch.setattr(f"agentevo.inference.{module}.find_spec", _without(package))
    monkeypatch.setattr("importlib.util.find_spec", _without(package))
    monkeypatch.setattr(sys, "meta_path", [NotInstalled, *sys.meta_path])

    code, _, err = agentevo("train", *with_recipe(words), "--dry-run")
    assert code == 2 and line in err, err


def _without(package):
    from importlib.util import find_spec

    return lambda name, parent=None: None if name == package else find_spec(name, parent)


@pytest.mark.slow
def test_a_dry_run_downloads_nothing_and_says_what_a_run_would(agentevo, monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTEVO_CACHE", str(tmp_path / "cache"))

    def download(*_):
        raise AssertionError("a dry run has downloaded a model")

    monkeypatch.setattr(resolve, "ensure_cached", download)
    for name in ("smollm2-135m-instruct", "hf://org/name"):
        code, out, err = agentevo("train", "plain.yaml", f"model.name={name}", "--dry-run")
        assert code == 0 and name in out
        assert f"the model {name} is not on this machine: a run downloads it first" in err
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_dry_run_reads_a_saved_model_but_its_weights(agentevo, tmp_path, saved_tiny):
    words = ["train", "plain.yaml", f"model.name={saved_tiny}", "--dry-run"]
    assert agentevo(*words)[0] == 0
    for more, said in (
        (["model.lora.rank=2", "model.lora.targets=[nothing]"], "nothing"),
        (["model.config_overrides={nothing: 1}"], "nothing"),
    ):
        code, _, err = agentevo(*words, *more)
        assert code == 2 and said in err, err

    (saved_tiny / "tokenizer.json").write_text("{")
    code, _, err = agentevo(*words)
    assert code == 2 and "the tokenizer in" in err


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "a bit":
        content[-9] ^= 4
    path.write_bytes(content[:-100] if how == "cut off" else content)
    if how == "no shard":
        path.rename(path.with_name("model-00001-of-00002.safetensors"))
        shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        index = {"metadata": {}, "weight_map": shards}
        path.with_name("model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpoint", [False, True])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut off", "model.safetensors"),
        ("a bit", "model.safetensors has the sha256"),
        ("no shard", "model-00002-of-00002.safetensors can't be read (it is missing)"),
    ],
)
def test_a_dry_run_refuses_damaged_weights_as_the_run_does(
    agentevo, saved_tiny, is_checkpoint, how, said
):
    if how == "no shard":
        damage(saved_tiny / "model.safetensors", how)
    if is_checkpoint:
        checkpoint_manifest.seal(saved_tiny, 3, None)
    if how != "no shard":
        damage(saved_tiny / "model.safetensors", how)

    words = ["train", "plain.yaml", f"model.name={saved_tiny}"]
    code, _, err = agentevo(*words, "--dry-run")
    if how == "a bit" and not is_checkpoint:
        assert code == 0  # nothing says what was saved
        return

    assert code == 2 and said in err, err
    assert agentevo(*words)[::2] == (code, err)


@pytest.mark.slow
def test_a_dry_run_says_where_it_did_not_compare_large_weights(agentevo, monkeypatch, saved_tiny):
    checkpoint_manifest.seal(saved_tiny, 3, None)
    size = (saved_tiny / "model.safetensors").stat().st_size
    monkeypatch.setattr("agentevo.models.files.weight_files.MAX_HASHED_BYTES", size)
    words = ["train", "plain.yaml", f"model.name={saved_tiny}", "--dry-run"]
    damage(saved_tiny / "model.safetensors", "a bit")
    code, _, err = agentevo(*words)
    assert code == 0 and "its weights were not compared with their digests" in err, err

    (saved_tiny / "config.json").write_text("{}")
    code, _, err = agentevo(*words)
    assert code == 2 and "config.json has the sha256" in err, err


@pytest.fixture
def saved_tiny(tmp_path) -> Path:
    from agentevo.config import load_config
    from agentevo.models.files.save import write_model
    from agentevo.runs.orchestration.components import load_policy

    loaded = load_policy(load_config("small.yaml", []))
    write_model(loaded.model, loaded.tokenizer, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_a_folder_with_a_run_is_refused_before_torch_is_imported(agentevo, monkeypatch):
    Path("taken").mkdir()
    Path("taken/config.yaml").write_text("# agentevo train\nenvironment: {type: coins}\n")
    monkeypatch.setitem(sys.modules, "agentevo.runs.orchestration.run", None)  # it imports torch
    for words in (["train"], ["train", "--dry-run"], ["sft", "data.train=[small.yaml]"]):
        code, _, err = agentevo(words[0], "small.yaml", "run.dir=taken", *words[1:])
        assert code == 2 and "holds a run already" in err, err


@pytest.mark.slow
def test_a_dry_run_asks_for_the_secret_of_its_engines(agentevo, monkeypatch):
    monkeypatch.delenv("NO_SECRET", raising=False)
    words = ["rollout.samplers=1", "rollout.engine_secret=${env:NO_SECRET}"]
    code, _, err = agentevo("train", "plain.yaml", *words, "--dry-run")
    assert code == 2 and "rollout.engine_secret" in err and "NO_SECRET" in err


@pytest.mark.slow
def test_a_dry_run_of_a_store_makes_none(agentevo, tmp_path):
    words = ["train", "small.yaml", f"store.url=sqlite:///{tmp_path}/new/store.sqlite"]
    assert agentevo(*words, "--dry-run")[0] == 0
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_dry_run_gives_the_account_of_the_rows_that_a_run_would_give(agentevo):
    broken = '{"query": "2 + 2?", "answer": "4"}\n{"query": \n{"query": "3 + 3?", "anwser": "6"}\n'
    Path("rows.jsonl").write_text(broken)
    code, _, err = agentevo("train", "rows.yaml", "evaluation.tasks=1", "--dry-run")
    assert code == 0, err
    assert "tasks.train: 2 of 3 rows are used" in err
    assert "tasks.train: 1 left out, not JSON: " in err
    assert "rows.jsonl:2" in err
    assert "tasks.train: 1 of 2 rows have no answer, while the others have one: " in err


@pytest.mark.slow
def test_all_that_is_refused_is_listed_at_once_a_line_each(agentevo, folder, monkeypatch):
    monkeypatch.setattr(
        resolve, "ensure_cached", lambda *_: pytest.fail("downloaded for a refused run")
    )
    words = [
        "rows.yaml",
        "tasks.train=[nothing.jsonl]",
        "engine.type=vlm",
        "model.name=smollm2-135m-instruct",
        "reward_model.name=./nothing",
        "trainer.optimizer_from=./nothing",
        "memory.offload_optimizer=true",
    ]
    expected = [
        "tasks.train: nothing.jsonl does not exist",
        "no engine is called 'vlm'",
        "trainer.optimizer_from",
        "memory.offload_optimizer",
        "model './nothing': there is no such folder",
    ]
    before = sorted(folder.rglob("*"))
    code, out, err = agentevo("train", *words, "--dry-run")
    assert code == 2 and not out and sorted(folder.rglob("*")) == before
    lines = err.splitlines()
    assert len(lines) == len(expected), err
    for line, part in zip(lines, expected, strict=True):
        assert line.startswith("error: ") and part in line

    code, _, err = agentevo("train", *words)
    assert code == 2 and err.splitlines() == lines[:-1], "before it looks at models"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "learn"])
def test_a_dry_run_reads_each_file_of_tasks_once(command, agentevo, saved_tiny, monkeypatch):
    read = []
    monkeypatch.setattr(
        "agentevo.rollout.given_tasks.read_rows",
        lambda source: read.append(source) or rows.read_rows(source),
    )
    held_out = Path("held_out.jsonl")
    held_out.write_text('{"query": "3 + 4?", "answer": "7"}\n')
    words = ["rows.yaml", f"tasks.eval=[{held_out}]", f"model.name={saved_tiny}", "--dry-run"]
    code, _, err = agentevo(command, *words)
    assert code == 0 and "tasks.eval: 1 of 1 rows are used" in err, err
    assert [Path(source).name for source in read] == ["rows.jsonl", "held_out.jsonl"]


@pytest.mark.parametrize("command", ["train", "sft", "learn"])
@pytest.mark.parametrize("place", ["/proc/x/y", "/dev/null/x", "/sys/x", "rows.yaml/x"])
def test_a_dry_run_refuses_a_place_where_no_run_can_be(command, place, agentevo, folder):
    data = ["data.train=[chats.jsonl]"] if command == "sft" else []
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    before = sorted(folder.rglob("*"))
    code, out, err = agentevo(command, "plain.yaml", *data, f"run.dir={place}", "--dry-run")
    assert (code, out) == (2, "") and "give another run.dir" in err and "Traceback" not in err
    assert sorted(folder.rglob("*")) == before


REFUSES_SYSTEM = (
    "{%- for m in messages if m.role == 'system' -%}{{- raise_exception('no system role') -}}"
    "{%- endfor -%}"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["plain.yaml", "agent.system_prompt=Be brief."], "set agent.system_prompt=null"),
        (
            ["rows.yaml", "agent.system_prompt=Be brief."],
            "set agent.system_prompt=null and agent.instruction",
        ),
        (["rows.yaml", "agent.type=code_agent"], "choose another model or agent"),
        (["rows.yaml"], ""),
    ],
)
def test_a_system_message_that_the_template_refuses_is_refused_with_advice_that_fits(
    words, remedy, agentevo, monkeypatch
):
    Path("rows.jsonl").write_text(
        "".join(f'{{"query": "{n}?", "answer": "4"}}\n' for n in range(9))
    )
    monkeypatch.setattr("agentevo.runs.orchestration.checks.load_policy", _load_without_system)
    code, _, err = agentevo("train", *words, "--dry-run")
    assert code == (2 if remedy else 0), err
    assert err.rstrip().endswith(remedy) and ("no system role" in err) == bool(remedy), err


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--dry-run"], *slow([])])
def test_a_text_model_is_refused_where_images_are_shown(more, agentevo):
    """Nothing of the run remains, and the same folder can be used again."""
    image = data_url(file_of(picture()))
    seen = [{"query": f"{n}?", "answer": "4", "image": image} for n in range(9)]
    Path("seen.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in seen))
    Path("seen.yaml").write_text(
        "agent: single_turn\ntasks: seen.jsonl\nrewards: [contains]\n"
        "model: {name: tiny, tiny: {tokenizer: byte, hidden_size: 32, num_layers: 1}}\n"
        "trainer: {groups_per_step: 2}\n"
    )
    lake = ["environment.type=frozen_lake", "environment.observation=image"]
    for words, shown in (
        (["small.yaml", *lake], "environment: its observations have images"),
        (["seen.yaml"], "tasks: some have images"),
    ):
        code, _, err = agentevo("train", *words, "run.dir=new", *more)
        assert code == 2 and f"{shown}, and model.name=tiny reads text only: choose" in err, err
        assert not Path("new").exists()


def _load_without_system(config, checkpoint=None, **options):
    from agentevo.runs.orchestration.components import load_policy

    loaded = load_policy(config, checkpoint, **options)
    loaded.tokenizer.chat_template = REFUSES_SYSTEM + loaded.tokenizer.chat_template
    return loaded
