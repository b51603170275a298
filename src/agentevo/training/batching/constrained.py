"""Recomputes the masks of turns that were sampled under a grammar. With these masks, the trainer's
distribution is exactly the one that the tokens were sampled from. If the masks can't be recomputed
identically (another version of llguidance), the turn becomes context and is not trained on, and
`trainer/unmasked_tokens` counts its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from agentevo.errors import GrammarError, TrainingError
from agentevo.models.grammar import Grammars
from agentevo.types import TokenMasks, Trajectory

LOG = logging.getLogger(__name__)

TurnMasks = Mapping[int, TokenMasks | None]
"""Turn -> the masks of its completion; None if they can't be recomputed. Turns without a grammar
are left out."""


def masks_of(
    trajectories: Sequence[Trajectory], grammars: Grammars | None
) -> tuple[dict[str, TurnMasks], dict[str, float]]:
    """Trajectory id -> the masks of its turns under a grammar, and metrics. Equal masks share one
    array. Raises TrainingError if the trainer has no grammars."""
    pool: dict[bytes, np.ndarray] = {}
    masks: dict[str, TurnMasks] = {}
    num_unmasked = 0
    problem = ""
    for trajectory in trajectories:
        of_turns: dict[int, TokenMasks | None] = {}
        for turn in trajectory.turns:
            if turn.constraint is None or turn.overrides is not None:
                continue

            if grammars is None:
                raise TrainingError(
                    f"turn {turn.index} of {trajectory.id} was sampled under a grammar, which "
                    f"this trainer can't apply: give Trainer(grammars=Grammars(tokenizer, "
                    f"vocabulary))"
                )

            try:
                turn_masks = grammars.masks_of(turn.constraint, turn.completion_ids)
                of_turns[turn.index] = turn_masks._replace(
                    table=[pool.setdefault(mask.tobytes(), mask) for mask in turn_masks.table]
                )
            except GrammarError as error:
                of_turns[turn.index] = None
                num_unmasked += len(turn.completion_ids)
                problem = str(error)

        if of_turns:
            masks[trajectory.id] = of_turns

    if num_unmasked:
        LOG.warning(
            "%d tokens that were sampled under a grammar are not trained: %s", num_unmasked, problem
        )

    return masks, {"trainer/unmasked_tokens": float(num_unmasked)} if masks else {}


def join_masks(parts: Sequence[tuple[int, TokenMasks | None]]) -> TokenMasks | None:
    """Joins the masks of a sample's stretches of tokens. Each stretch comes with its length."""
    if all(masks is None for _, masks in parts):
        return None

    table: list[np.ndarray] = []
    rows = []
    for length, masks in parts:
        if masks is None:
            rows.append(np.full(length, -1, dtype=np.int32))
        else:
            rows.append(masks.rows + np.int32(len(table)))
            table += masks.table

    return TokenMasks(table, np.concatenate(rows))
