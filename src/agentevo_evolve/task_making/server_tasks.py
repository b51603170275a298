"""Makes tasks for a tool server from the server alone. Real calls explore its tools
(exploration.py). Random call sequences run on the server (walks.py). The final state of a sequence,
or the value that it finds, becomes the reference of a task (grounding.py). A text asks the agent
for that state or value (wording.py). A model can propose tasks first (proposals.py); walks then
make what is missing.

All random choices come from the seed, so the same server, seed and counts give the same tasks.
Walks run in rounds of CONCURRENCY, each walk in its own session. If no tool changes anything, all
share one. The tools that a round prefers depend on earlier rounds. Only a task's content decides
whether the task is held out (scenario.py), so no content is both trained on and held out, even in
later sets of tasks.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from agentevo.config.tools import ToolSection
from agentevo.data.question_overlap import question_key
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.inference.remote_models.model import RemoteModel
from agentevo_evolve.task_making.calls import CallResult, ToolWorld, call_tool
from agentevo_evolve.task_making.exploration import explore_server
from agentevo_evolve.task_making.grounding import UngroundedError, ground_scenario
from agentevo_evolve.task_making.proposals import (
    MAX_IDLE_ROUNDS,
    PER_PROMPT,
    PROMPTS_PER_TASK,
    Draft,
    TaskProposal,
    first_messages,
    make_calls,
    proposable,
    show_server,
)
from agentevo_evolve.task_making.scenario import (
    MAX_DIFFICULTY,
    WRITTEN,
    Scenario,
    ScenarioStep,
    is_held_out,
    steps_of,
)
from agentevo_evolve.task_making.survey import Survey
from agentevo_evolve.task_making.walks import (
    MAX_CALLS,
    Coverage,
    extend_question,
    prune_steps,
    walk,
)
from agentevo_evolve.task_making.wording import (
    LANGUAGES,
    PERSONAS,
    find_tool_names,
    gives_away,
    shown,
    values_left_out,
    word_scenario,
)

CONCURRENCY = 8
UNANSWERED = "the model did not answer"
MAX_MISSES = 400
"""The number of walks in a row without a new task, after which the search ends."""
MAX_QUERY_CHARS = 4000
"""The maximum number of characters of a task. Descriptions can have any length."""
MAX_DIFFICULTY_SHARE = 0.4
"""The share of the tasks that may have the same difficulty while others are found. Beyond it, one
more task of that difficulty is accepted after MAX_MISSES / 2 unsuccessful walks, the next one after
half as many, and so on. So the search for other difficulties costs MAX_MISSES walks altogether."""
SAME_ANSWER = 4
SAME_SHARE = 0.03
"""The maximum number of tasks with the same last call and answer is SAME_ANSWER, or SAME_SHARE of
all wanted tasks. With more, an agent could guess the answer."""


class WantedTasks(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks to make."""

    train: int = 200
    held_out: int = 50
    seed: int = 0
    worlds: int = 1
    """The number of the server's worlds. A task's `world` is the number of its world."""
    max_calls: int = MAX_CALLS
    languages: tuple[str, ...] = ("en",)
    personas: tuple[str, ...] = ("",)
    """The personas that write the tasks. "" is a task without a persona."""
    kinds: tuple[str, ...] = ("state", "answer")
    min_difficulty: int = 1
    max_difficulty: int = MAX_DIFFICULTY
    values: Mapping[str, Sequence[Any]] = {}
    """Maps a parameter to the values that the user names."""


class MadeTasks(msgspec.Struct, kw_only=True):
    """The tasks that were made for a server."""

    train: list[dict[str, Any]] = []
    """The rows of the task file."""
    held_out: list[dict[str, Any]] = []
    survey: Survey
    reasons: dict[str, int] = {}
    """Maps a reason why walks gave no task to the number of these walks."""
    num_prompts: int | None = None
    """The number of prompts to the writer for scenarios. None if it was asked for none."""
    written_reasons: dict[str, int] = {}
    """Maps a reason why a proposal of the writer gave no task to the number of these proposals."""

    @property
    def shortage(self) -> str:
        """What is missing before these tasks can train a model and measure it, with the causes.
        Empty if there are tasks on both sides of the split."""
        if self.train and self.held_out:
            return ""
        why = "; ".join(f"{reason}: {count}" for reason, count in list(self.reasons.items())[:5])
        made, missing = ("training", "held-out") if self.train else ("held-out", "training")
        count = len(self.train) + len(self.held_out)
        return (
            f"no {missing} task was made, only {count} {made} ones ({why}): give more values of "
            "parameters by --value, or other tools"
        )

    @property
    def account(self) -> dict[str, Any]:
        """A summary of the tasks, for users and reports."""
        rows = [*self.train, *self.held_out]
        tools = Counter(tool for row in rows for tool in row["tools"])
        pairs = {pair for row in rows for pair in zip(row["tools"], row["tools"][1:], strict=False)}
        written = {
            "tasks": sum(WRITTEN in row for row in rows),
            "prompts": self.num_prompts,
            "reasons": self.written_reasons,
        }
        return {
            "train": len(self.train),
            "held_out": len(self.held_out),
            **({"written": written} if self.num_prompts is not None else {}),
            "difficulty": dict(sorted(Counter(row["difficulty"] for row in rows).items())),
            "tools": {name: tools[name] for name in self.survey.schemas},
            "pairs": sorted(f"{first} -> {then}" for first, then in pairs),
            "silent": self.survey.unresponsive,
            "changing": sorted(self.survey.changing),
            "left_out": self.survey.left_out,
            "reasons": self.reasons,
        }


def check_wanted(request: WantedTasks) -> None:
    """Raises ConfigError for a request that can't be fulfilled."""
    for chosen, allowed, what in (
        (request.languages, tuple(LANGUAGES), "--language"),
        (request.personas, ("", *PERSONAS), "--persona"),
        (request.kinds, ("state", "answer", "open"), "--kind"),
    ):
        unknown = next((value for value in chosen if value not in allowed), None)
        if unknown is not None or not chosen:
            names = ", ".join(filter(None, allowed))
            raise ConfigError(f"{what} {unknown or 'nothing'}: there are {names}")

    if not 1 <= request.min_difficulty <= request.max_difficulty <= MAX_DIFFICULTY:
        raise ConfigError(
            f"--difficulty: {request.min_difficulty} to {request.max_difficulty}: give 1 to "
            f"{MAX_DIFFICULTY}"
        )


async def make_tasks(
    sections: Sequence[ToolSection],
    request: WantedTasks,
    *,
    taken: frozenset[str] = frozenset(),
    harder_than: Sequence[Mapping[str, Any]] = (),
    writer: RemoteModel | None = None,
    on_note: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], None] = lambda done: None,
) -> MadeTasks:
    """Makes the tasks. `taken`: contents that are not made again. `harder_than`: rows of generated
    tasks. Every new task extends one of these tasks by further calls. `writer`: a model that
    proposes tasks before walks make the others. Raises ToolUnavailableError if the server can't be
    reached, ConfigError if none of its tools returns a result, and AgentEvoError if no task can be
    made, or if the writer never replies."""
    check_wanted(request)
    world = ToolWorld(sections)
    try:
        surveyed = await explore_server(world, request.values, seed=request.seed)
        for name, why in surveyed.unresponsive.items():
            on_note(
                f"no task needs {name}: it refuses calls that its schema allows, or fails ({why})"
            )
        for name, why in surveyed.left_out.items():
            on_note(f"no task needs {name}: {why}")
        if not surveyed.usable:
            raise AgentEvoError(
                "no tool of the server is left that tasks may need; the notes say why for each"
            )
        if request.worlds == 1 and not set(surveyed.usable) & surveyed.changing:
            world.keep_sessions()
        maker = _Maker(world, surveyed, request, taken, harder_than, progress)
        if writer is not None:
            await maker.write(writer)
        return await maker.make()
    finally:
        await world.close()


class _Maker:
    """Makes one set of tasks in rounds."""

    def __init__(
        self,
        world: ToolWorld,
        surveyed: Survey,
        request: WantedTasks,
        taken: frozenset[str],
        parents: Sequence[Mapping[str, Any]],
        progress: Callable[[int], None],
    ) -> None:
        self._world = world
        self._survey = surveyed
        self._request = request
        self._progress = progress
        self._reasons = Counter[str]()
        self._coverage = Coverage()
        self._taken_contents = set(taken)
        self._queries = set[bytes | None]()
        self._meanings = set[str]()
        """What the writer's tasks mean."""
        self._sides = dict[str, bool]()
        """Maps the final state of a task to whether the task is held out."""
        self._made = MadeTasks(survey=surveyed)
        self._num_by_difficulty = Counter[int]()
        self._misses = 0
        self._patience = MAX_MISSES // 2
        self._parents = parents

    async def make(self) -> MadeTasks:
        """See make_tasks."""
        tasks = self._made
        number = 0
        while self._misses < MAX_MISSES and self._num_missing:
            numbers = range(number, number + CONCURRENCY)
            number += CONCURRENCY

            walked = await asyncio.gather(*map(self._walk, numbers))
            for (scenario, results), draw in zip(walked, map(self._draw, numbers), strict=True):
                for result in results:
                    self._survey.learn(result)
                is_kept = scenario is not None and self._keep_walk(scenario, draw)
                if results and not is_kept:
                    self._coverage.fruitless[results[-1].tool] += 1
                self._misses = 0 if is_kept else self._misses + 1

            self._progress(self._num_made)

        tasks.reasons = dict(self._reasons.most_common())
        if not tasks.train and not tasks.held_out:
            why = "; ".join(f"{reason}: {count}" for reason, count in self._reasons.most_common(5))
            raise AgentEvoError(
                f"no call of the server could become a task ({why or 'no walk'}): "
                "give values of its parameters by --value, or other tools by --include"
            )

        return tasks

    async def write(self, model: RemoteModel) -> None:
        """Makes tasks of the writer's proposals, in rounds of prompts. Raises AgentEvoError if the
        writer never replies."""
        reasons = Counter[str]()
        num_prompts = 0
        has_tools = bool(proposable(self._survey))
        most = math.ceil(self._num_missing * PROMPTS_PER_TASK / 2) if has_tools else 0
        number = idle = 0
        while number < most and idle < MAX_IDLE_ROUNDS and self._num_missing:
            num_before = self._num_made
            num_drafts = math.ceil(self._num_missing / PER_PROMPT)
            numbers = range(number, min(most, number + min(CONCURRENCY, num_drafts)))
            number = numbers.stop

            drafts = list(await asyncio.gather(*map(self._open_draft, numbers)))
            for _ in range(2):
                num_prompts += len(drafts)
                errors = await asyncio.gather(*(self._propose(draft, model) for draft in drafts))
                failures = [error for error in errors if error is not None]
                reasons[UNANSWERED] += len(failures)
                if reasons[UNANSWERED] == num_prompts:
                    raise AgentEvoError(f"the writer has answered nothing: {failures[0]}")

                for draft in drafts:
                    self._keep_proposals(draft)
                    reasons.update(_kind_of(problem) for _, problem in draft.problems)
                drafts = [draft for draft in drafts if draft.problems]

            idle = 0 if self._num_made > num_before else idle + 1
            self._progress(self._num_made)

        self._made.num_prompts = num_prompts
        self._made.written_reasons = dict((+reasons).most_common())

    async def _open_draft(self, number: int) -> Draft:
        """The first prompt of a conversation with the writer. It asks for difficulties of which
        there are not enough."""
        draw = self._draw(number, "writer")
        request = self._request
        world = draw.randrange(request.worlds)
        language = draw.choice(request.languages)
        persona = draw.choice(request.personas)
        difficulties = range(request.min_difficulty, request.max_difficulty + 1)
        rare = [difficulty for difficulty in difficulties if not self._is_common(difficulty)]
        mark, messages = first_messages(
            await show_server(self._world, self._survey, world, draw),
            [row["query"] for row in [*self._made.train, *self._made.held_out]],
            count=PER_PROMPT,
            language=language,
            persona=persona,
            max_calls=request.max_calls,
            kinds=request.kinds,
            difficulties=rare or difficulties,
        )
        return Draft(number, world, language, persona, mark, messages)

    async def _propose(self, draft: Draft, model: RemoteModel) -> AgentEvoError | None:
        """Asks the writer, and tries its proposals. Returns the error if it does not reply."""
        try:
            await draft.ask(model, self._request.seed)
        except AgentEvoError as error:
            return error

        for proposal in draft.proposals:
            try:
                draft.tried.append((proposal, await self._try(proposal, draft)))
            except UngroundedError as error:
                draft.problems.append((proposal.task, str(error)))

        return None

    async def _try(self, proposal: TaskProposal, draft: Draft) -> Scenario:
        """Makes a proposal's calls, then treats them as a walk. Raises UngroundedError."""
        if len(proposal.calls) > self._request.max_calls:
            raise UngroundedError(f"it has more than {self._request.max_calls} calls")

        async with self._world.open(draft.world) as tools:
            steps = await make_calls(tools, self._survey, proposal, draft.results)

        planned = Scenario(
            steps=prune_steps(steps),
            world=draft.world,
            answer="" if proposal.answer is None else shown(proposal.answer).strip(),
            written_difficulty=proposal.difficulty,
        )
        return await self._scenario(planned, self._draw(draft.number, proposal.task))

    def _keep_proposals(self, draft: Draft) -> None:
        for result in draft.results:
            self._survey.learn(result)

        for proposal, scenario in draft.tried:
            problem = self._keep(scenario, proposal.task.strip(), draft.language, draft.persona)
            if problem:
                draft.problems.append((proposal.task, problem))
            else:
                self._meanings.add(scenario.meaning)

    @property
    def _num_made(self) -> int:
        return len(self._made.train) + len(self._made.held_out)

    @property
    def _num_missing(self) -> int:
        """The number of tasks that are missing on both sides of the split."""
        request = self._request
        missing = (
            request.train - len(self._made.train),
            request.held_out - len(self._made.held_out),
        )
        return sum(max(0, count) for count in missing)

    def _draw(self, number: int, purpose: str = "words") -> random.Random:
        return random.Random(f"{purpose}-{self._request.seed}-{number}")

    async def _walk(self, number: int) -> tuple[Scenario | None, list[CallResult]]:
        """A walk of a round: its scenario, and the results of its calls. It uses only knowledge
        from earlier rounds, so concurrent walks do not affect each other."""
        draw = self._draw(number, "walk")
        request = self._request

        parent = ""
        world = draw.randrange(request.worlds)
        start = list[ScenarioStep]()
        if self._parents:
            row = draw.choice(self._parents)
            start = [_without_loose_sources(step) for step in steps_of(row)]
            world = int(row.get("world", 0))
            parent = str(row["id"])

        fewest = 2 if self._has_enough(1) else 1
        most = max(fewest, request.max_calls)
        num_calls = max(1, draw.randint(fewest, most) - len(start))
        async with self._world.open(world) as tools:
            for step in start:
                await call_tool(tools, step.tool, step.arguments)
            is_question = bool(start) and start[-1].question is not None
            if is_question:
                walked, results = await extend_question(tools, self._survey, start, draw)
            else:
                walked, results = await walk(
                    tools, self._survey, self._coverage, draw, num_calls, start
                )

        steps = prune_steps(walked) if walked else []
        if not steps or (len(steps) <= len(start) and not is_question):
            self._reasons["a call was refused, or gave too much"] += 1
            return None, results

        planned = Scenario(steps=steps, world=world, parent=parent)
        try:
            return await self._scenario(planned, draw), results
        except UngroundedError as error:
            self._reasons[str(error)] += 1
            return None, results

    async def _scenario(self, planned: Scenario, draw: random.Random) -> Scenario:
        """The scenario with its outcome. `planned`: its calls and, if a model wrote it, its answer.
        Raises UngroundedError if it can't become a task, or is not needed."""
        steps = planned.steps
        takes_open = "open" in self._request.kinds
        if planned.kind not in self._request.kinds and not takes_open:
            raise UngroundedError("of a kind that is not wanted")

        least = self._request.min_difficulty
        most = self._request.max_difficulty
        if not least <= planned.difficulty <= most:
            raise UngroundedError("of a difficulty that is not wanted")

        is_final_kind = planned.kind == "state" or steps[-1].question is not None
        reason = (
            self._why_not_needed(planned) if is_final_kind else self._difficulty_problem(planned)
        )
        if reason:  # an unneeded scenario costs no further calls
            raise UngroundedError(reason)

        try:
            grounded = await ground_scenario(
                self._world, self._survey, steps, planned.world, draw, planned.answer
            )
        except UngroundedError as error:
            if error.varies and takes_open:
                return msgspec.structs.replace(planned, is_open=True, answer=None)
            raise

        if grounded.kind not in self._request.kinds:
            raise UngroundedError("of a kind that is not wanted")
        return msgspec.structs.replace(
            grounded, parent=planned.parent, written_difficulty=planned.written_difficulty
        )

    def _keep_walk(self, scenario: Scenario, draw: random.Random) -> bool:
        """Words a walk's scenario, and adds it to the tasks. Returns whether it was added."""
        language = draw.choice(self._request.languages)
        persona = draw.choice(self._request.personas)
        query = word_scenario(
            scenario, self._survey.descriptions, language=language, persona=persona
        )
        problem = self._keep(scenario, query, language, persona)
        if problem:
            self._reasons[_kind_of(problem)] += 1
        return not problem

    def _keep(self, scenario: Scenario, query: str, language: str, persona: str) -> str:
        """Adds the scenario to the tasks if it is acceptable. Returns the reason why it was not
        added, or an empty text."""
        request = self._request
        reason = self._why_not_needed(scenario) or self._wording_problem(scenario, query)
        if reason:
            return reason

        self._taken_contents.add(scenario.content)
        if scenario.end_state:
            self._sides[scenario.end_state] = is_held_out(scenario.content)
        self._queries.add(question_key(query))
        self._coverage.add([step.tool for step in scenario.steps], scenario.answer)

        if self._is_common(scenario.difficulty):
            self._patience //= 2

        self._num_by_difficulty[scenario.difficulty] += 1
        rows = self._made.held_out if is_held_out(scenario.content) else self._made.train
        rows.append(scenario.row(query, language=language, persona=persona, worlds=request.worlds))
        return ""

    def _why_not_needed(self, scenario: Scenario) -> str:
        """The reason why the scenario is not needed, independent of its results. Empty if it is
        needed."""
        tasks = self._made
        request = self._request

        content = scenario.content
        if content in self._taken_contents:
            return "there already"
        if scenario.meaning in self._meanings:
            return "asks for the same as another task, in other words"

        is_evaluation = is_held_out(content)
        if len(tasks.held_out if is_evaluation else tasks.train) >= (
            request.held_out if is_evaluation else request.train
        ):
            return "enough of its side of the split"

        if self._sides.get(scenario.end_state, is_evaluation) != is_evaluation:
            return "ends in the same state as a task on the other side of the split"
        return self._difficulty_problem(scenario)

    def _difficulty_problem(self, scenario: Scenario) -> str:
        return "enough have its difficulty" if self._has_enough(scenario.difficulty) else ""

    def _wording_problem(self, scenario: Scenario, query: str) -> str:
        if question_key(query) in self._queries:
            return "there already"
        if len(query) > MAX_QUERY_CHARS:
            return "its words are too long"
        if named := find_tool_names(query, self._survey.names):
            return f"its words name a tool: {named[0]}"
        if missing := values_left_out(query, scenario):
            return f"its words leave out what has to be told: {missing[0][:200]}"
        if gives_away(query, scenario):
            return "its words say what is to be found"

        last = scenario.steps[-1].tool
        num_wanted = self._request.train + self._request.held_out
        most = max(SAME_ANSWER, SAME_SHARE * num_wanted)
        if scenario.answer is not None and self._coverage.answers[last, scenario.answer] >= most:
            return "too many have the same answer"

        return ""

    def _has_enough(self, difficulty: int) -> bool:
        """Whether the search currently prefers other difficulties."""
        return self._is_common(difficulty) and self._misses < self._patience

    def _is_common(self, difficulty: int) -> bool:
        most = MAX_DIFFICULTY_SHARE * (self._request.train + self._request.held_out)
        return self._num_by_difficulty[difficulty] >= most


def _without_loose_sources(step: ScenarioStep) -> ScenarioStep:
    """The step with the arguments that stand anywhere in an earlier result as arguments that the
    agent receives: the grammar has no words for how to choose them."""
    sources = {name: source for name, source in step.found.items() if source.name}
    return msgspec.structs.replace(step, found=sources)


def _kind_of(problem: str) -> str:
    """A problem without its details."""
    return problem.partition(":")[0]
