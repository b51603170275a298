"""From a server of tools to stages that train on its tasks: what is planned, what is refused, and
one whole evolution, broken off and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from remote_server import RemoteServer, chat, gives

from agentevo.cli.main import main
from agentevo.config import TinyModel, sources
from agentevo.errors import ConfigError
from agentevo.models.tiny import make_tiny
from agentevo_evolve.evolution.evolve import evolve, last_run, read_evolution
from agentevo_evolve.evolution.schema import EvolveSection
from agentevo_evolve.evolution.stages import stages_of
from agentevo_evolve.pipeline import read_state
from agentevo_evolve.pipeline.state import digest_of_path
from agentevo_evolve.task_making.demonstrations import demonstration
from agentevo_evolve.task_making.files import made_rows

SMALL = (
    "model.name=tiny",
    "model.tiny.tokenizer=byte",
    "model.tiny.hidden_size=16",
    "model.tiny.num_layers=1",
    "model.tiny.num_heads=2",
    "model.tiny.context_length=8192",
    "trainer.steps=1",
    "trainer.groups_per_step=2",
    "trainer.group_size=2",
    "sampling.max_new_tokens=4",
    "agent.max_turns=1",
    "evaluation.samples=0",
    "tracking.report=false",
    "tracking.tensorboard=false",
    "sft.epochs=1",
    "sft.stop_at_gap.tasks=2",  # `show` measures, too
    "sft.stop_at_gap.attempts=2",
)
RECIPE = """
evolve:
  tasks: {train: 10, held_out: 3, worlds: 20, kinds: [state]}
  demonstrations: {count: 4}
  rounds: 2
  new_tasks: 2
agent: {tools: [{name: booking, options: {rooms: 9}}]}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "shop.yaml"
    path.write_text(RECIPE)
    return str(path)


def planned(**section):
    read = EvolveSection.model_validate(section)
    return stages_of(read, {"model": {"name": "base"}}, Path("/made"), ["recipe.yaml"])


def test_stages_begin_with_what_the_stage_before_made():
    stages = planned(rounds=3)
    assert list(stages) == ["show", "improve"]

    inner = stages["improve"]["stages"]
    assert inner["rl"]["model"] == "${previous.rl.checkpoint|stages.show.checkpoint}"
    assert inner["rl"]["config"]["tasks"]["train"] == "${previous.more.file|/made/train.jsonl}"
    assert inner["more"]["when"] == "${round} < 3"
    assert "prompts" not in inner and "agent" not in inner["rl"]["config"]

    alone = planned(rounds=1, demonstrations={"source": "none"})
    assert alone == {
        "improve": {
            "repeat": 1,
            "stages": {
                "rl": {
                    "kind": "train",
                    "model": "${previous.rl.checkpoint|base}",
                    "config": {"tasks": {"train": "/made/train.jsonl"}},
                }
            },
        }
    }

    sampled = planned(demonstrations={"source": "attempts"}, skip=["improve"], merge=True)
    assert list(sampled) == ["try", "choose", "show", "merge"]
    assert sampled["merge"]["options"] == {"source": "${stages.show.checkpoint}"}


@pytest.mark.parametrize(
    ("target", "overrides", "message"),
    [
        ("http://127.0.0.1:9/mcp", (), "model.name is missing"),
        ("http://127.0.0.1:9/mcp", ("model.name=tiny", "evolve.round=2"), "evolve.round"),
        (
            "http://127.0.0.1:9/mcp",
            ("model.name=tiny", "evolve.budget.days=2"),
            "days is not known",
        ),
        (
            "http://127.0.0.1:9/mcp",
            ("model.name=tiny", "evolve.tasks.train=x", "evolve.include=5"),
            r"(?s)evolve\.include: got 5; needs a list.*evolve\.tasks\.train: got 'x'; needs",
        ),
        ("http://u:p@127.0.0.1/mcp", ("model.name=tiny",), "evolve.server"),
        (" ", ("model.name=tiny",), "evolve.server"),
    ],
)
def test_what_can_not_be_evolved_is_refused_in_words(target, overrides, message):
    with pytest.raises(ConfigError, match=message):
        read_evolution(target, overrides)


@pytest.mark.slow
def test_a_dry_run_lists_the_stages_and_creates_nothing(tmp_path, recipe, capsys):
    words = [recipe, "--dry-run", f"run.dir={tmp_path / 'out'}", *SMALL]
    assert main(["evolve", *words]) == 0
    assert "improve.2.rl@held_out" in capsys.readouterr().out
    assert main(["evolve", *words, "--rl-only"]) == 0

    told = capsys.readouterr().out
    assert "improve.1.rl" in told and "show" not in told and "improve.2" not in told
    assert not (tmp_path / "out").exists()
    assert main(["evolve", *words, "trainer.stepz=1"]) == 2
    assert "trainer.stepz" in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_for_one_gpu_is_whole(tmp_path, capsys):
    example = Path(__file__).parents[3] / "examples" / "evolve" / "decision_agent.yaml"
    tree = sources.read_yaml(example)
    assert tree["model"]["lora"] == {"rank": 16} and tree["memory"] == {"checkpointing": "full"}

    pytest.importorskip("peft")
    shape = TinyModel(hidden_size=16, num_layers=1, num_heads=2, context_length=512)
    model, tokenizer = make_tiny(shape, {"a word"}, seed=0)
    for one in (model, tokenizer):
        one.save_pretrained(tmp_path / "base")

    words = [f"model.name={tmp_path / 'base'}", f"run.dir={tmp_path / 'out'}"]
    assert main(["evolve", str(example), "--dry-run", *words]) == 0

    told = capsys.readouterr().out
    kinds = ("sample", "filter", "sft", "train", "command", "merge")
    assert all(f" {kind}" in told for kind in kinds)


def test_texts_and_weights_take_turns_and_a_merge_is_not_measured_without_its_texts():
    prompts = {"attempts": 80, "config": {"optimize": {"method": "few_shot"}}}
    stages = planned(rounds=2, prompts=prompts, merge=True)
    inner = stages["improve"]["stages"]
    texts = {"texts": "${previous.prompts.file|/made/texts.yaml}"}
    assert inner["rl"]["config"]["agent"] == inner["prompts"]["config"]["agent"] == texts
    assert inner["prompts"]["model"] == "${stages.rl.checkpoint}"
    assert inner["prompts"]["config"]["optimize"] == {"attempts": 80, "method": "few_shot"}
    assert stages["merge"]["measure"] is False

    unimproved = planned(rounds=2, prompts=prompts, merge=True, skip=["improve"])
    assert "measure" not in unimproved["merge"]

    left_out = planned(rounds=2, prompts=prompts, skip=["prompts"])
    assert list(left_out["improve"]["stages"]) == ["rl", "more"]


def test_texts_of_a_file_are_those_of_the_recipe_wherever_it_is_started(tmp_path):
    (tmp_path / "shop.yaml").write_text(RECIPE.replace("agent: {", "agent: {texts: ours.yaml, "))
    (tmp_path / "ours.yaml").write_text("system: Be brief.\n")
    read = read_evolution(str(tmp_path / "shop.yaml"), [f"run.dir={tmp_path}/out", *SMALL])
    assert read.tree["agent"]["texts"] == {"system": "Be brief."}
    (tmp_path / "ours.yaml").unlink()
    with pytest.raises(ConfigError, match=r"agent\.texts: there is no file"):
        read_evolution(str(tmp_path / "shop.yaml"), SMALL)


@pytest.mark.slow
def test_an_evolution_that_was_broken_off_goes_on_with_the_same_tasks(
    tmp_path, recipe, monkeypatch
):
    out = tmp_path / "out"
    evolution = read_evolution(recipe, [f"run.dir={out}", *SMALL])
    monkeypatch.setattr("agentevo_evolve.evolution.evolve.run_pipeline", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        evolve(evolution, resume=False, note=print)

    made = {file: file.read_bytes() for file in (out / "tasks").iterdir() if file.is_file()}
    assert made
    with pytest.raises(ConfigError, match="--resume"):
        evolve(evolution, resume=False, note=print)
    with pytest.raises(KeyboardInterrupt):
        evolve(evolution, resume=True, note=print)
    assert {file: file.read_bytes() for file in made} == made


@pytest.mark.soak
def test_an_evolution_with_texts_never_trains_on_what_is_held_out(tmp_path, recipe):
    out = tmp_path / "out"
    texts = {"attempts": 30, "config": {"optimize": {"tasks": 6, "rounds": 1, "branches": 1}}}
    evolution = read_evolution(recipe, [f"run.dir={out}", *SMALL], prompts=texts)
    evolve(evolution, resume=False, note=print)
    made = (out / "tasks" / "eval.jsonl").read_text()
    state = read_state(out / "run")
    assert {stage.status for stage in state.stages.values()} <= {"finished", "skipped"}

    told = state.stages["improve.1.prompts@held_out"]
    assert told.status == "finished" and "gain" in told.numbers

    used = {"improve.1.prompts.file", "improve.2.rl.checkpoint"}
    again = state.stages["improve.2.prompts@held_out"].setting
    assert {f"input.{one}" for one in used} <= set(state.stages["improve.2.prompts"].setting)
    assert {"input.improve.2.prompts.file", "input.improve.2.rl.checkpoint"} <= set(again)

    last = last_run(out)
    assert last is not None and (last / "checkpoints").is_dir()

    held = {json.loads(line)["content"] for line in made.splitlines()}
    more = out / "run" / "stages" / "improve.1.more" / "made" / "train.jsonl"
    rows = made_rows([str(out / "tasks" / "train.jsonl"), str(more)])
    assert rows and not held & {row["content"] for row in rows}


class Teacher:
    """Plays as the tasks in a folder were made, but for the first of them, where it gives up."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tasks" / "train.jsonl"

    def __call__(self, body, handler):
        if body is None:
            gives({"data": [{"id": "m"}]})(body, handler)
            return

        rows = [json.loads(line) for line in self.file.read_text().splitlines()]
        asked = next(one["content"] for one in body["messages"] if one["role"] == "user")
        row = next(one for one in rows if one["query"] == asked)
        shown = demonstration(row, [])["messages"]
        said = sum(one["role"] == "assistant" for one in body["messages"])
        answers = [one for one in shown if one["role"] == "assistant"]
        answer = {"content": "No."} if row["id"] == rows[0]["id"] else answers[said]
        gives(chat(**{key: one for key, one in answer.items() if key != "role"}))(body, handler)


@pytest.mark.soak
def test_a_teacher_shows_what_it_has_solved(tmp_path, recipe):
    out = tmp_path / "out"
    with RemoteServer(Teacher(out)) as server:
        remote = {"base_url": server.base_url, "model": "m", "max_tries": 1, "deadline_s": 300}
        words = [f"remote_models.big={json.dumps(remote)}", "agent.max_turns=8"]
        shown = {"source": "teacher", "teacher": "big"}
        evolution = read_evolution(
            recipe,
            [f"run.dir={out}", *SMALL, *words],
            demonstrations=shown,
            skip=["improve"],
            rounds=1,
        )
        evolve(evolution, resume=False, note=print)

    state = read_state(out / "run")
    assert {name: stage.status for name, stage in state.stages.items()} == dict.fromkeys(
        ("start@held_out", "try", "choose", "show", "show@held_out"), "finished"
    )
    assert state.stages["try"].numbers["success"] == 0.9

    rows = made_rows([str(out / "tasks" / "train.jsonl")])
    (file,) = out.glob("run/**/choose/rows.jsonl")
    taught = {json.loads(line)["task_id"]: json.loads(line) for line in file.open()}
    assert sorted(taught) == sorted(row["id"] for row in rows[1:])

    for row in rows[1:]:
        said = [one for one in taught[row["id"]]["messages"] if one["role"] == "assistant"]
        calls = [call["function"]["name"] for one in said for call in one.get("tool_calls", ())]
        assert calls == [step["tool"] for step in row["solved_by_calls"]]
        assert taught[row["id"]]["tools"] and taught[row["id"]]["model"] == "big"


@pytest.fixture
def manual(tmp_path):
    folder = tmp_path / "manual"
    folder.mkdir()
    for n in range(40):
        text = f"The gauge of pump {n} shows {1000 + 7 * n} bars when Ada Berg{n} has opened it. "
        (folder / f"pump{n}.txt").write_text(f"{text}It was built in {1900 + n} by the river.")
    return folder


OF_DOCUMENTS = ("evolve.tasks={train: 12, held_out: 3}", "evolve.demonstrations.count=4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evolve.exclude=[search]"], "exclude needs a server"),
        (["evolve.tasks.worlds=3"], r"tasks\.worlds needs a server"),
        (["evolve.server=http://x/mcp"], "server needs a server"),
        (["evolve.tasks.languages=[en, de]"], "give one language"),
        (["evolve.tasks.writer=no-such-model"], r"evolve\.tasks\.writer: "),
        (["evolve.tasks.write_scenarios=true"], "write_scenarios needs a model that writes"),
        (
            ["evolve.tasks.write_scenarios=true", "evolve.tasks.writer=http://x/v1"],
            r"tasks\.write_scenarios needs a server",
        ),
        (["evolve.tasks.writer=http://u:p@x/v1"], r"evolve\.tasks\.writer: "),
    ],
)
def test_what_says_nothing_of_documents_is_refused(manual, words, message):
    with pytest.raises(ConfigError, match=message):
        read_evolution(str(manual), [*SMALL, *words])


def test_documents_that_are_none_are_refused_before_anything_is_created(tmp_path, manual, capsys):
    out = f"run.dir={tmp_path / 'out'}"
    (tmp_path / "empty").mkdir()
    (tmp_path / "dull.txt").write_text("Nothing is here to be asked for, alas.")

    for word, said in (
        (tmp_path / "empty", "there is no text in it"),
        (tmp_path / "away.md", "No such file"),
        (tmp_path / "dull.txt", "no task to train on could be made"),
    ):
        assert main(["evolve", str(word), out, *SMALL]) == 2
        assert said in capsys.readouterr().err

    assert main(["evolve", "http://127.0.0.1:9/mcp", str(manual), out, *SMALL]) == 2
    assert "is not KEY=VALUE" in capsys.readouterr().err
    assert main(["evolve", str(manual), str(tmp_path / "dull.txt"), out, *SMALL, "--dry-run"]) == 0

    told = capsys.readouterr().out
    assert "41 documents, 41 passages" in told and "improve.1.rl" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_documents_become_rounds_of_questions_none_of_which_is_held_out(tmp_path, manual, capsys):
    out = tmp_path / "out"
    words = [str(manual), f"run.dir={out}", *SMALL, *OF_DOCUMENTS, "evolve.rounds=2"]
    words += ["evolve.new_tasks=6"]
    assert main(["evolve", *words]) == 0

    held = [json.loads(line) for line in (out / "tasks/eval.jsonl").open()]
    more = out / "run/stages/improve.1.more/made/train.jsonl"
    rows = made_rows([str(out / "tasks/train.jsonl"), str(more)], ("passage", "content"))

    assert len(made_rows([str(more)], ("passage",))) == 12 + 6, "unsolved ones stay"
    assert not {row["passage"] for row in held} & {row["passage"] for row in rows}

    shown = [json.loads(line) for line in (out / "tasks/demonstrations.jsonl").open()]
    for row in shown:
        call, found, said = row["messages"][-3:]
        assert call["tool_calls"][0]["function"]["name"] == "search"
        assert said["content"] in found["content"]

    state = read_state(out / "run")
    assert state.status == "finished"

    rl = state.stages["improve.1.rl"]
    corpus = digest_of_path(out / "tasks/corpus.jsonl")
    assert rl.setting["file.agent.tools.corpus.jsonl"] == corpus

    (manual / "pump3.txt").write_text("Else.")
    assert main(["evolve", *words, "--resume"]) == 0
    assert "pump3.txt changed since the tasks were made" in capsys.readouterr().err
    assert read_state(out / "run").stages["improve.1.rl"].starts == rl.starts


@pytest.mark.slow
def test_a_search_that_could_only_compare_is_refused_before_anything_is_made(recipe):
    few = {"attempts": 20, "config": {"optimize": {"tasks": 12}}}
    with pytest.raises(ConfigError, match=r"evolve\.prompts\.attempts: .*needs 16 and"):
        read_evolution(recipe, [*SMALL, "evolve.tasks.held_out=8"], prompts=few).check()

    few["attempts"] = 28
    read_evolution(recipe, [*SMALL, "evolve.tasks.held_out=8"], prompts=few).check()
    ours = {"attempts": 20, "config": {"optimize": {"tasks": 12}, "evaluation": {"tasks": 4}}}
    read_evolution(recipe, [*SMALL, "evolve.tasks.held_out=8"], prompts=ours).check()

    ours["config"]["optimize"]["attempts"] = 3  # which is what would count
    with pytest.raises(ConfigError, match=r"optimize\.attempts=3: "):
        read_evolution(recipe, [*SMALL, "evolve.tasks.held_out=8"], prompts=ours).check()

    few["attempts"] = 1
    read_evolution(recipe, [*SMALL, "evolve.skip=[prompts]"], prompts=few).check()


def test_a_teacher_that_is_not_there_is_refused(recipe):
    read = read_evolution(recipe, SMALL, demonstrations={"source": "teacher", "teacher": "big"})
    with pytest.raises(ConfigError, match="there is no remote model 'big'"):
        read.check()
    with pytest.raises(ConfigError, match="belong together"):
        read_evolution(recipe, SMALL, demonstrations={"source": "teacher"})


def _interrupted(*words, **options):
    raise KeyboardInterrupt
