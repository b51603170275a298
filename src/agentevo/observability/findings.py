"""Why a run can't learn: pure functions of its attempts (attempt_facts.py) and metrics.

A finding says what is seen (numbers), why learning stops, and which key of this recipe to change.
The doctor asks about one group; a run asks about its last WINDOW steps (finding_monitor.py), so it
says by step 3 that it can't learn. docs/observability.md gives a reason for each threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import msgspec

from agentevo.observability.attempt_facts import AttemptFacts
from agentevo.observability.remedies import Remedies

WINDOW = 3
"""Steps whose attempts are judged together."""
SOLVED = 0.9
"""The success rate from which equal rewards and low entropy are the goal and not a fault."""
EQUAL_SHARE = 0.95
"""Share of groups with equal rewards from which a run can't learn."""
REPEATED = 0.8
"""Share of attempts that repeat another from which a policy explores nothing."""
GAIN_OF_GROUP = 0.1
"""If pass@group exceeds pass@1 by more, groups still find something to reinforce."""
CUT_SHARE = 0.3
MALFORMED_SHARE = 0.5
CALLING_SHARE = 0.05
MIN_CALLS = 8
SUCCESS_FOLLOWED = 0.3
"""The correlation of reward and success from which the reward follows success."""
FOLLOWED = 0.7
CERTAINTY = 4.5
"""Student's t of a correlation: by chance about once in ten thousand groups of 16."""
CLIPPED_FACTOR = 10.0
"""Gradient norm over trainer.max_grad_norm, in every step of the window."""
OLD_SHARE = 0.3


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. `text` is the whole as sentences."""

    code: str
    """The name of the finding, stable across releases: `all_failed`, `truncated_answers`, ..."""
    seen: str
    remedy: str

    @property
    def text(self) -> str:
        return f"{self.seen}. {self.remedy[:1].upper()}{self.remedy[1:]}."


@dataclass(frozen=True)
class Recipe:
    """What findings need to know of a recipe. The defaults fit any recipe."""

    remedies: Remedies = field(default_factory=Remedies)
    learns_from_reward: bool = True
    """Whether the update depends on rewards: not with trainer.epochs=0 or distillation alone."""
    within_group: bool = True
    """Whether advantages compare the attempts of a group."""
    max_grad_norm: float = 1.0
    gradient_key: str = "trainer.max_grad_norm"
    cancels_old: bool = False
    """Whether attempts that became too old are cancelled (rollout.policy)."""
    scorers: tuple[str, ...] = ()
    """The recipe's rewards by name; the first one decides success."""
    is_judged: bool = False
    """Whether a model decides success."""
    plays_fixed_tasks: bool = False
    """Whether steps draw evenly from a fixed set of tasks, so that their success can be compared
    with held-out success."""


def learning_findings(facts: AttemptFacts, recipe: Recipe, where: str) -> list[Finding]:
    """The findings that attempts alone show. `where`: which attempts, such as `of steps 1 to 3`."""
    findings = [sign(facts, recipe, where) for sign in ATTEMPT_SIGNS]
    return [finding for finding in findings if finding is not None]


def pass_words(facts: AttemptFacts) -> str:
    """`pass@1 12%, pass@8 50%`: the share of attempts, and of groups, that succeeded."""
    words = f"pass@1 {_ratio(facts.successes, facts.attempts):.0%}"
    if facts.groups:
        passed = _ratio(facts.passed_groups, facts.groups)
        words += f", pass@{facts.group_size} {passed:.0%}"
    return words


def is_solved(facts: AttemptFacts) -> bool:
    return facts.attempts > 0 and facts.successes >= SOLVED * facts.attempts


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _find_equal_rewards(facts: AttemptFacts, recipe: Recipe, where: str) -> Finding | None:
    """`all_failed`, `all_solved` or `equal_rewards`, whichever describes the groups best."""
    num = facts.groups
    if not (num and recipe.learns_from_reward) or facts.equal_groups < EQUAL_SHARE * num:
        return None

    reward = facts.mean("reward")
    differs = reward is not None and reward[1] > 0
    if not recipe.within_group and differs:  # the step's other groups are the baseline
        return None

    remedies = recipe.remedies
    others = num - facts.failed_groups - facts.solved_groups
    kinds = {"failed": facts.failed_groups, "solved": facts.solved_groups, "others": others}
    shares = f"in {facts.equal_groups} of {num} groups {where} all attempts have"
    if num == 1:
        shares = f"all {facts.group_size} attempts {where} have"
    seen = f"{shares} the same reward ({pass_words(facts)}), so no attempt is better than another"
    if kinds["failed"] >= EQUAL_SHARE * num:
        remedy = (
            f"make the task easier {remedies.tasks}, {remedies.add_demonstrations}, or try more "
            "per task (trainer.group_size); read a few attempts with `agentevo trajectories show`: "
            "the answer's format may be what fails"
        )
        return _finding("all_failed", f"{seen}: all failed, and nothing is reinforced", remedy)

    if kinds["solved"] >= EQUAL_SHARE * num:
        remedy = f"make the tasks harder {remedies.tasks}, or stop: nothing is left to learn here"
        return _finding("all_solved", f"{seen}: all succeeded", remedy)

    if is_solved(facts):
        return None

    kinds_words = (
        f"{kinds['failed']} all failed, {kinds['solved']} all solved, {kinds['others']} between"
    )
    remedy = (
        f"choose tasks of more mixed difficulty {remedies.tasks}, raise trainer.group_size or "
        "sampling.temperature, and look for a reward that is the same whatever an attempt does"
    )
    return _finding("equal_rewards", f"{seen}: {kinds_words}", remedy)


def _find_no_exploration(facts: AttemptFacts, recipe: Recipe, where: str) -> Finding | None:
    gain = _ratio(facts.passed_groups, facts.groups) - _ratio(facts.successes, facts.attempts)
    if (
        not facts.comparable
        or is_solved(facts)
        or gain > GAIN_OF_GROUP
        or facts.repeats < REPEATED * facts.comparable
    ):
        return None

    remedies = recipe.remedies
    advice = ["raise sampling.temperature", remedies.raise_entropy, remedies.teach_less]
    return _finding(
        "no_exploration",
        f"{facts.repeats} of {facts.comparable} attempts {where} repeat another attempt of their "
        f"group token for token ({pass_words(facts)}; entropy about "
        f"{_ratio(facts.surprise, facts.tokens):.2g} nats a token, "
        f"{_ratio(facts.surprise, facts.attempts):.2g} an attempt): the policy tries nothing that "
        "could turn out better",
        ", ".join(filter(None, advice[:-1])) + f", or {advice[-1]}",
    )


def _find_truncated_answers(facts: AttemptFacts, recipe: Recipe, where: str) -> Finding | None:
    """Cut answers that still succeed, such as answers of one token by design, are no fault."""
    share = _ratio(facts.cut_completions, facts.completions)
    whole = facts.attempts - facts.cut_attempts
    success_of_cut = _ratio(facts.cut_successes, facts.cut_attempts)
    success_of_whole = _ratio(facts.successes - facts.cut_successes, whole)
    if share < CUT_SHARE or success_of_cut >= max(0.1, success_of_whole / 2):
        return None

    return _finding(
        "truncated_answers",
        f"{facts.cut_completions} of {facts.completions} completions {where} ({share:.0%}) are cut "
        f"by the token limit (mean length {_ratio(facts.tokens, facts.completions):.0f} tokens), "
        f"and {success_of_cut:.0%} of these attempts succeed: an answer that is not finished earns "
        "nothing",
        "raise sampling.max_new_tokens, add the end of an answer to sampling.stop (such as "
        f"'</answer>'), or {recipe.remedies.answer_shorter}",
    )


CALL_WORDS = {
    "num_malformed_calls": "malformed",
    "num_unknown_tools": "of unknown tools",
    "num_wrong_arguments": "with wrong arguments",
    "num_format_errors": "that break the format",
}


def _find_malformed_calls(facts: AttemptFacts, recipe: Recipe, where: str) -> Finding | None:
    if (
        facts.calls < MIN_CALLS
        or facts.malformed < MALFORMED_SHARE * facts.calls
        or is_solved(facts)
    ):
        return None

    kinds = ", ".join(
        f"{count} {CALL_WORDS[kind]}" for kind, count in sorted(facts.malformed_kinds.items())
    )
    remedies = recipe.remedies
    return _finding(
        "malformed_calls",
        f"{facts.malformed} of {facts.calls} calls or actions {where} can't be carried out "
        f"({kinds}): the policy does not act on the task, so its reward says little about how",
        f"{remedies.show_format}, {remedies.plain_format}or {remedies.add_demonstrations}",
    )


def _find_unused_tools(facts: AttemptFacts, recipe: Recipe, where: str) -> Finding | None:
    offered = facts.offered_attempts
    if not offered or is_solved(facts):
        return None

    unused = [name for name in facts.offered_tools if name not in facts.called_tools]
    names = f" ({', '.join(unused[:8])}{', ...' * (len(unused) > 8)})" if unused else ""
    seen = f"{facts.calling_attempts} of {offered} attempts {where} called a tool"
    if facts.calling_attempts > CALLING_SHARE * offered:
        if facts.passed_groups or not unused or not facts.groups:
            return None
        seen += f", none succeeded, and {len(unused)} tools were never called{names}"
    else:
        seen += names and f"; never called:{names}"

    return _finding(
        "unused_tools",
        f"{seen}: reward can't teach a call that is never tried",
        f"say in {recipe.remedies.prompt} when to call which tool, or "
        f"{recipe.remedies.add_demonstrations}",
    )


def _find_reward_beside_success(facts: AttemptFacts, recipe: Recipe, where: str) -> Finding | None:
    """A reward that follows length or format, and not success, within groups."""
    follows_success = facts.correlation("r", "s") >= SUCCESS_FOLLOWED
    if not recipe.learns_from_reward or follows_success or is_solved(facts):
        return None

    followed = {"length": facts.correlation("r", "l"), "broken format": facts.correlation("r", "f")}
    name, correlation = max(followed.items(), key=lambda item: abs(item[1]))
    rest = max(1e-9, 1.0 - correlation * correlation)
    student_t = abs(correlation) * sqrt(facts.moments.get("dof", 0.0) / rest)
    if abs(correlation) < FOLLOWED or student_t < CERTAINTY or facts.attempts < MIN_CALLS:
        return None

    return _finding(
        "reward_beside_success",
        f"among attempts at the same task {where} the reward follows {name} (correlation "
        f"{correlation:.2f}) and not success ({facts.correlation('r', 's'):.2f}; "
        f"{pass_words(facts)}): training makes answers "
        f"{_direction(name, correlation)}, and no better",
        recipe.remedies.reward_by_format
        if name == "broken format"
        else recipe.remedies.reward_by_length,
    )


def _direction(name: str, correlation: float) -> str:
    if name == "length":
        return "longer" if correlation > 0 else "shorter"
    return "break the format more often" if correlation > 0 else "keep the format"


Sign = Callable[[AttemptFacts, Recipe, str], Finding | None]
ATTEMPT_SIGNS: tuple[Sign, ...] = (
    _find_equal_rewards,
    _find_malformed_calls,
    _find_truncated_answers,
    _find_unused_tools,
    _find_no_exploration,
    _find_reward_beside_success,
)


def find_clipped_gradient(norms: Sequence[float], recipe: Recipe, where: str) -> Finding | None:
    """`norms`: the gradient norm of each step of the window, before clipping."""
    largest = recipe.max_grad_norm
    if len(norms) < WINDOW or min(norms) < CLIPPED_FACTOR * largest:
        return None

    return _finding(
        "gradient_clipped",
        f"the gradient norm {where} is {min(norms):.3g} to {max(norms):.3g}, at every step more "
        f"than {CLIPPED_FACTOR:g} times {recipe.gradient_key}={largest:g}: clipping decides the "
        "size of every update, however much or little a step teaches",
        f"raise {recipe.gradient_key} to about {1.5 * max(norms):.2g}, and lower the learning rate "
        "if updates then become too large",
    )


def find_old_tokens(
    metrics: Sequence[Mapping[str, float]], recipe: Recipe, where: str
) -> Finding | None:
    """`metrics`: those of the window's steps."""
    sampled = sum(row.get("rollout/in", 0.0) for row in metrics)
    stale = sum(
        row.get("rollout/dropped/stale", 0.0)
        + row.get("staleness/masked_trajectories", 0.0)
        + recipe.cancels_old * row.get("rollout/dropped/cancelled", 0.0)
        for row in metrics
    )
    masked = [row["staleness/masked"] for row in metrics if "staleness/masked" in row]
    masked_share = _ratio(sum(masked), len(masked))
    if stale <= OLD_SHARE * sampled and masked_share <= OLD_SHARE:
        return None

    seen = f"{stale:.0f} of {sampled:.0f} attempts {where} are too old to train on"
    if masked:
        seen += f", and {masked_share:.0%} of the tokens that remain"
    return _finding(
        "tokens_too_old",
        f"{seen}: they were sampled more than rollout.staleness versions ago, and their rewards "
        "are lost",
        recipe.remedies.fresher_tokens,
    )


def _finding(code: str, seen: str, remedy: str) -> Finding:
    return Finding(code=code, seen=f"{seen[:1].upper()}{seen[1:]}", remedy=remedy)
