"""What a pipeline's file may say: names, references, order, recipes, and what is refused before
anything is created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentevo.config import sources
from agentevo.errors import ConfigError
from agentevo.inference import default_engine
from agentevo.runtime import devices
from agentevo_evolve.pipeline import Pipeline, build_pipeline
from agentevo_evolve.pipeline.next_stages import PipelineProgress
from agentevo_evolve.pipeline.references import (
    ReferenceProblem,
    StageReference,
    condition,
    parse_reference,
    replace_references,
)

LAKE: dict[str, Any] = {
    "model": {"name": "tiny", "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}},
    "environment": {"type": "frozen_lake", "size": 3, "view": "words", "max_actions": 4},
    "agent": {"format": "plain", "max_turns": 4},
    "sampling": {"max_new_tokens": 4},
}
SFT = {"kind": "sft", "config": {"data": {"demonstrations": 10}}}


def pipeline_of(stages: dict[str, Any], *overrides: str, **keys: Any) -> Pipeline:
    tree = {"config": LAKE, "stages": stages, **keys}
    return build_pipeline(tree, overrides, where="p.yaml")


def refusal(stages: dict[str, Any], *overrides: str, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        pipeline_of(stages, *overrides, **keys)
    return str(caught.value)


def test_stages_come_in_the_order_in_which_they_wait_and_each_model_is_measured(tmp_path: Path):
    plan = pipeline_of(
        {
            "rl": {"model": "${stages.warm.checkpoint}"},
            "warm": SFT,
            "sample": {"kind": "sample", "model": "${stages.rl.checkpoint}"},
        },
        dir=str(tmp_path / "p"),
    ).plan
    ids = [instance.id for instance in plan.instances]
    assert ids == [
        "start@held_out",
        "warm",
        "rl",
        "warm@held_out",
        "rl@held_out",
        "sample",
    ] or ids.index("warm") < ids.index("rl") < ids.index("sample")
    assert {"start@held_out", "warm@held_out", "rl@held_out"} < set(ids)
    assert "sample@held_out" not in ids
    assert list(tmp_path.iterdir()) == []


def test_rounds_follow_one_another_and_refer_to_the_round_before():
    plan = pipeline_of(
        {
            "warm": SFT,
            "loop": {
                "repeat": 3,
                "stop": {"rounds_without_gain": 1},
                "stages": {
                    "rl": {"model": "${previous.rl.checkpoint|stages.warm.checkpoint}"},
                    "sample": {"kind": "sample", "model": "${stages.rl.checkpoint}"},
                },
            },
            "last": {**SFT, "model": "${stages.loop.rl.checkpoint}"},
        }
    ).plan
    needs = {instance.id: set(instance.needs) for instance in plan.instances}
    assert needs["loop.1.rl"] == {"warm"}
    assert {"loop.1.rl", "loop.1.rl@held_out", "loop.1.sample"} <= needs["loop.2.rl"]
    assert needs["loop.2.sample"] >= {"loop.2.rl"}
    assert needs["last"] == {"loop.1.rl", "loop.2.rl", "loop.3.rl"}

    last = plan.by_id["last"]
    found = plan.targets(StageReference("stages", ("loop", "rl"), "checkpoint"), last)
    assert found == ["loop.3.rl", "loop.2.rl", "loop.1.rl"]


def test_words_of_the_command_line_go_to_the_pipeline_its_stages_and_their_recipes():
    stages = {"warm": SFT, "loop": {"repeat": 2, "stages": {"rl": {}}}}
    config = pipeline_of(
        stages,
        "seed=7",
        "held_out.tasks=5",
        "warm.sft.epochs=2",
        "loop.repeat=3",
        "loop.rl.trainer.steps=4",
        "warm.take=best",
    ).config
    assert (config.seed, config.held_out and config.held_out.tasks) == (7, 5)
    assert config.stages["warm"].config["sft"] == {"epochs": 2}
    assert config.stages["warm"].take == "best"
    assert config.stages["loop"].repeat == 3
    assert config.stages["loop"].stages["rl"].config == {"trainer": {"steps": 4}}


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({"a": {"model": "${stages.b.checkpoint}"}, "b": {"model": "${stages.a.checkpoint}"}},
         "wait for each other"),
        ({"a": {"model": "${stages.a.checkpoint}"}}, "refers to itself"),
        ({"a": {"model": "${stages.bb.checkpoint}"}, "b": SFT}, "did you mean b"),
        ({"a": {"model": "${stages.b.file}"}, "b": SFT}, "makes no file"),
        ({"a": {"needs": ["nothing"]}}, "no stage is called 'nothing'"),
        ({"a": {"kind": "trian"}}, "did you mean 'train'"),
        ({"a": {"trainer": {"steps": 1}}}, "unknown key"),
        ({"a": {"config": {"trainer": {"stpes": 1}}}}, "trainer.stpes"),
        ({"a": {"config": {"run": {"seed": 1}}}}, "which the pipeline sets"),
        ({"a": {"model": "${previous.checkpoint}"}}, "only a repeated stage"),
        ({"a": {"repeat": 2, "model": "${previous.checkpoint}"}}, "the first round has no"),
        ({"a": {"model": "${stages.b.checkpoint.x.y}"}, "b": SFT}, "is not a valid reference"),
        ({"a": {"when": "rl is good"}}, "is not a valid condition"),
        ({"a": {"stop": {}}}, "set repeat"),
        ({"a": {"stages": {"b": {}}, "model": "tiny"}}, "not model"),
        ({"a": {"kind": "filter", "options": {"source": "x", "best": 1}}}, "unknown key"),
        ({"a": {"kind": "filter", "options": {"source": "x"}, "config": {"a": 1}}},
         "reads no recipe"),
        ({"a": {"kind": "sft"}}, "there is no training data"),
        ({"seed": {}}, "which is a key"),
        ({"../a": {}}, "use letters"),
        ({"a": {"repeat": 1000, "stages": {"b": {}, "c": {}}}}, "the maximum is 1,000"),
    ],
)  # fmt: skip
def test_what_can_not_work_is_refused_in_words(stages: dict[str, Any], said: str, tmp_path: Path):
    message = refusal(stages, dir=str(tmp_path / "p"))
    assert said in message
    assert message.startswith("p.yaml: ")
    assert list(tmp_path.iterdir()) == []


def test_an_override_of_nothing_is_told_with_the_stages():
    assert "did you mean warm" in refusal({"warm": SFT}, "wram.sft.epochs=2")
    assert "names a stage without a key" in refusal({"warm": SFT}, "warm=2")


def test_what_a_stage_does_not_state_is_no_gain():
    stages = {"a": {"kind": "sample"}, "b": {"when": "${stages.a.success} > 0.5"}}
    assert "is not measured" in refusal(stages)


def write_tasks(path: Path, first: int, count: int) -> str:
    rows = [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(first, first + count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.slow
def test_held_out_tasks_that_another_stage_trains_on_are_refused(tmp_path: Path):
    own = write_tasks(tmp_path / "own.jsonl", 0, 20)
    other = write_tasks(tmp_path / "other.jsonl", 100, 10)
    leaky = tmp_path / "rows.jsonl"
    said = [("user", "what is  105 + 1?"), ("assistant", "106")]
    messages = [{"role": role, "content": content} for role, content in said]
    leaky.write_text(json.dumps({"messages": messages}))

    common = {
        "model": {**LAKE["model"], "tiny": {**LAKE["model"]["tiny"], "tokenizer": "byte"}},
        "rewards": ["exact_match"],
        "tasks": {"train": own, "eval": other},
    }
    stages = {"rl": {}}
    build_pipeline({"config": common, "stages": stages}, where="p.yaml")

    taught = {"warm": {"kind": "sft", "config": {"data": {"train": str(leaky)}}}, **stages}
    with pytest.raises(ConfigError, match=r"trains on 1 task that .* holds out"):
        build_pipeline({"config": common, "stages": taught}, where="p.yaml")

    for more in ({"rl": {}}, {"rl": {}, "again": {}, "third": {}}):
        with pytest.raises(ConfigError) as caught:
            build_pipeline(
                {"config": common, "stages": {"warm": taught["warm"], **more}}, where="p.yaml"
            )
        (line,) = str(caught.value).splitlines()  # not one for each stage that has them
        assert line.startswith("p.yaml: stages.warm: trains on 1 task that ")

    swapped = {"rl": {}, "more": {"config": {"tasks": {"train": other, "eval": own}}}}
    with pytest.raises(ConfigError, match="trains on 20 tasks"):
        build_pipeline({"config": common, "stages": swapped}, where="p.yaml")


def test_an_override_lies_over_the_short_form_in_the_recipes_of_a_pipeline(tmp_path: Path):
    own, other = (write_tasks(tmp_path / f"{n}.jsonl", n, 20) for n in (0, 100))
    given = {"model": LAKE["model"] | {"tiny": {"tokenizer": "byte"}}, "rewards": ["exact_match"]}
    tree = {"config": given | {"tasks": own}, "stages": {"s": {"config": {"tasks": own}}}}
    words = [f"config.tasks.eval={other}", f"s.tasks.eval={other}"]
    read = build_pipeline(tree, words, where="p.yaml").config
    assert read.config["tasks"] == {"train": own, "eval": other} == read.stages["s"].config["tasks"]


def test_only_a_recipes_own_section_has_a_short_form():
    def stage(tasks):
        return {"stages": {"s": {"config": {"environment": {"config": {"tasks": tasks}}}}}}

    assert sources.overlay(stage("x"), stage({"y": 1})) == stage({"y": 1})


def test_values_of_the_wrong_kind_are_refused_in_plain_words():
    def refusal(stage, **more):
        with pytest.raises(ConfigError) as caught:
            build_pipeline({"config": LAKE, "stages": {"s": stage}, **more}, where="p.yaml")
        return str(caught.value)

    for options, words in (
        ({"tasks": 5}, "options.tasks: got 5; needs a list of texts (default [])"),
        ({"tasks": "a b"}, "options.tasks: got 'a b'; needs a list of texts, as in [a, b]"),
        ({"attempts": 0}, "options.attempts: got 0; needs a whole number, at least 1, at most"),
        ({"frob": 1}, "options.frob: unknown key; it has attempts"),
    ):
        stage = {"kind": "evaluate", "options": options}
        assert f"p.yaml: stages.s: {words}" in refusal(stage)

    assert refusal({"repeat": "x"}).startswith("p.yaml: stages.s.repeat: got 'x'; needs a whole")

    grouped = {"repeat": 2, "stages": {"inner": {"needs": 3}}}
    assert "p.yaml: stages.s.stages.inner.needs: got 3; needs a list of texts" in refusal(grouped)
    assert "p.yaml: parallel: got 'many'; needs a whole number" in refusal({}, parallel="many")


def test_references_stand_for_values_within_texts_and_alone():
    tree = {"a": ["${round}", "x${round}/${stages.rl.folder}"], "b": "${model.name}"}
    found = replace_references(tree, lambda one: 3 if one.scope == "round" else "F")
    assert found == {"a": [3, "x3/F"], "b": "${model.name}"}

    fallback = parse_reference("previous.rl.checkpoint|stages.warm.checkpoint").fallback
    assert fallback == StageReference("stages", ("warm",), "checkpoint")
    assert parse_reference("previous.checkpoint|tiny").fallback == "tiny"

    for wrong in ("stages.a", "previous.a.b.c", "stages..x", "stage.file", "stages.a.b|"):
        with pytest.raises(ReferenceProblem):
            parse_reference(wrong)


def test_conditions_compare_one_number():
    assert condition("${stages.rl.gain} >= 0.1").holds(0.1)
    assert not condition("${stages.rl.gain} < -1e-3").holds(0.0)
    for wrong in ("1 < 2", "${stages.rl.gain} > nan", "${a} > 1 and 2", "${a} = 1"):
        with pytest.raises(ValueError, match="not a valid condition"):
            condition(wrong)


def test_a_stage_takes_the_engine_of_its_command_and_is_the_same_on_every_machine(
    tmp_path, monkeypatch
):
    stage = {"config": {"model": {"name": "org/name"}}}
    tree = {"dir": str(tmp_path / "p"), "recipe": "coins", "held_out": None, "stages": {"a": stage}}
    pipeline = build_pipeline(tree)

    def first() -> tuple[str, dict[str, str], list[str]]:
        standing = PipelineProgress(pipeline, tmp_path / "p", 0)
        decided = standing.next()
        assert decided is not None and decided.job.config is not None
        return decided.job.config.engine.type, decided.setting, standing.notes

    here, setting, notes = first()
    assert (here, notes) == ("torch", [])

    monkeypatch.setattr(devices, "is_available", lambda kind: kind == "cuda")
    monkeypatch.setattr(default_engine, "find_spec", lambda name: name == "sglang" or None)
    there, same, notes = first()
    assert there == "sglang" and same == setting
    assert len(notes) == 1 and notes[0].startswith("engine: sglang, made for GPUs")
