"""What a recipe gets by default where another program draws the tokens.

An engine that is not the trainer's own computes the same weights in other kernels and number
formats, so the policy that sampled is not quite the policy that is trained (Yao et al., "Your
efficient RL framework secretly brings you off-policy RL training", 2025). Where `engine.type` is
not `torch`, the default of `algorithm.importance` is therefore `token_tis`, and that of
`algorithm.old_logprobs` `recomputed`, which it needs. Whoever gives one of the two keys decides,
and so does an algorithm whose loss weighs already, compares whole answers, or trains what no engine
has drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentevo.catalogue.preference_presets import PREFERENCE_PRESETS
from agentevo.catalogue.presets import PRESETS

OWN = "torch"
"""The engine that computes with the trainer's kernels."""
WEIGHS = "decoupled_ppo"
DEFAULTS = {"importance": "token_tis", "old_logprobs": "recomputed"}


def with_importance(tree: Any) -> Any:
    """A recipe's tree with the defaults above, where they hold; unreadable parts stay as they are,
    to be refused by who reads them."""
    if not isinstance(tree, Mapping):
        return tree

    engine = tree.get("engine")
    kind = engine.get("type", OWN) if isinstance(engine, Mapping) else getattr(engine, "type", OWN)
    given = tree.get("algorithm", {})
    if kind == OWN or not isinstance(given, Mapping):
        return tree

    name = given.get("name", "grpo")
    if not isinstance(name, str) or name in PREFERENCE_PRESETS or name not in PRESETS:
        return tree

    preset = PRESETS[name]
    algorithm = {**preset.keys, **given}
    loss = algorithm.get("policy_loss") or preset.policy_loss
    if loss == WEIGHS or algorithm.get("train_observations"):
        return tree

    if not DEFAULTS.keys() & algorithm.keys():
        algorithm = {**given, **DEFAULTS}
    elif "importance" not in algorithm and algorithm["old_logprobs"] == DEFAULTS["old_logprobs"]:
        algorithm = {**given, "importance": DEFAULTS["importance"]}
    else:
        return tree

    return {**tree, "algorithm": algorithm}
