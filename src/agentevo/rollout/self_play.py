"""Self-play: the prompts of a step's proposer, its proposals, and their rewards.

    a valid question        max(0, learnability(p) - repetition |C| / K)
    a reply without one     the key `invalid`

p is the share of the solver's completed attempts that succeed. K is the number of completed
proposals of the same prompt, and C are those of them that ask the same question, this one included.
Learnability is 1 - 2 |p - 1/2|, with R-Zero's penalty (arXiv 2508.05004, with clusters of equal
questions in place of BLEU). Or it is 1 - p, and 0 if p is 0 or 1, as in Absolute Zero (arXiv
2505.03335).

A held-out question is not solved, its proposal gets no reward, and the proposal is not trained on.
So no gradient depends on held-out tasks. Equal questions of one step become one task, even if
several proposals have them. All rewards follow from the trajectories, so a resumed step has the
same rewards.

Questions of self-play, their families, and the agent that asks the proposer for a question.

A family is a user's class (config/self_play.py). During the attempt, the family parses a question
from the reply. The parser has its own thread, and its time counts towards the attempt's limit. The
question is stored with the proposer's trajectory as the file QUESTION. The solver's task comes from
that file, never from the reply.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from agentevo.agents import FunctionAgent
from agentevo.agents.policy import Policy
from agentevo.agents.single_turn import conversation_of
from agentevo.config.self_play import PROPOSER, PROPOSES, SOLVER, SelfPlay, question_families
from agentevo.config.tasks import TaskFields
from agentevo.data import RowError
from agentevo.data.conversation import check_text
from agentevo.data.question_overlap import question_key
from agentevo.errors import (
    ConfigError,
    StoreError,
    UnknownNameError,
    describe_error,
    shown,
    storable,
)
from agentevo.rewards.reward import rewards
from agentevo.rollout.given_tasks import content_id, task_of
from agentevo.runtime.daemon_threads import call_in_thread, run_in_thread
from agentevo.runtime.seeds import derive_seed
from agentevo.runtime.tracebacks import describe_failure, traceback_of
from agentevo.types import QUERY_MESSAGES, Outcome, Task, Trajectory

QUESTION = "question.json"
"""The file with the parsed question, among the files of the proposer's trajectory."""
MAX_REASON_CHARS = 500
"""The maximum number of stored characters of the reason why a reply has no question."""
MAX_QUESTION_BYTES = 1 << 20
"""The maximum size of a question, in bytes."""


class Question(msgspec.Struct, frozen=True):
    """A question from a proposer's reply, parsed by its question family."""

    query: str | list[dict[str, Any]]
    """The solver's prompt: a text, or chat messages."""
    answer: Any = None
    """The correct answer, for rewards, as JSON-compatible data."""
    scorer: str | None = None
    """The name of the reward that scores this question instead of the recipe's `rewards`."""
    cluster: str | None = None
    """Questions with the same cluster count as repetitions of one question. By default, questions
    are repetitions if they differ only in white space and case."""
    difficulty: float | None = None
    """A number for the metric `selfplay/difficulty`, such as the number of steps of a solution."""
    metadata: dict[str, Any] = {}
    """Further data for the solver's agent and rewards."""


class QuestionFamily(Protocol):
    """See config/self_play.py."""

    def prompt(self, rng: random.Random) -> str | list[dict[str, Any]]: ...

    def read(self, text: str, prompt: str | list[dict[str, Any]]) -> Question: ...


def make_family(section: SelfPlay, timeout_s: float) -> QuestionFamily:
    """Raises ConfigError if the family is unknown, or can't be created with its options within
    `timeout_s`."""
    try:
        kind = question_families.get(section.family)
    except UnknownNameError as error:
        raise ConfigError(
            f"tasks.self_play.family: {error}; one of your own is a class under "
            f"`@agentevo.question_family({section.family!r})`, in a file that the recipe imports "
            "(key import)"
        ) from error

    try:
        family: QuestionFamily = call_in_thread(
            partial(kind, **section.options), "question family", timeout_s
        )
    except Exception as error:
        raise ConfigError(
            f"tasks.self_play: the family {section.family!r} can't be made with the options "
            f"{shown(section.options)}: {describe_failure(error)}"
        ) from error

    return family


class SelfPlayAgent(FunctionAgent):
    """The agent of self-play. For the solver's and the held-out tasks it is the recipe's agent, and
    for a proposer's task it sends one prompt to the policy."""

    def __init__(self, solver: FunctionAgent, family: QuestionFamily) -> None:
        self._solver = solver
        self._family = family
        self.needs_scorer = solver.needs_scorer
        self.needs_session = solver.needs_session

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """See Agent.run. An exception of the family other than ValueError fails the attempt. A
        proposal gets its reward after the solver has attempted it (self_play.py)."""
        if PROPOSES not in task.metadata:
            return await self._solver.run(task, policy)
        reply = await policy.generate(conversation_of(task, system=None, instruction=None))
        prompt = task.metadata.get(QUERY_MESSAGES) or task.query
        row = await run_in_thread(partial(self._read, reply.answer, prompt), "question family")
        policy.keep_files({QUESTION: row})
        return Outcome(reward=0.0)

    def _read(self, text: str, prompt: Any) -> bytes:
        try:
            question = self._family.read(text, prompt)
        except ValueError as error:
            reason = storable(str(error), MAX_REASON_CHARS)
            return msgspec.json.encode({"invalid": reason or "no question"})
        return encode_question(question)

    async def close(self) -> None:
        await self._solver.close()


def encode_question(question: Question) -> bytes:
    """A question as it is stored. Raises TypeError if a family returns something else than a
    Question, values that JSON can't represent, or more than MAX_QUESTION_BYTES bytes. Raises
    RowError for half of a surrogate pair and for the cases of `task_of_question`, and
    UnknownNameError for an unknown scorer."""
    if not isinstance(question, Question):
        raise TypeError(
            f"the family's read returned {shown(question)}: return an agentevo.Question, or "
            f"raise ValueError if the reply has no question"
        )

    number = question.difficulty
    if number is not None and not (isinstance(number, (int, float)) and math.isfinite(number)):
        raise TypeError(f"the difficulty of a question is {shown(number)}: give a finite number")
    if not isinstance(question.cluster, str | None):
        raise TypeError(f"the cluster of a question is {shown(question.cluster)}: give a text")
    if not isinstance(question.metadata, Mapping):
        raise TypeError(f"the metadata of a question is {shown(question.metadata)}: give a mapping")

    try:
        text = json.dumps(msgspec.structs.asdict(question), allow_nan=False)
    except ValueError as error:
        raise TypeError(f"a question has a value that JSON can't represent: {error}") from error

    if len(text) > MAX_QUESTION_BYTES:
        raise TypeError(f"a question of {len(text)} bytes: the limit is {MAX_QUESTION_BYTES}")

    row = json.loads(text)
    check_text(row)
    task_of_question(row, "question")

    if question.scorer is not None:
        rewards.get(question.scorer)

    return text.encode()


def task_of_question(row: Mapping[str, Any], name: str) -> Task:
    """The solver's task from a stored question. Raises RowError if the question has no words, or if
    its metadata has a reserved key."""
    taken = sorted({"id", "query", "answer", "scorer"} & row["metadata"].keys())
    if taken:
        raise RowError("unknown_form", f"the metadata has the key {taken[0]}: rename it")
    fields = {"id": name, "query": row["query"], "answer": row["answer"], "scorer": row["scorer"]}
    return task_of({**row["metadata"], **fields}, TaskFields(), "agentevo")


HELD_OUT = "held-out"
"""The drop reason of a proposal whose question is held out."""
UNTRIED = "untried"
"""The drop reason of a proposal whose question has no completed attempt. Its difficulty is
unknown."""
PROPOSED_BY = "proposed_by"
"""The key in a question's metadata with the ids of the trajectories that proposed it."""


def role_of(task: Task) -> str:
    """The agent that plays the task."""
    return PROPOSER if PROPOSES in task.metadata else SOLVER


def learnability(p: float, kind: str) -> float:
    """The value of a question for which the share p of the attempts succeeds. The module has the
    formulas."""
    if kind == "r_zero":
        return 1.0 - 2.0 * abs(p - 0.5)
    return 1.0 - p if 0.0 < p < 1.0 else 0.0


class ProposalTasks:
    """The proposer's prompts, step by step. They follow from the run's seed."""

    def __init__(
        self, section: SelfPlay, family: QuestionFamily, seed: int, groups: int, *, timeout_s: float
    ) -> None:
        """`timeout_s`: the time limit of the family for a prompt, in seconds."""
        self._timeout_s = timeout_s
        self._family = family
        self._seed = seed
        self.group_size = groups if section.group_size is None else section.group_size
        self._prompts = groups // self.group_size

    def of_step(self, step: int) -> list[Task]:
        """A task for each prompt of a step. Raises ConfigError if the family returns no valid
        prompt."""
        return [self._task(step, number) for number in range(self._prompts)]

    def _task(self, step: int, number: int) -> Task:
        rng = random.Random(derive_seed(self._seed, "self_play", step, number))
        name = f"propose-{step}-{number}"
        try:
            query = call_in_thread(
                lambda: self._family.prompt(rng), "question family", self._timeout_s
            )
            task = task_of({"id": name, "query": query}, TaskFields())
        except Exception as error:
            trace = traceback_of(error)
            raise ConfigError(
                f"tasks.self_play: the family's prompt(rng) returns no valid prompt: "
                f"{describe_error(error)}: return a text, or chat messages that end with the user's"
                + (f"\n{trace}" if trace else "")
            ) from error

        return replace(task, metadata=task.metadata | {PROPOSES: step})


@dataclass(frozen=True)
class Proposal:
    """One reply of the proposer."""

    trajectory: Trajectory
    row: dict[str, Any] | None
    """The stored question. None if the reply has no question, or if the attempt is not
    completed."""
    key: bytes | None = None
    """The question's key, equal for equal questions."""
    is_held_out: bool = False

    @property
    def cluster(self) -> str:
        """Equal for proposals that count as repetitions of each other."""
        assert self.row is not None and self.key is not None
        cluster = self.row.get("cluster")
        return self.key.hex() if cluster is None else f"={cluster}"


@dataclass(frozen=True)
class Proposals:
    """All proposals of one step. `tasks`: the tasks for the solver. Each question is there once, in
    the order of the proposals."""

    step: int
    all: list[Proposal]
    tasks: list[Task] = field(init=False)
    _task_of: dict[bytes, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        by_key: dict[bytes, list[Proposal]] = defaultdict(list)
        for proposal in self.all:
            if proposal.key is not None and not proposal.is_held_out:
                by_key[proposal.key].append(proposal)

        tasks = []
        for key, proposals in by_key.items():
            row = proposals[0].row
            assert row is not None
            task = task_of_question(row, f"question-{self.step}-{content_id(row)}")
            by = {PROPOSED_BY: [proposal.trajectory.id for proposal in proposals]}
            tasks.append(replace(task, metadata=task.metadata | by))
            self._task_of[key] = task.id

        object.__setattr__(self, "tasks", tasks)

    def task_of(self, proposal: Proposal) -> str | None:
        """The id of the task that the proposal became."""
        return None if proposal.key is None else self._task_of.get(proposal.key)


def read_proposals(
    trajectories: Sequence[Trajectory], step: int, held_out: Iterable[bytes]
) -> Proposals:
    """Reads the questions of the proposer's attempts. `held_out`: keys of the questions that are
    never trained on. Raises StoreError if the file of a stored question is damaged."""
    never = frozenset(held_out)
    proposals = []
    for trajectory in trajectories:
        row = _row_of(trajectory) if trajectory.status == "completed" else None
        if row is None or "invalid" in row:
            proposals.append(Proposal(trajectory, None))
            continue

        query = task_of_question(row, "question").query or ""
        key = question_key(query)
        assert key is not None  # task_of_question refuses an empty text
        proposals.append(Proposal(trajectory, row, key, key in never))

    return Proposals(step, proposals)


def _row_of(trajectory: Trajectory) -> dict[str, Any]:
    try:
        row = json.loads(trajectory.files[QUESTION])
        if "invalid" not in row:  # drops the results that an earlier reward added
            row = {name: row[name] for name in Question.__struct_fields__}
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{trajectory.id}: its {QUESTION} is missing or damaged ({describe_error(error)}): the "
            "store was changed from outside"
        ) from error

    return row


@dataclass(frozen=True)
class RewardedProposals:
    """The rewards of a step's proposals."""

    trajectories: list[Trajectory]
    """The proposer's trajectories, with their rewards; the file QUESTION of each has the results of
    its question."""
    dropped: dict[str, str]
    metrics: dict[str, float]


def reward_proposals(
    proposals: Proposals, attempts: Sequence[Trajectory], section: SelfPlay
) -> RewardedProposals:
    """Rewards each proposal by the solver's `attempts` at its question."""
    solved: dict[str, list[bool]] = defaultdict(list)
    for attempt in attempts:
        if attempt.status == "completed":
            solved[attempt.task_id].append(attempt.success)

    size = Counter[str]()
    repeats = Counter[tuple[str, str]]()
    for proposal in proposals.all:
        group = proposal.trajectory.group_id
        size[group] += proposal.trajectory.status == "completed"
        if proposal.row is not None:
            repeats[group, proposal.cluster] += 1

    dropped: dict[str, str] = {}
    paid: list[Trajectory] = []
    for proposal in proposals.all:
        trajectory = proposal.trajectory
        task = proposals.task_of(proposal)
        if trajectory.status != "completed":
            paid.append(trajectory)
            continue

        if proposal.row is None:
            paid.append(_with_reward(trajectory, {"invalid": section.invalid}, {}))
            continue

        tries = solved.get(task or "", [])
        if not tries:
            dropped[trajectory.id] = HELD_OUT if proposal.is_held_out else UNTRIED
            paid.append(
                _with_reward(trajectory, {}, {dropped[trajectory.id].replace("-", "_"): True})
            )
            continue

        p = fmean(tries)
        num_same = repeats[trajectory.group_id, proposal.cluster]
        value_of_question = learnability(p, section.reward)
        penalty = min(value_of_question, section.repetition * num_same / size[trajectory.group_id])
        facts = {"task": task, "attempts": len(tries), "solved": sum(tries), "repeats": num_same}
        parts = {"learnability": value_of_question, "repetition": -penalty}
        paid.append(_with_reward(trajectory, parts, facts, success=0.0 < p < 1.0))

    return RewardedProposals(paid, dropped, _metrics(proposals, solved, repeats))


def _with_reward(
    trajectory: Trajectory,
    parts: Mapping[str, float],
    facts: Mapping[str, Any],
    success: bool = False,
) -> Trajectory:
    """The trajectory with its reward, and with the results of its question."""
    row = json.loads(trajectory.files[QUESTION]) | dict(facts)
    return replace(
        trajectory,
        reward=sum(parts.values()),
        reward_parts=dict(parts),
        success=success,
        files={**trajectory.files, QUESTION: msgspec.json.encode(row)},
    )


def _metrics(
    proposals: Proposals,
    solved: Mapping[str, Sequence[bool]],
    repeats: Mapping[tuple[str, str], int],
) -> dict[str, float]:
    """Shares of the step's proposals, and the solver's results for the questions."""
    completed = [
        proposal for proposal in proposals.all if proposal.trajectory.status == "completed"
    ]
    valid = [proposal for proposal in completed if proposal.row is not None]
    metrics = {
        "selfplay/proposed": float(len(completed)),
        "selfplay/questions": float(len(proposals.tasks)),
        "selfplay/held_out": float(sum(proposal.is_held_out for proposal in valid)),
    }
    if completed:
        metrics["selfplay/valid"] = len(valid) / len(completed)
    if valid:
        metrics["selfplay/distinct"] = len(repeats) / len(valid)

    shares = [fmean(tries) for tries in solved.values()]
    if shares:
        metrics["selfplay/success_rate"] = fmean(shares)
        metrics["selfplay/at_edge"] = fmean(0.0 < p < 1.0 for p in shares)

    rows = [proposal.row for proposal in valid if proposal.row is not None]
    levels = [row["difficulty"] for row in rows if row["difficulty"] is not None]
    if levels:
        metrics["selfplay/difficulty"] = fmean(levels)

    return metrics
