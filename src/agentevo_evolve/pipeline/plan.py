"""From named stages to instances, in order. Every round of a repeated stage is a separate instance,
and every measured model has an instance that measures it.

    a stage         rl
    a round         spin.2        of a group: improve.2.rl
    a measurement   rl@held_out   of the model that the pipeline begins with: start@held_out

Invariant: an instance comes after all instances that it waits for. This module reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from agentevo.errors import ConfigError
from agentevo.runtime.registry import nearest
from agentevo_evolve.pipeline.kinds import StageKind, stage_kinds
from agentevo_evolve.pipeline.references import (
    ReferenceProblem,
    StageReference,
    condition,
    references_in,
)
from agentevo_evolve.pipeline.schema import PipelineConfig, StageConfig

HELD_OUT = "held_out"
START = "start"
"""The name of the model that the pipeline begins with."""
GAINS = ("success", "reward", "gain", "gain_from_start")
"""The numbers of a measurement, without the ends of their intervals."""


@dataclass(frozen=True)
class Instance:
    """A stage, a round of a stage, or a measurement."""

    id: str
    path: tuple[str, ...]
    """The place in the file: the names below `stages`."""
    stage: StageConfig
    kind: StageKind
    group: str | None = None
    """The repeated stage that this instance is a round of, or belongs to."""
    round: int = 1
    needs: tuple[str, ...] = ()
    """The ids of instances that must be done or skipped before this one."""
    measures: str | None = None
    """The id of the instance whose checkpoint this one measures. START for the first model."""

    @property
    def is_measured(self) -> bool:
        """Whether another instance measures its model."""
        measure = self.stage.measure
        return self.measures is None and (self.kind.measured if measure is None else measure)


@dataclass(frozen=True)
class PipelinePlan:
    """All instances, each after those that it waits for."""

    instances: tuple[Instance, ...]
    by_id: Mapping[str, Instance] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_id", {instance.id: instance for instance in self.instances})

    def targets(self, reference: StageReference, of: Instance) -> list[str]:
        """The ids of the instances that a reference can mean. The first finished one counts. Empty
        if there can be none, as in the first round. Raises ReferenceProblem for an unknown name."""
        if reference.scope in ("stage", "round"):
            return []
        if reference.scope == "previous":
            return self._of_rounds(reference, of, of.group, of.round - 1)

        names = reference.names
        if of.group is not None and len(names) == 1:
            inner = instance_id(of.group, of.round, names[0])
            if inner in self.by_id:
                return [inner]

        if len(names) == 1 and names[0] in self.by_id:
            return [names[0]]

        return self._of_rounds(reference, of, names[0], None)

    def _of_rounds(
        self, reference: StageReference, of: Instance, group: str | None, last: int | None
    ) -> list[str]:
        inner = reference.names[-1] if reference.scope == "previous" and reference.names else ""
        if reference.scope == "stages" and len(reference.names) == 2:
            inner = reference.names[1]

        rounds = [
            instance
            for instance in self.instances
            if instance.group == group and group is not None and instance.measures is None
        ]
        in_round = [
            instance
            for instance in rounds
            if instance.id == instance_id(group or "", instance.round, inner)
        ]
        if not in_round:
            raise ReferenceProblem(_unknown_stage(self, reference, of))

        earlier = [instance for instance in in_round if last is None or instance.round <= last]
        return [planned.id for planned in sorted(earlier, key=lambda instance: -instance.round)]


def _unknown_stage(plan: PipelinePlan, reference: StageReference, of: Instance) -> str:
    if reference.scope == "previous" and of.group is None:
        return f"${{{reference.text}}}: only a repeated stage has a previous round: set repeat"

    known_names = list(
        dict.fromkeys(instance.path[-1] for instance in plan.instances if instance.measures is None)
    )
    known_names += [
        group for group in dict.fromkeys(o.group for o in plan.instances) if group is not None
    ]
    stage_name = ".".join(reference.names)
    guess = nearest(reference.names[-1] if reference.names else "", known_names)
    hint = f"did you mean {guess}? " if guess else ""

    return (
        f"${{{reference.text}}}: no stage is called {stage_name or 'this'!r}: {hint}the stages "
        f"are {', '.join(sorted(set(known_names)))}"
    )


def instance_id(group: str, round_: int, inner: str) -> str:
    """The id of an instance: `spin.2`, or `improve.2.rl` for a stage in a group."""
    return ".".join([group, str(round_), *([inner] if inner else [])])


def make_plan(config: PipelineConfig, where: str) -> PipelinePlan:
    """Raises ConfigError with a line for each problem: unknown kinds, names and keys, and stages
    that wait for each other."""
    problems: list[str] = []
    bare: list[Instance] = []
    for name, stage in config.stages.items():
        for number in range(1, stage.repeat + 1):
            for inner, stage_config in (stage.stages or {"": stage}).items():
                path = (name, *(["stages", inner] if inner else []))
                try:
                    kind = stage_kinds.get(stage_config.kind)
                except ConfigError as error:
                    problems.append(f"{_place(path)}.kind: {error}")
                    continue

                repeated = stage.is_repeated
                id_ = instance_id(name, number, inner) if repeated else name
                group = name if repeated else None
                bare.append(Instance(id_, path, stage_config, kind, group, number))

    if not problems:
        plan = PipelinePlan(tuple(bare))
        needs = {instance.id: _needs(plan, instance, config, problems) for instance in bare}
        if not problems:
            measured = tuple(_with_measurements(bare, needs, config))
            return PipelinePlan(_sort_instances(measured, where))

    lines = dict.fromkeys(problems)
    raise ConfigError("\n".join(f"{where}: {line}" for line in lines))


def texts_of(instance: Instance, config: PipelineConfig) -> list[object]:
    """All texts of a stage that can contain references, including the pipeline's `config`."""
    stage = instance.stage
    common = [config.config] if instance.kind.reads_recipe else []
    reference = [] if stage.reference == "start" else [stage.reference]
    return [*common, stage.config, stage.model, stage.options, list(stage.when), *reference]


def _needs(
    plan: PipelinePlan, waiting: Instance, config: PipelineConfig, problems: list[str]
) -> dict[str, None]:
    """The ids that the instance waits for, in order. Appends errors to `problems`."""
    place = _place(waiting.path)
    needs = dict[str, None]()
    try:
        for text in waiting.stage.when:
            condition(text)
        for reference in references_in(texts_of(waiting, config)):
            needs |= _referenced_stages(plan, waiting, reference)
    except (ReferenceProblem, ValueError) as error:
        problems.append(f"{place}: {error}")

    outer = config.stages[waiting.path[0]]
    for name in dict.fromkeys([*waiting.stage.needs, *outer.needs]):
        parts = tuple(name.split("."))
        needed = StageReference("stages", parts[:2], "folder")
        try:
            needs |= dict.fromkeys(_all_of(plan, waiting, name) or plan.targets(needed, waiting))
        except ReferenceProblem as error:
            problems.append(f"{place}.needs: {str(error).partition(': ')[2]}")

    if waiting.round > 1:  # rounds follow one another
        needs |= {
            instance.id: None
            for instance in plan.instances
            if instance.group == waiting.group and instance.round == waiting.round - 1
        }

    if waiting.id in needs:
        problems.append(f"{place}: refers to itself: name another stage, or ${{stage.folder}}")

    return needs


def _all_of(plan: PipelinePlan, of: Instance, name: str) -> list[str]:
    """All instances of a group's last round."""
    rounds = [
        instance for instance in plan.instances if instance.group == name and name != of.group
    ]
    return [
        instance.id
        for instance in rounds
        if instance.round == max(candidate.round for candidate in rounds)
    ]


def _referenced_stages(
    plan: PipelinePlan, instance: Instance, reference: StageReference
) -> dict[str, None]:
    """The instances that a reference waits for, including those of its fallback. Raises
    ReferenceProblem."""
    needs: dict[str, None] = {}
    if isinstance(reference.fallback, StageReference):
        needs |= _referenced_stages(plan, instance, reference.fallback)
    if reference.scope == "round" and instance.group is None:
        raise ReferenceProblem("${round}: only a repeated stage has rounds: set repeat")
    if reference.scope in ("round", "stage"):
        return needs

    targets = plan.targets(reference, instance)
    if not targets and reference.fallback is None:
        raise ReferenceProblem(
            f"${{{reference.text}}}: the first round has no previous one: add a fallback after a "
            f"bar, ${{{reference.text}|stages.NAME.{reference.key}}} or "
            f"${{{reference.text}|MODEL}}"
        )

    for target in targets:
        _check_key(plan.by_id[target], reference)
        is_gain = reference.key.partition("_low")[0].partition("_high")[0] in GAINS
        is_measured = is_gain and plan.by_id[target].is_measured
        needs[f"{target}@{HELD_OUT}" if is_measured else target] = None

    return needs


def _check_key(target: Instance, reference: StageReference) -> None:
    """Raises ReferenceProblem for a key that the stage never has."""
    kind = target.kind
    key = reference.key
    if key in ("checkpoint", "file") and key not in {*kind.makes, *_stated_outputs(target)}:
        keys = ", ".join(["folder", *kind.makes, *_stated_outputs(target)])
        raise ReferenceProblem(
            f"${{{reference.text}}}: a stage of the kind {target.stage.kind} makes no {key}; "
            f"it has {keys}"
        )

    if key in GAINS and not target.is_measured and target.stage.kind not in ("evaluate", "score"):
        raise ReferenceProblem(
            f"${{{reference.text}}}: the stage is not measured on the held-out tasks: set "
            "measure: true there"
        )


def _stated_outputs(target: Instance) -> list[str]:
    """The outputs that the stage's own options name, as those of `command` do."""
    return [key for key in ("checkpoint", "file") if target.stage.options.get(key) is not None]


def _with_measurements(
    bare: Sequence[Instance], needs: Mapping[str, Mapping[str, None]], config: PipelineConfig
) -> Iterator[Instance]:
    """The instances with the ids that they need, and the instances that measure them."""
    kind = stage_kinds.get("evaluate")
    held_out = config.held_out is not None
    measured = [instance for instance in bare if instance.is_measured] if held_out else []
    if measured:
        yield Instance(
            f"{START}@{HELD_OUT}", (), StageConfig(kind="evaluate"), kind, measures=START
        )

    by_id = {instance.id: instance for instance in measured}
    for instance in bare:
        waits_for = {
            need if need in needs or need.partition("@")[0] in by_id else need.partition("@")[0]: 0
            for need in needs[instance.id]
        }
        if instance.round > 1 and config.stages[instance.path[0]].stop is not None:
            waits_for |= {f"{need}@{HELD_OUT}": 0 for need in list(waits_for) if need in by_id}

        yield replace(instance, needs=tuple(waits_for))
        if instance.id in by_id:
            yield replace(
                instance,
                id=f"{instance.id}@{HELD_OUT}",
                stage=StageConfig(kind="evaluate", config=instance.stage.config),
                kind=kind,
                needs=(instance.id, f"{START}@{HELD_OUT}"),
                measures=instance.id,
            )


def _sort_instances(instances: Sequence[Instance], where: str) -> tuple[Instance, ...]:
    """Each instance after those that it waits for, otherwise in the order of the file. Raises
    ConfigError for a cycle."""
    place = {instance.id: number for number, instance in enumerate(instances)}
    waits = {
        instance.id: {need for need in instance.needs if need in place} for instance in instances
    }
    after: dict[str, list[str]] = {instance.id: [] for instance in instances}
    for name, needs in waits.items():
        for need in needs:
            after[need].append(name)

    ready: list[int] = []
    for name, needs in waits.items():
        if not needs:
            heappush(ready, place[name])

    ordered: list[Instance] = []
    while ready:
        earliest = instances[heappop(ready)]
        ordered.append(earliest)
        for name in after[earliest.id]:
            waits[name].discard(earliest.id)
            if not waits[name]:
                heappush(ready, place[name])

    if len(ordered) < len(instances):
        ring = _find_cycle({name: needs for name, needs in waits.items() if needs})
        raise ConfigError(
            f"{where}: stages: {' -> '.join(ring)} wait for each other, so none can start: remove "
            "one of these references or needs"
        )

    return tuple(ordered)


def _find_cycle(waits: Mapping[str, set[str]]) -> list[str]:
    """A cycle of waiting names: each waits for the next."""
    name = next(iter(waits))
    path = list[str]()
    while name not in path:
        path.append(name)
        name = next(need for need in sorted(waits[name]) if need in waits)
    return [*path[path.index(name) :], name]


def _place(path: Sequence[str]) -> str:
    return ".".join(["stages", *path])
