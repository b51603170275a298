"""A run that trains on submissions of programs' loops: a thread with an event loop of its own, on
which its engine samples and its trainer's loop (runs/orchestration/run.py) waits for
submissions.

Callers use `call` from another event loop: that of a program (local.py) or that of a server's
gateway (server.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from agentevo.agents.policy import Policy, PolicyGateway
from agentevo.api.loop import records
from agentevo.api.loop.attempts import Attempts
from agentevo.api.loop.calls import Calls
from agentevo.api.loop.contents import Sealer, check_id, check_outcome, check_task
from agentevo.api.loop.group import Group, baseline_name
from agentevo.api.loop.wire import error_of, failure_of
from agentevo.config import RunConfig
from agentevo.config.named_agents import by_rank, trained_agents
from agentevo.config.parallel import check_alone
from agentevo.errors import (
    AgentEvoError,
    CheckpointError,
    ConfigError,
    EngineUnavailableError,
    StoreError,
    StoreUnavailableError,
    UnusableCheckpointError,
)
from agentevo.inference.serving.secret import RunSecret
from agentevo.models import checkpoint_manifest as manifest
from agentevo.models.chat.template_rendering import untrusted_templates
from agentevo.models.compute.positions import context_length
from agentevo.observability import LiveView
from agentevo.rollout.attempt_images import put_images
from agentevo.rollout.failures import summarize_failures
from agentevo.rollout.sampler import Sampler, group_name
from agentevo.runs.folder.chain import is_given_up
from agentevo.runs.folder.creation import check_place
from agentevo.runs.orchestration.agent_policies import players
from agentevo.runs.orchestration.checks import check_parts
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.run import run_training
from agentevo.runs.orchestration.submissions import KEY, Submission, Submissions
from agentevo.runtime.event_loop import in_thread, run_coroutine
from agentevo.store.codec import content_digest, encode_task, encode_trajectories
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import StepPlan
from agentevo.training.checkpoint import Checkpoints
from agentevo.types import Outcome, Task, Trajectory, group_of_agent
from agentevo.types.images import images_of_task, images_of_trajectory

T = TypeVar("T")

CLOSE_S = 600.0
"""The time limit of a run's end: the current step, and a checkpoint."""
BREAK_OFF_S = 10.0
"""The time limit of the end of a run that is still opening: an engine that starts, a model that
loads. Work that can't be cancelled, such as a download, ends with the process."""
START_S = 60.0
"""The time limit of the gateway's start."""
GREEDY = "greedy"
"""Label of groups that are never trained on."""


class _Notes(LiveView):
    """Prints messages for the user, but no progress, which is the program's."""

    def __init__(self, title: str, notify: Callable[[str], None]) -> None:
        super().__init__(title, plain=True)
        self._tell = notify

    def phase(self, name: str, detail: str = "") -> None:
        self._enter_phase(name, detail)

    def step(self, step: int, *arguments: Any) -> None:
        self.set_progress(step, math.inf)

    def evaluation(self, *arguments: Any) -> None: ...

    def _print(self, text: str) -> None:
        self._tell(text)


class _Nobody:
    """The agent of a run whose attempts a program makes."""

    async def run(self, task: Task, policy: Policy) -> Outcome:
        raise NotImplementedError


class LoopService:
    """See the module."""

    def __init__(
        self,
        config: RunConfig,
        *,
        resume: bool,
        gateway: PolicyGateway | None,
        note: Callable[[str], None],
        is_of_stranger: bool = False,
    ) -> None:
        """`gateway`: serves the API clients of attempts; None for a gateway of its own. `note`
        receives messages for the user. `is_of_stranger`: chat templates are rendered within bounds
        (models/chat/template_rendering.py). Raises ConfigError, before anything is created, for a
        recipe that can't be trained this way."""
        check_loop(config, resume=resume)
        self.config = config
        self._resume = resume and not is_given_up(config.run_dir)
        self._gateway = gateway
        self._note = note
        self._is_of_stranger = is_of_stranger
        self._opened: Future[None] = Future()
        self._calls = Calls(self.error_of_end)
        self._is_closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"agentevo-{config.run.name}", daemon=True
        )
        self._group_counts: Counter[str] = Counter()
        self._steps: dict[str, int] = {}
        """Submission -> the step that it became."""
        self._step = 0

    @property
    def is_over(self) -> bool:
        return self._opened.done() and not self._thread.is_alive()

    @property
    def is_open(self) -> bool:
        """Whether it accepts attempts and groups."""
        opened = self._opened.done() and self._opened.exception() is None
        return opened and not self.is_ending

    @property
    def has_failed(self) -> bool:
        """Whether something other than `close` has ended it."""
        return self._failure is not None

    @property
    def is_ending(self) -> bool:
        """Whether it has ended or is ending: its last files may still be in the making."""
        return self.is_over or self._calls.is_closed

    async def start(self) -> None:
        """Opens the run, unless another caller does so already, and returns once it is open; raises
        the error that prevents that."""
        if self._thread.ident is None:
            self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._opened))

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work on the run's event loop. If the run has ended, or ends during the work, raises
        the reason."""
        return await self._calls.call(work)

    def call_now(self, work: Callable[[], T]) -> T:
        """Calls a function that does not wait, from a thread that may block for it."""
        return self._calls.call_now(work, START_S)

    async def close(self) -> None:
        """Ends the run after the current work, with a checkpoint."""
        self._is_closing = True  # for a thread that has not started yet
        self._calls.soon(self._end_run)
        limit_s = CLOSE_S if self._opened.done() else BREAK_OFF_S
        if self._thread.ident is not None:
            await in_thread(self._thread.join, limit_s)

        if self._thread.is_alive():
            raise EngineUnavailableError(
                f"{self.config.run_dir}: the run did not end within {limit_s:g} s"
            )

        if self._failure is not None:
            raise self._failure

    def _end_run(self) -> None:
        """Ends the run after the current step, or at once if it is still opening."""
        self._submissions.close()
        if not self._opened.done():
            self._main.cancel()

    def error_of_end(self) -> AgentEvoError:
        """Why the run accepts no further work: a new exception for each caller."""
        if isinstance(self._failure, AgentEvoError):
            return error_of(failure_of(self._failure)[1])
        why = "it was closed" if self._failure is None else f"it failed: {self._failure}"
        return EngineUnavailableError(f"{self.config.run_dir}: the run has ended: {why}")

    def _run(self) -> None:
        try:
            with untrusted_templates() if self._is_of_stranger else nullcontext():
                run_coroutine(self._train())
        except asyncio.CancelledError as error:
            if self._opened.done():  # otherwise it was closed before that
                self._failure = error
        except BaseException as error:  # noqa: BLE001 (handed to who waits)
            self._failure = error
        self._calls.end()
        if not self._opened.done():
            self._opened.set_exception(self._failure or self.error_of_end())

    async def _train(self) -> None:
        main = asyncio.current_task()
        assert main is not None
        self._main = main
        self._submissions = Submissions(self)
        self._calls.begin()
        if self._is_closing:
            return

        await run_training(
            self.config,
            _Notes(self.config.run.name, self._note),
            command="loop",
            resume=self._resume,
            submissions=self._submissions,
        )

    async def note_open(self, parts: Components) -> None:
        config = self.config
        self._parts = parts
        self._sampler = Sampler(
            config,
            parts.engine,
            parts.chat,
            _Nobody(),
            parts.store,
            context_length(parts.model.config),
            calls=parts.calls,
            note=self._note,
            players=players(config, parts.policies),
            gateway=self._gateway,
        )
        secret = await in_thread(RunSecret(config.run_dir / "engines").value)
        self._sealer = Sealer(secret)
        self.attempts = Attempts(
            self._policy,
            self._sealer,
            limit=config.rollout.max_attempts,
            timeout_s=config.agent.timeout_s,
            put_images=partial(put_images, parts.store),
        )

        for record in await parts.store.steps():
            self.note_commit(str(record.record["source"].get(KEY)), record.step)

        self._opened.set_result(None)

    async def closing(self, failure: BaseException | None) -> None:
        self._failure = failure
        await self.attempts.close()
        self._calls.close()
        self._sampler.close()

    def _policy(self, new: records.NewAttempt, name: str) -> Policy:
        temperature = 0.0 if new.greedy else self.config.sampling.temperature
        return self._sampler.policy(name, temperature)

    def note_commit(self, submission: str, step: int) -> None:
        self._steps[submission] = self._step = step

    # What follows happens on the run's event loop.

    async def state(self) -> records.ModelState:
        config = self.config
        return records.ModelState(
            name=config.run.name,
            step=self._step,
            group_size=config.trainer.group_size,
            max_attempts=config.rollout.max_attempts,
            attempt_timeout_s=config.agent.timeout_s,
            request_timeout_s=config.engine.timeout_s,
            seed=config.run.seed,
            has_baseline="baseline_rewards" in config.algorithm.needs,
            agents=list(by_rank(config)),
            trained_agents=list(trained_agents(config)),
        )

    async def group(self, task_id: str, *, greedy: bool) -> str:
        """See LoopConnection.group. The first group of a task under some weights has the name, and
        so the seeds, that `agentevo train` gives it."""
        check_id(task_id, "a task")
        name = group_name(task_id, GREEDY if greedy else "train", self._step + 1)
        self._group_counts[name] += 1
        count = self._group_counts[name]
        return name if count == 1 else f"{name}.{count}"

    async def train(self, groups: Sequence[Group]) -> records.TrainedSubmission:
        name = await self.submit(groups)
        return await self.wait_for_training(name)

    async def submit(self, groups: Sequence[Group]) -> str:
        """Takes groups for a step, unless it has them already; returns the submission's id. Raises
        what TrainableModel.train raises."""
        name = await in_thread(submission_id, groups)
        if not self._has(name):
            await in_thread(check_groups, groups, self._sealer)
            await put_images_of_groups(self._parts.store, groups)

        checked_at = None
        while not self._has(name):
            if checked_at == self._step:
                trajectories = [member for group in groups for member in group.members]
                tasks = list({group.task.id: group.task for group in groups}.values())

                steps = self.config.trainer.steps
                if self._step + self._submissions.num_under_way >= steps:
                    raise ConfigError(
                        f"train: trainer.steps={steps} is reached: open the model with more"
                    )

                # Nothing awaits here, so no other submission can take these groups meanwhile.
                self._submissions.submit(Submission(name, tasks, trajectories))
                break

            checked_at = self._step  # a step that was just committed may have some of them
            try:
                await self._check_new(groups)
            except ConfigError:
                if not self._has(name):
                    raise

        return name

    def _has(self, name: str) -> bool:
        """Whether this submission has become a step, or is about to."""
        return name in self._steps or self._submissions.has(name)

    async def wait_for_training(self, name: str) -> records.TrainedSubmission:
        """The result of a submission, once it is committed."""
        if name not in self._steps:
            if not self._submissions.has(name):
                raise records.ModelNotOpenError("this submission is unknown here: submit it again")
            await asyncio.shield(self._submissions.future(name))

        (record, *_) = await self._parts.store.steps(after=self._steps[name] - 1)
        dropped = StepPlan.of(record.step, record.record).dropped
        return records.TrainedSubmission(
            step=record.step,
            metrics=record.record["metrics"],
            dropped={name: reason for reason, names in dropped.items() for name in names},
        )

    async def _check_new(self, groups: Sequence[Group]) -> None:
        """Raises ConfigError for attempts that were submitted before, and for a task that differs
        from an earlier one of its id."""
        store = self._parts.store
        for group in groups:
            ids = {member.id for member in group.members}
            for name in {member.group_id for member in group.members}:
                for row in await store.summaries(group_id=name):
                    if row.id in ids:
                        what = row.drop_reason or row.error or "trained on"
                        raise ConfigError(
                            f"train: the attempt {row.id!r} was submitted for step {row.step} "
                            f"({what}): no attempt is trained on twice; trainer.epochs makes "
                            "several passes"
                        )

            try:
                stored_digest = (await store.stored_task(group.task.id)).digest
            except StoreUnavailableError:
                raise
            except StoreError:  # a new one
                continue

            if stored_digest != encode_task(group.task).digest:
                raise ConfigError(
                    f"train: the task {group.task.id!r} differs from the task of that id in an "
                    f"earlier step: give each task its own id"
                )

    async def save(self) -> None:
        await self._submissions.save_checkpoint()

    async def checkpoints(self) -> list[records.Checkpoint]:
        return await in_thread(self._checkpoints)

    def _checkpoints(self) -> list[records.Checkpoint]:
        folder = Checkpoints(self.config.run_dir / "checkpoints", self.config.checkpoint.keep_last)
        checkpoints = []
        for step in folder.steps():
            path = folder.path(step)
            with suppress(OSError, CheckpointError):  # a newer one has just replaced it
                names = [*manifest.read(path).files, manifest.NAME]
                sizes = {name: (path / name).stat().st_size for name in names}
                checkpoints.append(records.Checkpoint(step=step, files=sizes))

        return checkpoints

    def checkpoint_file(self, step: int, name: str) -> Path:
        """The path of a checkpoint's file. Raises UnusableCheckpointError if there is none."""
        by_step = {checkpoint.step: checkpoint for checkpoint in self._checkpoints()}
        if step not in by_step or name not in by_step[step].files:
            raise UnusableCheckpointError(
                f"there is no file {name!r} in a checkpoint of step {step}: it was replaced by a "
                "newer one; fetch that"
            )
        return self.config.run_dir / "checkpoints" / f"step-{step:06d}" / name


def submission_id(groups: Sequence[Group]) -> str:
    """Equal for the same attempts with the same outcomes in the same order. Raises StoreError for
    content that can't be stored."""
    digest = hashlib.sha256()
    for group in groups:
        for trajectory in group.members:
            digest.update(content_digest(trajectory))
    return digest.hexdigest()


def check_groups(groups: Sequence[Group], sealer: Sealer) -> None:
    """Raises ConfigError, SealError or StoreError for groups that can't be trained on."""
    seen_ids: set[str] = set()
    compared: set[str] = set()
    tasks: dict[str, Task] = {}
    for group in groups:
        if group.id.startswith(f"{group.task.id}/{GREEDY}@"):
            raise ConfigError(f"train: the group {group.id} is greedy, so only for evaluation")
        if tasks.setdefault(group.task.id, group.task) != group.task:
            raise ConfigError(f"train: two tasks have the id {group.task.id!r}")

        check_task(group.task)
        encode_task(group.task)
        if not group.trajectories:
            raise ConfigError(f"train: the group {group.id} has no attempt: leave it out")

        if group.baseline is not None and group.task.id in compared:
            raise ConfigError(
                f"train: two groups of the task {group.task.id!r}, each with a baseline: a step "
                f"uses one baseline for each task"
            )

        compared.add(group.task.id)
        for member in group.members:
            if (member.group_id, member.task_id) != (_group_id(group, member), group.task.id):
                raise ConfigError(
                    f"train: the attempt {member.id!r} is not of the group {group.id}"
                )
            if member.id in seen_ids:
                raise ConfigError(f"train: the attempt {member.id!r} appears twice")
            seen_ids.add(member.id)
            sealer.check(member, group.seals.get(member.id))
            check_outcome(member, is_baseline=member is group.baseline)

        encode_trajectories(group.members, "train", 0)

    errors = [trajectory.error for group in groups for trajectory in group.trajectories]
    if not any(group.completed for group in groups):
        raise ConfigError(
            f"train: no attempt has completed: {summarize_failures(errors, len(errors))}"
        )


async def put_images_of_groups(store: Store, groups: Sequence[Group]) -> None:
    """Stores the groups' images. Raises ConfigError if a task or an attempt names another one that
    the store does not have: the step could not be written."""
    images = [image for group in groups for image in group.images]
    await put_images(store, images)

    group_of_image: dict[str, str] = {}
    for group in groups:
        of_attempts = (images_of_trajectory(member) for member in group.members)
        named = [*images_of_task(group.task), *chain.from_iterable(of_attempts)]
        group_of_image |= dict.fromkeys(named, group.id)

    missing = group_of_image.keys() - {image.part.sha256 for image in images}
    missing -= (await store.images(missing)).keys() if missing else set()
    if missing:
        first = min(missing)
        raise ConfigError(
            f"train: the group {group_of_image[first]} names the image {first}, which neither the "
            "group nor the run has: add it to the group's `images`"
        )


def _group_id(group: Group, trajectory: Trajectory) -> str:
    """The group id that a trajectory of the group must have."""
    if trajectory is group.baseline:
        return baseline_name(group.id, group.task.id)
    return group_of_agent(group.id, trajectory.agent)


def check_loop(config: RunConfig, *, resume: bool) -> None:
    """Raises ConfigError, before anything is created, for settings that a program's own loop can't
    use."""
    agent = config.agent.type
    for is_set, key, why in (
        (agent not in ("environment", "function"), f"agent.type={agent}", "the program plays"),
        (config.environment is not None, "environment", "the program plays"),
        (config.tasks.given, "tasks", "the program chooses the tasks of its groups"),
        (config.rollout.samplers > 0, "rollout.samplers", "the program samples"),
        (config.data.given, "data", "the program submits the training data"),
        (config.cold_start.episodes > 0, "cold_start", "there is no environment to demonstrate"),
        (config.evaluation.stop_after > 0, "evaluation.stop_after", "the program evaluates"),
        (
            config.algorithm.replay_successes > 0,
            "algorithm.replay_successes",
            "the program chooses the attempts of its groups",
        ),
        (config.distillation.enabled, "distillation", "no teacher scores submitted attempts"),
        (config.profile.enabled, "profile", "the program's own time is not part of a step"),
    ):
        if is_set:
            raise ConfigError(f"{key}: {why}: leave it out")

    check_alone("a program's own loop")
    check_parts(config, None, resume)
    check_place(config, "loop", resume=resume and not is_given_up(config.run_dir))
