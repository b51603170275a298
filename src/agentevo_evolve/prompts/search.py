"""The search for better texts, as a beam or on a Pareto front. Both use the same edits.

    beam (apo, few_shot, phrases)   of every text of the beam some edits; the best of both continue.
                                    With a writer an edit is a criticism of attempts and a change
                                    by it: textual gradients, after Pryzant et al. 2023
                                    (arXiv 2305.03495)
    Pareto front (gepa)             a parent is drawn among the texts that are best at some task,
                                    by how many these are; the writer reflects on its attempts; now
                                    and then two parents are merged, text by text: after Agrawal et
                                    al. 2025 (arXiv 2507.19457)

An edit is first compared with its parent on some tasks, where it must not be worse (gepa: must be
better). Only then is it judged on all tasks. The tasks for judging texts differ from those that
edits learn from, so no task is judged with its own example in the prompt. Every choice follows from
the seed, the round and the branch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentevo.agents.named_texts import Kind, as_examples, examples_of
from agentevo.config.optimize import OptimizeSection
from agentevo.config.texts import text_problem
from agentevo.data.messages import messages_of
from agentevo.errors import BadRequestError
from agentevo.runtime.seeds import derive_seed
from agentevo.types import Message, Task
from agentevo_evolve.prompts.budget import BudgetSpentError
from agentevo_evolve.prompts.folder import Candidate, OptimizeFolder, PlayedAttempt, Record
from agentevo_evolve.prompts.playing import JUDGED, SAMPLED, Playing
from agentevo_evolve.prompts.writing import TextWriter, WriterFailedError, shown_attempts

MERGE_EVERY = 4
SAMPLES = 4
"""The number of attempts at each task to choose examples from, if greedy attempts give too few."""


@dataclass(frozen=True)
class Judged:
    """A candidate and its scores on the tasks for judging texts."""

    candidate: Candidate
    scores: dict[str, float]

    @property
    def mean(self) -> float:
        return sum(self.scores.values()) / len(self.scores)

    @property
    def rank(self) -> tuple[float, int, str]:
        """The sort key: the best first, and among equals the shortest."""
        return -self.mean, self.candidate.size, self.candidate.id


@dataclass
class TextSearch:
    """Searches for better texts within a budget."""

    section: OptimizeSection
    method: str
    seed: int
    kinds: dict[str, Kind]
    """The kinds of the searched texts."""
    playing: Playing
    writer: TextWriter | None
    folder: OptimizeFolder
    learning: Sequence[Task]
    judging: Sequence[Task]
    note: Callable[[str], None]
    known_problems: set[str] = field(default_factory=set)
    """The candidates in the log."""
    pool: list[Judged] = field(default_factory=list)
    num_tried: int = 0
    end_reason: str = ""
    """Why the search ended."""

    def restore(self, records: Sequence[Record]) -> None:
        """Restores the state from the log."""
        self.known_problems |= {record.id for record in records if isinstance(record, Candidate)}

    async def run(self, start: Candidate) -> Judged:
        """The best candidate that was found within the budget, which may be `start`. Raises
        BudgetSpentError only if not even `start` could be judged."""
        self._log_candidate(start)
        self.pool.append(await self._judge(start))
        self.note(f"the agent's own texts: {self.pool[0].mean:.3f} on {len(self.judging)} tasks")

        try:
            await (self._front() if self.method == "gepa" else self._beam())
            self.end_reason = self.end_reason or f"optimize.rounds={self.section.rounds} are over"
        except (BudgetSpentError, WriterFailedError) as error:
            self.end_reason = str(error)

        self.note(f"the search ended: {self.end_reason}")
        return min(self.pool, key=lambda judged: judged.rank)

    async def _beam(self) -> None:
        beam = [self.pool[0]]
        for number in range(1, self.section.rounds + 1):
            accepted: list[Judged] = []
            tried = self.num_tried
            for parent in beam:
                for branch in range(self.section.branches):
                    draw = self._draw(number, parent.candidate.id, branch)
                    child = await self._edit(parent.candidate, draw, branch)
                    judged = await self._try_child(child, parent, draw, strictly=False)
                    if judged is not None:
                        accepted.append(judged)
                        self.pool.append(judged)

            if tried == self.num_tried:
                self.end_reason = f"round {number} gave no new text"
                return

            beam = sorted([*beam, *accepted], key=lambda judged: judged.rank)[
                : self.section.beam_width
            ]
            self._report(number)

    async def _front(self) -> None:
        """Searches on a Pareto front, with as many edits as the beam would make."""
        per_round = self.section.beam_width * self.section.branches
        for number in range(self.section.rounds * per_round):
            draw = self._draw(number, "front", 0)
            parents = self.front()
            weights = [wins for _, wins in parents]
            (parent,) = draw.choices([judged for judged, _ in parents], weights)
            merges = number % MERGE_EVERY == MERGE_EVERY - 1 and len(self.kinds) > 1
            other_parents = [judged for judged, _ in parents if judged is not parent]
            if merges and other_parents:
                child: Candidate | None = _merge_parents(parent, draw.choice(other_parents), draw)
            else:
                child = await self._edit(parent.candidate, draw, number)

            judged = await self._try_child(child, parent, draw, strictly=True)
            if judged is not None:
                self.pool.append(judged)
            if (number + 1) % per_round == 0:
                self._report((number + 1) // per_round)

    def front(self) -> list[tuple[Judged, int]]:
        """The candidates that are best at some task, with the number of such tasks."""
        best = {
            task.id: max(judged.scores[task.id] for judged in self.pool) for task in self.judging
        }
        wins = [
            sum(judged.scores[task] >= top for task, top in best.items()) for judged in self.pool
        ]
        return [(judged, count) for judged, count in zip(self.pool, wins, strict=True) if count]

    async def _try_child(
        self, child: Candidate | None, parent: Judged, draw: random.Random, *, strictly: bool
    ) -> Judged | None:
        """The judged child. None if it is not new, or if it is worse than its parent on some
        tasks."""
        if child is None or any(judged.candidate.id == child.id for judged in self.pool):
            return None

        self._log_candidate(child)
        self.num_tried += 1
        some = draw.sample(list(self.judging), min(2 * self.section.batch, len(self.judging)))
        scores = self.playing.scores(await self.playing.play(child, some))
        total = sum(scores.values())
        before = sum(parent.scores[task.id] for task in some)
        # If the parent fails on all these tasks, an edit that also fails is not worse.
        if total < before or (strictly and total == before):
            return None

        return await self._judge(child)

    async def _judge(self, candidate: Candidate) -> Judged:
        played = await self.playing.play(candidate, self.judging)
        return Judged(candidate, self.playing.scores(played))

    async def _edit(self, parent: Candidate, draw: random.Random, number: int) -> Candidate | None:
        """Another candidate, with one text changed. None if the edit fails."""
        names = sorted(self.kinds)
        name = names[number % len(names)]
        before = parent.texts[name]
        how = ""
        new: str | None
        if self.kinds[name] == "examples":
            new = await self._examples(parent, before, draw)
            how = "examples"
        elif self.writer is None:
            change = edit(before, self.section.phrases, draw)
            new, how = change if change is not None else (None, "")
        else:
            new = await self._written(self.writer, parent, name, draw)
            how = self.method

        if new is None or new == before:
            return None

        texts = {**parent.texts, name: new}
        return Candidate(texts=texts, parent=parent.id, how=f"{name}: {how}")

    async def _written(
        self, writer: TextWriter, parent: Candidate, name: str, draw: random.Random
    ) -> str | None:
        before = parent.texts[name]
        number = draw.getrandbits(32)
        tasks = draw.sample(list(self.learning), min(self.section.batch, len(self.learning)))
        played = await self.playing.play(parent, tasks)
        shown = shown_attempts(tasks, [played[task.id] for task in tasks])
        if self.method == "gepa":
            return await writer.reflect(name, before, shown, number)

        critique = await writer.critique(name, before, shown, number)
        return None if critique is None else await writer.edit(name, before, critique, number)

    async def _examples(self, parent: Candidate, before: str, draw: random.Random) -> str | None:
        """Chooses examples from the parent's attempts at the learning tasks. If there are too few
        good ones, sampled attempts are added."""
        greedy = await self.playing.play(parent, self.learning)
        played: list[PlayedAttempt] = [attempt for of_it in greedy.values() for attempt in of_it]
        if sum(attempt.success for attempt in played) < self.section.examples:
            sampled = await self.playing.play(
                parent, self.learning, label=SAMPLED, attempts=SAMPLES
            )
            played += [attempt for of_it in sampled.values() for attempt in of_it]
        return chosen_examples(played, before, self.section.examples, draw)

    def _draw(self, number: int, of: str, branch: int) -> random.Random:
        return random.Random(derive_seed(self.seed, "optimize", number, of, branch))

    def _log_candidate(self, candidate: Candidate) -> None:
        """Logs the candidate before its first attempt."""
        if candidate.id not in self.known_problems:
            self.folder.add(candidate)
            self.known_problems.add(candidate.id)

    def _report(self, number: int) -> None:
        best = min(self.pool, key=lambda judged: judged.rank)
        budget = self.playing.budget
        self.note(
            f"round {number}: best {best.mean:.3f} ({JUDGED} at {len(self.judging)} tasks), "
            f"{len(self.pool)} of {self.num_tried + 1} texts judged, {budget.num_begun} of "
            f"{self.section.attempts} attempts begun"
        )


def _merge_parents(first: Judged, second: Judged, draw: random.Random) -> Candidate:
    """Takes each text from one of the two parents, at random."""
    pairs = (first.candidate.texts, second.candidate.texts)
    texts = {name: pairs[draw.random() < 0.5][name] for name in sorted(pairs[0])}
    return Candidate(
        texts=texts, parent=first.candidate.id, how=f"merged with {second.candidate.id}"
    )


_END = re.compile(r"(?<=[.!?])\s+|\n+")


def sentences_of(text: str) -> list[str]:
    """The sentences and lines of a text, without the space between them."""
    return [sentence for sentence in (part.strip() for part in _END.split(text)) if sentence]


def edit(text: str, phrases: Sequence[str], draw: random.Random) -> tuple[str, str] | None:
    """Another text, and a description of the edit. None if no edit is possible. The space between
    sentences (line breaks) is kept only if a sentence is added."""
    sentences = sentences_of(text)
    absent = [phrase for phrase in phrases if phrase not in text]
    kinds = (["add"] * 2 if absent else []) + (["drop", "move"] if len(sentences) > 1 else [])
    if not kinds:
        return None

    kind = draw.choice(kinds)
    if kind == "add":
        phrase = draw.choice(absent)
        if not text:
            return phrase, f"says: {phrase}"
        first = draw.random() < 0.5
        new = f"{phrase}\n{text}" if first else f"{text}\n{phrase}"
        return new, f"says {'first' if first else 'last'}: {phrase}"

    place = draw.randrange(len(sentences))
    sentence = sentences.pop(place)
    if kind == "drop":
        return "\n".join(sentences), f"without: {sentence[:100]}"

    target = draw.choice([number for number in range(len(sentences) + 1) if number != place])
    sentences.insert(target, sentence)
    return "\n".join(sentences), f"moved: {sentence[:100]}"


def best_attempts(played: Sequence[PlayedAttempt]) -> list[PlayedAttempt]:
    """An attempt of each task, the highest reward first. They are successful attempts or, if there
    are none, attempts with a reward above the mean."""
    completed = [
        attempt for attempt in played if attempt.status == "completed" and attempt.messages
    ]
    good = [attempt for attempt in completed if attempt.success]
    if not good and completed:
        mean = sum(attempt.reward for attempt in completed) / len(completed)
        good = [attempt for attempt in completed if attempt.reward > mean]

    best: dict[str, PlayedAttempt] = {}
    for candidate in sorted(
        good, key=lambda attempt: (-attempt.reward, attempt.task, attempt.label, attempt.attempt)
    ):
        best.setdefault(candidate.task, candidate)

    return list(best.values())


def chosen_examples(
    played: Sequence[PlayedAttempt], before: str, most: int, draw: random.Random
) -> str | None:
    """A text of at most `most` conversations, sampled from `best_attempts`. None if there are none.
    `before`: the examples in these attempts' prompts, which are not the attempts' own
    conversations."""
    shown = [message for example in examples_of("examples", before) for message in example]
    opening = common_opening([attempt for attempt in played if attempt.messages], shown)
    talks = [
        talk
        for best_attempt in best_attempts(played)
        if (talk := attempt_messages(best_attempt, opening))
    ]
    if not talks:
        return None

    count = min(len(talks), draw.randint(max(1, most // 2), most))
    text = as_examples(draw.sample(talks, count))
    return text if text_problem("examples", text) is None else None


def common_opening(played: Sequence[PlayedAttempt], shown: Sequence[Message]) -> list[Message]:
    """The common beginning of conversations, without system messages: the messages that the
    conversations of all tasks share. For a single task, the examples in `shown`."""
    openings = {attempt.task: _talk(attempt) for attempt in played}
    talks = [talk for talk in openings.values() if talk]
    if len(talks) < 2:
        return list(shown)

    common: list[Message] = []
    for same in zip(*talks, strict=False):
        if any(_said(message) != _said(same[0]) for message in same):
            break
        common.append(same[0])

    return common


def attempt_messages(played: PlayedAttempt, opening: Sequence[Message]) -> list[Message]:
    """The attempt's conversation without system messages and without the common beginning. Empty if
    it can't be an example."""
    talk = _talk(played)
    if [_said(message) for message in talk[: len(opening)]] == [
        _said(message) for message in opening
    ]:
        talk = talk[len(opening) :]
    return talk if talk and talk[-1].role == "assistant" else []


def _talk(played: PlayedAttempt) -> list[Message]:
    try:
        return [message for message in messages_of(played.messages) if message.role != "system"]
    except BadRequestError:
        return []


def _said(message: Message) -> tuple[str, str]:
    return message.role, message.text
