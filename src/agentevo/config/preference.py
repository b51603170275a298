"""Contradictions of a preference loss with other sections, and of pairs without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentevo.algorithms.presets import PREFERENCE_PRESETS
from agentevo.config.unused_keys import keys_off_default

if TYPE_CHECKING:
    from agentevo.config import RunConfig


def preference_contradictions(config: RunConfig) -> Iterator[str]:
    """Contradictions of the algorithm section with other sections, as 'what: remedy'."""
    section = config.algorithm
    data = config.data
    preference = section.preference()

    if data.pairs is not None and data.pairs_from is not None:
        yield (
            "data.pairs and data.pairs_from both set the training data: give only one of the two"
        )

    if preference is None:
        if data.given:
            yield (
                "data.pairs and data.pairs_from need a preference loss, and "
                f"algorithm.name={section.name} has none: "
                f"choose one of {', '.join(PREFERENCE_PRESETS)}, or remove them"
            )
        return

    if config.reward_model.name is not None:
        yield (
            f"reward_model.name scores single tokens, which algorithm.name={section.name} does "
            "not use: remove it"
        )

    if preference.pairs == "demonstrations" and data.pairs_from is not None:
        yield (
            "algorithm.pairs=demonstrations lets the environment's solver play sampled tasks, "
            "not stored groups: set algorithm.pairs=best_worst, or remove data.pairs_from"
        )

    idle = (
        []
        if data.pairs is None
        else keys_off_default(section, ("pairs", "pairs_per_group", "pair_margin"))
    )
    if idle:
        yield (
            f"data.pairs sets the pairs, so algorithm.{', algorithm.'.join(idle)} does nothing: "
            "remove it"
        )

    if preference.pairs == "demonstrations" and not data.given and config.environment is None:
        yield (
            "algorithm.pairs=demonstrations needs an environment with a solver: set "
            "algorithm.pairs=best_worst for an agent function"
        )
