"""Self-play in whole runs: who is compared with whom, what the store holds, a run that is broken
off within a step, and what is held out."""

from __future__ import annotations

import json

import pytest
from slow import soak

import agentevo
from agentevo.errors import StoreError
from agentevo.observability import read_metrics
from agentevo.rollout.sampler import Sampler


@agentevo.question_family("test_letters")
class Letters:
    """The question is the first character of a reply, where that is no control character."""

    def prompt(self, rng):
        return f"ask {rng.randrange(3)}"

    def read(self, text, prompt):
        if not text.strip() or not text[0].isprintable():
            raise ValueError("no character")
        return agentevo.Question(f"Say {text[0]}", text[0], difficulty=ord(text[0]))


@agentevo.reward("test_easy_letters")
def easy(completion, task):
    """Every attempt at half of the questions succeeds, and none at the others."""
    return float(ord(str(task.answer)[0]) % 2 == 0)


@agentevo.reward("test_half")
def half(completion, task):
    return float(sum(map(ord, completion)) % 2)


def recipe(tmp_path, name="run", *, reward="test_half", held_out=("Say never",), **more):
    rows = tmp_path / "held_out.jsonl"
    rows.write_text("".join(json.dumps({"query": q, "answer": "x"}) + "\n" for q in held_out))
    sections = {
        "tasks": {"eval": str(rows), "self_play": {"family": "test_letters", "group_size": 4}},
        "rewards": [reward],
        "model": {
            "name": "tiny",
            "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1, "num_heads": 2},
        },
        "sampling": {"max_new_tokens": 3},
        "trainer": {"steps": 3, "groups_per_step": 8, "group_size": 4, "learning_rate": 0.003},
        "evaluation": {"tasks": 1, "samples": 0},
        "checkpoint": {"every": 1, "keep_last": 5},
        "tracking": {"report": False, "tensorboard": False},
        "run": {"dir": str(tmp_path / name)},
    }
    return sections | more


def play(tmp_path, *arguments, resume=False, **more):
    sections = recipe(tmp_path, *arguments, **more)
    return agentevo.train("single_turn", resume=resume, **sections)


def told(run):
    """What was said and earned, with the ids."""
    return sorted(
        (
            trajectory.id,
            trajectory.reward,
            trajectory.success,
            trajectory.files,
            [(turn.completion_ids, turn.logprobs, turn.versions) for turn in trajectory.turns],
        )
        for trajectory in run.trajectories(split="train")
    )


def losses(run):
    rows = read_metrics(run.dir / "metrics.jsonl")
    return [(row.get("actor/pg_loss"), row.get("actor/grad_norm")) for row in rows]


@pytest.mark.slow
def test_questions_are_proposed_solved_and_paid_for_and_the_store_has_all_of_it(tmp_path):
    run = play(tmp_path)
    assert run.audit().ok

    stored = run.trajectories(split="train")
    proposals = {one.id: one for one in stored if one.agent == "proposer"}

    solved = {}
    for one in stored:
        if one.agent == "solver":
            solved.setdefault(one.task_id, []).append(one)

    assert len(proposals) == 3 * 8 and solved
    assert len({proposal.group_id for proposal in proposals.values()}) == 3 * 2
    for one in proposals.values():
        row = json.loads(one.files["question.json"])
        if "invalid" in row:
            assert one.reward == -1.0
            continue

        attempts = solved[row["task"]]
        assert len({attempt.group_id for attempt in attempts}) == 1 and len(attempts) == 4

        p = sum(attempt.success for attempt in attempts) / 4
        assert row["solved"] == 4 * p and row["query"] == f"Say {row['answer']}"

        worth = max(0.0, 1 - 2 * abs(p - 0.5) - row["repeats"] / 4)
        assert one.reward == pytest.approx(worth)

    logged = read_metrics(run.dir / "metrics.jsonl")[1]
    assert {"selfplay/valid", "selfplay/success_rate", "selfplay/at_edge"} <= logged.keys()
    assert {"selfplay/distinct", "selfplay/difficulty", "selfplay/held_out"} <= logged.keys()
    assert logged["train/success"] == logged["agents/solver/train/success"]

    replays = run.replays(6)
    assert all(replay.same for replay in replays)
    assert any(replay.played for replay in replays)


@pytest.mark.slow
def test_attempts_at_one_question_are_compared_and_those_at_others_are_not(tmp_path):
    # Each question is always or never solved. Together their rewards differ, so a baseline over
    # several questions would train on them.
    run = play(tmp_path, reward="test_easy_letters")
    stored = run.trajectories(split="train")
    solver = {one.id for one in stored if one.agent == "solver"}
    assert {one.reward for one in stored if one.id in solver} == {0.0, 1.0}
    assert solver <= set(run.audit().reasons["dropped"]["zero-variance"])


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["after them", *soak("before the proposals")])
def test_a_run_that_is_broken_off_within_a_step_goes_on_bit_for_bit(tmp_path, monkeypatch, moment):
    whole = play(tmp_path, "whole")
    write = Sampler.write

    async def broken(self, trajectories, *, split, step):
        is_paid = trajectories and trajectories[0].agent == "proposer"
        if step != 2 or not is_paid:
            return await write(self, trajectories, split=split, step=step)
        if moment == "after them":
            await write(self, trajectories, split=split, step=step)
        raise StoreError("the machine goes")

    monkeypatch.setattr(Sampler, "write", broken)
    with pytest.raises(StoreError, match="the machine goes"):
        play(tmp_path)

    monkeypatch.undo()
    resumed = play(tmp_path, resume=True)
    assert told(resumed) == told(whole)
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    assert resumed.audit().ok


@pytest.mark.slow
def test_no_held_out_question_is_trained_on(tmp_path):
    # two in three of the questions that can be asked
    held_out = [f"say  {chr(code).lower()}" for code in range(32, 127) if code % 3]
    run = play(tmp_path, held_out=held_out)
    stored = run.trajectories(split="train")
    asked = {json.loads(one.files["question.json"]).get("held_out") for one in stored if one.files}
    assert True in asked

    reasons = run.audit().reasons["dropped"]
    never = {" ".join(one.split()).casefold() for one in held_out}
    for one in stored:
        row = json.loads(one.files.get("question.json", b"{}"))
        if "held_out" in row:
            assert one.id in reasons["held-out"] and one.reward == 0
            assert row["query"].casefold() in never
        elif one.agent == "solver":
            assert one.turns[0].messages[0].text.casefold() not in never

    logged = [row for row in read_metrics(run.dir / "metrics.jsonl") if "selfplay/held_out" in row]
    assert sum(row["selfplay/held_out"] for row in logged) == len(reasons["held-out"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "proposer", [{"train": False}, {}, *soak({"weights_of": "solver", "lag": 1})]
)
def test_a_proposer_may_stay_as_it_is_or_have_weights_of_its_own(tmp_path, proposer):
    run = play(tmp_path, agents={"solver": {}, "proposer": proposer})
    stored = run.trajectories(split="train")
    versions = {
        version
        for one in stored
        if one.agent == "proposer"
        for turn in one.turns
        for version in turn.versions
    }
    reasons = run.audit().reasons["dropped"]
    proposals = {one.id for one in stored if one.agent == "proposer"}
    if proposer:
        assert versions == ({0, 1} if "lag" in proposer else {0})
        assert proposals <= set(reasons["not-trained"])
    else:
        assert versions == {0, 1, 2} and not proposals <= set().union(*reasons.values())
        assert (run.checkpoint_path("last") / "agents" / "proposer").is_dir()

    assert run.eval()
