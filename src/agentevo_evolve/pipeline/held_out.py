"""The gain of a stage on the fixed held-out tasks: the difference between the model that the stage
began with and the model that it made, on the same tasks, with an interval. Also the rule that ends
rounds without a gain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentevo.errors import AgentEvoError
from agentevo_evolve.pipeline.plan import HELD_OUT, START, Instance
from agentevo_evolve.pipeline.references import StageReference, references_in

if TYPE_CHECKING:
    from agentevo_evolve.pipeline.next_stages import PipelineProgress
    from agentevo_evolve.pipeline.schema import StopSection


def add_gains(standing: PipelineProgress, instance: Instance) -> dict[str, float]:
    """`gain` over the model that the measured stage began with, and `gain_from_start` over the
    pipeline's first model, each with `_low` and `_high`. Empty if there is no such measurement."""
    assert instance.measures is not None
    if instance.measures == START:
        return {}

    numbers: dict[str, float] = {}
    parent = parent_of(standing, instance.measures)
    for name, before in (("gain", parent), ("gain_from_start", START)):
        state = standing.state.stages.get(f"{before}@{HELD_OUT}")
        if state is None or state.status != "finished":
            continue

        folders = [standing.dir / HELD_OUT / which for which in (before, instance.measures)]
        gain = gain_between(folders[0], folders[1])
        if gain is not None:
            value, low, high = gain
            numbers |= {name: value, f"{name}_low": low, f"{name}_high": high}

    return numbers


def why_rounds_end(standing: PipelineProgress, of: Instance, rule: StopSection) -> str:
    """Why the rounds of a group end before this round. Empty if they continue."""
    best = _success(standing, f"{START}@{HELD_OUT}")
    without = 0
    for number in range(1, of.round):
        ids = [
            instance.id
            for instance in standing.plan.instances
            if instance.group == of.group
            and instance.round == number
            and instance.measures is not None
        ]
        successes = [value for name in ids if (value := _success(standing, name)) is not None]
        if not successes:
            continue

        if best is None or successes[-1] > best + rule.min_gain:
            best = successes[-1]
            without = 0
        else:
            without += 1

        if without >= rule.rounds_without_gain:
            return (
                f"rounds {number - without + 1} to {number} had no gain of more than "
                f"{100 * rule.min_gain:g} points over {100 * best:.1f}% of the held-out tasks"
            )

    return ""


def _success(standing: PipelineProgress, name: str) -> float | None:
    state = standing.state.stages.get(name)
    return None if state is None else state.numbers.get("success")


def parent_of(standing: PipelineProgress, measured: str) -> str:
    """The measured stage whose model a stage began with. START if there is none."""
    for _ in standing.plan.instances:
        instance = standing.plan.by_id[measured]
        sources = [instance.stage.model, instance.stage.options.get("source")]
        targets = [
            target
            for written in references_in(sources)
            for reference in with_fallbacks(written)
            for target in standing.plan.targets(reference, instance)
            if standing.state.stages[target].status == "finished"
        ]
        if not targets:
            return START

        measured = targets[0]
        if standing.plan.by_id[measured].is_measured:
            return measured

    return START


def with_fallbacks(reference: StageReference) -> list[StageReference]:
    """A reference and its fallbacks, in order."""
    fallback = reference.fallback
    return [reference, *(with_fallbacks(fallback) if isinstance(fallback, StageReference) else [])]


def gain_between(before: Path, after: Path) -> tuple[float, float, float] | None:
    """The increase of the success rate from the first folder of results to the second, and the ends
    of its interval. None if a folder can't be read, or if the two share no task."""
    from agentevo.runs.evaluation.results import ResultsFolder
    from agentevo.runs.evaluation.summary import summarise

    try:
        lines = [list(ResultsFolder(path).attempts().values()) for path in (before, after)]
    except (AgentEvoError, OSError):
        return None

    if not all(lines):
        return None

    differences = summarise({"before": lines[0], "after": lines[1]}, 1, {})["differences"][0]
    pass_at_one = differences["pass_at"]["1"]
    return (
        None
        if pass_at_one is None
        else (pass_at_one["value"], pass_at_one["low"], pass_at_one["high"])
    )
