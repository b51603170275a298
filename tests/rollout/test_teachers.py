"""Which log-prob goes to which token of an attempt that branches, and what a failed teacher
leaves."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import torch

from agentevo.config.distillation import DistillationSection
from agentevo.errors import ConfigError, StoreError, TrainingError
from agentevo.inference.remote_models.ledger import BudgetExceededError, RemoteModelError
from agentevo.rollout.failures import failure_kind
from agentevo.rollout.teachers import Teachers, TeacherUnavailableError, check_teachers
from agentevo.store.codec import encode_trajectories
from agentevo.training.batching.samples import teacher_table, trajectory_rows
from agentevo.types import QUERY_MESSAGES, Task, Trajectory, Turn
from agentevo.types.image_span import ImageSpan

SECTION = DistillationSection(teachers={"default": "t"})
TASK = Task(id="q")


class PlaceModel:
    """The log-prob of a token is minus its id over 1,000, minus its place in the context."""

    def __init__(self, fails_at: str = "", error: Exception | None = None) -> None:
        self.fails_at = fails_at
        self.error = error or RemoteModelError("it is away")
        self.num_asked = 0

    async def score(self, context_ids, ids, *, role, attempt):
        self.num_asked += 1
        if attempt == self.fails_at:
            raise self.error
        first = len(context_ids)
        return [-(first + place) - token / 1000 for place, token in enumerate(ids)]


def branching(name: str = "a", **fields) -> Trajectory:
    """Turn 0 is continued by turns 1 and 2; turn 3 is a root of its own."""
    shared = {"finish_reason": "stop"}
    turns = [
        Turn(index=0, prompt_ids=[1, 2], completion_ids=[3, 4], logprobs=[-1, -1], versions=[0, 0],
             **shared),
        Turn(index=1, parent=0, prompt_ids=[5], completion_ids=[6], logprobs=[-1], versions=[0],
             **shared),
        Turn(index=2, parent=0, prompt_ids=[7, 8, 9], completion_ids=[10, 11], logprobs=[-1, -1],
             versions=[0, 0], **shared),
        Turn(index=3, prompt_ids=[12], completion_ids=[13], logprobs=[-1], versions=[0], **shared),
    ]  # fmt: skip
    return Trajectory(id=name, task_id="q", group_id="q/train@1", turns=turns, **fields)


def scored(trajectories, model):
    teachers = Teachers(SECTION, {"t": model})
    return asyncio.run(teachers.score(trajectories, {}, TASK))


def test_each_token_gets_the_log_prob_in_its_own_context():
    model = PlaceModel()
    (attempt,) = scored([branching()], model)
    assert [list(turn.teacher_logprobs) for turn in attempt.turns] == [
        pytest.approx([-2.003, -3.004]),
        pytest.approx([-5.006]),
        pytest.approx([-7.010, -8.011]),
        pytest.approx([-1.013]),
    ]
    assert model.num_asked == 3, "one request for each leaf"

    rows = trajectory_rows(attempt)
    table = teacher_table(rows)
    for row, numbers in zip(rows, table, strict=True):
        ids = row.sample.ids[row.sample.loss_mask]
        expected = {3: -2.003, 4: -3.004, 6: -5.006, 10: -7.01, 11: -8.011, 13: -1.013}
        assert numbers[: len(ids)].tolist() == pytest.approx([expected[int(i)] for i in ids])


def test_a_branch_without_a_token_of_its_own_has_no_scores():
    turns = [
        Turn(index=0, prompt_ids=[1, 2], completion_ids=[3], logprobs=[-1], versions=[0],
             finish_reason="stop"),
        Turn(index=1, parent=0, prompt_ids=[5], completion_ids=[6], logprobs=[-1], versions=[0],
             finish_reason="stop"),
        Turn(index=2, parent=0, prompt_ids=[7], completion_ids=[], logprobs=[], versions=[],
             finish_reason="length"),
    ]  # fmt: skip
    (attempt,) = scored(
        [Trajectory(id="a", task_id="q", group_id="q/train@1", turns=turns)], PlaceModel()
    )
    table = teacher_table(trajectory_rows(attempt))
    torch.testing.assert_close(table, torch.tensor([[-2.003, -4.006], [0.0, 0.0]]))


def test_a_teacher_that_fails_fails_its_attempt_alone():
    failed, good, before = scored(
        [branching("a", reward=1.0, success=True), branching("b"), branching("c", status="failed")],
        PlaceModel(fails_at="a"),
    )
    assert (failed.status, failed.reward, failed.success) == ("failed", 0.0, False)
    assert failed.error == "the teacher 't' failed: RemoteModelError: it is away"
    assert failure_kind(failed.error) == "teacher"
    assert good.status == "completed" and good.turns[0].teacher_logprobs is not None
    assert before.turns[0].teacher_logprobs is None


def test_images_are_not_scored_by_their_ids_alone():
    digest = "a" * 64
    attempt = branching("a")
    spans = (ImageSpan(0, 1, (1,), digest),)
    attempt.turns[1] = msgspec.structs.replace(attempt.turns[1], images=spans)
    model = PlaceModel()
    failed, good = scored([attempt, branching("b")], model)
    assert failed.status == "failed" and "do not say which images" in failed.error
    assert failure_kind(failed.error) == "teacher"
    assert good.status == "completed" and model.num_asked == 3, "those of the other attempt"

    content = [{"type": "image", "sha256": digest}]
    shown = Task(id="q", metadata={QUERY_MESSAGES: [{"role": "user", "content": content}]})
    with pytest.raises(ConfigError, match=r"distillation.teachers: the task 'q' has images"):
        check_teachers([shown], SECTION)


@pytest.mark.parametrize("status", [0, 401, 404, 503])
def test_a_teacher_that_answers_nothing_ends_the_run(status):
    model = PlaceModel(fails_at="a", error=RemoteModelError("it is away", status))
    with pytest.raises(TeacherUnavailableError, match=r"'t' does not answer: it is away: start"):
        scored([branching("a"), branching("c", status="failed")], model)


@pytest.mark.parametrize(
    "error", [RemoteModelError("too long", 400), BudgetExceededError("no budget")]
)
def test_a_teacher_that_refuses_an_attempt_fails_it(error):
    (failed,) = scored([branching("a")], PlaceModel(fails_at="a", error=error))
    assert failed.status == "failed" and str(error) in failed.error


def test_attempts_without_a_teacher_are_not_trained():
    with pytest.raises(TrainingError, match=r"trajectory a .* for 0 of 3 trained tokens"):
        teacher_table(trajectory_rows(branching()))


@pytest.mark.parametrize("scores", [[-1.0], [-1.0, float("nan")]])
def test_a_store_refuses_scores_that_do_not_fit(scores):
    turn = Turn(
        index=0, prompt_ids=[1], completion_ids=[2, 3], logprobs=[-1, -1], versions=[0, 0],
        finish_reason="stop", teacher_logprobs=scores,
    )  # fmt: skip
    attempt = Trajectory(id="a", task_id="q", group_id="g", turns=[turn])
    with pytest.raises(StoreError, match="teacher_logprobs for 2 completion_ids"):
        encode_trajectories([attempt], "train", 1)
