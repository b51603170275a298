"""The environment loop: observe, answer, act, until the environment or a limit ends the episode.

The first user message has the rules, how to answer, and the first observation; each later one has
the observation after the actions. The format sets where an answer has the action:

    plain         Up
    answer        <answer>Up</answer>
    think_answer  <think>...</think><answer>Up</answer>

An environment runs on its own thread (environment_thread.py), which also decodes the images that
the policy sees. If it hangs, its attempt fails after `agent.step_timeout_s` or `agent.timeout_s`.

Text outside of the tags is allowed around `answer`, not around `think_answer`. If the chat template
itself opens a thought, `plain` and `answer` read the text after it. A turn that breaks the format
takes no action. Such a turn, and a turn with an invalid action, costs `agent.format_penalty` once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TypeVar

from agentevo.agents.environment_thread import EnvironmentThread, Pace
from agentevo.agents.history import keep_last_images
from agentevo.agents.policy import Policy
from agentevo.config import EnvironmentAgentSection
from agentevo.config.agents import agents
from agentevo.data.message_images import ImageCollector
from agentevo.environments import TextEnvironment
from agentevo.environments.observation import Seen, read_observation, read_pictures, text_of
from agentevo.environments.step_results import read_reset, read_step
from agentevo.errors import EnvironmentFailure, RequestTooLongError
from agentevo.rewards.returned_values import plain_bool, plain_number
from agentevo.types import Message, Outcome, Task
from agentevo.types.content import Content, content_of
from agentevo.types.images import ImageFile

T = TypeVar("T")

FACTS = ("valid", "effective", "success")
"""The keys that the info of every step has (environments/environment.py)."""
_THOUGHT = r"\s*<think>.*?</think>\s*"


def parse_answer(text: str, section: EnvironmentAgentSection) -> list[str] | None:
    """The actions of an answer, at most `actions_per_turn`; None if it breaks the format."""
    if section.format == "plain":
        content = text
    else:
        tagged = f"<{section.answer_tag}>(.*?)</{section.answer_tag}>"
        if section.format == "answer":
            match = re.search(tagged, text, re.DOTALL)
        else:
            match = re.fullmatch(rf"{_THOUGHT}{tagged}\s*", text, re.DOTALL)
        content = match.group(1) if match else ""

    parts = content.split(section.action_separator) if section.actions_per_turn > 1 else [content]
    actions = [part.strip() for part in parts if part.strip()]
    return actions[: section.actions_per_turn] or None


def format_answer(actions: list[str], section: EnvironmentAgentSection) -> str:
    """An answer with these actions, for a demonstration."""
    content = f" {section.action_separator} ".join(actions)
    if section.format == "plain":
        return content
    answer = f"<{section.answer_tag}>{content}</{section.answer_tag}>"
    return answer if section.format == "answer" else f"<think></think>{answer}"


def answer_instructions(section: EnvironmentAgentSection) -> str:
    """The instructions about the form of the player's answers; empty for `plain` answers of one
    action."""
    several = (
        f"up to {section.actions_per_turn} actions separated by {section.action_separator}"
        if section.actions_per_turn > 1
        else "your action"
    )
    if section.format == "plain":
        return f"Answer with {several}." if section.actions_per_turn > 1 else ""
    shown = f"<{section.answer_tag}>...</{section.answer_tag}>"
    if section.format == "answer":
        return f"Answer with {several} like this: {shown}"

    return f"Think first, then answer with {several}: <think>...</think>{shown}"


def first_messages(
    environment: TextEnvironment, observation: Content, section: EnvironmentAgentSection
) -> list[Message]:
    """The conversation before the policy's first turn."""
    rules = section.texts.get("rules", environment.instructions)
    system = section.texts.get("system", section.system_prompt)
    told = [part for part in (rules, answer_instructions(section)) if part]
    if isinstance(observation, str):
        content: Content = "\n".join([*told, observation] if observation else told)
    else:
        content = content_of([*(f"{part}\n" for part in told), *observation])
    opening = [Message("user", content)]
    return opening if system is None else [Message("system", system), *opening]


def with_texts(
    section: EnvironmentAgentSection, policy: Policy, environment: TextEnvironment
) -> EnvironmentAgentSection:
    """The section with the texts of the attempt, which are noted as used. A text that is not given
    keeps the section's value; an empty system prompt counts as given."""
    texts = policy.texts
    texts.text("system", section.system_prompt)
    texts.text("rules", environment.instructions)
    return section.model_copy(update={"texts": dict(texts.overrides)})


def next_messages(
    messages: list[Message],
    reply: Message,
    environment: TextEnvironment,
    observation: Content,
    section: EnvironmentAgentSection,
) -> list[Message]:
    """The conversation before the next turn: the continued one, or, with `memory: turn`, a new
    one."""
    if section.memory == "turn":
        return first_messages(environment, observation, section)
    return [*messages, reply, Message("user", observation)]


def with_reward(content: Content, reward: float, section: EnvironmentAgentSection) -> Content:
    """The observation after a turn. With `show_reward`, it begins with a line that says the turn's
    reward."""
    if not section.show_reward:
        return content

    line = f"Reward: {reward + 0.0:g}"  # + 0.0: -0 is shown as 0
    if isinstance(content, str):
        return f"{line}\n{content}" if content else line
    return content_of([f"{line}\n", *content])


@dataclass
class _Episode:
    turn_rewards: dict[int, float] = field(default_factory=dict)
    earned: float = 0.0
    """The sum of the environment's rewards."""
    penalties: float = 0.0
    num_actions: int = 0
    num_invalid: int = 0
    num_format_errors: int = 0
    num_effective: int = 0
    steps_s: list[float] = field(default_factory=list)
    """How long each step took, in seconds."""
    success: bool = False
    over: bool = False
    truncated: bool = False
    observation: Seen = ""


@agents.register("environment")
class EnvironmentAgent:
    """Plays one environment per task, in a loop of observations and actions; `make` builds a fresh
    environment."""

    Config = EnvironmentAgentSection
    plays_environment = True

    def __init__(
        self, section: EnvironmentAgentSection, make: Callable[[], TextEnvironment]
    ) -> None:
        self._make = make
        self._section = section
        self._pace = Pace()

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """See Agent.run: plays the environment that `task.seed` makes."""
        thread = EnvironmentThread(self._pace)
        environments: list[TextEnvironment] = []

        def make() -> TextEnvironment:
            environments.append(self._make())
            return environments[0]

        def close() -> None:  # also of an environment that is made too late
            for environment in environments:
                environment.close()

        try:
            environment = await thread.call(make, "make")
            observation = read_reset(
                await self._within(thread, lambda: environment.reset(seed=task.seed), "reset")
            )
            episode = _Episode(observation=read_observation(observation, "reset"))
            section = with_texts(self._section, policy, environment)
            content = await self._content(thread, policy, episode.observation, "reset")
            messages = first_messages(environment, content, section)
            for _ in range(self._section.max_turns):
                try:
                    reply = await policy.generate(self._kept(messages))
                except RequestTooLongError:
                    if not episode.turn_rewards:
                        raise
                    # A full context is a limit like any other: the reward until then counts.
                    episode.truncated = True
                    break

                answer = (
                    reply.opening + reply.text
                    if self._section.format == "think_answer"
                    else reply.answer
                )
                await self._act(thread, environment, episode, reply.turn, answer)
                if episode.over:
                    break

                content = await self._content(thread, policy, episode.observation, "step")
                content = with_reward(content, episode.turn_rewards[reply.turn], section)
                messages = next_messages(messages, reply.message, environment, content, section)
            else:
                episode.truncated = True
        except BaseException:
            with suppress(Exception):  # the first exception is the reason
                await thread.end(close)
            raise

        await thread.end(close)
        return Outcome(
            reward=sum(episode.turn_rewards.values()),
            success=episode.success,
            reward_parts={"environment": episode.earned, "format": 0.0 - episode.penalties},
            turn_rewards=episode.turn_rewards,
            truncated=episode.truncated,
            ending=text_of(episode.observation),
            metrics={
                "num_actions": float(episode.num_actions),
                "num_invalid_actions": float(episode.num_invalid),
                "num_format_errors": float(episode.num_format_errors),
                "num_effective_actions": float(episode.num_effective),
            },
            timings={
                "environment_step_s/mean": fmean(episode.steps_s),
                "environment_step_s/max": max(episode.steps_s),
            }
            if episode.steps_s
            else {},
        )

    def _kept(self, messages: list[Message]) -> list[Message]:
        """The messages with the images that the policy sees."""
        num_images = self._section.history.last_images
        return messages if num_images is None else keep_last_images(messages, num_images)

    async def _content(
        self, thread: EnvironmentThread, policy: Policy, seen: Seen, method: str
    ) -> Content:
        """The observation as a message's content. The environment's thread decodes its images."""
        if isinstance(seen, str):
            return seen
        return await self._within(
            thread, lambda: read_pictures(seen, policy.add_image, method), method
        )

    async def _within(self, thread: EnvironmentThread, call: Callable[[], T], name: str) -> T:
        """Returns the result of `call`, the environment's reset or step. Raises EnvironmentFailure
        after `step_timeout_s`."""
        limit_s = self._section.step_timeout_s
        try:
            return await thread.call(call, name, within_s=limit_s)
        except TimeoutError as error:
            if not thread.is_busy:  # the environment raised it
                raise
            raise EnvironmentFailure(
                f"the environment's {name}() did not return in agent.step_timeout_s={limit_s} s"
            ) from error

    async def _act(
        self,
        thread: EnvironmentThread,
        environment: TextEnvironment,
        episode: _Episode,
        turn: int,
        text: str,
    ) -> None:
        """Takes the actions of one answer."""
        actions = parse_answer(text, self._section)
        reward = 0.0
        broken = actions is None
        episode.num_format_errors += broken
        for action in actions or []:
            observation, step_reward, terminated, truncated, info = read_step(
                await self._within(thread, partial(environment.step, action), "step")
            )
            episode.steps_s.append(thread.last_call_s)
            reward += plain_number(step_reward, "the reward of the environment's step()")
            episode.observation = read_observation(observation, "step")
            valid, effective, success = (_fact(info, name) for name in FACTS)
            episode.num_actions += 1
            episode.num_invalid += not valid
            episode.num_effective += effective
            broken |= not valid

            episode.success |= success
            terminated = plain_bool(terminated, "`terminated` of the environment's step()")
            truncated = plain_bool(truncated, "`truncated` of the environment's step()")
            episode.truncated |= truncated and not terminated
            if terminated or truncated:
                episode.over = True
                break

        penalty = self._section.format_penalty if broken else 0.0
        episode.turn_rewards[turn] = reward - penalty
        episode.earned += reward
        episode.penalties += penalty


def _fact(info: object, name: str) -> bool:
    """The value of `info[name]` after a step. Raises EnvironmentFailure without one."""
    if not isinstance(info, Mapping) or name not in info:
        holds = f"the keys {sorted(map(str, info))}" if isinstance(info, Mapping) else repr(info)
        raise EnvironmentFailure(
            f"the info of the environment's step() has no {name!r} but {holds}: give it "
            f"{', '.join(FACTS)}, each true or false"
        )
    return plain_bool(info[name], f"info[{name!r}] of the environment's step()")


@dataclass(frozen=True)
class Demonstration:
    """An episode of the environment's own solver, as the conversations that the agent would have
    had: one, or with `memory: turn` one for every turn. Each ends with an assistant message."""

    conversations: list[list[Message]]
    success: bool
    images: Mapping[str, ImageFile] = field(default_factory=dict)
    """Maps a digest to the image, for every image in the conversations."""


def demonstrate(
    environment: TextEnvironment, seed: int, section: EnvironmentAgentSection, random_rate: float
) -> Demonstration | None:
    """Plays `seed` with the solver; a share `random_rate` of the actions is random. None if no
    solver exists.

    With several actions per turn the solver plans them one after the other, with the environment's
    real answers. If a random action makes the task unsolvable, the demonstration ends.
    """
    rng = random.Random(seed)
    images = ImageCollector()
    seen = read_observation(read_reset(environment.reset(seed=seed)), "reset")
    messages = first_messages(environment, read_pictures(seen, images.read, "reset"), section)
    conversations: list[list[Message]] = []
    success = over = False
    for _ in range(section.max_turns):
        actions: list[str] = []
        reward = 0.0
        is_valid = True
        while len(actions) < section.actions_per_turn and not over:
            best = environment.optimal_action()
            if best is None:
                break

            action = environment.random_action(rng) if rng.random() < random_rate else best
            observation, step_reward, terminated, truncated, info = read_step(
                environment.step(action)
            )
            actions.append(action)
            reward += plain_number(step_reward, "the reward of the environment's step()")
            is_valid &= bool(info["valid"])
            success |= bool(info["success"])
            seen = read_observation(observation, "step")
            over = terminated or truncated

        if not actions:
            break

        reply = Message("assistant", format_answer(actions, section))
        conversations.append([*messages, reply])
        if over:
            break

        reward -= 0.0 if is_valid else section.format_penalty
        content = with_reward(read_pictures(seen, images.read, "step"), reward, section)
        messages = next_messages(messages, reply, environment, content, section)

    if not conversations:
        return None

    shown = conversations if section.memory == "turn" else conversations[-1:]
    return Demonstration(shown, success, images.files)
