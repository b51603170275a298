"""`agentevo sft`: supervised fine-tuning on conversations, as a run like any other: a folder with
configuration, metrics, checkpoints and a report, which can be interrupted and goes on bit for bit.

    read and encode every row -> evaluate -> optimizer steps, evaluating and saving in between -> evaluate -> report

Evaluated are the held-out conversations (loss, perplexity, token accuracy) and, where the recipe
has an environment, success on held-out tasks, as in `agentevo train`. The best checkpoint is that
of the highest success, or without an environment of the lowest held-out loss.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.config import RunConfig
from agentevo.errors import CheckpointError, ConfigError
from agentevo.event_loop import run_coroutine
from agentevo.models.adapters import dropping_out
from agentevo.models.chat import ChatFormat
from agentevo.models.device_peak import device_peak
from agentevo.models.load import LoadedModel
from agentevo.models.resolve import resolve
from agentevo.observability import LiveView, MetricsLog, report_from_run
from agentevo.orchestration.components import (
    Components,
    check_memory,
    load_policy,
    make_environment,
    open_components,
)
from agentevo.orchestration.evaluation import evaluate, headline, reference_players
from agentevo.orchestration.loop import Progress
from agentevo.orchestration.profiling import Profiling
from agentevo.orchestration.sft_data import BAD_ROWS, SFTData, check_sft_data, load_sft_data
from agentevo.runs.creation import check_folder, prepare_folder, write_config
from agentevo.runs.resume_rules import check_resume
from agentevo.runs.summary import sampled_success, write_summary
from agentevo.seeds import derive_seed
from agentevo.signals import stop_on_interrupt
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.phases import phase
from agentevo.training.supervised import SupervisedTrainer, held_out_metrics, plan_batches
from agentevo.training.workload import speed_metrics

HELD_OUT = "sft/eval/"
"""Prefix of the metrics on held-out conversations."""


def sft(config: RunConfig, *, resume: bool = False, view: LiveView | None = None) -> None:
    """Trains to the end, or to a clean stop at Ctrl-C; blocks. Raises ConfigError before anything
    is created, also for data without a usable row."""
    view = view if view is not None else LiveView(config.run.name)
    checkpoints = Checkpoints(config.run_dir / "checkpoints", config.checkpoint.keep_last)
    check_sft_data(config)
    check_memory(config)
    if config.environment is not None:
        make_environment(config).close()
    if config.model.name != "tiny" and not resume:
        resolve(config.model.name)
    if resume:
        for key, (was, now) in check_resume(config, checkpoints, "sft").items():
            view.note(f"from here on with {key}={now!r}, which was {was!r}")
    else:
        check_folder(config)
    run_coroutine(_sft(config, checkpoints, resume, view))


async def _sft(config: RunConfig, checkpoints: Checkpoints, resume: bool, view: LiveView) -> None:
    folder = config.run_dir
    checkpoint = _newest_whole(checkpoints, view) if resume else None
    with view, stop_on_interrupt(view.note) as asked:
        view.phase("loading", config.model.name)
        loaded = load_policy(config, checkpoint)
        context = int(getattr(loaded.model.config, "max_position_embeddings", 1 << 30))
        chat = (
            None
            if config.environment is None
            else ChatFormat(loaded.tokenizer, getattr(loaded.model, "generation_config", None))
        )
        data = load_sft_data(config, loaded.tokenizer, chat, context, view)
        if not resume:
            prepare_folder(config)
        write_config(config)
        (folder / BAD_ROWS).unlink(missing_ok=True)
        for report in data.reports:
            report.write(folder / BAD_ROWS)
        log = MetricsLog(
            folder / "metrics.jsonl",
            folder / "tensorboard" if config.tracking.tensorboard else None,
        )
        with log:
            async with _player(config, loaded) as parts:
                run = SupervisedRun(
                    config,
                    loaded.model,
                    loaded.tokenizer,
                    parts,
                    data,
                    checkpoints,
                    log,
                    view,
                    lambda: bool(asked),
                )
                if checkpoint is not None:
                    await run.restore(checkpoint)
                await run.run()
                write_summary(folder, run.summary())
        if config.tracking.report:
            view.phase("reporting")
            view.note(
                "report: "
                f"{report_from_run(folder, lambda token: str(loaded.tokenizer.decode([token])))}"
            )
    if asked:
        raise KeyboardInterrupt


def _newest_whole(checkpoints: Checkpoints, view: LiveView) -> Path:
    """Raises CheckpointError if every checkpoint is torn."""
    step = checkpoints.newest_whole(
        torn=lambda step, error: view.note(f"the checkpoint of step {step} is passed over: {error}")
    )
    if step is None:
        raise CheckpointError(
            f"{checkpoints.folder} has no whole checkpoint to resume from: start again with "
            "run.overwrite=true"
        )
    return checkpoints.path(step)


@asynccontextmanager
async def _player(config: RunConfig, loaded: LoadedModel) -> AsyncIterator[Components | None]:
    """What plays the held-out tasks; None without an environment."""
    if config.environment is None:
        yield None
        return
    async with open_components(config, loaded=loaded) as parts:
        yield parts


class SupervisedRun:
    """The optimizer steps of one configuration, one after the other; `stop` asks it to end after
    the current one."""

    def __init__(
        self,
        config: RunConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        parts: Components | None,
        data: SFTData,
        checkpoints: Checkpoints,
        log: MetricsLog,
        view: LiveView,
        stop: Callable[[], bool],
    ) -> None:
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.parts = parts
        self.data = data
        self.checkpoints, self.log, self.view, self.stop = checkpoints, log, view, stop
        self.batches = plan_batches(
            data.sizes(), config.sft, derive_seed(config.run.seed, "sft-order")
        )
        self.trainer = SupervisedTrainer(model, config.sft, len(self.batches), memory=config.memory)
        self.held_out = data.held_out_samples()
        self.players = reference_players(parts) if parts is not None else None
        self.progress = Progress()
        self.profiling = Profiling(
            config.profile, config.run_dir, model, warn=self._warn, note=view.note
        )
        self.peak = device_peak(self.profiling.device, self.profiling.dtype)
        self._clock = time.perf_counter()

    async def run(self) -> None:
        """From where `progress` stands to the last step, or until `stop`."""
        if not self.checkpoints.steps():
            self.log.log(
                0,
                {
                    key: value
                    for report in self.data.reports
                    for key, value in report.metrics().items()
                },
            )
            self.progress.before = self.progress.after = await self.evaluate("before", full=True)
        with self.profiling:
            while self.progress.step < len(self.batches) and not self.stop():
                with self.profiling.step(self.progress.step + 1):
                    await self._step()
                    await self._milestones(last=self.progress.step == len(self.batches))
        if self.checkpoints.steps()[-1:] != [self.progress.step]:
            self._save(None)

    async def _step(self) -> None:
        step, started = self.progress.step + 1, time.perf_counter()
        self.view.phase("training", f"step {step}")
        with phase("data"):
            batch = self.data.batch(self.batches[step - 1])
        with dropping_out(self.model, derive_seed(self.config.run.seed, "dropout", step)):
            metrics = self.trainer.step(batch)
        spent = time.perf_counter() - started
        self.progress.step = step
        self.progress.trained_tokens += int(metrics["trainer/trained_tokens"])
        metrics |= {
            "training/global_step": float(step),
            "training/epoch": step / len(self.batches) * self.config.sft.epochs,
            "timing_s/step": spent,
            "timing_s/update_actor": spent,
            **speed_metrics(metrics, spent, self.peak.flops_per_s),
        }
        if self.parts is not None:
            with phase("store"):
                await self.parts.store.commit_step(
                    step, {"metrics": metrics}, ids=[]
                )  # a resumed run rewinds the store to it
        self.log.log(step, metrics)
        self.view.step(step, len(self.batches), metrics, {})

    async def evaluate(self, name: str, *, full: bool) -> dict[str, float]:
        """Logs and shows an evaluation of the current weights; `full` adds sampled attempts at the
        tasks."""
        self.view.phase("evaluating", name)
        started, step = time.perf_counter(), self.progress.step
        with phase("evaluation"):
            metrics = (
                held_out_metrics(self.model, self.held_out, self.config.sft.micro_batch_tokens)
                if self.held_out
                else {}
            )
        if metrics:
            told = ", ".join(
                f"{key.removeprefix(HELD_OUT).replace('_', ' ')} {value:.4g}"
                for key, value in metrics.items()
            )
            self.view.note(f"held-out conversations at step {step}: {told}")
        if self.parts is not None:
            await self.parts.weights.begin(step)
            before = self.parts.engine.stats()["engine/generated_tokens"]
            with phase("evaluation"):
                found, _ = await evaluate(
                    self.parts,
                    step,
                    samples=self.config.evaluation.samples if full else 0,
                    players=self.players,
                )
                metrics |= found
            self.progress.generated_tokens += int(
                self.parts.engine.stats()["engine/generated_tokens"] - before
            )
            self.view.evaluation(step, metrics)
        self.log.log(step, metrics | {"timing_s/testing": time.perf_counter() - started})
        return metrics

    async def _milestones(self, *, last: bool) -> None:
        """Evaluation and checkpoint, when one is due."""
        step, every = self.progress.step, self.config.evaluation.every
        value = None
        if last or (every and step % every == 0):
            self.progress.after = await self.evaluate(
                "after" if last else f"step {step}", full=last
            )
            value = self._value()
        best = self.checkpoints.best_value
        better = value is not None and (best is None or value > best)
        if last or (
            self.config.checkpoint.every and (better or step % self.config.checkpoint.every == 0)
        ):
            self._save(value)

    def _value(self) -> float | None:
        """What the best checkpoint has most of."""
        if self.parts is not None:
            return headline(self.progress.after)
        loss = self.progress.after.get(f"{HELD_OUT}loss")
        return None if loss is None else -loss

    def _save(self, value: float | None) -> None:
        self.view.phase("saving", f"checkpoint of step {self.progress.step}")
        self.progress.wall_s = self.wall_s()
        self._clock = time.perf_counter()
        state: dict[str, Any] = {
            "command": "sft",
            "progress": msgspec.to_builtins(self.progress),
            "planned_steps": len(self.batches),
        }
        with phase("checkpoint"):
            self.checkpoints.save(
                self.progress.step,
                self.model,
                self.tokenizer,
                self.trainer.state_dict(),
                state,
                value,
            )

    async def restore(self, checkpoint: Path) -> None:
        """Goes on from this checkpoint, whose weights are loaded already."""
        trainer_state, run_state = self.checkpoints.load(checkpoint)
        if run_state["planned_steps"] != len(self.batches):
            raise ConfigError(
                f"{checkpoint}: the data gives {len(self.batches)} steps, but gave "
                f"{run_state['planned_steps']}: it has changed since; "
                "restore it, or start again with run.overwrite=true"
            )
        self.trainer.load_state_dict(trainer_state)
        self.progress = msgspec.convert(run_state["progress"], Progress)
        step = self.progress.step
        if self.parts is not None:
            await self.parts.store.rewind(step)
        self.log.resume(step)
        self.checkpoints.forget_after(step)
        self.view.note(f"resuming after step {step} from {checkpoint}")

    def _warn(self, text: str) -> None:
        self.progress.warnings.append(text)
        self.view.warn(text)

    def wall_s(self) -> float:
        return self.progress.wall_s + time.perf_counter() - self._clock

    def summary(self) -> dict[str, Any]:
        """For summary.json: that of `agentevo train`, with the account of the rows and the held-out
        conversations."""
        config, progress, players = self.config, self.progress, self.players
        before, after = progress.before, progress.after
        plays = self.parts is not None
        return {
            "name": config.run.name,
            "command": "sft",
            "model": config.model.name,
            "environment": config.environment.type if config.environment is not None else None,
            "seed": config.run.seed,
            "eval": {
                "before": headline(before) if plays else None,
                "after": headline(after) if plays else None,
                "n": len(self.parts.tasks.held_out()) if self.parts is not None else None,
                "cold_start_before": None,
                "random": players.random if players is not None else None,
                "optimal": players.optimal if players is not None else None,
                "sampled": {"before": sampled_success(before), "after": sampled_success(after)},
            },
            "held_out": {
                "conversations": len(self.data.held_out),
                "before": _held_out(before),
                "after": _held_out(after),
            },
            "data": {report.kind: report.summary() for report in self.data.reports},
            "wall_s": self.wall_s(),
            "steps": progress.step,
            "planned_steps": len(self.batches),
            "tokens": {"generated": progress.generated_tokens, "trained": progress.trained_tokens},
            "best": {"step": self.checkpoints.best_step, "value": self.checkpoints.best_value},
            "profile": self.profiling.summary,
            "warnings": [
                *(
                    line
                    for report in self.data.reports
                    for line in report.lines()
                    if " left out, " in line
                ),
                *progress.warnings,
            ],
        }


def _held_out(metrics: dict[str, float]) -> dict[str, float]:
    return {
        key.removeprefix(HELD_OUT): value
        for key, value in metrics.items()
        if key.startswith(HELD_OUT)
    }
