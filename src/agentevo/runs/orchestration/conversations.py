"""The training data of `agentevo sft`: conversations from files, episodes of the environment's
solver, the best stored attempts of another run. A RowReport lists every unused row with its reason
and its place.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentevo.config import RunConfig, check_sft
from agentevo.data import RowError, RowReport, check_source, read_conversations
from agentevo.data.message_images import ImageCollector
from agentevo.data.question_overlap import question_key, question_of, questions_in
from agentevo.data.spooled_images import SpooledImages
from agentevo.errors import ConfigError
from agentevo.models.chat.chat_format import NO_IMAGES, ChatFormat, chat_of
from agentevo.models.compute.positions import context_length, row_limit
from agentevo.models.files.load import LoadedModel
from agentevo.models.vision.processor import VisionProcessor
from agentevo.observability import LiveView
from agentevo.runs.folder.run_folder import check_run_folder, read_store
from agentevo.runs.orchestration.batch_sources import BatchSource
from agentevo.runs.orchestration.cold_start import solver_samples
from agentevo.runs.orchestration.collect import Collected
from agentevo.runs.orchestration.players import check_solver
from agentevo.runs.orchestration.preference_data import check_tokenizer, stored_images
from agentevo.runs.orchestration.rollout_sources import StopAskedError
from agentevo.runtime.seeds import derive_seed
from agentevo.training.assistant_tokens import AssistantTokens, TokenRow
from agentevo.training.learner import PreparedBatch
from agentevo.training.pairs import answer_of
from agentevo.training.supervised import plan_batches
from agentevo.types import Sample, Task, Trajectory
from agentevo.types.images import ImageFile, images_of_samples

HELD_OUT = "sft/eval/"
"""Prefix of the metrics on held-out conversations."""
LEFT_OUT = " left out, "
BAD_ROWS = "bad_rows.jsonl"
"""In the run's folder: every row that is not used."""
Conversations = dict[str, list[TokenRow]]
"""Name -> the samples of one conversation. They stay together."""


@dataclass
class SFTData:
    """All encoded conversations."""

    train: Conversations = field(default_factory=dict)
    held_out: Conversations = field(default_factory=dict)
    reports: list[RowReport] = field(default_factory=list)
    images: MutableMapping[str, ImageFile] = field(default_factory=SpooledImages)
    """Maps a digest to an image of the conversations."""
    questions: set[bytes] = field(default_factory=set)
    """The keys of the questions in files that are trained on, where sft.stop_at_gap needs them."""
    task_ids: set[str] = field(default_factory=set)
    """The tasks of the stored attempts that are trained on."""

    def demonstrates(self, task: Task) -> bool:
        """Whether a conversation solves the task: its attempt, or a question in the same words."""
        return task.id in self.task_ids or question_key(question_of(task)) in self.questions

    def sizes(self) -> dict[str, int]:
        """Conversation -> its tokens."""
        return {name: sum(len(row.ids) for row in rows) for name, rows in self.train.items()}

    def batch(self, names: Iterable[str]) -> list[Sample]:
        return [row.sample() for name in names for row in self.train[name]]

    def digest(self) -> str:
        """SHA-256 of the tokens and masks of all conversations, hex."""
        digest = hashlib.sha256()
        for conversations in (self.train, self.held_out):
            for row in (row for rows in conversations.values() for row in rows):
                digest.update(struct.pack("<q", len(row.ids)) + row.ids.tobytes())
                digest.update(row.mask.tobytes())
                digest.update("".join(span.digest for span in row.images).encode())
            digest.update(b"|")
        return digest.hexdigest()

    def write_reports(self, folder: Path) -> None:
        """Replaces BAD_ROWS in the run's folder."""
        (folder / BAD_ROWS).unlink(missing_ok=True)
        for report in self.reports:
            report.write(folder / BAD_ROWS)

    def held_out_samples(self) -> list[Sample]:
        return [row.sample() for rows in self.held_out.values() for row in rows]


class ConversationBatches(BatchSource):
    """Batches of conversations, in an order that follows from the run's seed (supervised
    fine-tuning).

    Some conversations may be held out. The best checkpoint is then the one with the lowest loss on
    these, unless the recipe has an environment to play.
    """

    def __init__(self, config: RunConfig, data: SFTData) -> None:
        self._config = config
        self._data = data
        self.measure: Callable[..., dict[str, float] | None] | None = None
        """SupervisedTrainer.held_out of the trainer that trains on the conversations."""
        self.show: Callable[[Mapping[str, ImageFile]], None] = lambda images: None
        """SupervisedTrainer.show of that trainer."""
        seed = derive_seed(config.run.seed, "sft-order")
        self._batches = plan_batches(data.sizes(), config.sft, seed)
        self.num_steps = len(self._batches)
        self._held_out = data.held_out_samples()
        self._digest = data.digest()

    async def collect(self, step: int) -> Collected:
        """The step's conversations."""
        epochs = step / self.num_steps * self._config.sft.epochs
        samples = self._data.batch(self._batches[step - 1])
        return Collected(data_items=samples, metrics={"training/epoch": epochs})

    def prepare(self, collected: Collected, step: int) -> PreparedBatch:
        """The conversations are trained on as they are."""
        samples = collected.data_items
        return PreparedBatch(samples, images=images_of_samples(samples, self._data.images))

    def evaluate(self, stop: Callable[[], bool]) -> dict[str, float]:
        """Loss, perplexity and token accuracy on the held-out conversations, if there are any.
        Raises StopAskedError if `stop()` says so between two of their batches."""
        if not self._held_out:
            return {}
        assert self.measure is not None
        if images := images_of_samples(self._held_out, self._data.images):
            self.show(images)
        metrics = self.measure(self._held_out, stop=stop)
        if metrics is None:
            raise StopAskedError("stopped while evaluating")
        return metrics

    def opening_metrics(self) -> dict[str, float]:
        """How many rows were read and used."""
        return {
            key: value for report in self._data.reports for key, value in report.metrics().items()
        }

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The negative held-out loss."""
        loss = metrics.get(f"{HELD_OUT}loss")
        return None if loss is None else -loss

    def summary(self, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
        """The account of the rows, and the held-out conversations before and after."""
        return {
            "held_out": {
                "conversations": len(self._data.held_out),
                "before": _held_out_only(before),
                "after": _held_out_only(after),
            },
            "data": {report.kind: report.summary() for report in self._data.reports},
        }

    def warnings(self) -> list[str]:
        """The rows that were left out."""
        return [
            line for report in self._data.reports for line in report.lines() if LEFT_OUT in line
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"planned_steps": self.num_steps, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError if the data gives another number of steps than when the run was
        started."""
        if state["planned_steps"] != self.num_steps:
            raise ConfigError(
                f"data: it gives {self.num_steps} steps, but gave {state['planned_steps']} when "
                "the run was started, so it has changed since: restore it, or start again with "
                "run.overwrite=true"
            )

        if state["digest"] != self._digest:
            raise ConfigError(
                "data: its conversations differ from those that the run was started with: restore "
                "them, or start again with run.overwrite=true"
            )


def _held_out_only(metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        key.removeprefix(HELD_OUT): value
        for key, value in metrics.items()
        if key.startswith(HELD_OUT)
    }


def check_sft_data(config: RunConfig) -> None:
    """Raises ConfigError, before anything is created, for missing files, packages, solver or other
    run."""
    check_sft(config)
    data = config.data
    for key, sources in (("data.train", data.train), ("data.eval", data.eval)):
        for source in sources:
            check_source(source, key)

    paths = [str(Path(source).expanduser().resolve()) for source in (*data.train, *data.eval)]
    duplicate = next((source for source in paths if paths.count(source) > 1), None)
    if duplicate is not None:
        raise ConfigError(
            f"data.train, data.eval: {duplicate} is given twice: its conversations would count "
            "twice, or be held out and trained on"
        )

    if data.best_of is not None:
        check_run_folder(data.best_of)
        if data.best_of.resolve() == config.run_dir.resolve():
            raise ConfigError(
                f"data.best_of: {data.best_of} is this run's own folder: give it another one "
                "with run.dir"
            )

    if data.demonstrations:
        check_solver(config, "data.demonstrations needs: remove data.demonstrations")


def read_sft_data(
    config: RunConfig, loaded: LoadedModel, view: LiveView, stop: Callable[[], bool]
) -> SFTData | None:
    """`load_sft_data` for a model; None when `stop()` becomes true while it reads."""
    context = context_length(loaded.model.config)
    chat = None
    if config.environment is not None:
        chat = chat_of(loaded)

    try:
        return load_sft_data(
            config, loaded.tokenizer, chat, context, view, processor=loaded.processor, stop=stop
        )
    except StopAskedError:
        return None


def load_sft_data(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat | None,
    context_length: int,
    view: LiveView,
    *,
    processor: VisionProcessor | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> SFTData:
    """Reads and encodes everything. `processor`: the model's, if it sees. Raises ConfigError if no
    row is left to train on, and StopAskedError when `stop()` becomes true while it reads.
    Demonstrations need `chat`."""
    section = config.data
    conversations = SFTData()
    limit = row_limit(context_length, section.max_tokens)
    images = None if processor is None else ImageCollector(files=conversations.images)
    encoder = AssistantTokens(
        tokenizer,
        max_tokens=limit,
        train_on=section.train_on,
        too_long=section.too_long,
        processor=processor,
        images=NO_IMAGES if images is None else images.files,
    )
    if section.train:
        conversations.train |= _from_files(
            config, section.train, "train", encoder, images, conversations, view, stop
        )

    if section.demonstrations:
        assert chat is not None
        samples, shown_images = solver_samples(
            config, chat, section.demonstrations, section.random_action_rate, view, stop
        )
        conversations.images.update(shown_images)
        conversations.train |= _fitting(samples, "demonstrations", limit, conversations.reports)

    if section.best_of is not None:
        samples, report, shown, conversations.task_ids = _best_attempts(
            config, section.best_of, tokenizer
        )
        conversations.train |= _fitting(samples, report, limit, conversations.reports)
        conversations.images.update(shown)

    if section.eval:
        conversations.held_out |= _from_files(
            config, section.eval, "eval", encoder, images, conversations, view, stop
        )
    elif section.eval_share:
        conversations.held_out = _hold_out(conversations.train, section.eval_share, config.run.seed)

    for line in (line for report in conversations.reports for line in report.lines()):
        (view.warn if LEFT_OUT in line else view.note)(line)

    if not conversations.train:
        raise ConfigError(
            "data: no usable row to train on:\n"
            + "\n".join(line for report in conversations.reports for line in report.lines())
        )

    return conversations


def _from_files(
    config: RunConfig,
    sources: Sequence[str],
    kind: str,
    encoder: AssistantTokens,
    images: ImageCollector | None,
    data: SFTData,
    view: LiveView,
    stop: Callable[[], bool],
) -> Conversations:
    section = config.data
    report = RowReport(kind)
    conversations = Conversations()
    data.reports.append(report)
    keeps_questions = kind == "train" and config.sft.stop_at_gap.tasks > 0

    for source in sources:
        for conversation in read_conversations(source, section.format, report, images):
            if stop():
                raise StopAskedError("stopped while reading conversations")

            try:
                conversations[conversation.where], shortened = encoder.encode(conversation)
                report.shortened += shortened
                if keeps_questions:
                    keys = map(question_key, questions_in(conversation.messages))
                    data.questions.update(key for key in keys if key is not None)
            except RowError as error:
                report.add(conversation.where, error)

            if report.rows % 500 == 0:
                view.phase("reading", f"{source}: {report.rows} rows")

    return conversations


def _fitting(
    samples: Sequence[Sample], report: RowReport | str, limit: int, reports: list[RowReport]
) -> Conversations:
    """Samples by the conversation that they belong to. One sample that is too long excludes the
    whole conversation."""
    grouped: dict[str, list[Sample]] = {}
    for sample in samples:
        grouped.setdefault(sample.trajectory_id, []).append(sample)

    if isinstance(report, str):
        report = RowReport(report, rows=len(grouped))

    reports.append(report)
    conversations = Conversations()
    for name, members in grouped.items():
        longest = max(len(s.ids) for s in members)
        if longest > limit:
            report.add(
                name,
                RowError(
                    "too_long", f"it has {longest} tokens, the limit is {limit} (data.max_tokens)"
                ),
            )
        else:
            conversations[name] = [
                TokenRow(name, s.ids, s.loss_mask, s.images, s.processor) for s in members
            ]

    return conversations


def _best_attempts(
    config: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Sample], RowReport, dict[str, ImageFile], set[str]]:
    """Rejection sampling: the samples of the best stored training attempts, at most `per_task` for
    each task, an account of all attempts, the images of the samples, and the ids of their tasks."""
    check_tokenizer(folder, tokenizer, "data.best_of", config.model.name)

    async def read(store: Any) -> list[Trajectory]:
        return [
            row.trajectory async for row in store.trajectories(split="train", status="completed")
        ]

    attempts = [t for t in read_store(folder, read) if t.num_completion_tokens()]
    data = config.data
    samples, report = best_attempts(attempts, data.min_reward, data.per_task, str(folder))

    chosen = {sample.trajectory_id for sample in samples}
    ids = {attempt.task_id for attempt in attempts if attempt.id in chosen}
    task_ids = ids | {id.rpartition("~")[0] for id in ids if "~" in id}  # rounds of one task
    return samples, report, stored_images(folder, samples), task_ids


def best_attempts(
    attempts: Sequence[Trajectory], min_reward: float | None, per_task: int, where: str
) -> tuple[list[Sample], RowReport]:
    """For every task the attempts with the highest reward, and among equals the one with the fewest
    tokens. No two of them have equal tokens."""
    report = RowReport("best_of", rows=len(attempts))
    tasks: dict[str, list[Trajectory]] = {}
    for attempt in attempts:
        name = f"{where}:{attempt.id}"
        if min_reward is None and not attempt.success:
            report.add(name, RowError("low_reward", f"no success (reward {attempt.reward:g})"))
        elif min_reward is not None and attempt.reward < min_reward:
            report.add(
                name, RowError("low_reward", f"reward {attempt.reward:g} is below {min_reward:g}")
            )
        else:
            tasks.setdefault(attempt.task_id, []).append(attempt)

    samples: list[Sample] = []
    for task, members in tasks.items():
        members.sort(key=lambda t: (-t.reward, t.num_completion_tokens(), t.id))
        accepted: list[Any] = []
        for attempt in members:
            name = f"{where}:{attempt.id}"
            answer = answer_of(attempt)
            if any(answer.says(previous) for previous in accepted):
                report.add(
                    name,
                    RowError("duplicate", f"has the same answer as a better attempt at {task}"),
                )
            elif len(accepted) == per_task:
                report.add(
                    name, RowError("beyond_per_task", f"{per_task} of {task} are used already")
                )
            else:
                accepted.append(answer)
                samples += answer.rows

    return samples, report


def _hold_out(train: Conversations, share: float, seed: int) -> Conversations:
    """Moves the share out of `train`, at least one conversation and never the last one."""
    names = list(train)
    count = min(max(1, round(share * len(names))), len(names) - 1)
    chosen = set(random.Random(derive_seed(seed, "sft-held-out")).sample(names, max(count, 0)))
    return {name: train.pop(name) for name in names if name in chosen}
