"""The tool agent: generates replies, calls tools and reads the results, up to the final answer or a
limit.

Every reply stays in the prompt as its sampled ids, so each prompt extends the ids before it.
Results are messages of role `tool` that the chat template writes (format `native`) or observations
in user messages (`react`). For a call that can't be made, the policy reads the reason, the attempt
continues, and the trajectory's metrics count it (agents/tools/toolbox.py).

    reward = the tools' outcomes for their final state, if any tool gives one
             + the rewards of tool results - agent.call_penalty for each turn with a wrong call
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

from agentevo.agents.browse import Browse
from agentevo.agents.history import History
from agentevo.agents.policy import Policy
from agentevo.agents.single_turn import opening_of, with_system
from agentevo.agents.task_agent import ask_once, asks_once
from agentevo.agents.tool_format import (
    NativeFormat,
    ParsedReply,
    ReActFormat,
    SearchTags,
    ToolFormat,
)
from agentevo.agents.tools.tool import ToolResult
from agentevo.agents.tools.toolbox import AttemptTools
from agentevo.agents.tools_agent import ToolsAgent
from agentevo.config.agents import ToolAgentSection, agents
from agentevo.errors import RequestTooLongError
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.runtime.seeds import derive_seed
from agentevo.types import Message, Outcome, Task, ToolCall

ENDS = ("answer", "turns", "tokens", "context", "repeats")
"""How an attempt can end: with the final answer, or by a limit."""
WRONG = ("num_unknown_tools", "num_wrong_arguments")
"""The metrics of wrong calls, which cost `agent.call_penalty`. Malformed calls cost it, too."""
_FORMATS: dict[str, type[ToolFormat]] = {
    "native": NativeFormat,
    "react": ReActFormat,
    "search_tags": SearchTags,
}
_ONE_CALL = AnswerForm(calls="required", parallel=False)
_NO_ANSWER = "Call a tool, or give the final answer as <answer>...</answer>."
_NO_SEARCH = "Search by <search>...</search>, or give the final answer as <answer>...</answer>."


@dataclass
class _ToolProgress:
    """The state of one attempt."""

    turn_rewards: dict[int, float] = field(default_factory=dict)
    earned: float = 0.0
    """The rewards of tool results."""
    num_wrong: int = 0
    """The number of turns with a wrong call."""
    num_calls: int = 0
    num_malformed: int = 0
    num_repeats: int = 0
    last_calls: tuple[tuple[str, str], ...] = ()


@agents.register("tool_agent")
class ToolAgent(ToolsAgent):
    """See the module."""

    Config = ToolAgentSection

    def __init__(self, section: ToolAgentSection) -> None:
        super().__init__(section)
        self._section = section
        self._browse = Browse(section.browse) if section.browse.is_on else None

    async def run(self, task: Task, policy: Policy) -> Outcome:
        if asks_once(task):
            return await ask_once(self._opening_messages(task, policy), policy)

        seed = derive_seed(task.seed, "tools", policy.name)
        async with AsyncExitStack() as stack:
            with policy.waiting():
                tools = await stack.enter_async_context(self._toolbox.open(task, seed))

            reader = None if self._browse is None else self._browse.reader(policy)
            tools.condense = None if reader is None else reader.condense
            progress = _ToolProgress()
            form = _FORMATS[self._section.format](policy, policy.texts.of_tools(tools.schemas))
            opening = form.opening(
                with_system(self._opening_messages(task, policy), tools.instructions)
            )
            history = History(opening, self._section.context, self._section.history.last_images)
            end = await self._play(form, history, policy, tools, progress)
            return await self._outcome(
                tools,
                history,
                own_parts={
                    "tool_results": progress.earned,
                    "call_penalty": 0.0 - self._section.call_penalty * progress.num_wrong,
                },
                turn_rewards=progress.turn_rewards,
                metrics={
                    "num_malformed_calls": float(progress.num_malformed),
                    **({} if reader is None else reader.metrics),
                },
                end=end,
                ends=ENDS,
            )

    async def _play(
        self,
        form: ToolFormat,
        history: History,
        policy: Policy,
        tools: AttemptTools,
        progress: _ToolProgress,
    ) -> str:
        """Plays until the attempt ends. Returns how it ended, as one of ENDS."""
        section = self._section
        num_tokens = 0
        for turns_left in reversed(range(section.max_turns)):
            is_required = section.max_turns - turns_left <= section.required_calls
            ask = partial(form.ask, form=_ONE_CALL if is_required else None)
            try:
                parsed = await history.ask_within_context(ask, policy)
            except RequestTooLongError:
                if not progress.turn_rewards:
                    raise
                return "context"

            progress.turn_rewards[parsed.reply.turn] = 0.0
            num_tokens += parsed.num_tokens
            if not parsed.calls and not parsed.malformed and self._is_final(parsed.reply.answer):
                return "answer"
            if self._repeats(parsed, progress):
                return "repeats"

            # Also make the calls of the last reply, although the policy does not read their
            # results: calls change state and earn rewards.
            answers = await self._answers(form, parsed, tools, progress)
            if section.max_tokens is not None and num_tokens >= section.max_tokens:
                return "tokens"

            if turns_left:
                history.add(parsed.message, answers)
                await history.look(parsed.reply.turn, policy, form.tools)

        return "turns"

    def _opening_messages(self, task: Task, policy: Policy) -> list[Message]:
        section = self._section
        return opening_of(task, policy.texts, section.system_prompt, section.instruction)

    def _repeats(self, parsed: ParsedReply, progress: _ToolProgress) -> bool:
        """Whether the policy has repeated the same calls too often."""
        calls = tuple((call.name, call.arguments) for call in parsed.calls)
        same = bool(calls) and calls == progress.last_calls
        progress.num_repeats = progress.num_repeats + 1 if same else 0
        progress.last_calls = calls
        return progress.num_repeats >= self._section.max_repeats

    async def _answers(
        self, form: ToolFormat, parsed: ParsedReply, tools: AttemptTools, progress: _ToolProgress
    ) -> list[Message]:
        """The messages that the policy reads next."""
        before = sum(tools.metrics[name] for name in WRONG)
        made_calls, refused = self._split(parsed.calls, progress)
        results = [*await tools.call(made_calls), *refused]
        progress.num_malformed += len(parsed.malformed)
        wrong = bool(parsed.malformed) or sum(tools.metrics[name] for name in WRONG) > before
        earned = sum(result.reward for result in results)
        progress.earned += earned
        progress.num_wrong += wrong
        turn = parsed.reply.turn
        progress.turn_rewards[turn] += earned - (self._section.call_penalty if wrong else 0.0)

        if not parsed.calls and not parsed.malformed:
            searches = self._section.format == "search_tags"
            return [Message("user", _NO_SEARCH if searches else _NO_ANSWER)]

        return form.answers(parsed, results)

    def _split(
        self, calls: Sequence[ToolCall], progress: _ToolProgress
    ) -> tuple[Sequence[ToolCall], list[ToolResult]]:
        """Splits the calls into those that are made and refusals of the others."""
        section = self._section
        num_allowed = section.max_calls_per_turn
        why = f"a reply may hold {num_allowed} calls, and this one is beyond them"
        if (
            section.max_tool_calls is not None
            and section.max_tool_calls - progress.num_calls < num_allowed
        ):
            num_allowed = section.max_tool_calls - progress.num_calls
            why = f"all {section.max_tool_calls} calls are used up: give the final answer"

        made_calls = calls[:num_allowed]
        refused_calls = calls[num_allowed:]
        progress.num_calls += len(made_calls)
        return made_calls, [ToolResult(text=f"Error: {why}", is_error=True) for _ in refused_calls]
