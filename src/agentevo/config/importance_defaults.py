"""Defaults of a recipe if the policy that samples tokens differs slightly from the trained one.

There are two causes. An engine that is not the trainer's own computes the same weights in other
kernels and number formats (Yao et al., "Your efficient RL framework secretly brings you off-policy
RL training", 2025). A base in 8 bits rounds a token's activations by the largest activation of all
tokens in the same computation (LLM.int8(), arXiv 2208.07339, section 3), and these are other tokens
in sampling than in an update. In both cases the default of `algorithm.importance` is `token_tis`,
and that of `algorithm.old_logprobs` is `recomputed`, which it needs. The defaults do not apply if
the recipe sets one of the two keys, or if the algorithm's loss already weighs, compares whole
answers, or trains tokens that no engine has sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentevo.algorithms.losses import POLICY_LOSSES
from agentevo.algorithms.presets import POLICY_PRESETS

OWN = "torch"
"""The engine that computes with the trainer's kernels."""
DEFAULTS = {"importance": "token_tis", "old_logprobs": "recomputed"}


def with_importance(tree: Any) -> Any:
    """A recipe's tree with the defaults above, if they apply. Unreadable parts are not changed;
    a later check refuses them."""
    if not isinstance(tree, Mapping):
        return tree

    engine = _value(tree, "engine", "type", default=OWN)
    quantize = _value(tree, "model", "lora", "quantize", default="none")
    section = tree.get("algorithm", {})
    if (engine == OWN and quantize != "8bit") or not isinstance(section, Mapping):
        return tree

    name = section.get("name", "grpo")
    if not isinstance(name, str) or name not in POLICY_PRESETS:
        return tree

    preset = POLICY_PRESETS[name]
    algorithm = {**preset.keys, **section}
    loss = POLICY_LOSSES.get(algorithm.get("policy_loss") or preset.parts["policy_loss"])
    if loss is None or loss.has_importance_weights or algorithm.get("train_observations"):
        return tree

    if not DEFAULTS.keys() & algorithm.keys():
        algorithm = {**section, **DEFAULTS}
    elif "importance" not in algorithm and algorithm["old_logprobs"] == DEFAULTS["old_logprobs"]:
        algorithm = {**section, "importance": DEFAULTS["importance"]}
    else:
        return tree

    return {**tree, "algorithm": algorithm}


def _value(tree: Any, *keys: str, default: str) -> Any:
    """The value at a path of mappings and sections; `default` if there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else getattr(tree, key, None)
    return default if tree is None else tree
