"""The common part of the agents that call tools over many turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentevo.agents.agent import outcome_of
from agentevo.agents.history import History
from agentevo.agents.tools.toolbox import METRICS, AttemptTools, Toolbox
from agentevo.config.agents import CodeAgentSection, ToolAgentSection
from agentevo.rewards.answer_texts import find_answer
from agentevo.types import Outcome


class ToolsAgent:
    """All attempts of a process share one object, with the tools of the section."""

    def __init__(self, section: CodeAgentSection | ToolAgentSection) -> None:
        """Raises ConfigError for tools that can't be made."""
        self._final = section.final
        self._toolbox = Toolbox(section.tools)
        self.needs_scorer = not self._toolbox.has_outcome

    async def close(self) -> None:
        """See FunctionAgent.close."""
        await self._toolbox.close()

    def _is_final(self, text: str) -> bool:
        return self._final == "reply" or find_answer(text, "answer") is not None

    async def _outcome(
        self,
        tools: AttemptTools,
        history: History,
        *,
        own_parts: Mapping[str, float],
        turn_rewards: dict[int, float],
        metrics: Mapping[str, float],
        end: str,
        ends: Sequence[str],
    ) -> Outcome:
        """The tools' outcomes for their final state, and the agent's own parts, whose sum is the
        reward. It is None, so that a scorer decides, if the tools could give outcomes but give
        none, and no reward was earned. `end` is one of `ends`; the first of `ends` is the final
        answer. Raises the errors of the toolsets."""
        outcomes = {
            name: outcome_of(returned) for name, returned in (await tools.outcomes()).items()
        }
        parts: dict[str, float] = {}
        for name, outcome in outcomes.items():
            named = {f"{name}.{part}": value for part, value in outcome.reward_parts.items()}
            parts |= named or {name: outcome.reward or 0.0}

        parts |= own_parts
        all_metrics = {
            key: metric for judge in outcomes.values() for key, metric in judge.metrics.items()
        }
        all_metrics |= {name: float(tools.metrics[name]) for name in METRICS}
        all_metrics |= {"num_context_cuts": float(history.num_cuts), **metrics}
        is_unsaid = self._toolbox.has_outcome and not outcomes and not any(parts.values())

        return Outcome(
            reward=None if is_unsaid else sum(parts.values()),
            success=bool(outcomes) and all(outcome.success for outcome in outcomes.values()),
            reward_parts=parts,
            turn_rewards=turn_rewards,
            truncated=end != ends[0],
            metrics=all_metrics | {f"ended_by_{name}": float(name == end) for name in ends},
        )
