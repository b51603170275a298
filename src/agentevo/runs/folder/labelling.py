"""Selects the next attempts to annotate, and turns people's answers into records (annotations.py),
for every interface alike.

Attempts without an annotation come first, and among them the most surprising: those whose outcome
is unlikely given the other attempts of the group.

    surprise = -log2 p,    p = (n_same + 1) / (n + 2)

for an attempt with n other attempts in its group, of which n_same have the same outcome (success or
not), by Laplace's rule of succession. Among equals, the attempt whose reward is farther from its
group's mean comes first, then the newest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, cast

from agentevo.errors import ConfigError
from agentevo.runs.folder.annotation_export import last_answer
from agentevo.runs.folder.annotations import (
    MAX_NOTE,
    MAX_REPLY,
    Annotation,
    Annotations,
    Preference,
)
from agentevo.store.records import TrajectorySummary
from agentevo.types import Trajectory

Verdict = Literal["right", "wrong", ""]


def surprises(summaries: Sequence[TrajectorySummary]) -> dict[str, tuple[float, float]]:
    """The (bits, distance from the mean reward) of each completed attempt, by its id."""
    groups: dict[str, list[TrajectorySummary]] = defaultdict(list)
    for summary in summaries:
        if summary.status == "completed":
            groups[summary.group_id].append(summary)

    surprise_by_id = {}
    for members in groups.values():
        mean = sum(member.reward for member in members) / len(members)
        for summary in members:
            same = sum(peer.success == summary.success for peer in members) - 1
            bits = -math.log2((same + 1) / (len(members) + 1))
            surprise_by_id[summary.id] = (bits, abs(summary.reward - mean))

    return surprise_by_id


def attempts_to_label(
    summaries: Sequence[TrajectorySummary], annotations: Annotations
) -> list[str]:
    """The ids of the completed attempts without an annotation, in the order in which they are
    shown."""
    surprise = surprises(summaries)
    unlabelled = [
        summary
        for summary in summaries
        if summary.id in surprise and summary.id not in annotations.attempts
    ]
    unlabelled.sort(
        key=lambda summary: (
            *(-part for part in surprise[summary.id]),
            -summary.written_at,
            summary.id,
        )
    )
    return [summary.id for summary in unlabelled]


def pairs_to_compare(
    summaries: Sequence[TrajectorySummary], annotations: Annotations
) -> list[tuple[str, str]]:
    """Two attempts of each group that were not compared yet: the best and the worst if rewards
    differ, else the first two. The groups with the largest surprise come first."""
    surprise = surprises(summaries)
    groups: dict[str, list[TrajectorySummary]] = defaultdict(list)
    for summary in summaries:
        if summary.id in surprise:
            groups[summary.group_id].append(summary)

    scored_pairs = []
    for members in groups.values():
        if len(members) < 2:
            continue

        ranked = sorted(members, key=lambda member: (member.reward, member.attempt))
        first = ranked[-1]
        second = ranked[0]
        if frozenset((first.id, second.id)) not in annotations.pairs:
            most = max(surprise[member.id] for member in members)
            # The better one is not always shown first, because that would be a hint.
            pair = (
                (first.id, second.id) if first.attempt < second.attempt else (second.id, first.id)
            )
            scored_pairs.append((most, pair))

    scored_pairs.sort(key=lambda scored: (*(-part for part in scored[0]), scored[1]))
    return [pair for _, pair in scored_pairs]


def annotation_of(
    trajectory: Trajectory,
    *,
    verdict: str = "",
    note: str = "",
    reply: str | None = None,
    who: str = "",
    id: str = "",
) -> Annotation:
    """The record of a person's annotation of an attempt, with the scorers' results. Raises
    ConfigError if it can't be stored, or if there is no last reply to edit."""
    if verdict not in ("right", "wrong", ""):
        raise ConfigError("a verdict is right, wrong, or none")

    if len(note) > MAX_NOTE or len(reply or "") > MAX_REPLY:
        raise ConfigError(
            f"a note has at most {MAX_NOTE:,} characters, an edited reply {MAX_REPLY:,}"
        )

    if reply is not None and last_answer(trajectory) is None:
        raise ConfigError("this attempt has no reply to edit")

    return Annotation(
        attempt=trajectory.id,
        who=who,
        id=id,
        verdict=cast("Verdict", verdict),
        note=note.strip(),
        reply=reply,
        task=trajectory.task_id,
        reward=trajectory.reward,
        success=trajectory.success,
        parts=dict(trajectory.reward_parts),
    )


def preference_of(
    better: str,
    shown_first: Trajectory,
    shown_second: Trajectory,
    *,
    who: str = "",
    id: str = "",
) -> Preference:
    """The record of a person's choice between two attempts, by id. Empty for neither. Raises
    ConfigError for another id."""
    if better not in ("", shown_first.id, shown_second.id):
        raise ConfigError("`better` must be one of these two attempts, or neither")

    first, second = (
        (shown_second, shown_first) if better == shown_second.id else (shown_first, shown_second)
    )
    return Preference(
        better=first.id,
        worse=second.id,
        equal=not better,
        who=who,
        id=id,
        rewards=(first.reward, second.reward),
    )
