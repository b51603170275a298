"""The agent contract: make one attempt at a task with replies from a policy.

An agent's `run` can return an `Outcome`, a number (the reward), a mapping of named parts (whose sum
is the reward), a list with a reward for each turn or a mapping from turns to rewards (whose sum is
the reward), or None. With None, the posted rewards count. If none were posted, a scorer decides
(the recipe's `rewards`, or the task's own). A reward of 1 or more counts as success. Turns have the
numbers of `Reply.turn`; an agent that uses only its own client counts the turns that it received,
from 0. In a rollout of several agents, such a value is the common outcome of all agents. A mapping
from agent names to such values gives each agent its own outcome.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec

from agentevo.agents.capture import capture_calls
from agentevo.agents.policy import Policy
from agentevo.agents.posted_rewards import outcome_of_rewards
from agentevo.agents.rollout_thread import BlockingPolicy
from agentevo.config import AgentSection
from agentevo.config.agents import agents, is_async, takes_policy
from agentevo.environments import TextEnvironment
from agentevo.errors import ConfigError, NoCallError, describe_error, shown
from agentevo.rewards.returned_values import (
    MAX_METRIC,
    named_parts,
    plain_bool,
    plain_number,
    plain_numbers,
)
from agentevo.runtime.console import to_stderr
from agentevo.runtime.daemon_threads import run_in_thread
from agentevo.runtime.event_loop import NoticesBlocks
from agentevo.runtime.signals import Interrupt
from agentevo.runtime.tracebacks import describe_function, traceback_of
from agentevo.runtime.user_code import construct
from agentevo.types import REWARD_PARTS, TIMINGS, Outcome, Task

AgentFunction: TypeAlias = Callable[..., Any]
"""`run(task, policy)`, or `run(task)`, which calls the policy through its own client; async or
not."""


CLOSING_S = 60.0
"""The time limit of an agent's `close`."""
TYPO_SIMILARITY = 0.8
"""A name at least this similar to an agent's name (difflib's ratio) counts as a typo of it."""


class Agent(Protocol):
    """An agent. If it raises, the attempt is recorded as failed and the run continues."""

    async def run(self, task: Task, policy: Policy) -> Outcome: ...


class FunctionAgent:
    """An agent that is a function, or a method of an object. Each call of a function that is not
    async runs on its own thread.

    A function with one parameter calls the policy through the gateway, with its own client. The
    base URL in the environment points to the gateway, and the attempt's context (capture.py)
    identifies the attempt of a call.

    Raises ConfigError for a function with other parameters."""

    def __init__(self, function: AgentFunction, player: Any = None) -> None:
        """`player`: the object of the method. It may have a method `close`, async or not."""
        self.needs_scorer = bool(getattr(player, "needs_scorer", False))
        """Whether a scorer decides the reward of the attempts."""
        self._player = player
        self.needs_session = not takes_policy(function)
        """Whether the attempts need the gateway, because the function uses its own client."""
        self._is_async = is_async(function)
        self._is_ours = (getattr(function, "__module__", "") or "").startswith("agentevo.")
        """Whether it is an agent of AgentEvo, of which no user is told that it blocks the loop."""
        self._function = function
        self._notices = NoticesBlocks(
            f"the agent {describe_function(function)}",
            "await an async client, make blocking calls with `await asyncio.to_thread(...)`, or "
            "write `def` instead of `async def`: each attempt then has its own thread",
        )

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """See Agent.run. Raises NoCallError if a function with one parameter did not call the
        policy."""
        if self.needs_session:
            with capture_calls(policy.session.base, policy.api_key), policy.texts.current():
                returned = await self._await_return(task)

            await policy.settle()
            if not policy.was_asked:
                raise NoCallError(
                    f"{describe_function(self._function)} made no call to the policy, which is at "
                    f"{policy.base_url}: create its client inside the function, with no base URL "
                    "or with that of the environment variable, or take a second parameter and give "
                    "the client base_url=policy.base_url and api_key=policy.api_key"
                )
        else:
            with policy.texts.current():
                returned = await self._await_return(task, policy)
            await policy.settle()

        try:
            if isinstance(returned, list) and not policy.agents:
                received_turns = policy.conversation.received
                if len(returned) != len(received_turns):
                    raise ValueError(
                        f"the agent returned a list of {len(returned)} rewards, but it took "
                        f"{len(received_turns)} turns: return one reward for each turn"
                    )
                return _outcome_of_turns(dict(zip(received_turns, returned, strict=True)))

            if returned is None:
                posted = outcome_of_rewards(policy.posted, policy.received)
                return outcome_of(posted, policy.rewarded)

            outcome = outcome_of(returned, policy.rewarded)
            return outcome if policy.has_replied else _to_turn_indices(outcome, policy.received)
        except (TypeError, ValueError) as error:
            error.add_note(f"It was returned by {describe_function(self._function)}.")
            raise

    async def close(self) -> None:
        """Closes everything that attempts share, after the last attempt. An error of `close`, or a
        time above CLOSING_S, is only reported, since the attempts have their outcomes."""
        close = getattr(self._player, "close", None)
        if close is None:
            return

        try:
            async with asyncio.timeout(CLOSING_S):
                closing = close() if is_async(close) else await run_in_thread(close, "agent")
                if inspect.isawaitable(closing):
                    await closing
        except Interrupt:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (user code)
            to_stderr(f"the agent's close failed: {describe_error(error)}\n{traceback_of(error)}")

    async def _await_return(self, task: Task, *policy: Policy) -> Any:
        if self._is_async:
            work = self._function(task, *policy)
            return await (work if self._is_ours else self._notices.run(work))
        arguments = [BlockingPolicy(item) for item in policy]
        returned = await run_in_thread(partial(self._function, task, *arguments), "agent")
        return await returned if inspect.isawaitable(returned) else returned


def outcome_of(returned: Any, agents: Sequence[str] = ()) -> Outcome:
    """An agent's return value as an Outcome of plain values, see the module's docstring. `agents`:
    the names in a rollout of several agents. Raises TypeError or ValueError for any other value."""
    if agents:
        return _outcome_of_agents(returned, agents)

    if isinstance(returned, Outcome):
        if returned.agents:
            raise ValueError(
                f"the agent's outcome names the agents {', '.join(map(str, returned.agents))}, and "
                "this run has no named agents: add them to the recipe's section agents"
            )
        return _plain_outcome(returned)

    if returned is None:
        return Outcome(reward=None)
    if isinstance(returned, list):
        return _outcome_of_turns(dict(enumerate(returned)))

    if isinstance(returned, Mapping):
        if returned and all(type(name) is int for name in returned):
            return _outcome_of_turns(returned)
        parts = named_parts(returned, "the mapping that the agent returned")
        reward = plain_number(sum(parts.values()), "the agent's reward")
        return Outcome(reward=reward, success=reward >= 1.0, reward_parts=parts)

    try:
        reward = plain_number(returned, "the agent's reward")
    except TypeError:
        raise TypeError(
            f"the agent returned a {type(returned).__name__}: return a number, a mapping of named "
            "rewards, a list with one for each turn, or an agentevo.Outcome"
        ) from None

    return Outcome(reward=reward, success=reward >= 1.0)


def _outcome_of_agents(returned: Any, agents: Sequence[str]) -> Outcome:
    """The outcome for each of several agents. A value without agent names is the outcome of all
    agents."""
    if isinstance(returned, Outcome):
        by_agent: Mapping[Any, Any] = returned.agents
        returned = msgspec.structs.replace(returned, agents={})
    elif isinstance(returned, Mapping) and not returned.keys().isdisjoint(agents):
        by_agent = returned
        returned = None
    else:
        by_agent = {}
        if isinstance(returned, Mapping):
            _check_no_typo(returned, agents)

    unknown = next((name for name in by_agent if name not in agents), None)
    if unknown is not None:
        raise ValueError(
            f"a reward names {shown(unknown)}, which is not an agent: use {', '.join(agents)}"
        )

    all_agents = outcome_of(returned)
    if all_agents.turn_rewards:
        raise ValueError(
            "rewards of turns need the name of their agent: return a mapping such as "
            f'{{"{agents[0]}": [0.0, 1.0]}}'
        )

    by_name = {name: outcome_of(reward) for name, reward in by_agent.items()}
    return msgspec.structs.replace(all_agents, agents=by_name)


def _check_no_typo(parts: Mapping[Any, Any], agents: Sequence[str]) -> None:
    """Raises ValueError if the name of a common reward part is almost an agent's name."""
    for name in parts:
        similar = difflib.get_close_matches(str(name), agents, n=1, cutoff=TYPO_SIMILARITY)
        if similar:
            raise ValueError(
                f"{shown(name)} is not an agent; did you mean {similar[0]!r}? A part of the common "
                "reward needs a name that is less similar to an agent's"
            )


def _to_turn_indices(outcome: Outcome, received: Mapping[str, Sequence[int]]) -> Outcome:
    """Converts the outcome of an agent that counts its received turns to turn indices."""

    def number_rewards(rewards: Mapping[int, float], agent: str) -> dict[int, float]:
        received_turns = received.get(agent, ())
        unknown = next((turn for turn in rewards if not 0 <= turn < len(received_turns)), None)
        if unknown is not None:
            who = f"agent {agent!r}" if agent else "agent"
            raise ValueError(
                f"the {who}'s turn_rewards name the turn {unknown}, but it took "
                f"{len(received_turns)} turns: the first is 0"
            )

        return {received_turns[turn]: reward for turn, reward in rewards.items()}

    return msgspec.structs.replace(
        outcome,
        turn_rewards=number_rewards(outcome.turn_rewards, ""),
        agents={
            name: _to_turn_indices(agent_outcome, {"": received[name]})
            for name, agent_outcome in outcome.agents.items()
        },
    )


def _outcome_of_turns(rewards: Mapping[Any, Any]) -> Outcome:
    turns = {
        _turn_number(turn): plain_number(reward, f"the agent's reward of turn {shown(turn)}")
        for turn, reward in rewards.items()
    }
    reward = plain_number(sum(turns.values()), "the agent's reward")
    return Outcome(reward=reward, success=reward >= 1.0, turn_rewards=turns)


def _plain_outcome(outcome: Outcome) -> Outcome:
    reward = outcome.reward
    turn_rewards = outcome.turn_rewards
    if not isinstance(turn_rewards, Mapping):
        raise TypeError(
            f"the agent's turn_rewards is {shown(turn_rewards)}: give a mapping from turns to "
            "rewards"
        )

    return Outcome(
        reward=None if reward is None else plain_number(reward, "the agent's reward"),
        success=plain_bool(outcome.success, "the agent's success"),
        reward_parts=plain_numbers(outcome.reward_parts, "the agent's reward_parts"),
        turn_rewards={
            _turn_number(turn): plain_number(reward, f"the agent's reward of turn {shown(turn)}")
            for turn, reward in turn_rewards.items()
        },
        truncated=plain_bool(outcome.truncated, "the agent's truncated"),
        ending=str(outcome.ending),
        metrics=_metrics(outcome.metrics),
        timings=plain_numbers(outcome.timings, "the agent's timings", MAX_METRIC),
    )


def _metrics(values: Any) -> dict[str, float]:
    metrics = plain_numbers(values, "the agent's metrics", MAX_METRIC)
    reserved = next((name for name in metrics if name.startswith((REWARD_PARTS, TIMINGS))), None)
    if reserved is not None:
        kind, place = (
            ("parts of the reward", "reward_parts")
            if reserved.startswith(REWARD_PARTS)
            else ("times", "timings")
        )
        raise ValueError(
            f"the agent's metrics have the name {reserved!r}, which {kind} use: choose another "
            f"name, or return the value in {place}"
        )

    return metrics


def _turn_number(turn: Any) -> int:
    try:
        return operator.index(turn)
    except TypeError:
        raise TypeError(
            f"the agent's turn_rewards name a turn {shown(turn)}: turns have numbers, `reply.turn`"
        ) from None


def make_agent(
    section: AgentSection, make_environment: Callable[[], TextEnvironment]
) -> FunctionAgent:
    """The registered agent that `section` describes; `make_environment` makes a new environment for
    an agent that plays one. Raises ConfigError, also for an exception of a user's class."""
    if section.type == "function":
        raise ConfigError(
            "agent.type: function: the agent is a function of the program that started the run: "
            "pass it again (`agentevo.load_run(folder, agent=...)`), or register it with "
            "@agentevo.agent(NAME) in a file that the recipe imports"
        )

    registered = agents.get(section.type)
    if not inspect.isclass(registered):
        return FunctionAgent(registered)

    plays_environment = getattr(registered, "plays_environment", False)
    options = [section, make_environment] if plays_environment else [section]
    player = make_player(section, options)
    return FunctionAgent(player.run, player)


def _accepts(registered: Any, options: Sequence[Any]) -> bool:
    """Whether a class takes options. Python gives a subclass of a protocol without its own
    `__init__` a constructor that seems to accept anything."""
    owner = next(base for base in registered.__mro__ if "__init__" in vars(base))
    if getattr(owner, "_is_protocol", False):
        return False

    signature = inspect.signature(registered)
    try:
        signature.bind(*options)
    except TypeError:
        return bool(signature.parameters)  # the constructor raises for missing parameters

    return True


def make_player(section: AgentSection, options: Sequence[Any] | None = None) -> Any:
    """An object of the registered class that `section` names, made with the `options` (default: the
    section), or without them if the class has no `__init__`. Raises ConfigError, also for an
    exception of a user's class."""
    registered = agents.get(section.type)
    options = (section,) if options is None else options

    def make() -> Any:
        return registered(*options) if _accepts(registered, options) else registered()

    return construct(make, f"agent.type: {section.type}", registered.__name__)
