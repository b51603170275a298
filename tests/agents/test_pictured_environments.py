"""Environments that return images: the messages that the policy sees, and demonstrations."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
import threading
from contextlib import redirect_stdout

import numpy as np
import pytest
from seeing_chats import seeing_conversation

from agentevo import EnvironmentConfig, Observation, TextEnvironment
from agentevo.agents import EnvironmentAgent, Policy, Reply
from agentevo.agents.environment_agent import demonstrate
from agentevo.agents.history import IMAGE_LEFT_OUT
from agentevo.agents.named_texts import Texts
from agentevo.config import EnvironmentAgentSection
from agentevo.data.message_images import ImageCollector, inline_images
from agentevo.data.messages import messages_of
from agentevo.environments.frozen_lake import FrozenLakeConfig, FrozenLakeEnvironment
from agentevo.environments.sokoban import SokobanConfig, SokobanEnvironment
from agentevo.errors import AgentEvoError, EnvironmentFailure
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.types import ImagePart, Message, Task, TextPart
from agentevo.types.images import images_of_messages

PLAIN = EnvironmentAgentSection(format="plain", max_turns=6)
DARK = np.zeros((4, 4, 3), np.uint8)


class SeeingPolicy:
    """Says the texts in order. Keeps the messages that it was given, and its images."""

    def __init__(self, says):
        self.texts = Texts()
        self.asked = []
        self.images = ImageCollector()
        self.threads = set()
        self._says = iter(says)

    def add_image(self, source, where="an image"):
        self.threads.add(threading.current_thread().name)
        return self.images.read(source, where)

    async def generate(self, messages):
        self.asked.append(list(messages))
        text = next(self._says)
        return Reply(text, True, len(self.asked) - 1, Message("assistant", text))


class Film(TextEnvironment):
    """A user's own class. `frames` are the observations of reset and of every step; a step has the
    four values of gym, or five."""

    instructions = "Watch."

    def __init__(self, frames, num_values=5, info=None):
        super().__init__(EnvironmentConfig(type="film"))
        self._frames = frames
        self._num_values = num_values
        self._info = info or {"valid": True, "effective": True, "success": False}

    def reset(self, *, seed=None, options=None):
        self._place = 0
        return self._frames[0], {}

    def step(self, action):
        self._place += 1
        over = self._place == len(self._frames) - 1
        ends = (over, False) if self._num_values == 5 else (over,)
        return self._frames[self._place], 1.0, *ends, {**self._info, "success": over}


def play(environment, says, section=PLAIN, seed=0):
    policy = SeeingPolicy(says)
    agent = EnvironmentAgent(section, lambda: environment)
    outcome = asyncio.run(agent.run(Task(id="t", seed=seed), policy))
    return outcome, policy


def grey(level):
    return np.full((4, 4, 3), level, np.uint8)


FRAMES = [
    Observation("start", [grey(10)]),
    {"obs_str": "then <image> now", "multi_modal_data": {"<image>": [grey(20)]}},
    [{"type": "text", "text": "and "}, {"type": "image", "image": grey(30)}],
    "a text",
    Observation("the end", [grey(40)]),
]


@pytest.mark.parametrize("num_values", [4, 5])
def test_observations_become_messages_with_images_by_digest(num_values):
    outcome, policy = play(Film(FRAMES, num_values), ["go"] * 4)
    last = policy.asked[-1]
    first, second, third = policy.images.files
    assert [message.content for message in last if message.role == "user"] == [
        (TextPart("Watch.\n"), ImagePart(first), TextPart("start")),
        (TextPart("then "), ImagePart(second), TextPart(" now")),
        (TextPart("and "), ImagePart(third)),
        "a text",
    ]
    assert (outcome.reward, outcome.success, outcome.ending) == (4.0, True, "the end")
    assert policy.threads == {"environment"}  # images are decoded off the event loop


def test_only_images_that_the_policy_sees_are_decoded():
    section = EnvironmentAgentSection(format="plain", actions_per_turn=2, max_turns=6)
    unread = Observation("", [b"no image"])
    outcome, policy = play(Film([FRAMES[0], unread, FRAMES[1], unread]), ["a || b", "c"], section)
    assert (outcome.reward, len(policy.images.files)) == (3.0, 2)


def test_a_turn_without_memory_has_the_newest_image_alone():
    section = EnvironmentAgentSection(format="plain", memory="turn", max_turns=6)
    _, policy = play(Film(FRAMES), ["go"] * 4, section)
    assert [len(messages) for messages in policy.asked] == [1, 1, 1, 1]
    shown = [messages[0].content for messages in policy.asked]
    digests = list(policy.images.files)
    assert [part for part in shown[1] if isinstance(part, ImagePart)] == [ImagePart(digests[1])]
    assert shown[3] == "Watch.\na text"


def test_the_reward_stands_before_the_images_of_an_observation():
    section = EnvironmentAgentSection(format="plain", max_turns=6, show_reward=True)
    _, policy = play(Film(FRAMES), ["go"] * 4, section)
    *_, third = policy.images.files
    asked = [message.content for message in policy.asked[-1] if message.role == "user"]
    assert asked[2:] == [
        (TextPart("Reward: 1\nand "), ImagePart(third)),
        "Reward: 1\na text",
    ]


def test_the_last_images_of_the_history_are_kept():
    section = EnvironmentAgentSection(format="plain", max_turns=6, history={"last_images": 1})
    _, policy = play(Film(FRAMES), ["go"] * 4, section)
    *_, third = policy.images.files
    assert list(images_of_messages(policy.asked[-1])) == [ImagePart(third)]
    assert policy.asked[-1][0].text == f"Watch.\n{IMAGE_LEFT_OUT}start"


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([3], r"the observation of the environment's reset\(\) is a int: return a text"),
        (["a", 3], r"the observation of the environment's step\(\) is a int: return a text"),
        ([Observation("", [b"gif"])], r"image 1 of the environment's reset\(\).*give a whole PNG"),
        (
            ["a", Observation("", [DARK.astype(int)]), "b"],
            r"image 1 of the environment's step\(\) is an array .* of int64: give",
        ),
    ],
)
def test_what_an_environment_did_wrong_is_said_with_its_place(frames, words):
    with pytest.raises(EnvironmentFailure, match=words):
        play(Film(frames), ["go"] * 3)


@pytest.mark.parametrize("info", [{}, None, {"valid": True, "success": True}])
def test_an_info_without_the_facts_is_refused(info):
    class Short(Film):
        def step(self, action):
            return *super().step(action)[:4], info

    with pytest.raises(EnvironmentFailure, match="give it valid, effective, success, each true"):
        play(Short(FRAMES), ["go"])


LAKE = FrozenLakeConfig(slippery=False, observation="image")
ROOM = SokobanConfig(observation="both")


@pytest.mark.parametrize(
    ("make", "config"),
    [(FrozenLakeEnvironment, LAKE), (SokobanEnvironment, ROOM)],
    ids=["lake", "room"],
)
def test_a_demonstration_has_the_images_that_the_player_would_see(make, config):
    section = EnvironmentAgentSection(format="answer", max_turns=10)
    shown = demonstrate(make(config), 5, section, 0.0)
    (messages,) = shown.conversations
    actions = [message.text for message in messages if message.role == "assistant"]
    _, policy = play(make(config), actions, section, seed=5)
    assert messages == [
        *policy.asked[-1],
        Message("assistant", actions[-1]),
    ]
    assert shown.success
    assert shown.images == policy.images.files

    # and as rows for SFT, which other programs can read too
    rows = json.loads(json.dumps([inline_images(message, shown.images) for message in messages]))
    url = next(part for part in rows[0]["content"] if part["type"] == "image_url")
    data = base64.b64decode(url["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert data in [image.data for image in shown.images.values()]

    again = ImageCollector()
    assert messages_of(rows, again) == messages
    assert again.files == shown.images


def test_a_seed_and_a_player_are_the_same_in_text_and_in_pictures():
    section = EnvironmentAgentSection(format="answer", max_turns=10)
    for make, config in ((FrozenLakeEnvironment, LAKE), (SokobanEnvironment, ROOM)):
        told = make(config.model_copy(update={"observation": "text"}))
        drawn = make(config)
        for seed in range(3):
            played = [demonstrate(world, seed, section, 0.0) for world in (told, drawn)]
            said = [
                [message.text for message in episode.conversations[0] if message.role != "user"]
                for episode in played
            ]
            assert said[0] == said[1]
            for world in (told, drawn):
                world.reset(seed=seed)
            assert told.baselines() == drawn.baselines()


DRAWS = """
from hashlib import sha256
from agentevo.environments.frozen_lake import FrozenLakeConfig, FrozenLakeEnvironment
from agentevo.environments.sokoban import SokobanConfig, SokobanEnvironment

for world in (
    FrozenLakeEnvironment(FrozenLakeConfig(observation="image", slippery=False)),
    SokobanEnvironment(SokobanConfig(observation="image", num_boxes=2)),
):
    for seed in range(4):
        print(sha256(world.reset(seed=seed)[0].images[0]).hexdigest())
        print(sha256(world.step("Down")[0].images[0]).hexdigest())
"""


@pytest.mark.slow
def test_two_processes_draw_the_same_bytes():
    other = subprocess.run(
        [sys.executable, "-c", DRAWS], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    with redirect_stdout(io.StringIO()) as here:
        exec(DRAWS, {})
    assert other == here.getvalue()
    assert len(set(other.split())) > 8


def test_a_policy_that_sees_gets_the_pictures_and_its_turns_name_them():
    conversation, engine = seeing_conversation()
    engine._ids = [
        *conversation.chat.tokenizer.encode("Right", add_special_tokens=False),
        conversation.chat.end_of_turn_id,
    ]
    policy = Policy(conversation)
    world = FrozenLakeEnvironment(
        LAKE.model_copy(update={"size": 6, "frozen_probability": 1.0, "max_actions": 3})
    )
    agent = EnvironmentAgent(PLAIN, lambda: world)
    asyncio.run(agent.run(Task(id="t", seed=2), policy))

    assert [len(images) for images in engine.images] == [1, 2, 3][: len(engine.images)]
    shown = [image.file.data for image in engine.images[-1]]
    world.reset(seed=2)
    played = [world.observe().images[0]]
    played += [world.step("Right")[0].images[0] for _ in shown[1:]]
    assert shown == played
    assert [len(turn.images) for turn in policy.turns] == [1] * len(policy.turns)
    assert all(turn.processor for turn in policy.turns)


def test_a_policy_that_sees_nothing_refuses_the_picture(tiny_policy):
    blind = ChatFormat(tiny_policy(tokenizer="byte", context_length=1024).tokenizer)
    conversation, _ = seeing_conversation(chat=blind)
    agent = EnvironmentAgent(PLAIN, lambda: FrozenLakeEnvironment(LAKE))
    with pytest.raises(AgentEvoError, match=r"image"):
        asyncio.run(agent.run(Task(id="t", seed=2), Policy(conversation)))
