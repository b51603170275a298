"""Whole runs with a teacher of another architecture: what it says is stored and trained on, a
killed run resumes to the same weights, and a teacher that fails or has other tokens is said."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from remote_server import RemoteServer, gives
from run_fixtures import SMALL
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentevo.api.run import Run, train
from agentevo.config import RunConfig, TinyModel, build_config, to_yaml
from agentevo.errors import ConfigError
from agentevo.models.tiny_tokenizer import tiny_tokenizer
from agentevo.observability import read_metrics
from agentevo.rollout.teachers import TeacherUnavailableError
from agentevo.runs.orchestration.checks import check_dry

pytestmark = pytest.mark.slow

KILLED = """
import os, signal, sys
from agentevo.config import load_config
from agentevo.observability import LiveView
from agentevo.api.run import train

class View(LiveView):
    def phase(self, name, detail=""):
        if f"{name} {detail}" == "training step 2":
            os.kill(os.getpid(), signal.SIGKILL)

train(load_config(sys.argv[1]), view=View("killed", plain=True, stream=open(os.devnull, "w")))
"""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """A folder with a random Qwen3 over bytes. The policy is a Llama."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = tiny_tokenizer(TinyModel(tokenizer="byte"), ())
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 7,  # padded, as some are
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def distilled(teacher):
    def make(folder, *overrides: str, **model) -> RunConfig:
        tree = copy.deepcopy(SMALL)
        tree["model"]["tiny"]["tokenizer"] = "byte"
        tree["cold_start"] = {"episodes": 0}
        tree["trainer"] |= {"steps": 2, "groups_per_step": 2, "group_size": 2}
        tree["environment"]["max_actions"] = tree["agent"]["max_turns"] = 2
        tree["remote_models"] = {"big": model or {"api": "engine", "model": teacher}}
        tree["distillation"] = {"teachers": {"frozen_lake": "big"}}
        return build_config(tree, [f"run.dir={folder}", "checkpoint.every=1", *overrides])

    return make


def trained_attempts(config: RunConfig):
    return [t for t in Run(config).trajectories(split="train") if t.status == "completed"]


def test_what_the_teacher_says_is_stored_trained_on_and_the_same_after_a_kill(
    distilled, teacher, tmp_path, quiet_view, outcome_of, assert_same
):
    whole = distilled(tmp_path / "whole")
    train(whole, view=quiet_view())

    model = Qwen3ForCausalLM.from_pretrained(teacher)
    num_tokens = len(AutoTokenizer.from_pretrained(teacher))
    attempts = trained_attempts(whole)
    assert len(attempts) == 2 * 4, "equal rewards drop no group"
    gaps = []
    for attempt in attempts:
        for turn in attempt.turns:
            context = attempt.context_ids(turn.index)
            ids = torch.tensor([[*context, *turn.completion_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(context) - 1 : -1, :num_tokens]
                logp = logits.log_softmax(-1)  # an engine knows no ids that no token has
            expected = logp.gather(1, torch.tensor(list(turn.completion_ids))[:, None])[:, 0]
            np.testing.assert_allclose(turn.teacher_logprobs, expected.numpy(), atol=1e-4)
            if attempt.turns[0].versions[0] == 0:
                gaps += list(np.asarray(turn.logprobs) - np.asarray(turn.teacher_logprobs))

    assert all(
        turn.teacher_logprobs is None
        for t in Run(whole).trajectories(split="eval")
        for turn in t.turns
    )
    rows = [row for row in read_metrics(whole.run_dir / "metrics.jsonl") if "actor/lr" in row]
    assert rows[0]["distillation/reverse_kl"] == pytest.approx(np.mean(gaps), abs=1e-5)

    config = distilled(tmp_path / "run")
    recipe = tmp_path / "run.yaml"
    recipe.write_text(to_yaml(config))
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(recipe)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    train(config, resume=True, view=quiet_view())
    assert_same(outcome_of(config.run_dir), outcome_of(whole.run_dir))
    stored = {t.id: [turn.teacher_logprobs for turn in t.turns] for t in trained_attempts(config)}
    assert stored == {t.id: [turn.teacher_logprobs for turn in t.turns] for t in attempts}
    assert Run(whole).audit().ok


def test_a_teacher_that_fails_costs_its_attempts(distilled, tmp_path, quiet_view):
    def answers(request, handler):
        number = len(server.received)
        logprobs = [None, *[-1.0] * len(request["prompt"])]
        body = {"choices": [{"logprobs": {"token_logprobs": logprobs}}]}
        gives(body if number % 4 else {"error": "broken"}, 200 if number % 4 else 400)(
            request, handler
        )

    with RemoteServer(answers) as server:
        tokenizer = tmp_path / "tokenizer"
        model = {"base_url": server.base_url, "model": "m", "tokenizer": str(tokenizer)}
        tiny_tokenizer(TinyModel(tokenizer="byte"), ()).save_pretrained(tokenizer)
        config = distilled(tmp_path / "run", "trainer.steps=1", **model)
        train(config, view=quiet_view())

    attempts = Run(config).trajectories(split="train")
    failed = [t for t in attempts if t.status == "failed"]
    assert len(failed) == 1 and len(attempts) == 4
    assert failed[0].error.startswith("the teacher 'big' failed: RemoteModelError: ")
    assert "answered 400: broken" in failed[0].error
    (row,) = [row for row in read_metrics(config.run_dir / "metrics.jsonl") if "actor/lr" in row]
    assert row["rollout/failed/teacher"] == 1


def test_a_teacher_that_is_gone_ends_the_run_which_resumes_when_it_is_back(
    distilled, tmp_path, quiet_view
):
    is_gone = threading.Event()

    def answers(request, handler):
        if is_gone.is_set():  # connections that are still open
            handler.close_connection = True
            return
        logprobs = [None, *(-1 - id / 1000 for id in request["prompt"]), -1.0]
        gives({"choices": [{"logprobs": {"token_logprobs": logprobs[:-1]}}]})(request, handler)

    class ClosingView(type(quiet_view())):
        def step(self, step, *arguments, **named):
            super().step(step, *arguments, **named)
            if step == 1:
                is_gone.set()
                server.__exit__()

    tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer(TinyModel(tokenizer="byte"), ()).save_pretrained(tokenizer)
    server = RemoteServer(answers)
    model = {"base_url": server.base_url, "model": "m", "tokenizer": str(tokenizer)}
    config = distilled(tmp_path / "run", **model | {"max_tries": 2, "deadline_s": 60})
    server.__enter__()
    with pytest.raises(TeacherUnavailableError, match=r"the teacher 'big' does not answer: no us"):
        train(config, view=ClosingView())
    assert {attempt.status for attempt in Run(config).trajectories(split="train")} == {"completed"}
    assert len(trained_attempts(config)) == 4, "the attempts of step 1, and none of step 2"

    is_gone.clear()
    with RemoteServer(answers, port=int(server.url.rpartition(":")[2])):
        train(config, resume=True, view=quiet_view())
    assert len(trained_attempts(config)) == 2 * 4
    assert all(turn.teacher_logprobs for t in trained_attempts(config) for turn in t.turns)
    assert Run(config).audit().ok


def test_a_teacher_with_other_tokens_is_refused_before_anything_is_created(
    distilled, teacher, tmp_path
):
    config = distilled(tmp_path / "run", "model.tiny.tokenizer=word")
    words = (
        r"the tokenizer of remote_models.big is not the policy's: \d+ tokens differ, for example"
    )
    for check in (train, check_dry):
        with pytest.raises(ConfigError, match=words):
            check(config)
    assert not config.run_dir.exists()

    unknown = distilled(tmp_path / "run", base_url="http://127.0.0.1:1", model="org/name")
    with pytest.raises(ConfigError, match=r"not on this machine .* give remote_models.big.token"):
        train(unknown)
    assert not config.run_dir.exists()


def test_more_ids_than_the_policys_are_no_other_tokenizer(distilled, teacher, tmp_path):
    larger = tmp_path / "larger"
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(larger)
    check_dry(distilled(tmp_path / "run", f"remote_models.big.tokenizer={larger}"))


def test_a_run_names_the_tokenizer(distilled, tmp_path, quiet_view):
    run = tmp_path / "teacher"
    train(distilled(run, "trainer.steps=0"), view=quiet_view())
    check_dry(distilled(tmp_path / "run", f"remote_models.big.tokenizer={run}"))
