"""The section `optimize`: which texts `agentevo optimize` searches, how, and within what budget."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from agentevo.config.texts import text_problem
from agentevo.runtime.section import Section

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
    """Names of the texts to change. Default: every text of the agent that the method can write."""
    method: Literal["auto", "apo", "gepa", "few_shot", "phrases"] = "auto"
    """`apo`: a beam of texts; the writer criticises each text, then edits it by the critique.
    `gepa`: the writer reflects on attempts, and the search keeps each text that is the best at some
    task. `few_shot`: examples from the agent's own best attempts. `phrases`: seeded edits of
    sentences and of the list `phrases`, without a writer. `auto`: gepa with a writer, else few_shot
    if the agent uses examples, else phrases."""
    writer: str | None = None
    """The model that writes the texts: a name in remote_models, or `policy`, the model that
    plays."""
    tasks: int = Field(default=48, ge=6)
    """Number of tasks in the search, taken from the start of the training order: one third to learn
    from, the rest to judge texts. They never include held-out tasks."""
    attempts: int = Field(default=800, ge=1)
    """Maximum number of attempts, including lost ones and the comparison on held-out tasks."""
    minutes: float | None = Field(default=None, gt=0)
    """Maximum time in minutes, over all resumptions. Attempts that still run then are stopped."""
    cost: float | None = Field(default=None, gt=0)
    """Maximum cost of remote models, in the currency of their prices. It is split evenly among the
    models that have a price."""
    attempts_per_task: int = Field(default=1, ge=1)
    """Attempts per task when a text is judged; 1 for a greedy policy."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the policy."""
    rounds: int = Field(default=6, ge=1)
    """Rounds of the search, if the budget allows."""
    beam_width: int = Field(default=3, ge=1)
    """Texts that a round of `apo`, `few_shot` or `phrases` starts from."""
    branches: int = Field(default=4, ge=1)
    """New texts made from each of them."""
    batch: int = Field(default=4, ge=1)
    """Tasks whose attempts the writer reads at once."""
    examples: int = Field(default=4, ge=1)
    """Maximum number of conversations in a text of examples."""
    max_chars: int = Field(default=4000, ge=1)
    """Maximum length of a text by the writer, in characters."""
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
                f"method {self.method} needs a model that writes texts: set optimize.writer to a "
                "name in remote_models, or to policy"
            )

        if self.temperature == 0 and self.attempts_per_task > 1:
            raise ValueError(
                "attempts_per_task: greedy attempts at a task are all the same: set temperature, "
                "or attempts_per_task=1"
            )

        return self
