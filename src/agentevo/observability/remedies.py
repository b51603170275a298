"""Advice of warnings and checks that fits the recipe. It names no key that the recipe refuses, and
none that is already set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remedies:
    """Parts of sentences. The defaults fit any recipe."""

    answer_shorter: str = "ask for shorter answers in the agent's prompt"
    show_format: str = "show the format with an example in the agent's prompt"
    tasks: str = "(the environment's options, or other tasks)"
    """Where tasks come from."""
    add_demonstrations: str = "teach it from conversations first (`agentevo sft`)"
    """How a policy learns what it does not find by itself."""
    raise_entropy: str = "set algorithm.entropy_coef (0.001 to 0.01)"
    """What keeps entropy up."""
    lower_entropy: str = "lower trainer.learning_rate"
    """What keeps entropy down."""
    limit_drift: str = "set algorithm.kl_coef (0.001 to 0.01)"
    """What keeps the policy near its start."""
    widen_clipping: str = "set algorithm.clip_high=0.28"
    """What allows rare tokens to grow. Empty if the recipe already does."""
    keep_groups: str = ""
    """What gives groups without spread their entropy bonus. Empty if the recipe keeps such
    groups."""
    raise_precision: str = "set model.dtype=float32"
    """What rounds less. Empty in float32."""


def remedies_of(tree: Mapping[str, Any]) -> Remedies:
    """The remedies of a resolved recipe (config.yaml, or `RunConfig.model_dump`). A missing or
    damaged value counts as unknown."""
    if not isinstance(tree.get("agent"), Mapping):
        return Remedies()

    agent = tree["agent"]
    algorithm = _section(tree, "algorithm")
    has_environment = tree.get("environment") is not None
    has_prompt = "system_prompt" in agent
    episodes = _section(tree, "cold_start").get("episodes")
    entropy = bool(algorithm.get("entropy_coef"))
    clip = algorithm.get("clip_high")
    where = "agent.system_prompt" if has_prompt else "the agent's own prompt"

    teach = Remedies.add_demonstrations
    if has_environment:
        what = "more demonstrations" if episodes else "demonstrations"
        teach = f"show it {what} first (cold_start.episodes)"

    return Remedies(
        answer_shorter=f"ask for shorter answers in {where}",
        show_format=f"show the format with an example in {where}",
        tasks="(environment options)" if has_environment else "(tasks.train, or the agent's own)",
        add_demonstrations=teach,
        raise_entropy=("raise algorithm.entropy_coef" if entropy else Remedies.raise_entropy),
        lower_entropy=Remedies.lower_entropy + (" or algorithm.entropy_coef" if entropy else ""),
        limit_drift="raise algorithm.kl_coef" if algorithm.get("kl_coef") else Remedies.limit_drift,
        widen_clipping=""
        if isinstance(clip, int | float) and clip >= 0.28
        else Remedies.widen_clipping,
        keep_groups=(
            "keep groups without spread for their entropy bonus (algorithm.drop_zero_variance="
            "false)"
            if algorithm.get("drop_zero_variance")
            else ""
        ),
        raise_precision=""
        if _section(tree, "model").get("dtype") == "float32"
        else Remedies.raise_precision,
    )


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}
