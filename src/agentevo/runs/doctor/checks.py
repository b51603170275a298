"""The checks of `agentevo doctor`: measured numbers -> a finding in plain words, with what to
change. Pure functions; `group_checks.py` measures.

good     as it should be
warning  training will run, but worse or slower than it could
wrong    training would fail, or learn nothing, or learn from wrong numbers
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentevo.observability.attempt_facts import AttemptFacts
from agentevo.observability.findings import Recipe, learning_findings, pass_words

LOGPROB_TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 0.2}
"""Largest allowed |engine - trainer| for one token, in nats, by the dtype of the computation."""
GIB = 1024**3
MEMORY_ROOM = 0.8
"""The share of free memory that a plan can use, if the run has started."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check."""

    name: str
    status: Literal["good", "warning", "wrong"]
    finding: str
    advice: str = ""
    """What to change; empty if nothing."""

    def __str__(self) -> str:
        line = f"{self.status:<8} {self.name}: {self.finding}"
        return f"{line}\n         -> {self.advice}" if self.advice else line


def judge_attempts(num_attempts: int, errors: Sequence[str]) -> Check:
    """`errors`: the errors of the failed attempts."""
    if not errors:
        return Check("attempts", "good", f"all {num_attempts} ran to their end")
    finding = f"{len(errors)} of {num_attempts} failed, the first with: {errors[0]}"
    advice = "failed attempts are never trained on"
    if any("timeout_s" in error for error in errors):
        advice += "; raise agent.timeout_s, or make the agent faster"
    return Check("attempts", "wrong" if len(errors) == num_attempts else "warning", finding, advice)


def judge_token_ids(
    num_turns: int, num_other_context: int, num_attempts: int, num_reencoded_differently: int
) -> Check:
    """`num_other_context`: turns whose recorded context differs from the engine's prompt.
    `num_reencoded_differently`: attempts whose text, encoded again, gives other ids. This is
    harmless here, since no text is encoded twice."""
    if num_other_context:
        return Check(
            "token ids",
            "wrong",
            f"{num_other_context} of {num_turns} turns were sampled from a context that differs "
            "from the recorded one, which is trained on",
            "this is a defect of the agent: let it prompt only through the policy handle, and "
            "never edit earlier messages in place",
        )

    finding = (
        f"in all {num_turns} turns the trainer gets exactly the tokens that the engine read and "
        "sampled"
    )
    if num_reencoded_differently:
        finding += (
            f" ({num_reencoded_differently} of {num_attempts} attempts would have changed "
            "if their text had been encoded again)"
        )

    return Check("token ids", "good", finding)


def judge_drift(extended: int, branched: int, places: Sequence[str]) -> Check:
    """`extended`: requests that reuse the ids of all recorded replies in them; `branched`: the
    others. `places`: a line for each class of drift."""
    requests = extended + branched
    finding = (
        f"merge rate {extended / requests:.0%}: {extended} of {requests} requests with recorded "
        "answers reuse their ids"
    )
    finding = "\n         ".join([finding, *places])
    if not branched:
        return Check("drift", "good", finding)

    advice = (
        "each other request starts a branch and is encoded again: let the agent send replies back "
        "unchanged, and only append to its history"
    )
    return Check("drift", "warning", finding, advice)


def describe_computation(rows: str) -> Check:
    """`rows`: how and why the model computes rows; empty if it computes the token tree."""
    tree = "the token tree: shared prefixes are computed once"
    return Check("computation", "good", rows or tree)


def judge_logprobs(num_tokens: int, max_difference: float, dtype: str) -> Check:
    """`max_difference`: largest |engine log-prob - full forward pass| over the sampled tokens, in
    nats; not finite if either was."""
    if num_tokens == 0:
        return Check(
            "log-probs",
            "wrong",
            "the policy sampled no token",
            "see the attempts above",
        )

    tolerance = LOGPROB_TOLERANCE[dtype]
    if max_difference <= tolerance:
        return Check(
            "log-probs",
            "good",
            f"engine and trainer agree on all {num_tokens} sampled tokens to {max_difference:.1e}",
        )

    return Check(
        "log-probs",
        "wrong",
        f"engine and trainer differ by up to {max_difference:.2g} on {num_tokens} sampled tokens "
        f"({tolerance:g} is allowed in {dtype})",
        "try engine.prefix_sharing=false, and report the difference as a defect"
        if dtype == "float32"
        else "set model.dtype=float32",
    )


def judge_play(facts: AttemptFacts, rewards: Sequence[float], recipe: Recipe) -> list[Check]:
    """What a run would say of its first steps (observability/findings.py), for one group: rewards,
    completions, calls or actions, tools, exploration. `rewards`: of its finished attempts."""
    findings = {
        finding.code: finding for finding in learning_findings(facts, recipe, "of this group")
    }
    num_new = facts.comparable - facts.repeats
    nats = facts.surprise / max(facts.tokens, 1)
    good = {
        "rewards": f"mean {statistics.fmean(rewards or [0.0]):.3g}, spread "
        f"{statistics.pstdev(rewards or [0.0]):.3g} over {len(rewards)} attempts, "
        f"{facts.successes} solved the task ({pass_words(facts)})",
        "completions": f"the token limit left {facts.cut_completions} of {facts.completions} "
        f"unfinished (mean length {facts.tokens / max(facts.completions, 1):.0f} tokens)",
        "calls": f"{facts.malformed} of {facts.calls} can't be carried out" * bool(facts.calls),
        "tools": f"{facts.calling_attempts} of {facts.offered_attempts} attempts called one"
        * bool(facts.offered_attempts),
        "exploration": f"{num_new} of {facts.comparable} further attempts differ from the first "
        f"(entropy about {nats:.2g} nats a token)" * bool(facts.comparable),
    }

    checks = []
    if not recipe.learns_from_reward:
        del good["rewards"]
    for name in good:
        found = [findings[code] for code in CODES_OF_CHECKS[name] if code in findings]
        checks += [Check(name, "warning", f.seen, _chance(f.code) + f.remedy) for f in found]
        checks += [Check(name, "good", good[name])] if good[name] and not found else []

    if facts.attempts < 2 and recipe.learns_from_reward:
        few = f"{facts.attempts} finished attempts: nothing to compare"
        advice = "raise trainer.group_size, and see the attempts above"
        checks[0] = Check("rewards", "wrong", few, advice)

    return checks


CODES_OF_CHECKS = {
    "rewards": ("all_failed", "all_solved", "equal_rewards", "reward_beside_success"),
    "completions": ("truncated_answers",),
    "calls": ("malformed_calls",),
    "tools": ("unused_tools",),
    "exploration": ("no_exploration",),
}
"""Check -> the findings that it stands for."""


def _chance(code: str) -> str:
    """What comes before the advice if one task may be an exception."""
    is_chance = code in ("all_failed", "all_solved", "equal_rewards")
    return "try other tasks (run.seed=1), and if they are the same, " if is_chance else ""


def judge_context(
    longest: int, worst_case: int, context_length: int, *, is_tiny: bool = False
) -> Check:
    """Tokens of the longest conversation, of the longest one possible under the limits, and of the
    model's context. `is_tiny`: the recipe makes a tiny model."""
    finding = (
        f"longest conversation {longest} tokens, at most {worst_case} under the limits, "
        f"the model reads {context_length}"
    )
    if worst_case <= context_length:
        return Check("context", "good", finding)

    advice = (
        "lower sampling.max_new_tokens or agent.max_turns, or use a model with a longer context"
    )
    if is_tiny:
        advice += " (model.tiny.context_length)"
    return Check("context", "wrong" if longest >= context_length else "warning", finding, advice)


def judge_turns(
    num_attempts: int, num_truncated: int, max_turns: int, max_actions: int | None
) -> Check:
    """`num_truncated`: attempts ended by a limit and not by the environment. `max_actions`: None
    without an environment."""
    action_limit = "" if max_actions is None else f", at most {max_actions} actions"
    finding = (
        f"{num_truncated} of {num_attempts} attempts ended by a limit "
        f"(agent.max_turns={max_turns}{action_limit})"
    )
    if (
        num_truncated <= num_attempts / 2 or max_turns == 1
    ):  # one turn is a design: an answer, not an episode
        return Check("turns", "good", finding)

    advice = (
        "an untrained policy often runs into limits; if an optimal player needs more, raise "
        f"agent.max_turns{' or environment.max_actions' if action_limit else ''}"
    )
    return Check("turns", "warning", finding, advice)


def judge_kv_cache(
    num_together: int, worst_case: int, kv_tokens: int, bytes_per_token: float, max_running: int
) -> Check:
    """A step samples `num_together` attempts of at most `worst_case` tokens each. Shared prompts
    need less. The cache holds `kv_tokens`."""
    room = kv_tokens // max(worst_case, 1)
    finding = (
        f"{kv_tokens} tokens fit, that is {room} attempts of {worst_case}; a step samples "
        f"{num_together}"
    )
    if room == 0:
        return Check(
            "key-value memory",
            "wrong",
            finding,
            f"set engine.kv_cache_gb={_gib(worst_case * bytes_per_token)} or more",
        )

    if min(room, max_running) < num_together:
        enough = f"engine.kv_cache_gb={_gib(num_together * worst_case * bytes_per_token)}"
        setting = enough if room < num_together else f"engine.max_running={num_together}"
        return Check(
            "key-value memory",
            "warning",
            finding,
            f"the others wait in a queue; {setting} would sample all at once",
        )

    return Check("key-value memory", "good", finding)


def _gib(size: float) -> float:
    """Bytes in GiB, rounded up to two figures after the point."""
    return math.ceil(100 * size / GIB) / 100


def judge_memory(
    parts: Mapping[str, float], available: float, turned: Mapping[str, float] | None = None
) -> Check:
    """`parts`: name -> bytes that training will still need. `available`: bytes that are free now.
    `turned`: 'key=value' -> bytes needed with this change, the cheapest change first."""
    needed = sum(parts.values())
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
    finding = (
        f"needs about {needed / GIB:.2f} GiB more ({listed}), {available / GIB:.2f} GiB are free"
    )
    if needed <= MEMORY_ROOM * available:
        return Check("memory", "good", finding)

    status: Literal["warning", "wrong"] = "wrong" if needed > available else "warning"
    return Check("memory", status, finding, _memory_advice(needed, available, turned or {}))


def _memory_advice(needed: float, available: float, turned: Mapping[str, float]) -> str:
    """The first change that is enough; else those that save more than a fiftieth, the best of each
    key, the largest saving first."""
    best: dict[str, tuple[float, str]] = {}
    for change, needed_after in turned.items():
        saved = needed - needed_after
        if needed_after <= MEMORY_ROOM * available:
            return f"set {change}, which saves {saved / GIB:.2f} GiB"
        key = change.partition("=")[0]
        best[key] = max(best.get(key, (0.02 * needed, "")), (saved, change))

    measures = [
        f"{change} saves {saved / GIB:.2f} GiB"
        for saved, change in sorted(best.values(), reverse=True)
        if change
    ]
    last = "use a smaller model, or close other programs"
    if not measures:
        return last
    return f"no single change is enough: {', '.join(measures)}; combine them, or {last}"


def judge_rows(num_rows: int, num_bad: int) -> Check:
    """Conversations that `agentevo sft` would read, and how many it would leave out."""
    finding = f"{num_rows - num_bad} of {num_rows} conversations are trained on or held out"
    if not num_bad:
        return Check("rows", "good", finding)

    advice = (
        "the lines above say which are left out, and why; `agentevo sft` writes all of them "
        "to bad_rows.jsonl"
    )
    return Check("rows", "warning", finding, advice)


def judge_lengths(lengths: Sequence[int], context_length: int) -> Check:
    """`lengths`: tokens of every sequence that is used."""
    finding = (
        f"sequences of {min(lengths)} to {max(lengths)} tokens, "
        f"{statistics.fmean(lengths):.0f} on average; "
    )
    return Check("lengths", "good", finding + f"the model reads {context_length}")


def before_cold_start(check: Check) -> Check:
    """The play of an untrained policy says little if the recipe has a cold start before RL."""
    if check.status == "good":
        return check
    advice = (
        "this is normal before the cold start; afterwards, run the doctor again with the run's "
        "folder instead of the recipe"
    )
    return replace(check, status="warning", advice=advice)


def judge_version(name: str, version: str | None, requirement: str) -> Check:
    """A package that AgentEvo needs. `None` means that it is not installed."""
    if version is None:
        return Check(name, "wrong", "not installed", f"pip install '{name}{requirement}'")
    return Check(name, "good", version)


def judge_threads(num_threads: int, num_cores: int, missing: str | None = None) -> Check:
    """`num_threads`: what PyTorch uses. `num_cores`: physical cores that this process may use.
    `missing`: why OpenMP may start fewer, and what to do."""
    threads = f"{num_threads} thread{'s' * (num_threads != 1)}"
    finding = f"PyTorch uses {threads} on {num_cores} core{'s' * (num_cores != 1)}"
    if missing is not None:
        return Check(
            "threads", "wrong", finding, f"PyTorch's results on a CPU are wrong under {missing}"
        )

    if num_threads > num_cores:
        return Check(
            "threads",
            "warning",
            finding,
            f"more threads than cores slow each other down: set run.threads={num_cores}",
        )

    if num_threads < num_cores:
        return Check(
            "threads",
            "warning",
            finding,
            f"cores stay idle: set run.threads={num_cores}, or unset OMP_NUM_THREADS",
        )

    return Check("threads", "good", finding)


def judge_processor(capability: str, onednn: bool) -> Check:
    """`capability`: the widest vector instructions that PyTorch has kernels for on this CPU, in its
    own words."""
    finding = f"vector instructions {capability}, oneDNN {'on' if onednn else 'off'}"
    if capability.upper() in ("DEFAULT", "NO AVX"):
        return Check(
            "processor",
            "warning",
            finding,
            "this CPU (or PyTorch build) has no vector kernels: training will be several times "
            "slower",
        )

    if not onednn:
        return Check(
            "processor",
            "warning",
            finding,
            "install a PyTorch build with oneDNN (the one from PyPI has it)",
        )

    return Check("processor", "good", finding)


def judge_kernels(problem: str, remedy: str) -> Check:
    """`problem`: why AgentEvo's CPU kernels are missing, empty if they exist; `remedy`: what to do
    about it, if anything."""
    if not problem:
        return Check("cpu kernels", "good", "built for this processor")
    slower = "an engine on the CPU generates at about two thirds of the speed"
    if not remedy:
        return Check("cpu kernels", "good", f"none ({problem}); {slower}")
    return Check("cpu kernels", "warning", f"none ({problem}); {slower}", remedy)


def judge_disk(free: float, place: str) -> Check:
    """`free`: bytes. A run of a 135M model keeps about 6 GiB (three checkpoints of weights and
    optimizer state)."""
    finding = f"{free / GIB:.1f} GiB free in {place}"
    if free < 1 * GIB:
        return Check(
            "disk", "wrong", finding, "free some space, or put runs elsewhere with run.dir"
        )

    if free < 8 * GIB:
        return Check(
            "disk",
            "warning",
            finding,
            "checkpoints of larger models may not fit: checkpoint.keep_last=1, or another run.dir",
        )

    return Check("disk", "good", finding)
