"""Replay of successes: which ones, in whose place, and that a run's record proves it; a run that
was broken off replays as the one that was not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from audited_run import change_turns, trajectory

from agentevo.algorithms.loss_inputs import LossTables
from agentevo.algorithms.losses import POLICY_LOSSES, bind_policy_loss
from agentevo.api.run import train
from agentevo.config import build_config
from agentevo.config.collect import WITHOUT_RATIO
from agentevo.errors import ConfigError, TrainingError
from agentevo.observability.metrics import read_metrics
from agentevo.rewards import reward
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.audit.audit import audit
from agentevo.runs.audit.token_history import follow
from agentevo.runs.folder.chain import ROWS, End
from agentevo.runs.orchestration.collect import Collected, Collector
from agentevo.runs.orchestration.ledger import RowDigests, commit, plan_of, reserve
from agentevo.runs.orchestration.rollout_sources import RolloutRound
from agentevo.runs.orchestration.success_replay import SuccessReplay
from agentevo.store import open_store
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import StepPlan
from agentevo.training.learner import PreparedBatch
from agentevo.types import Task, Trajectory


def attempts_at(
    task: str, step: int, rewards: Sequence[float], *, truncated: bool = False
) -> list[Trajectory]:
    """A group that was sampled for a step, at version step - 1. Every reward above 0 is a
    success."""
    return [
        trajectory(
            task,
            number,
            version=step - 1,
            reward=value,
            success=value > 0,
            truncated=truncated,
        )
        for number, value in enumerate(rewards)
    ]


class Steps:
    """Steps of scripted groups, collected and committed as a run does it."""

    def __init__(self, store: Store, **keys: object) -> None:
        self.store = store
        self.config = build_config(
            {
                "agent": {"type": "single_turn"},
                "rewards": ["numeric"],
                "trainer": {"groups_per_step": 2, "group_size": 3},
                "evaluation": {"tasks": 1},
                "algorithm": {"replay_successes": 1, **keys},
            },
            needs_environment=False,
        )
        self.tasks = TaskSource(self.config, [Task(id=f"t{n}") for n in range(3)])
        self.end = End()
        self.plans: list[StepPlan] = []
        self.truncated = False
        """Whether the attempts are cut by a limit."""
        self._digests = RowDigests(store)
        self._groups: list[Trajectory] = []
        self._collector = self.make_collector()

    def make_collector(self) -> Collector:
        successes = SuccessReplay(self.config, self.store, self.tasks.given_id)
        return Collector(self.config, self, self.tasks, successes)  # type: ignore[arg-type]

    async def round(self, step: int, tasks: Sequence[Task]) -> RolloutRound:
        return RolloutRound(self._groups)

    async def run(self, **rewards: Sequence[float]) -> Collected:
        """The next step, of a group for each task with these rewards."""
        step = self.end.step + 1
        self._groups = [
            attempt
            for task, values in rewards.items()
            for attempt in attempts_at(task, step, values, truncated=self.truncated)
        ]
        await self.store.add_tasks([Task(id=task) for task in rewards], queue=False)
        await self.store.write_trajectories(self._groups, split="train", step=step)
        collected = await self._collector.collect(step)
        again = await self.make_collector().collect(step)  # of a trainer that has just resumed
        assert again == collected

        batch = PreparedBatch([])
        ids = await reserve(self.store, step, collected, batch)
        plan = plan_of(self.config, ids, collected, batch, {})
        rows = await self._digests.of_step(step, collected.trajectories, plan.ids)
        record = {"metrics": collected.metrics, ROWS: msgspec.to_builtins(rows)}
        self.end = await commit(self.store, self.end, plan, record)
        self.plans.append(plan)
        return collected


def in_store(folder: Path, work, **keys: object):
    async def opened():
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}") as store:
            return await work(Steps(store, **keys))

    return asyncio.run(opened())


MIXED = [0.0, 1.0, 0.0]
FAILED = [0.0, 0.0, 0.0]


def test_a_success_takes_the_place_of_the_first_failure_of_a_group_that_failed(tmp_path):
    async def work(steps: Steps) -> None:
        await steps.run(t0=MIXED, t1=FAILED)
        collected = await steps.run(t0=FAILED, t1=MIXED)

        ids = [t.id for t in collected.trainable if t.task_id == "t0"]
        assert ids == ["t0/train@2#1", "t0/train@2#2", "t0/train@1#1"]
        (success,) = collected.replayed
        assert success == collected.trainable[-1]
        assert success.group_id == "t0/train@2"
        earned = await steps.store.trajectory("t0/train@1#1")
        assert success.turns == earned.turns  # tokens, log-probs and versions of the old policy
        assert collected.dropped == {"t0/train@2#0": "replaced"}

        # what the step reports of its own attempts does not count it
        assert len(collected.trajectories) == 6
        assert collected.metrics["train/success"] == pytest.approx(1 / 6)
        assert collected.metrics["critic/score/max"] == 1.0
        assert collected.metrics["rollout/replayed"] == 1
        assert collected.metrics["rollout/replay_age"] == 1

        plan = steps.plans[-1]
        assert plan.replayed == ["t0/train@1#1"]
        assert plan.replayed_groups == {"t0/train@1#1": "t0/train@2"}
        assert "t0/train@1#1" not in plan.ids
        stored = await plan.read_trained(steps.store, 2)
        assert plan.restore_trained(stored) == collected.trainable

        report = await audit(steps.store, tmp_path)
        assert [str(v) for v in report.violations if v.step or v.trajectory] == []
        assert (report.trained, report.replayed) == (8, 1)
        history = await follow(steps.store, tmp_path, "t0/train@1#1", 0, 0)
        assert history.fate.startswith("trained on in step 1")
        assert history.fate.endswith("replayed in step 2")

    in_store(tmp_path, work)


def test_the_failure_with_the_lowest_reward_makes_room(tmp_path):
    async def work(steps: Steps) -> None:
        await steps.run(t0=MIXED, t1=FAILED)
        collected = await steps.run(t0=[-0.2, -0.5, -0.1], t1=MIXED)
        ids = [t.id for t in collected.trainable if t.task_id == "t0"]
        assert ids == ["t0/train@2#0", "t0/train@2#2", "t0/train@1#1"]

    in_store(tmp_path, work)


def test_only_groups_without_a_success_and_with_another_member_get_one(tmp_path):
    async def work(steps: Steps) -> None:
        await steps.run(t0=MIXED, t1=MIXED)
        assert (await steps.run(t0=MIXED, t1=FAILED)).metrics["rollout/replayed"] == 1
        assert (await steps.run(t0=[0.0], t2=FAILED)).replayed == []  # one member; no success yet
        assert (await steps.run(t0=[1.0, 1.0], t1=[0.5, 1.0])).replayed == []

        # all attempts succeeded, so no step was trained on them
        await steps.run(t2=[1.0, 1.0])
        assert (await steps.run(t2=FAILED)).replayed == []

    in_store(tmp_path, work)


def test_a_group_keeps_a_failure_and_no_success_comes_twice_in_a_step(tmp_path):
    async def work(steps: Steps) -> None:
        await steps.run(t0=[0.0, 1.0, 1.0])
        collected = await steps.run(**{"t0": FAILED, "t0~1": FAILED, "t0~2": [0.0, 0.0]})
        assert sorted(t.id for t in collected.replayed) == ["t0/train@1#1", "t0/train@1#2"]
        assert collected.replayed[0].group_id == collected.replayed[1].group_id == "t0/train@2"
        assert len([t for t in collected.trainable if t.group_id == "t0/train@2"]) == 3

    in_store(tmp_path, work, replay_successes=2)


@pytest.mark.slow
def test_the_buffer_holds_the_newest_successes_that_are_not_too_old(tmp_path):
    async def work(steps: Steps) -> set[str]:
        for _ in range(4):
            await steps.run(t0=MIXED)
        replayed = set()
        for _ in range(5):
            replayed |= {t.id for t in (await steps.run(t0=FAILED)).replayed}
        return replayed

    newest = {"t0/train@3#1", "t0/train@4#1"}
    assert in_store(tmp_path, work, replay_per_task=2) == newest  # drawn, so both come
    (tmp_path / "old").mkdir()
    assert in_store(tmp_path / "old", work, replay_max_age=1) == {"t0/train@4#1"}


def test_a_success_that_was_changed_since_is_not_replayed(tmp_path):
    async def work(steps: Steps) -> None:
        await steps.run(t0=MIXED)
        await asyncio.to_thread(
            change_turns,
            tmp_path,
            "t0/train@1#1",
            lambda turn: msgspec.structs.replace(turn, logprobs=[-0.5, -0.2, 0.0]),
        )
        with pytest.raises(TrainingError, match="'t0/train@1#1' in the store is not the one"):
            await steps.run(t0=FAILED)

    in_store(tmp_path, work)


def test_a_failure_stays_where_the_success_may_no_longer_be_trained_on(tmp_path):
    """The run was resumed with algorithm.drop_truncated=true since."""

    async def work(steps: Steps) -> None:
        steps.truncated = True
        await steps.run(t0=MIXED)
        successes = SuccessReplay(steps.config, steps.store, steps.tasks.given_id)
        await successes.begin_step(2)
        failures = attempts_at("t0", 2, FAILED)
        assert await successes.replay(failures, 2) != ([], [])

        algorithm = steps.config.algorithm.model_copy(update={"drop_truncated": True})
        config = steps.config.model_copy(update={"algorithm": algorithm})
        successes = SuccessReplay(config, steps.store, steps.tasks.given_id)
        await successes.begin_step(2)
        assert await successes.replay(failures, 2) == ([], [])

    in_store(tmp_path, work)


def test_an_audit_finds_what_a_plan_may_not_replay(tmp_path):
    async def work(steps: Steps) -> list[str]:
        await steps.run(t0=MIXED)
        await steps.run(t1=[0.0, 1.0])
        honest = steps.plans[-1]
        later = attempts_at("t1", 3, MIXED)
        await steps.store.write_trajectories(later, split="train", step=3)
        await steps.store.reserve([t.id for t in later[:2]], 3)
        false = ["t0/train@1#0", "t1/train@3#2", "gone"]
        plan = msgspec.structs.replace(honest, ids=[t.id for t in later[:2]], replayed=false)
        rows = await RowDigests(steps.store).of_step(3, [], plan.ids)
        record = {"metrics": {}, ROWS: msgspec.to_builtins(rows)}
        await commit(steps.store, steps.end, plan, record)
        return [str(v) for v in (await audit(steps.store, tmp_path)).violations]

    found = "\n".join(in_store(tmp_path, work))
    for words in (
        "t0/train@1#0: it was replayed though it did not succeed",
        "t0/train@1#0: it was replayed at age 2, the bound was 0",
        "t1/train@3#2: its plan replays it, but no earlier step has trained on it",
        "gone: its plan replays it, but no earlier step has trained on it",
        "gone: its plan replays it: no trajectory 'gone'",
    ):
        assert words in found


REFUSED = [
    ({"replay_per_task": 4}, {}, "replay_successes is 0"),
    ({"replay_successes": 3}, {}, "leaves no failure in a group of trainer.group_size=3"),
    (
        {"replay_successes": 2, "replay_per_task": 1},
        {},
        "more than the algorithm.replay_per_task=1",
    ),
    ({"replay_successes": 1, "name": "ppo"}, {}, "compares no members of a group"),
    ({"replay_successes": 1, "name": "dpo"}, {}, "does not use replay_successes"),
    ({"replay_successes": 1, "policy_loss": "reinforce"}, {}, "no ratio to the policy"),
    ({"replay_successes": 1, "old_logprobs": "recomputed"}, {}, "no ratio to the policy"),
    ({"replay_successes": 1, "rlpr_beta": 0.5}, {}, "can't be combined with algorithm.rlpr_beta"),
    ({"replay_successes": 1}, {"trainer": {"group_size": 3, "epochs": 0}}, "trainer.epochs=0"),
    ({"replay_successes": 1}, {"environment": {"type": "coins"}}, "makes new tasks"),
]


@pytest.mark.parametrize(("algorithm", "changes", "words"), REFUSED)
def test_what_contradicts_a_replay_is_refused(algorithm, changes, words):
    given = {"agent": {"type": "single_turn"}, "rewards": ["numeric"]}
    tree = {"trainer": {"group_size": 3}, "algorithm": algorithm} | changes
    if "environment" not in changes:
        tree |= given
    with pytest.raises(ConfigError, match=words):
        build_config(tree, needs_environment=False)


def test_every_other_loss_has_a_ratio_to_the_policy_that_sampled():
    logp = torch.linspace(-2, -1, 6).reshape(2, 3)
    for name in POLICY_LOSSES:
        if name == "function":
            continue
        hyper = {"beta": 0.1} if name == "dro" else {}
        loss = bind_policy_loss(name, hyper, aggregation=_aggregation(name))
        results = []
        for shift in (0.05, 0.1):
            old = logp - shift
            tables = LossTables(
                logp=logp.clone().requires_grad_(),
                old_logp=old,
                advantages=torch.tensor([[0.5], [-1.0]]).expand(2, 3),
                mask=torch.ones(2, 3, dtype=torch.bool),
                rollout_logp=old,
                proximal_logp=old + 0.02 * shift,
            )
            losses = loss(tables, loss.statistics(tables))[0]
            (gradient,) = torch.autograd.grad(losses.sum(), tables.logp)
            results.append(gradient)
        assert (torch.equal(*results)) == (name in WITHOUT_RATIO), name


def _aggregation(name: str) -> str:
    needed = POLICY_LOSSES[name].aggregation
    return "token-mean" if needed is None else str(needed(POLICY_LOSSES.resolve(name, {})))


@reward("test_rare")
def rare(completion):
    """About one reply of nine of an untaught policy of bytes."""
    return float(completion[:1] in "abcdefghijklm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        (),
        pytest.param(("rollout.staleness=1",), marks=pytest.mark.soak),
        pytest.param(("rollout.staleness=1", "rollout.policy=mask"), marks=pytest.mark.soak),
    ],
    ids=["synchronous", "ahead", "masked"],
)
def test_a_resumed_run_replays_as_one_that_was_not_broken_off(tmp_path, quiet_view, keys):
    file = tmp_path / "tasks.jsonl"
    rows = [{"id": f"t{n}", "query": f"{n}?", "answer": "1"} for n in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": {"name": "tiny", "tiny": {"hidden_size": 16, "num_layers": 1, "num_heads": 2}},
        "tasks": {"train": str(file)},
        "agent": {"type": "single_turn"},
        "rewards": ["test_rare"],
        "sampling": {"max_new_tokens": 3},
        "trainer": {"groups_per_step": 3, "group_size": 4, "steps": 8},
        "algorithm": {"replay_successes": 1, "replay_per_task": 2},
        "evaluation": {"tasks": 1, "samples": 0, "every": 0},
        "tracking": {"report": False, "tensorboard": False},
        "checkpoint": {"every": 3},
    }

    def play(name, **options):
        config = build_config(tree, (*keys, f"run.dir={tmp_path / name}"))
        try:
            run = train(config, **options)
        except KeyboardInterrupt:
            return None

        assert run.audit().violations == []
        steps = read_metrics(tmp_path / name / "metrics.jsonl")
        return [
            {key: row.get(key) for key in ("rollout/replayed", "train/success", "actor/grad_norm")}
            for row in steps
            if "rollout/replayed" in row
        ]

    whole = play("whole", view=quiet_view())
    assert whole is not None
    assert sum(row["rollout/replayed"] for row in whole[:4]) > 0  # before the run is broken off
    assert sum(row["rollout/replayed"] for row in whole[5:]) > 0
    assert play("broken", view=quiet_view(step=5)) is None
    resumed = play("broken", view=quiet_view(), resume=True)
    # between the reservation of the step's attempts and its commit
    assert play("torn", view=quiet_view(phase=("publishing weights", "version 5"))) is None
    torn = play("torn", view=quiet_view(), resume=True)
    assert resumed is not None and torn is not None
    if not keys:  # sampling ahead, a resumed run may have other weights for groups that it lost
        assert resumed == torn == whole
