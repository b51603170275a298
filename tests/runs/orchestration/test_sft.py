"""`agentevo sft` as a whole: demonstrations, files, another run's best attempts; interrupted,
resumed, and gone on from by RL."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from byte_policy import byte_policy
from chat_templates import HERMES, tokenizer_with
from slow import soak
from transformers import AutoTokenizer, LlamaConfig

from agentevo.api.run import Run, sft, train
from agentevo.config import ModelSection, RunConfig, build_config
from agentevo.errors import CheckpointError, ConfigError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.files.resolve import resolve
from agentevo.observability import read_metrics
from agentevo.runs.orchestration.conversations import best_attempts, load_sft_data
from agentevo.runs.orchestration.preference_data import given_pairs
from agentevo.types import Trajectory, Turn

SFT = (
    "data.demonstrations=24",
    "data.eval_share=0.2",
    "sft.batch_conversations=4",
    "sft.learning_rate=1e-2",
    "sft.epochs=2",
    "cold_start.episodes=0",
    "evaluation.every=4",
    "checkpoint.every=3",
)
FILES = {
    "model": byte_policy(hidden_size=32, num_heads=2, context_length=128),
    "sft": {"batch_conversations": 2, "learning_rate": 1e-2, "epochs": 3},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 0},
    "tracking": {"tensorboard": False, "report": True},
    "run": {"threads": 1},
}


def conversation(question: str, answer: str) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def files_config(folder: Path, rows: list[object], *overrides: str) -> RunConfig:
    path = folder / "rows.jsonl"
    path.write_bytes(
        b"".join(
            row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows
        )
    )
    overrides = (f"data.train={path}", f"run.dir={folder / 'run'}", *overrides)
    return build_config(FILES, overrides, needs_environment=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_config, quiet_view) -> Run:
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return sft(small_config(folder, *SFT), view=quiet_view())


@pytest.mark.slow
def test_the_solver_is_imitated(whole):
    run = whole
    rows = read_metrics(run.dir / "metrics.jsonl")
    losses = [row["sft/loss"] for row in rows if "sft/loss" in row]
    assert len(losses) == 10  # 24 episodes, 5 of them held out; 19 in batches of 4, twice
    assert losses[0] > 3.0 and losses[-1] < 0.5 * losses[0]

    held_out = [(row["step"], row["sft/eval/loss"]) for row in rows if "sft/eval/loss" in row]
    assert [step for step, _ in held_out] == [0, 4, 8, 10]

    summary = run.summary
    assert summary["data"] == {
        "demonstrations": {"rows": 24, "used": 24, "shortened": 0, "left_out": {}}
    }
    assert summary["held_out"]["conversations"] == 5
    assert (
        summary["held_out"]["after"]["loss"] == pytest.approx(held_out[-1][1])
        and held_out[-1][1] < held_out[0][1]
    )
    assert summary["eval"]["n"] == 2 and 0 <= summary["eval"]["after"] <= 1
    assert summary["steps"] == summary["planned_steps"] == 10
    assert run.eval()["val-core/frozen_lake/n"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, *soak(2, 5)])
def test_an_interrupted_run_goes_on_bit_for_bit(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same, step
):
    config = small_config(tmp_path / "cut", *SFT)
    with pytest.raises(KeyboardInterrupt):
        sft(config, view=quiet_view(step=step))
    sft(config, resume=True, view=quiet_view())
    assert_same(outcome_of(whole.dir), outcome_of(tmp_path / "cut"))


@pytest.mark.slow
def test_a_torn_checkpoint_is_passed_over(
    whole, tmp_path, small_config, quiet_view, outcome_of, assert_same
):
    apart = [*SFT, "checkpoint.every=2", "checkpoint.keep_last=9"]
    config = small_config(tmp_path / "cut", *apart)
    with pytest.raises(KeyboardInterrupt):
        sft(config, view=quiet_view(step=5))

    folder = tmp_path / "cut" / "checkpoints"
    for step in (4, 5):
        weights = folder / f"step-{step:06d}" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(bytes(content))

    sft(config, resume=True, view=quiet_view())
    expected = outcome_of(whole.dir)
    assert_same(expected, outcome_of(tmp_path / "cut"))
    (folder / "step-000010" / "trainer.pt").write_bytes(b"")

    for path in folder.glob("step-00000*"):
        (path / "state.json").write_text("{}")

    sft(config, resume=True, view=quiet_view())
    again = outcome_of(tmp_path / "cut")
    assert_same(expected["weights"], again["weights"])  # every step replayed from the first weights


@pytest.mark.slow
def test_sft_then_rl_then_evaluation(whole, tmp_path, small_config, quiet_view):
    """RAGEN's flow. A run's folder as model.name is its best checkpoint."""
    first = whole
    assert resolve(str(first.dir)) == first.checkpoint
    config = small_config(tmp_path / "rl", "cold_start.episodes=0", "trainer.steps=1")
    config = config.model_copy(update={"model": ModelSection(name=str(first.dir))})
    second = train(config, view=quiet_view())
    assert second.summary["eval"]["before"] == pytest.approx(
        first.eval(samples=0)["val-core/frozen_lake/success/greedy"]
    )
    assert "val-core/frozen_lake/success/greedy" in Run(second.config).eval(samples=0)


LONG_ANSWER = "a" * 140_000
"""In tokens of bytes."""
TAKES_MILLIONS = 3_000_000
"""Tokens of a model's context."""


@pytest.mark.slow
def test_a_row_is_bounded_where_the_model_takes_millions_of_tokens(tmp_path, quiet_view):
    """Nobody has said how long rows may be: one of two million tokens would be trained for days."""
    rows = [conversation("say it", LONG_ANSWER), conversation("say it", "a")]
    config = files_config(tmp_path, rows, "data.eval_share=0")

    def read(*overrides):
        config = files_config(tmp_path, rows, "data.eval_share=0", *overrides)
        view = quiet_view()
        return load_sft_data(config, tokenizer_with(HERMES), None, TAKES_MILLIONS, view)

    (problem,) = read().reports[0].bad
    assert problem.where == f"{config.data.train[0]}:1" and problem.reason == "too_long"
    assert "140" in problem.detail and "the limit is 131072 (data.max_tokens)" in problem.detail
    assert len(read("data.max_tokens=200000").train) == 2


@pytest.mark.slow
@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_an_answer_of_a_pair_is_bounded_alike(tmp_path, key):
    pair = {"prompt": [{"role": "user", "content": "q"}], "chosen": "b", "rejected": "c"}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(pair | {key: LONG_ANSWER}))
    tree = FILES | {"environment": {"type": "coins"}, "algorithm": {"name": "dpo"}}
    del tree["sft"]

    def read(*overrides):
        config = build_config(tree, [f"data.pairs={path}", *overrides])
        model = SimpleNamespace(config=LlamaConfig(max_position_embeddings=TAKES_MILLIONS))
        chat = ChatFormat(tokenizer_with(HERMES))
        return given_pairs(SimpleNamespace(config=config, chat=chat, model=model))[0]

    words = rf"pairs\.jsonl:1: prompt and {key} have 140\d+ tokens, .* 131072 \(data\.max_tokens"
    with pytest.raises(ConfigError, match=words):
        read()
    assert len(read("data.max_tokens=200000")) == 1


@pytest.mark.slow
def test_files_of_which_some_rows_are_bad(tmp_path, quiet_view):
    good = [conversation(f"say {n}", "ok" * (n % 3 + 1)) for n in range(8)]
    bad = [
        b'{"messages": [{"role": "user", "content": "\xff"}]}\n',
        conversation("too long", "a" * 200),
        conversation("", "empty question"),
        {"messages": [{"role": "user", "content": "nobody answers"}]},
        conversation("end <|end|> early", "b"),
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "tool", "content": "b"},
                {"role": "assistant", "content": "c"},
            ]
        },
        b"torn {\n",
    ]
    run = sft(
        files_config(tmp_path, [*good[:4], *bad, *good[4:]], "data.eval_share=0.25"),
        view=quiet_view(),
    )
    path = tmp_path / "rows.jsonl"
    reasons = [
        "not_utf8",
        "too_long",
        "empty",
        "wrong_roles",
        "special_token",
        "wrong_roles",
        "not_json",
    ]
    told = [json.loads(line) for line in (run.dir / "bad_rows.jsonl").read_text().splitlines()]
    assert {one["where"]: one["reason"] for one in told} == {
        f"{path}:{n}": reason for n, reason in enumerate(reasons, start=5)
    }

    account = run.summary["data"]["train"]
    assert (account["rows"], account["used"]) == (15, 8)
    assert account["left_out"]["wrong_roles"] == {"count": 2, "first": [f"{path}:8", f"{path}:10"]}

    (row,) = [row for row in read_metrics(run.dir / "metrics.jsonl") if "data/train/rows" in row]
    assert row["data/train/left_out"] == 7.0
    assert run.summary["held_out"]["conversations"] == 2
    assert run.summary["steps"] == 9  # six conversations in batches of two, three times
    assert (
        run.summary["held_out"]["after"]["perplexity"]
        < run.summary["held_out"]["before"]["perplexity"]
    )
    assert "rows.jsonl:8" in (run.dir / "report.html").read_text()
    assert (run.dir / "plots" / "supervised.png").is_file()

    with pytest.raises(ConfigError, match="this run has none"):
        run.eval()


@pytest.mark.slow
def test_held_out_files_are_not_trained_on(tmp_path, quiet_view):
    held = tmp_path / "eval.jsonl"
    held.write_text(json.dumps(conversation("say", "held")) + "\n")
    config = files_config(tmp_path, [conversation("say", "ok")] * 4, f"data.eval={held}")
    run = sft(config, view=quiet_view())
    assert run.summary["steps"] == 6 and run.summary["held_out"]["conversations"] == 1
    assert set(run.summary["data"]) == {"train", "eval"}


def test_nothing_left_to_train_on_creates_nothing(tmp_path, quiet_view):
    config = files_config(tmp_path, [{"messages": []}, {"text": "no form"}])
    with pytest.raises(
        ConfigError, match=r"(?s)no usable row to train on.*0 of 2 rows are used.*rows\.jsonl:1"
    ):
        sft(config, view=quiet_view())
    assert not config.run_dir.exists()


@pytest.mark.slow
def test_best_attempts_of_a_run_are_learnt_token_by_token(tmp_path, small_config, quiet_view):
    source = train(small_config(tmp_path / "rl", "trainer.steps=2"), view=quiet_view())
    attempts = source.trajectories(split="train", status="completed")
    least = sorted(t.reward for t in attempts)[len(attempts) // 2]
    config = small_config(
        tmp_path / "run",
        "cold_start.episodes=0",
        f"data.best_of={source.dir}",
        f"data.min_reward={least}",
        "data.per_task=2",
        "data.eval_share=0",
    )
    run = sft(config, view=quiet_view())
    account = run.summary["data"]["best_of"]
    assert account["rows"] == len(attempts)
    assert account["left_out"].get("low_reward", {"count": 0})["count"] == sum(
        t.reward < least for t in attempts
    )
    assert (
        account["used"]
        == len(attempts) - sum(one["count"] for one in account["left_out"].values())
        > 0
    )

    tokenizer = AutoTokenizer.from_pretrained(source.checkpoint)
    tokenizer.add_tokens(["another"])
    for path in sorted((source.dir / "checkpoints").glob("step-*")):
        tokenizer.save_pretrained(path)

    with pytest.raises(ConfigError, match=r"data\.best_of: .* another tokenizer"):
        sft(small_config(tmp_path / "other", f"data.best_of={source.dir}"), view=quiet_view())


def attempt(name: str, task: str, reward: float, said: list[int]) -> Trajectory:
    zeros = [0] * len(said)
    turn = Turn(
        index=0,
        prompt_ids=[1, 2],
        completion_ids=said,
        logprobs=[-1.0] * len(said),
        versions=zeros,
        finish_reason="stop",
    )
    return Trajectory(
        id=name, task_id=task, group_id=task, turns=[turn], reward=reward, success=reward >= 1
    )


def test_which_attempts_are_the_best():
    attempts = [
        attempt("failed", "a", 0.5, [3]),
        attempt("long", "a", 1.0, [3, 4, 5]),
        attempt("short", "a", 1.0, [3, 4]),
        attempt("twin", "a", 1.0, [3, 4]),
        attempt("more", "a", 2.0, [6]),
        attempt("other", "b", 1.0, [3, 4]),
    ]
    samples, report = best_attempts(attempts, None, 2, "run")
    assert [s.trajectory_id for s in samples] == ["more", "short", "other"]
    assert {row.where: row.reason for row in report.bad} == {
        "run:failed": "low_reward",
        "run:twin": "duplicate",
        "run:long": "beyond_per_task",
    }
    assert samples[1].ids.tolist() == [1, 2, 3, 4]
    assert samples[1].loss_mask.tolist() == [False, False, True, True]
    assert len(best_attempts(attempts, 0.5, 9, "run")[0]) == 5


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ((), "there is no training data"),
        (("data.train=nowhere.jsonl",), "does not exist"),
        (("data.best_of=nowhere",), "is not the folder of a run"),
        (("data.train=a/b", "data.min_reward=1"), "min_reward: chooses among"),
    ],
)
def test_what_is_missing_is_refused_before_anything_is_created(
    tmp_path, small_config, quiet_view, overrides, match
):
    config = small_config(tmp_path / "run", *overrides)
    with pytest.raises(ConfigError, match=match):
        sft(config, view=quiet_view())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_each_command_resumes_its_own_runs(tmp_path, small_config, quiet_view):
    config = small_config(tmp_path / "run", *SFT)
    with pytest.raises(KeyboardInterrupt):
        sft(config, view=quiet_view(step=3))
    with pytest.raises(ConfigError, match="agentevo sft RECIPE --resume"):
        train(config, resume=True, view=quiet_view())
    with pytest.raises(ConfigError, match=r"sft\.epochs=2 and not 3"):
        sft(small_config(tmp_path / "run", *SFT, "sft.epochs=3"), resume=True, view=quiet_view())
    with pytest.raises(ConfigError, match="holds a run already"):
        sft(config, view=quiet_view())
    with pytest.raises((CheckpointError, ConfigError), match="no run to resume"):
        sft(small_config(tmp_path / "none", *SFT), resume=True, view=quiet_view())


@pytest.mark.slow
def test_data_that_has_changed_is_not_resumed(tmp_path, quiet_view):
    config = files_config(tmp_path, [conversation("say", "ok")] * 9, "checkpoint.every=1")
    with pytest.raises(KeyboardInterrupt):
        sft(config, view=quiet_view(step=2))
    files_config(tmp_path, [conversation("say", "ok")] * 5)
    with pytest.raises(ConfigError, match="it has changed since"):
        sft(config, resume=True, view=quiet_view())
