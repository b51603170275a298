"""The RL maths: pure functions of tensors [sequences, tokens], each with its formula and source.

Names, formulas, hyper-parameters and what others call them: `agentevo.catalogue`, `agentevo list
algorithms`, docs/algorithms.md.
"""

from agentevo.algorithms.aggregation import aggregate, aggregation_weights
from agentevo.algorithms.divergence import AdaptiveKL, FixedKL, kl, kl_controller
from agentevo.algorithms.estimators import advantage
from agentevo.algorithms.importance import importance_weights
from agentevo.algorithms.losses import batch_statistics, policy_loss, policy_loss_terms
from agentevo.algorithms.preference import preference_loss
from agentevo.algorithms.value import value_loss
from agentevo.catalogue.preference_presets import (
    PREFERENCE_PRESETS,
    PreferenceAlgorithm,
    PreferencePreset,
    resolve_preference,
)
from agentevo.catalogue.presets import PRESETS, Algorithm, Preset, resolve_preset

__all__ = [
    "PREFERENCE_PRESETS",
    "PRESETS",
    "AdaptiveKL",
    "Algorithm",
    "FixedKL",
    "PreferenceAlgorithm",
    "PreferencePreset",
    "Preset",
    "advantage",
    "aggregate",
    "aggregation_weights",
    "batch_statistics",
    "importance_weights",
    "kl",
    "kl_controller",
    "policy_loss",
    "policy_loss_terms",
    "preference_loss",
    "resolve_preference",
    "resolve_preset",
    "value_loss",
]
