"""A run behind `agentevo serve --openai` as the teacher of another run's student."""

from __future__ import annotations

import asyncio
import copy

import httpx
import pytest
from run_fixtures import SMALL
from served_model import served

from agentevo.api.run import Run, train
from agentevo.config import RunConfig, build_config
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.runs.orchestration.components import load_policy

pytestmark = pytest.mark.slow


def recipe(folder, *overrides: str, **sections) -> RunConfig:
    tree = copy.deepcopy(SMALL)
    tree["model"]["tiny"]["tokenizer"] = "byte"
    tree["cold_start"] = {"episodes": 0}
    tree["trainer"] |= {"steps": 1, "groups_per_step": 1, "group_size": 2, "minibatches": 1}
    tree["environment"]["max_actions"] = tree["agent"]["max_turns"] = 2
    return build_config(tree | sections, [f"run.dir={folder}", *overrides])


def test_a_served_model_scores_what_a_student_drew(tmp_path, quiet_view, monkeypatch):
    served_config = recipe(tmp_path / "teacher", "run.seed=7", "model.tiny.hidden_size=48")
    loaded = load_policy(served_config)
    loaded.tokenizer.save_pretrained(tmp_path / "tokenizer")
    engine = TorchEngine(loaded.model, loaded.tokenizer, served_config.engine)

    def scores_of(ids: list[int]) -> list[float]:
        return list(asyncio.run(engine.score(ids[:1], ids[1:], deadline_s=300)).logprobs)

    def work(base: str, key: str):
        def ask(**body):
            headers = {"Authorization": f"Bearer {key}"}
            url = f"{base}/v1/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=300)
            assert answer.status_code == 200, answer.text
            return answer.json()

        text = "left or right?"
        ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        asked = {"echo": True, "logprobs": 1, "temperature": 1}
        alone = ask(prompt=ids, max_tokens=0, **asked)
        more = ask(prompt=[ids, ids[:1]], max_tokens=1, **asked)

        monkeypatch.setenv("TEACHER_KEY", key)
        student = recipe(
            tmp_path / "student",
            remote_models={
                "big": {
                    "base_url": f"{base}/v1",
                    "model": "teacher",
                    "tokenizer": str(tmp_path / "tokenizer"),
                    "api_key": "${env:TEACHER_KEY}",
                }
            },
            distillation={"teachers": {"frozen_lake": "big"}},
        )
        train(student, view=quiet_view())
        return ids, alone, more, student

    ids, alone, more, student = served(served_config, work, checkpoint=None)
    expected = pytest.approx(scores_of(ids), abs=1e-5)

    (choice,) = alone["choices"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == expected
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == "left or right?"
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["finish_reason"] == "length"
    assert alone["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "total_tokens": len(ids),
    } | {key: alone["usage"][key] for key in alone["usage"] if key.endswith("details")}

    whole, single = (choice["logprobs"] for choice in more["choices"])
    assert whole["token_logprobs"][0] is None
    assert whole["token_logprobs"][1:-1] == expected
    assert whole["text_offset"] == [sum(map(len, whole["tokens"][:n])) for n in range(len(ids) + 1)]
    assert len(single["token_logprobs"]) == 2 and single["token_logprobs"][0] is None

    attempts = Run(student).trajectories(split="train")
    assert len(attempts) == 2
    for attempt in attempts:
        assert attempt.status == "completed", attempt.error
        for turn in attempt.turns:
            context = attempt.context_ids(turn.index)
            scores = scores_of([*context, *turn.completion_ids])
            drawn = scores[len(context) - 1 :]
            assert list(turn.teacher_logprobs) == pytest.approx(drawn, abs=1e-5)
