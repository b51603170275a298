"""The code agent: the policy writes Python, reads its output, and continues until a reply has no
code.

Code as action (Wang et al. 2024, arXiv 2402.01030): the blocks between ```python and ``` of a reply
run in one interpreter in a sandbox, whose variables live for the whole attempt. The agent's tools
are functions there. A JSON result becomes a value, any other result a text, and a failure raises an
exception. The task's files are in the sandbox, and the files that the code writes are kept
(attempt_files.py).

    reward = the tools' outcomes for their final state, if any tool gives one
             + the rewards of tool results - agent.code_penalty for each turn whose code failed
"""

from __future__ import annotations

import itertools
import json
import keyword
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from agentevo.agents.attempt_files import AttemptFiles
from agentevo.agents.history import History
from agentevo.agents.policy import Policy
from agentevo.agents.single_turn import conversation_of, with_examples, with_system
from agentevo.agents.task_agent import ask_once, asks_once
from agentevo.agents.tools.tool import shorten_text
from agentevo.agents.tools.toolbox import AttemptTools
from agentevo.agents.tools_agent import ToolsAgent
from agentevo.config.agents import CodeAgentSection, agents
from agentevo.environments.sandbox import Execution, Sandbox, Sandboxes, SandboxTool
from agentevo.errors import RequestTooLongError, ToolError
from agentevo.rewards.sqlite_state import LEFT_OUT_METRIC
from agentevo.runtime.seeds import derive_seed
from agentevo.store.call_log import record_call
from agentevo.types import Message, Outcome, Task, ToolCall

ENDS = ("answer", "turns", "tokens", "context")
"""How an attempt can end: with the final answer, or by a limit."""
_BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:\n[ \t]*)?```", re.DOTALL | re.IGNORECASE)
_OPEN_BLOCK = re.compile(r"```(?:python|py)[ \t]*(?:\n|\Z)", re.IGNORECASE)
_NO_ANSWER = "Write code, or give the final answer as <answer>...</answer>."
_UNCLOSED = "Error: the block of code is not closed: end it with ```"
RULES = """Solve the task by writing Python code. Put it into a block:
```python
print(6 * 7)
```
You are then told what it printed, and the value of its last expression. Variables stay from one \
block to the next. When you know the answer, write it without a block of code."""
_FUNCTIONS = "The code may call these functions:"


def read_code(text: str) -> str | None:
    """The blocks of code of a reply, joined in their order. None if the reply has no block. An
    unclosed block does not count, see `is_unfinished`."""
    blocks = _BLOCK.findall(text)
    return "\n".join(blocks) if blocks else None


def is_unfinished(text: str) -> bool:
    """Whether the reply ends within a block of code."""
    return _OPEN_BLOCK.search(_BLOCK.sub("", text)) is not None


def rules_of(section: CodeAgentSection) -> str:
    """The rules for writing code: the recipe's, or RULES."""
    return RULES if section.system_prompt is None else section.system_prompt


def system_message(
    section: CodeAgentSection, schemas: Sequence[Mapping[str, Any]], rules: str | None = None
) -> str:
    """The instructions before the task: how to write code, and the available functions. `schemas`:
    the schemas of the agent's tools; `rules`: replaces the rules of `rules_of`."""
    rules = rules_of(section) if rules is None else rules
    functions = [_describe(function) for function in _name_functions(schemas)]
    return "\n".join([rules, _FUNCTIONS, *functions]) if functions else rules


@dataclass
class _CodeProgress:
    """The state of one attempt."""

    turn_rewards: dict[int, float] = field(default_factory=dict)
    earned: float = 0.0
    """The rewards of tool results in the current turn."""
    total_earned: float = 0.0
    num_blocks: int = 0
    num_failed: int = 0


@agents.register("code_agent")
class CodeAgent(ToolsAgent):
    """An agent whose actions are Python code."""

    Config = CodeAgentSection

    def __init__(self, section: CodeAgentSection) -> None:
        super().__init__(section)
        self._section = section
        self._sandboxes = Sandboxes(section.sandbox)

    async def run(self, task: Task, policy: Policy) -> Outcome:
        if asks_once(task):
            messages = conversation_of(task, system=None, instruction=self._section.instruction)
            return await ask_once(messages, policy)

        progress = _CodeProgress()
        files = AttemptFiles(task, policy, self._section.keep_files_kib * 1024)
        async with AsyncExitStack() as stack:
            with policy.waiting():
                seed = derive_seed(task.seed, "tools", policy.name)
                tools = await stack.enter_async_context(self._toolbox.open(task, seed))
                functions = _sandbox_functions(tools, progress)
                sandbox = await stack.enter_async_context(self._sandboxes.open(functions))
                await files.put(sandbox)

            messages = with_system(
                self._first_messages(task, policy, tools, files), tools.instructions
            )
            interpreter = _AgentInterpreter(sandbox, files, self._section.max_output_chars)
            history = History(messages, self._section.context)
            end = await self._play(history, policy, interpreter, progress)
            return await self._outcome(
                tools,
                history,
                own_parts={
                    "tool_results": progress.total_earned,
                    "code_penalty": 0.0 - self._section.code_penalty * progress.num_failed,
                },
                turn_rewards=progress.turn_rewards,
                metrics={
                    "num_code_blocks": float(progress.num_blocks),
                    "num_failed_code_blocks": float(progress.num_failed),
                    LEFT_OUT_METRIC: float(files.num_left_out),
                },
                end=end,
                ends=ENDS,
            )

    def _first_messages(
        self, task: Task, policy: Policy, tools: AttemptTools, files: AttemptFiles
    ) -> list[Message]:
        """The conversation before the first reply, without the tools' instructions."""
        rules = policy.texts.text("system", rules_of(self._section))
        schemas = policy.texts.of_tools(tools.schemas)
        parts = [system_message(self._section, schemas, rules), files.announcement]
        system = "\n".join(part for part in parts if part)
        instruction = policy.texts.replacing("instruction", self._section.instruction)
        chat = conversation_of(task, system=system, instruction=instruction)
        return with_examples(chat, policy.texts)

    async def _play(
        self,
        history: History,
        policy: Policy,
        interpreter: _AgentInterpreter,
        progress: _CodeProgress,
    ) -> str:
        """Plays until the attempt ends. Returns how it ended, as one of ENDS."""
        section = self._section
        num_tokens = 0
        for turns_left in reversed(range(section.max_turns)):
            try:
                reply = await history.ask_within_context(policy.generate, policy)
            except RequestTooLongError:
                if not progress.turn_rewards:
                    raise
                return "context"

            progress.turn_rewards[reply.turn] = 0.0
            num_tokens += policy.num_tokens(reply.turn)[1]

            text = reply.answer
            code = read_code(text)
            is_open = is_unfinished(text)
            if code is None and not is_open and self._is_final(text):
                return "answer"
            if section.max_tokens is not None and num_tokens >= section.max_tokens:
                return "tokens"

            if code is None:
                observation = _UNCLOSED if is_open else _NO_ANSWER
                has_failed = is_open
            else:
                observation, has_failed = await interpreter.run(code)
                progress.num_blocks += 1

            progress.num_failed += has_failed
            progress.turn_rewards[reply.turn] += progress.earned
            progress.turn_rewards[reply.turn] -= section.code_penalty if has_failed else 0.0
            progress.total_earned += progress.earned
            progress.earned = 0.0

            if turns_left:
                history.add(reply.message, [Message("user", observation)])
                await history.look(reply.turn, policy)

        return "turns"


@dataclass(frozen=True)
class _AgentInterpreter:
    """Runs the code of an attempt."""

    sandbox: Sandbox
    files: AttemptFiles
    max_output_chars: int

    async def run(self, code: str) -> tuple[str, bool]:
        """Runs the code. Returns the output for the policy, and whether the code failed."""
        async with record_call("tool", "python") as call:
            call.keep(code=code)
            is_new = await self.files.put(self.sandbox)  # a new sandbox has no files yet
            execution = await self.sandbox.run(code)
            if is_new:
                execution = msgspec.structs.replace(execution, is_new=True)

            text = shorten_text(_format_output(execution), self.max_output_chars)
            call.keep(output=text)
            if execution.error is not None:
                call.outcome("failed", f"{execution.error.type}: {execution.error.message}")

        if execution.files_lost:
            self.files.lost()

        await self.files.keep(self.sandbox, execution.files)
        return text, execution.error is not None


def _format_output(execution: Execution) -> str:
    """The output of a block of code, for the policy."""
    parts = [execution.stdout.rstrip("\n"), execution.stderr.rstrip("\n"), execution.value or ""]
    error = execution.error
    if error is not None:
        parts.append(error.traceback.rstrip() or f"{error.type}: {error.message}")
        if not execution.is_alive:
            parts.append("The interpreter has ended: variables are lost.")

    if execution.is_new:
        parts.insert(0, "A new interpreter has started: earlier variables are lost.")

    return "Output:\n" + ("\n".join(part for part in parts if part) or "(nothing was printed)")


def _sandbox_functions(tools: AttemptTools, progress: _CodeProgress) -> dict[str, SandboxTool]:
    """The tools as callable functions of the sandbox."""
    functions = {}
    for function in _name_functions(tools.schemas):
        functions[function.name] = SandboxTool(
            name=function.name,
            parameters=function.parameters,
            description=function.description,
            call=_make_call(tools, function.tool, progress),
        )

    return functions


class _AgentFunction(NamedTuple):
    tool: str
    name: str
    parameters: tuple[str, ...]
    description: str


def _name_functions(schemas: Sequence[Mapping[str, Any]]) -> list[_AgentFunction]:
    """The tools as functions with unique names that are valid in Python."""
    functions: dict[str, _AgentFunction] = {}
    for schema in schemas:
        function = schema["function"]
        preferred = _python_name(function["name"])
        numbered = (f"{preferred}_{number}" for number in itertools.count(2))
        name = next(
            candidate
            for candidate in itertools.chain([preferred], numbered)
            if candidate not in functions
        )
        functions[name] = _AgentFunction(
            tool=function["name"],
            name=name,
            parameters=tuple(function["parameters"].get("properties") or {}),
            description=function["description"],
        )

    return list(functions.values())


def _python_name(name: str) -> str:
    """A valid Python name: `search-web` becomes search_web, `7z` _7z, `import` import_."""
    name = re.sub(r"\W|^(?=\d)", "_", name)
    return f"{name}_" if keyword.iskeyword(name) else name


def _make_call(tools: AttemptTools, name: str, progress: _CodeProgress) -> Any:
    async def call(arguments: dict[str, Any]) -> Any:
        (result,) = await tools.call([ToolCall(name, json.dumps(arguments))])
        progress.earned += result.reward
        if result.is_error:
            raise ToolError(result.text.removeprefix("Error: "))

        try:
            return json.loads(result.text)
        except (ValueError, RecursionError):
            return result.text

    return call


def _describe(function: _AgentFunction) -> str:
    description = " ".join(function.description.split())
    return f"- {function.name}({', '.join(function.parameters)}): {description}".rstrip(": ")
