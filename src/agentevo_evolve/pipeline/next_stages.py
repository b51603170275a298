"""Decides what a pipeline does next: which stages are ready, which are skipped, and which are
unchanged.

A finished stage never runs again while its setting and inputs are unchanged. Every decision follows
from the plan, pipeline.json and the folders, so it is the same after a kill.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentevo.config import RunConfig, sources, to_yaml
from agentevo.config.sweep import nest_keys
from agentevo.errors import ConfigError
from agentevo.inference.default_engine import installed_engines, load_with_engine
from agentevo.runtime.files import must_write, write_atomic
from agentevo_evolve.pipeline.held_out import add_gains, why_rounds_end
from agentevo_evolve.pipeline.kinds import Job
from agentevo_evolve.pipeline.leaks import Leaks
from agentevo_evolve.pipeline.plan import HELD_OUT, START, Instance
from agentevo_evolve.pipeline.reading import Pipeline, read_options, stage_folder
from agentevo_evolve.pipeline.references import (
    StageReference,
    condition,
    parse_reference,
    replace_references,
)
from agentevo_evolve.pipeline.state import (
    Input,
    PipelineState,
    StageOutput,
    StageState,
    as_setting,
    digest_of,
    digest_of_path,
    files_outside,
    is_pipeline_folder,
    read_state,
    replaced_texts,
    what_changed,
    without_places,
    write_state,
)

DONE = ("finished", "skipped")


class MissingOutputError(Exception):
    """The output that a reference names does not exist, because its stage was skipped."""


@dataclass(frozen=True)
class StageChoice:
    """The stages that this process of the pipeline runs."""

    only: tuple[str, ...] = ()
    """Run only these stages."""
    start: str | None = None
    """Run this stage and all that depend on it, even if they are finished."""
    skip: tuple[str, ...] = ()
    """Skip these stages and use their earlier outputs."""


@dataclass
class StageStart:
    """A stage that starts now."""

    instance: Instance
    job: Job
    setting: dict[str, str]
    inputs: list[Input]


@dataclass
class PipelineProgress:
    """The state of a pipeline with one seed, in its folder."""

    pipeline: Pipeline
    dir: Path
    seed: int
    choice: StageChoice = field(default_factory=StageChoice)

    def __post_init__(self) -> None:
        self.recipes = self.pipeline.recipes(self.seed)
        self.plan = self.pipeline.plan
        self.leaks = Leaks()
        self.settled: set[str] = set()
        """The ids that are decided in this process: finished, skipped, failed, or not chosen."""
        self.running: set[str] = set()
        self.notes: list[str] = []
        """Notes for the user."""
        self._noted: set[str] = set()
        self.failures: list[str] = []
        """Stages that could not start, with the reason."""
        self._rerun: set[str] = self._followers_of(self.choice.start)
        self.state = self._read()

    def _read(self) -> PipelineState:
        name = self.pipeline.config.name
        before = read_state(self.dir) if is_pipeline_folder(self.dir) else None
        state = before or PipelineState(name=name, seed=self.seed)
        if state.seed != self.seed:
            raise ConfigError(
                f"{self.dir} was started with seed={state.seed}, not {self.seed}: resume it with "
                "that seed, or give another dir"
            )

        recorded = state.stages
        fresh = {
            instance.id: StageState(kind=instance.stage.kind) for instance in self.plan.instances
        }
        state.stages = {name: recorded.get(name, new) for name, new in fresh.items()}
        state.status = "running"
        return state

    def write(self) -> None:
        """Writes pipeline.json."""
        write_state(self.dir, self.state)

    # What is next.

    def next(self) -> StageStart | None:
        """A stage that can start now. None if there is none. Settles the stages that need no
        process."""
        for instance in self.plan.instances:
            if instance.id in self.settled or instance.id in self.running:
                continue
            if not all(need in self.settled for need in instance.needs):
                continue
            decided = self._decide(instance)
            if decided is not None:
                return decided
            self._settle(instance)

        return None

    @property
    def is_over(self) -> bool:
        """Whether every stage is settled."""
        return len(self.settled) == len(self.plan.instances)

    def _decide(self, instance: Instance) -> StageStart | None:
        """The start of the stage. None if it needs no process, and is settled."""
        state = self.state.stages[instance.id]
        failed = [need for need in instance.needs if self.state.stages[need].status not in DONE]
        if failed or not self._is_chosen(instance):
            if failed and state.status not in ("finished", "failed"):
                state.status = "waiting"
                state.why = f"waits for {failed[0]}"
            return None

        try:
            reason = self._why_left_out(instance)
            if not reason:
                return self._ready(instance, state)
        except MissingOutputError as error:
            reason = str(error)
        except ConfigError as error:
            state.status = "failed"
            state.why = str(error)
            self.failures.append(f"{instance.id}: {error}")
            return None

        if state.status != "skipped":
            self.notes.append(f"{instance.id}: left out: {reason}")

        self.state.stages[instance.id] = StageState(
            kind=instance.stage.kind, status="skipped", why=reason, starts=state.starts
        )
        return None

    def _settle(self, instance: Instance) -> None:
        self.settled.add(instance.id)
        self.write()

    def _is_chosen(self, instance: Instance) -> bool:
        instance_names = names_of(instance)
        choice = self.choice
        if choice.only:
            return bool(instance_names & set(choice.only)) or instance.measures == START
        return choice.start is None or instance.id in self._rerun or self._is_unfinished(instance)

    def _is_unfinished(self, instance: Instance) -> bool:
        return self.state.stages[instance.id].status not in DONE

    def _followers_of(self, start: str | None) -> set[str]:
        """The ids of a stage and of all stages that depend on it."""
        followers: set[str] = set()
        for instance in self.plan.instances:
            if start is not None and (
                start in names_of(instance) or followers & set(instance.needs)
            ):
                followers.add(instance.id)
        return followers

    def _why_left_out(self, instance: Instance) -> str:
        """Why the stage is skipped, by the pipeline's rules or --skip. Empty if it is not
        skipped."""
        if names_of(instance) & set(self.choice.skip) and self._is_unfinished(instance):
            return "skipped by --skip"

        outer = self.pipeline.config.stages.get(instance.path[0]) if instance.path else None
        if outer is not None and outer.stop is not None and instance.round > 1:
            reason = why_rounds_end(self, instance, outer.stop)
            if reason:
                return reason

        for text in instance.stage.when:
            test = condition(text)
            reference = parse_reference(test.reference.removeprefix("${").removesuffix("}"))
            value = self._meaning(instance, reference, [])
            if not isinstance(value, (int, float)) or not test.holds(float(value)):
                return f"{text} does not hold ({value})"

        return ""

    # Whether it is as it was.

    def _ready(self, instance: Instance, state: StageState) -> StageStart | None:
        inputs: list[Input] = []
        job, setting = self._job(instance, inputs)
        if job.config is not None:
            place = f"{self.pipeline.where}: {self.recipes.place(instance)}"
            self.leaks.add_stage(job.config, place, instance.kind.trains_on)

        digest = digest_of(setting)
        is_same = state.digest == digest and instance.id not in self._rerun
        if state.status == "finished" and is_same and self._has_all_outputs(state):
            return None

        is_begun = is_same and state.status in ("running", "stopped", "failed")
        if is_begun and instance.kind.is_finished(job):
            # The process was killed between the stage's end and the record of it.
            self.take_outputs(instance, job, inputs)
            return None

        if is_begun:
            job = replace(job, resume=instance.kind.can_resume(job))
        elif state.status != "waiting" and state.digest:
            self.notes.append(
                f"{instance.id}: runs again: {self._why_rerun(instance, state, setting)}"
            )

        self._rerun.discard(instance.id)
        return StageStart(instance, job, setting, inputs)

    def _why_rerun(self, instance: Instance, state: StageState, setting: Mapping[str, str]) -> str:
        if state.digest != digest_of(setting):
            return what_changed(state.setting, setting)
        return "as asked" if instance.id in self._rerun else "its output is gone, or was changed"

    def _has_all_outputs(self, state: StageState) -> bool:
        """Whether all outputs of the stage still exist."""
        return all(self.path_of(output).exists() for output in state.outputs.values())

    def path_of(self, output: StageOutput) -> Path:
        """The absolute path of an output."""
        return self.dir / output.path

    def _job(self, instance: Instance, inputs: list[Input]) -> tuple[Job, dict[str, str]]:
        """The stage with every reference resolved, and its setting. Raises NothingThereError,
        ConfigError."""
        stage = instance.stage
        folder = stage_folder(self.dir, instance)
        digests = {str(folder): "stage.folder"}

        def meaning(reference: StageReference) -> str | float:
            before = len(inputs)
            value = self._meaning(instance, reference, inputs)
            for used in inputs[before:]:
                digests[str(value)] = f"{used.stage}:{used.sha256}"
            return value

        model: Any = self._measured_model(instance, meaning, inputs)
        if stage.model is not None:
            model = str(replace_references(stage.model, meaning))

        written = self._options(instance)
        options = read_options(instance, replace_references(written, meaning))
        config: RunConfig | None = None
        tree: Mapping[str, Any] = {}
        if instance.kind.reads_recipe:
            base_tree, home = self.recipes.tree(
                instance, model if instance.measures is None else None
            )
            tree = replace_references(
                self._with_made_texts(base_tree, instance, digests, inputs), meaning
            )
            config = self._read_recipe(instance, tree, home, folder)
            instance.kind.check(config, options, model)

        recipe = self.dir / "recipes" / f"{instance.id}.yaml" if config is not None else None
        job = Job(instance.id, folder, options, recipe, config, model, take=stage.take)

        setting = dict(as_setting(replaced_texts(without_places(tree), digests), "config"))
        setting_options = replaced_texts(replace_references(written, meaning), digests)
        setting |= dict(as_setting(setting_options, "options"))
        setting |= {"kind": stage.kind, "take": stage.take, **files_outside(config, self.dir)}
        if config is not None:
            setting["run.seed"] = str(config.run.seed)

        inputs[:] = {(used.stage, used.key): used for used in inputs}.values()
        for used in inputs:
            setting[f"input.{used.stage}.{used.key}"] = used.sha256

        return job, setting

    def _read_recipe(
        self, instance: Instance, tree: Mapping[str, Any], home: Path, folder: Path
    ) -> RunConfig:
        """The recipe as the stage's program would read it. An engine that a stage chooses for the
        machine does not count as an input of the stage."""
        if not (instance.kind.chooses_engine and installed_engines()):
            return self.recipes.read(instance, tree, home, folder)

        def load(overrides: list[str]) -> RunConfig:
            engine = dict(sources.split_override(text) for text in overrides)
            return self.recipes.read(
                instance, sources.overlay(tree, nest_keys(engine)), home, folder
            )

        return load_with_engine(load, note=self._note_once, is_separate=False)

    def _note_once(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self.notes.append(line)

    def _options(self, instance: Instance) -> Mapping[str, Any]:
        if instance.measures is None:
            return instance.stage.options
        held_out = self.pipeline.config.held_out
        assert held_out is not None
        return {"attempts": held_out.attempts, "temperature": held_out.temperature}

    def _measured_model(
        self,
        instance: Instance,
        meaning: Callable[[StageReference], str | float],
        inputs: list[Input],
    ) -> str | None:
        """The checkpoint of a measurement. None for the recipe's own model."""
        if instance.measures in (None, START):
            return None
        assert instance.measures is not None
        if self.state.stages[instance.measures].status != "finished":
            raise MissingOutputError(f"{instance.measures} was left out")

        measured = self.plan.by_id[instance.measures]
        if not measured.kind.makes_texts:
            return str(self._output(instance.measures, "checkpoint", inputs))

        began_with = measured.stage.model
        return None if began_with is None else str(replace_references(began_with, meaning))

    def _with_made_texts(
        self,
        tree: Mapping[str, Any],
        instance: Instance,
        digests: dict[str, str],
        inputs: list[Input],
    ) -> Mapping[str, Any]:
        """The recipe of a measurement with the texts that the measured stage has made."""
        if instance.measures in (None, START):
            return tree
        assert instance.measures is not None
        if not self.plan.by_id[instance.measures].kind.makes_texts:
            return tree

        file = str(self._output(instance.measures, "file", inputs))
        digests[file] = f"{instance.measures}:{inputs[-1].sha256}"
        return sources.overlay(tree, {"agent": {"texts": file}})

    def _meaning(
        self, instance: Instance, reference: StageReference, inputs: list[Input]
    ) -> str | float:
        """The value of a reference. Raises NothingThereError."""
        if reference.scope == "round":
            return instance.round
        if reference.scope == "stage":
            return str(stage_folder(self.dir, instance))

        for target in self.plan.targets(reference, instance):
            if self.state.stages[target].status == "finished":
                return self._output(target, reference.key, inputs)

        if isinstance(reference.fallback, StageReference):
            return self._meaning(instance, reference.fallback, inputs)
        if reference.fallback is None:
            raise MissingOutputError(f"${{{reference.text}}} was left out")

        return reference.fallback

    def _output(self, target: str, key: str, inputs: list[Input]) -> str | float:
        """An output of a finished stage, and its current digest."""
        state = self.state.stages[target]
        if key == "folder":
            folder = stage_folder(self.dir, self.plan.by_id[target])
            name = state.outputs["folder"].sha256 if "folder" in state.outputs else state.digest
            inputs.append(Input(stage=target, key=key, sha256=name))
            return str(folder)

        if key in state.outputs:
            path = self.path_of(state.outputs[key])
            inputs.append(Input(stage=target, key=key, sha256=digest_of_path(path) or "missing"))
            return str(path)

        measurement = self.state.stages.get(f"{target}@{HELD_OUT}")
        numbers = {**(measurement.numbers if measurement else {}), **state.numbers}
        if key not in numbers:
            known_keys = ", ".join(sorted({*state.outputs, *numbers}))
            raise ConfigError(
                f"{self.pipeline.where}: ${{stages.{target}.{key}}}: {target} has no {key}: it "
                f"has {known_keys}"
            )

        return numbers[key]

    # What becomes of it.

    def begin(self, decided: StageStart) -> Job:
        """Creates the folder and the recipe's file, and records that the stage runs."""
        instance = decided.instance
        job = decided.job
        if not job.resume and job.folder.exists():
            shutil.rmtree(job.folder)

        with must_write(job.folder):
            if job.recipe is not None and job.config is not None:
                job.recipe.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(job.recipe, to_yaml(job.config))
            if not instance.kind.makes_folder:
                job.folder.mkdir(parents=True, exist_ok=True)

        before = self.state.stages[instance.id]
        self.state.stages[instance.id] = StageState(
            kind=instance.stage.kind,
            status="running",
            digest=digest_of(decided.setting),
            setting=decided.setting,
            inputs=decided.inputs,
            seed=None if job.config is None else job.config.run.seed,
            starts=before.starts + 1,
            began_at=before.began_at if job.resume else time.time(),
            wall_s=before.wall_s if job.resume else 0.0,
        )
        self.running.add(instance.id)
        self.write()

        return job

    def record_end(
        self, decided: StageStart, code: int, seconds: float, *, is_asked_to_stop: bool = False
    ) -> str:
        """Records how the stage's process ended. Returns the failure, or an empty text.
        `is_asked_to_stop`: the process got a signal to stop, so its failure is a stop. A Python
        that is interrupted while it starts exits with code 1."""
        instance = decided.instance
        state = self.state.stages[decided.instance.id]
        state.wall_s += seconds
        self.running.discard(instance.id)

        how = ""
        if code == 0 and instance.kind.is_finished(decided.job):
            try:
                self.take_outputs(instance, decided.job, decided.inputs)
                return ""
            except ConfigError as error:
                how = str(error)

        state.ended_at = time.time()
        is_clean_stop = code in (130, 143)
        if code and not is_clean_stop:
            how = f"killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        elif not code and not how:
            how = (
                "exited with code 0, but without the output of a stage of the kind "
                f"{instance.stage.kind}"
            )

        is_stopped = is_clean_stop or (is_asked_to_stop and code != 0)
        state.status = "stopped" if is_stopped else "failed"
        state.why = how
        self._settle(instance)
        return "" if is_stopped else how

    def take_outputs(self, instance: Instance, job: Job, inputs: list[Input]) -> None:
        """Records the stage's outputs. Raises ConfigError for a damaged folder."""
        state = self.state.stages[instance.id]
        products = instance.kind.made(job)
        outputs = {"folder": StageOutput(path=self._within(job.folder), sha256=uuid.uuid4().hex)}
        for key, path in products.outputs.items():
            outputs[key] = StageOutput(path=self._within(path), sha256=digest_of_path(path) or "")

        state.numbers = dict(products.numbers)
        if instance.measures is not None:
            state.numbers |= add_gains(self, instance)

        state.outputs = outputs
        state.inputs = inputs
        state.tokens = products.tokens
        state.cost = products.cost
        state.status = "finished"
        state.why = products.remark
        state.ended_at = time.time()
        self._settle(instance)

    def _within(self, path: Path) -> str:
        return os.path.relpath(path, self.dir)


def names_of(instance: Instance) -> set[str]:
    """The names by which a user can refer to an instance: its id, its name, its group."""
    whose = instance.measures if instance.measures is not None else instance.id
    return {
        instance.id,
        whose,
        whose.partition(".")[0],
        ".".join(part for part in instance.path if part != "stages"),
    }
