"""The section `optimize`: which texts `agentevo optimize` searches, how, and within what budget."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from agentevo.config.section import Section
from agentevo.config.texts import text_problem

PHRASES = (
    "Answer with nothing but what was asked for.",
    "Use exactly the form that the examples and the instructions show.",
    "Read the question twice, and use its own words in the answer.",
    "Work it out step by step before you answer.",
    "Be brief.",
    "If there are tools, call one before you answer.",
    "Check the answer once more before you give it.",
)


class OptimizeSection(Section):
    """What `agentevo optimize` searches, how, and within what budget; other commands don't read
    it."""

    texts: tuple[str, ...] = ()
    """Names of the texts that it may change. Default: all that the agent asks for and the method
    can write."""
    method: Literal["auto", "apo", "gepa", "few_shot", "phrases"] = "auto"
    """`apo`: a beam of texts, each criticised by the writer and edited by that; `gepa`: the writer
    reflects on attempts, and texts that are best at some task are kept; `few_shot`: examples from
    the agent's own best attempts; `phrases`: seeded edits without a writer, of sentences and the
    list `phrases`. `auto`: gepa with a writer, else few_shot where the agent asks for examples,
    else phrases."""
    writer: str | None = None
    """Who writes: a name of remote_models, or `policy`, the model that plays."""
    tasks: int = Field(default=48, ge=6)
    """Tasks of the search, the first that training would draw: a third to learn from, the others to
    judge texts by. Held-out tasks are never among them."""
    attempts: int = Field(default=800, ge=1)
    """Most attempts, the comparison on held-out tasks and lost ones included."""
    minutes: float | None = Field(default=None, gt=0)
    """Most minutes, all resumptions together. Attempts that run then are broken off."""
    cost: float | None = Field(default=None, gt=0)
    """Most money for remote models, in the currency of their prices: shared evenly among those that
    have one."""
    attempts_per_task: int = Field(default=1, ge=1)
    """Attempts at a task by which a text is judged: 1 for a greedy policy."""
    temperature: float = Field(default=0.0, ge=0)
    """At which the policy plays."""
    rounds: int = Field(default=6, ge=1)
    """Rounds of the search, where the budget lasts."""
    beam_width: int = Field(default=3, ge=1)
    """Texts that a round of `apo`, `few_shot` and `phrases` goes on from."""
    branches: int = Field(default=4, ge=1)
    """New texts of each of them."""
    batch: int = Field(default=4, ge=1)
    """Tasks whose attempts the writer reads at once."""
    examples: int = Field(default=4, ge=1)
    """Most conversations in a text of examples."""
    max_chars: int = Field(default=4000, ge=1)
    """Longest text that a writer may give."""
    phrases: tuple[str, ...] = PHRASES
    """Sentences that `phrases` tries to add."""

    @field_validator("phrases", mode="after")
    @classmethod
    def _are_texts(cls, phrases: tuple[str, ...]) -> tuple[str, ...]:
        for phrase in phrases:
            if problem := text_problem("phrase", phrase):
                raise ValueError(problem)
        return phrases

    @model_validator(mode="after")
    def _writes(self) -> Self:
        if self.method in ("apo", "gepa") and self.writer is None:
            raise ValueError(
                f"method {self.method} has texts written: set optimize.writer to a name of "
                "remote_models, or to policy"
            )

        if self.temperature == 0 and self.attempts_per_task > 1:
            raise ValueError(
                "attempts_per_task: greedy attempts at a task are all the same: set temperature, "
                "or attempts_per_task=1"
            )

        return self
