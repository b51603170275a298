"""What a step's attempts say about learning, as sums that can be added over steps.

`facts_of` reads attempts and changes nothing: no clock, no randomness, no tokenizer. Facts go into
the record of their step, so a resumed run has the same facts. They are of bounded size, however
many attempts a step has: texts are read of MAX_READ attempts, evenly spread over the step.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite
from statistics import fmean
from types import MappingProxyType
from typing import Any

import msgspec

from agentevo.types import REWARD_PARTS, Message, Trajectory, Turn
from agentevo.types.equality import are_equal

MAX_READ = 64
"""Attempts of a step whose texts are read."""
MAX_CHARACTERS = 4000
"""Characters of an answer that are read."""
PHRASE_WORDS = 5
MAX_PHRASES = 16
PHRASE_SHARE = 0.1
"""Phrases in less than this share of a step's answers are not kept."""
MAX_TOOLS = 64
BROKEN_CALLS = ("num_malformed_calls", "num_unknown_tools", "num_wrong_arguments")
OTHER_CALLS = ("num_tool_calls", "num_tool_timeouts", "num_tool_failures")
BROKEN_TURNS = "num_format_errors"
SPEAKS_TO_JUDGE = re.compile(
    r"\b(?:dear|hello|hi|attention|note to(?: the)?|assistant \(?) ?"
    r"(?:judge|grader|evaluator|reviewer|assessor)\b"
    r"|\bthe (?:judge|grader|evaluator) (?:gives?|decide[sd]|should|must|will)\b"
    r"|\b(?:give|gives|award|assign|grant|deserves?|merits?|receives?|gets?|has)\b[^.\n]{0,40}"
    r"\b(?:full|maximum|highest|perfect|top|best(?: possible)?|(?:a|the)) "
    r"(?:score|marks?|points?|grade|rating|reward|credit)\b"
    r"|\b(?:ignore|disregard|forget|vergiss)\b[^.\n]{0,30}"
    r"\b(?:instructions?|rubrics?|criteria|guidelines?|anweisungen)\b"
    r"|\b(?:rate|grade|score|judge|mark) (?:this|my|the|it) ?(?:answer|response|reply|solution|"
    r"attempt|1\b)"
    r"|\bthis (?:answer|response|reply|solution|attempt) (?:is|was|should be|must be) "
    r"(?:graded|scored|rated|marked|judged|accepted|verified|clearly the best)\b"
    r"|\b(?:score|rating|verdict)\W{1,4}(?:1(?:\.0)?\b|10/10|correct\b|full\b)"
    r"|忽略之前|给[^。\n]{0,8}(?:打|满分|最高分|高分)|(?:尊敬|亲爱)的(?:评委|评审|裁判)|评委请",
    re.IGNORECASE,
)
"""Words to whoever scores the answer."""


class AttemptFacts(msgspec.Struct, kw_only=True):
    """Counts over the completed attempts of one or more steps; see the module."""

    attempts: int = 0
    successes: int = 0
    groups: int = 0
    """Groups of at least two completed attempts. The next five count among them."""
    group_size: int = 0
    """The attempts of the largest."""
    failed_groups: int = 0
    """No attempt succeeded, and all have the same reward."""
    solved_groups: int = 0
    """All attempts succeeded, and all have the same reward."""
    equal_groups: int = 0
    """All attempts have the same reward."""
    passed_groups: int = 0
    """At least one attempt succeeded."""
    repeats: int = 0
    """Attempts that sampled exactly the tokens of an earlier one of their group."""
    comparable: int = 0
    """Attempts that could have been repeats: all but the first of each group."""
    tokens: int = 0
    """Sampled tokens."""
    surprise: float = 0.0
    """The sum of minus their log-probs: an unbiased estimate of the entropy of sampling, in
    nats."""
    completions: int = 0
    cut_completions: int = 0
    """Those that the token limit ended; of an environment's agent, without those whose action was
    understood."""
    cut_attempts: int = 0
    """Attempts with such a completion."""
    cut_successes: int = 0
    calls: int = 0
    """Tool calls; of an environment's agent: turns."""
    malformed: int = 0
    """Those that can't be read, or name a tool or arguments that do not exist."""
    malformed_kinds: dict[str, int] = {}
    offered_attempts: int = 0
    """Attempts whose prompt offers tools."""
    calling_attempts: int = 0
    """Those of them that called one."""
    offered_tools: dict[str, int] = {}
    """Tool -> attempts that were offered it."""
    called_tools: dict[str, int] = {}
    """Tool -> attempts that called it."""
    moments: dict[str, float] = {}
    """Sums of products of two of reward (r), success (s), length (l) and format errors (f), each
    less its mean over the group; `dof`: attempts less groups."""
    measures: dict[str, tuple[int, float, float]] = {}
    """Measure (`reward`, `success`, `reward_parts/NAME`) -> groups, and the sums of the groups'
    means and of their squares."""
    answers: int = 0
    """Answers that were read. The next three count among them."""
    phrases: dict[str, int] = {}
    """Frequent phrase that is in no prompt -> answers with it."""
    to_judge: int = 0
    """Answers that speak to whoever scores them."""
    to_judge_example: str = ""

    def mean(self, measure: str) -> tuple[float, float] | None:
        """Mean of a measure over groups, and the variance of this mean. None without groups."""
        num, total, squares = self.measures.get(measure, (0, 0.0, 0.0))
        if num < 2:
            return None
        mean = total / num
        return mean, max(0.0, squares / num - mean * mean) / (num - 1)

    def correlation(self, first: str, second: str) -> float:
        """Correlation within groups of two of `moments`, such as r and l; 0 without spread."""
        product = self.moments.get(first + second, self.moments.get(second + first, 0.0))
        spread = self.moments.get(2 * first, 0.0) * self.moments.get(2 * second, 0.0)
        return product / spread**0.5 if spread > 1e-18 else 0.0


def add_facts(parts: Iterable[AttemptFacts]) -> AttemptFacts:
    """The facts of several steps together."""
    total: dict[str, Any] = {}
    for part in parts:
        for name in part.__struct_fields__:
            value = getattr(part, name)
            before = total.get(name)
            if before is None:
                total[name] = dict(value) if isinstance(value, dict) else value
            elif name == "group_size":
                total[name] = max(before, value)
            elif isinstance(value, str):
                total[name] = before or value
            elif isinstance(value, dict):
                for key, amount in value.items():
                    before[key] = _add(before[key], amount) if key in before else amount
            else:
                total[name] = before + value

    return AttemptFacts(**total)


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip(one, other, strict=True))
    return one + other


def facts_of(
    attempts: Sequence[Trajectory], rewards: Mapping[str, float] = MappingProxyType({})
) -> AttemptFacts:
    """The facts of one step. `rewards`: the final rewards (after length shaping) of those attempts
    that have one, by id."""
    done = [t for t in attempts if t.status == "completed" and t.turns]
    by_group: dict[str, list[Trajectory]] = defaultdict(list)
    for t in done:
        by_group[t.group_id].append(t)

    groups = [group for group in by_group.values() if len(group) > 1]
    facts = AttemptFacts(
        attempts=len(done),
        successes=sum(t.success for t in done),
        tokens=sum(t.num_completion_tokens() for t in done),
        surprise=_surprise(done),
        completions=sum(len(t.turns) for t in done),
        measures=_measures(by_group.values()),
        moments=_moments(groups, rewards),
    )
    for group in groups:
        _count_group(facts, group, [rewards.get(t.id, t.reward) for t in group])
    for t in done:
        _count_calls(facts, t)
    _read_texts(facts, done[:: -(-len(done) // MAX_READ) or 1])

    return facts


def _surprise(attempts: Iterable[Trajectory]) -> float:
    total = -sum(sum(turn.logprobs) for t in attempts for turn in t.turns)
    return total if isfinite(total) else 0.0


def _count_group(
    facts: AttemptFacts, group: Sequence[Trajectory], rewards: Sequence[float]
) -> None:
    is_equal = are_equal(rewards)
    num_solved = sum(t.success for t in group)
    sampled = {tuple(turn.completion_ids.tobytes() for turn in t.turns) for t in group}  # type: ignore[attr-defined]

    facts.groups += 1
    facts.group_size = max(facts.group_size, len(group))
    facts.equal_groups += is_equal
    facts.failed_groups += is_equal and num_solved == 0
    facts.solved_groups += is_equal and num_solved == len(group)
    facts.passed_groups += num_solved > 0
    facts.repeats += len(group) - len(sampled)
    facts.comparable += len(group) - 1


def _count_calls(facts: AttemptFacts, t: Trajectory) -> None:
    num_cut = sum(turn.finish_reason == "length" for turn in t.turns)
    if BROKEN_TURNS in t.metrics:  # an action that was understood is whole
        num_cut = min(num_cut, int(t.metrics[BROKEN_TURNS]))

    facts.cut_completions += num_cut
    facts.cut_attempts += num_cut > 0
    facts.cut_successes += num_cut > 0 and t.success

    broken = {name: t.metrics[name] for name in BROKEN_CALLS if t.metrics.get(name)}
    facts.calls += int(sum(broken.values()) + sum(t.metrics.get(name, 0) for name in OTHER_CALLS))
    if BROKEN_TURNS in t.metrics:
        facts.calls += len(t.turns)
        broken[BROKEN_TURNS] = t.metrics[BROKEN_TURNS]

    for name, count in broken.items():
        if count:
            facts.malformed += int(count)
            facts.malformed_kinds[name] = facts.malformed_kinds.get(name, 0) + int(count)

    offered = {name for turn in t.turns if turn.tools for name in _tool_names(turn.tools)}
    if not offered and "num_tool_calls" not in t.metrics:
        return

    called = {call.name for turn in t.turns for call in _answer_of(turn).tool_calls}
    tried = any(t.metrics.get(name) for name in (*BROKEN_CALLS, *OTHER_CALLS))
    facts.offered_attempts += 1
    facts.calling_attempts += bool(called) or tried
    for counts, names in ((facts.offered_tools, offered), (facts.called_tools, called)):
        for name in sorted(names):
            if name in counts or len(counts) < MAX_TOOLS:
                counts[name] = counts.get(name, 0) + 1


def _answer_of(turn: Turn) -> Message:
    """What the policy said in a turn; an empty message if no text was recorded."""
    is_answer = bool(turn.messages) and turn.messages[-1].role == "assistant"
    return turn.messages[-1] if is_answer else Message(role="assistant", content="")


def _tool_names(tools: str) -> list[str]:
    """The names in a turn's tools, a JSON list of schemas."""
    try:
        schemas = msgspec.json.decode(tools)
    except msgspec.DecodeError:
        return []

    functions = [s.get("function", s) for s in schemas if isinstance(s, dict)]
    return [str(f["name"]) for f in functions if isinstance(f, dict) and "name" in f]


def _measures(groups: Iterable[Sequence[Trajectory]]) -> dict[str, tuple[int, float, float]]:
    sums: dict[str, tuple[int, float, float]] = {}
    for group in groups:
        means = {
            "reward": fmean(t.reward for t in group),
            "success": fmean(t.success for t in group),
        }
        for name in sorted({name for t in group for name in t.reward_parts}):
            means[REWARD_PARTS + name] = fmean(t.reward_parts.get(name, 0.0) for t in group)

        for name, mean in means.items():
            num, total, squares = sums.get(name, (0, 0.0, 0.0))
            sums[name] = (num + 1, total + mean, squares + mean * mean)

    return sums


def _moments(
    groups: Iterable[Sequence[Trajectory]], rewards: Mapping[str, float]
) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for group in groups:
        columns = {
            "r": [rewards.get(t.id, t.reward) for t in group],
            "s": [float(t.success) for t in group],
            "l": [float(t.num_completion_tokens()) for t in group],
            "f": [_num_broken(t) for t in group],
        }
        means = {name: fmean(values) for name, values in columns.items()}
        centered = {
            name: [value - means[name] for value in values] for name, values in columns.items()
        }
        for pair in ("rr", "ss", "ll", "ff", "rs", "rl", "rf"):
            columns_of_pair = zip(centered[pair[0]], centered[pair[1]], strict=True)
            sums[pair] += sum(a * b for a, b in columns_of_pair)  # type: ignore[assignment]

        sums["dof"] += len(group) - 1

    return dict(sums)


def _num_broken(t: Trajectory) -> float:
    return sum(t.metrics.get(name, 0.0) for name in (*BROKEN_CALLS, BROKEN_TURNS))


def _read_texts(facts: AttemptFacts, attempts: Sequence[Trajectory]) -> None:
    """Counts frequent phrases, and answers that speak to a judge."""
    prompts: list[str] = []
    counts: Counter[tuple[str, ...]] = Counter()
    by_group: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    spoken: list[re.Match[str]] = []
    for t in attempts:
        answer = _answer_of(t.turns[-1]).text[:MAX_CHARACTERS]
        if not answer.strip():
            continue

        facts.answers += 1
        prompts.append(" ".join(_prompt_words(t)))
        words = answer.lower().split()
        phrases = set(zip(*(words[first:] for first in range(PHRASE_WORDS)), strict=False))
        counts.update(phrases)
        by_group[t.group_id] |= phrases

        match = SPEAKS_TO_JUDGE.search(answer)
        if match is not None and match[0].lower() not in prompts[-1]:
            spoken.append(match)

    frequent = [
        (" ".join(phrase), count)
        for phrase, count in counts.items()
        if count >= max(2, PHRASE_SHARE * facts.answers)
        and sum(phrase in phrases for phrases in by_group.values()) > 1
    ]
    frequent.sort(key=lambda pair: (-pair[1], pair[0]))
    of_no_prompt = (
        (phrase, count)
        for phrase, count in frequent
        if not any(phrase in prompt for prompt in prompts)
    )
    facts.phrases = dict(islice(of_no_prompt, MAX_PHRASES))
    facts.to_judge = len(spoken)
    facts.to_judge_example = spoken[0][0] if spoken else ""


def _prompt_words(t: Trajectory) -> list[str]:
    """The words that the policy read, in lower case."""
    texts = [
        message.text[:MAX_CHARACTERS]
        for turn in t.turns
        for message in turn.messages
        if message.role != "assistant"
    ]
    return " ".join(texts).lower().split()
