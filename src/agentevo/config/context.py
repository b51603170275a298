"""The section `agent.context`: which part of a long history the policy sees."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentevo.runtime.section import Section


class ContextSection(Section):
    """What the policy sees of a long history. Training uses exactly what the policy saw: when the
    history is cut, the trajectory's tree begins a new branch."""

    strategy: Literal["full", "window", "discard_results", "summary"] = "full"
    """`full`: everything, until the context is full. `window`: the task and the last keep_turns
    turns. `discard_results`: everything except the tool results before the last keep_turns turns.
    `summary`: the task, a summary of the earlier turns, and the last keep_turns turns."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The history is cut when a turn's prompt and reply have more tokens than this. Default: when
    the context is full."""
    keep_turns: int = Field(default=1, ge=0)
    """Number of last turns, with their results, that are kept unchanged."""
    summary_model: str | None = None
    """The model that writes summaries: a name of remote_models. Default: the policy itself, whose
    summaries are then trained too."""
    summary_prompt: str = (
        "Summarise what was done and found so far, with every fact that is needed to go on. You "
        "will see the task and your summary, and nothing else of this."
    )
    """The prompt for a summary."""

    @model_validator(mode="after")
    def _has_room_for_a_summary(self) -> Self:
        if self.strategy == "summary" and self.max_tokens is None:
            raise ValueError(
                "strategy=summary needs max_tokens, well below the context's length, so that there "
                "is room for the summary"
            )

        if self.summary_model is not None and self.strategy != "summary":
            raise ValueError("summary_model is for strategy=summary: leave it out")
        return self
