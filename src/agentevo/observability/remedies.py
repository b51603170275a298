"""Advice of warnings and checks that fits the recipe. It names no key that the recipe refuses, and
none that is already set."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Remedies:
    """Parts of sentences. The defaults fit any recipe."""

    answer_shorter: str = "ask for shorter answers in the agent's prompt"
    prompt: str = "the agent's prompt"
    """Where instructions are."""
    show_format: str = "show the format with an example in the agent's prompt"
    plain_format: str = ""
    """A format that is harder to break, and a comma. Empty if the agent has none."""
    tasks: str = "(the environment's options, or other tasks)"
    """Where tasks come from."""
    add_demonstrations: str = "teach it from conversations first (`agentevo sft`)"
    """How a policy learns what it does not find by itself."""
    teach_less: str = "begin RL from an earlier checkpoint of what taught it"
    """What leaves a taught policy something to explore."""
    reward_by_length: str = "let success decide more of the reward, and length less"
    """What makes a reward follow success rather than length."""
    reward_by_format: str = "let success decide more of the reward, and format less"
    limit_length: str = "lower sampling.max_new_tokens"
    check_judge: str = ""
    """What shows whether a judge can be deceived. Empty if no model scores attempts."""
    fresher_tokens: str = "raise rollout.staleness"
    """What loses fewer attempts because of their age."""
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


PENALTIES = ("format_penalty", "call_penalty", "code_penalty")
"""Keys of agents that make a reward depend on the form of replies."""


ADVISED = {"entropy_coef": 0.001, "kl_coef": 0.001, "clip_high": 0.28}
"""Keys of the section algorithm that advice may set, with a value. Some algorithms refuse them."""


def remedies_of(tree: Mapping[str, Any], refused: Collection[str] = ()) -> Remedies:
    """The remedies of a resolved recipe (`RunConfig.model_dump`). `refused`: the keys of ADVISED
    that its algorithm does not use. A missing or damaged value counts as unknown."""
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
    penalty = next((key for key in PENALTIES if agent.get(key)), None)

    teach = Remedies.add_demonstrations
    if has_environment:
        what = "more demonstrations" if episodes else "demonstrations"
        teach = f"show it {what} first (cold_start.episodes)"

    return Remedies(
        answer_shorter=f"ask for shorter answers in {where}",
        prompt=where,
        show_format=f"show the format with an example in {where}",
        plain_format="set agent.format=plain, "
        if agent.get("format") in ("answer", "think_answer")
        else "",
        tasks="(environment options)" if has_environment else "(tasks.train, or the agent's own)",
        add_demonstrations=teach,
        teach_less="teach it less first (cold_start.episodes, cold_start.until_loss)"
        if episodes
        else Remedies.teach_less,
        reward_by_length="set algorithm.length_shaping=none, or give success more weight"
        if algorithm.get("length_shaping", "none") != "none"
        else _weigh_success(tree, "length"),
        reward_by_format=f"lower agent.{penalty}, or give success more weight"
        if penalty
        else _weigh_success(tree, "format"),
        limit_length=Remedies.limit_length
        + (" or raise algorithm.length_weight" if algorithm.get("length_weight") else ""),
        check_judge="check the judge with `agentevo judge`" if _has_judge(tree) else "",
        fresher_tokens=_fresher_tokens(_section(tree, "rollout")),
        raise_entropy="begin from a policy with more entropy"
        if "entropy_coef" in refused
        else ("raise algorithm.entropy_coef" if entropy else Remedies.raise_entropy),
        lower_entropy=Remedies.lower_entropy + (" or algorithm.entropy_coef" if entropy else ""),
        limit_drift="begin again from an earlier checkpoint"
        if "kl_coef" in refused
        else ("raise algorithm.kl_coef" if algorithm.get("kl_coef") else Remedies.limit_drift),
        widen_clipping=""
        if "clip_high" in refused or (isinstance(clip, int | float) and clip >= 0.28)
        else Remedies.widen_clipping,
        keep_groups=(
            "keep groups without spread for their entropy bonus (algorithm.drop_zero_variance="
            "false)"
            if algorithm.get("drop_zero_variance")
            and algorithm.get("dynamic_sampling") in (None, 1)
            and "entropy_coef" not in refused
            else ""
        ),
        raise_precision=""
        if _section(tree, "model").get("dtype") == "float32"
        else Remedies.raise_precision,
    )


def _weigh_success(tree: Mapping[str, Any], other: str) -> str:
    """What makes a reward follow success rather than `other`."""
    if tree.get("rewards"):
        return f"in `rewards`, give the reward that decides success more weight than {other} has"
    if tree.get("environment") is not None:
        return (
            f"make success worth more than {other} in the environment's reward, or let an attempt "
            "succeed sooner with easier tasks (environment options)"
        )
    return f"let success decide more of the agent's reward, and {other} less"


def _has_judge(tree: Mapping[str, Any]) -> bool:
    rewards = tree.get("rewards")
    entries = rewards if isinstance(rewards, list | tuple) else []
    return any(isinstance(entry, Mapping) and entry.get("models") for entry in entries)


def _fresher_tokens(rollout: Mapping[str, Any]) -> str:
    waits = rollout.get("policy") == "wait"
    return (
        f"raise rollout.staleness (now {rollout.get('staleness', 0)}), "
        + ("" if waits else "set rollout.policy=wait, which loses no attempt, ")
        + "or make attempts shorter (agent.max_turns, sampling.max_new_tokens)"
    )


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}
