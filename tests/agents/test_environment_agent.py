"""The environment loop: how answers are read, what each turn earns, when an episode ends."""

from __future__ import annotations

import asyncio
import random
from typing import Literal

import pytest
from chat_templates import QWQ, tokenizer_with
from hypothesis import given
from hypothesis import strategies as st

from agentevo.agents import EnvironmentAgent, Policy, Reply
from agentevo.agents import Outcome as Attempt
from agentevo.agents.environment_agent import (
    answer_instructions,
    demonstrate,
    format_answer,
    parse_answer,
)
from agentevo.config import EnvironmentAgentSection
from agentevo.environments.environment import EnvironmentConfig
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment
from agentevo.environments.sokoban import SokobanConfig, SokobanEnvironment
from agentevo.errors import EnvironmentFailure
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.types import Baselines, Message, SamplingParams, Task

PLAIN = EnvironmentAgentSection(format="plain")
ANSWER = EnvironmentAgentSection(format="answer")
THINK = EnvironmentAgentSection(format="think_answer")
RAGEN = EnvironmentAgentSection(format="think_answer", answer_tag="ans")
SEVERAL = EnvironmentAgentSection(format="answer", actions_per_turn=3)
FORGETFUL = EnvironmentAgentSection(format="answer", memory="turn")
LONG = EnvironmentAgentSection(format="plain", max_turns=100)


@pytest.mark.parametrize(
    ("section", "text", "expected"),
    [
        (PLAIN, "Up", ["Up"]),
        (PLAIN, "  Up\n", ["Up"]),
        (PLAIN, "", None),
        (PLAIN, " \n ", None),
        (PLAIN, "Up || Down", ["Up || Down"]),
        (PLAIN, "<answer>Up</answer>", ["<answer>Up</answer>"]),
        (ANSWER, "<answer>Up</answer>", ["Up"]),
        (ANSWER, "I go <answer> Up </answer> now", ["Up"]),
        (ANSWER, "<answer>Up</answer><answer>Down</answer>", ["Up"]),
        (ANSWER, "<answer>go\nUp</answer>", ["go\nUp"]),
        (ANSWER, "<answer></answer>", None),
        (ANSWER, "<answer>Up", None),
        (ANSWER, "Up</answer>", None),
        (ANSWER, "Up", None),
        (THINK, "<think>hm</think><answer>Up</answer>", ["Up"]),
        (THINK, "\n<think>\nhm\n</think>\n <answer>Up</answer>\n", ["Up"]),
        (THINK, "<think></think><answer>Up</answer>", ["Up"]),
        (THINK, "<answer>Up</answer>", None),
        (THINK, "so: <think>hm</think><answer>Up</answer>", None),
        (THINK, "<think>hm</think> then <answer>Up</answer>", None),
        (THINK, "<think>hm</think><answer>Up</answer> done", None),
        (THINK, "<think>hm<answer>Up</answer>", None),
        (THINK, "<think>hm</think>", None),
        (SEVERAL, "<answer>Up || Down</answer>", ["Up", "Down"]),
        (SEVERAL, "<answer>Up||Down||Left||Right</answer>", ["Up", "Down", "Left"]),
        (SEVERAL, "<answer> || Up ||  || Down</answer>", ["Up", "Down"]),
        (SEVERAL, "<answer>||</answer>", None),
        (SEVERAL, "<answer>Up, Down</answer>", ["Up, Down"]),
        (
            SEVERAL.model_copy(update={"action_separator": ","}),
            "<answer>Up, Down</answer>",
            ["Up", "Down"],
        ),
        (RAGEN, "<think>hm</think><ans>Up</ans>", ["Up"]),
        (RAGEN, "<think>hm</think><answer>Up</answer>", None),
        (RAGEN, "<ans>Up</ans>", None),
    ],
)
def test_how_an_answer_is_read(section, text, expected):
    assert parse_answer(text, section) == expected


@given(
    st.sampled_from(["plain", "answer", "think_answer"]),
    st.lists(st.text("abcxyz ", min_size=1).filter(str.strip), min_size=1, max_size=3),
    st.sampled_from(["||", ",", " then "]),
    st.sampled_from(["answer", "ans"]),
)
def test_what_a_demonstration_says_is_read_as_it_was_meant(form, actions, separator, tag):
    section = EnvironmentAgentSection(
        format=form, actions_per_turn=3, action_separator=separator, answer_tag=tag
    )
    assert parse_answer(format_answer(actions, section), section) == [
        action.strip() for action in actions
    ]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (PLAIN, ""),
        (
            PLAIN.model_copy(update={"actions_per_turn": 2}),
            "Answer with up to 2 actions separated by ||.",
        ),
        (ANSWER, "Answer with your action like this: <answer>...</answer>"),
        (SEVERAL, "Answer with up to 3 actions separated by || like this: <answer>...</answer>"),
        (
            THINK,
            "Think first, then answer with your action: <think>...</think><answer>...</answer>",
        ),
        (
            THINK.model_copy(update={"answer_tag": "ans"}),
            "Think first, then answer with your action: <think>...</think><ans>...</ans>",
        ),
    ],
)
def test_what_the_player_is_told(section, expected):
    assert answer_instructions(section) == expected


class CorridorConfig(EnvironmentConfig):
    type: Literal["test_corridor"] = "test_corridor"
    max_actions: int = 6
    """Actions after which an unfinished episode is truncated."""
    solvable: bool = True
    """Whether the solver knows the way."""


class Corridor(EpisodicEnvironment):
    """Walk right from a place given by the seed to place 3; each step costs 0.25, arriving pays 2.
    At -1 the environment ends."""

    Config = CorridorConfig
    config: CorridorConfig
    instructions = "Walk Right to the end."
    closed = 0

    def start(self, seed: int) -> None:
        self.place = seed % 3

    def observe(self) -> str:
        return f"at {self.place}"

    def act(self, action: str) -> ActionResult:
        if action == "break":
            raise EnvironmentFailure("the corridor collapsed")
        if action not in ("Left", "Right"):
            return INVALID

        self.place += 1 if action == "Right" else -1
        won = self.place == 3
        return ActionResult(
            reward=2.0 if won else -0.25, terminated=won or self.place < 0, success=won
        )

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(["Left", "Right"])

    def optimal_action(self) -> str | None:
        return "Right" if self.config.solvable else None

    def baselines(self, max_actions: int | None = None) -> Baselines:
        return Baselines(random=None, optimal=1.0)

    def close(self) -> None:
        Corridor.closed += 1


@pytest.fixture
def chat(tiny_policy):
    return ChatFormat(tiny_policy(tokenizer="byte", context_length=1024).tokenizer)


@pytest.fixture
def play(chat, scripted_engine):
    """`play(section, says, seed=0)` -> outcome and policy of one episode in which the policy says
    these things."""

    def run(
        section: EnvironmentAgentSection,
        says: list[str],
        seed: int = 0,
        max_actions: int = 6,
        context_length: int = 1024,
    ):
        engine = scripted_engine(chat.tokenizer, chat.end_of_turn_id, says)
        policy = Policy(
            Conversation(
                engine,
                chat,
                SamplingParams(),
                name="a",
                seed=0,
                context_length=context_length,
                timeout_s=300,
            )
        )
        agent = EnvironmentAgent(section, lambda: Corridor(CorridorConfig(max_actions=max_actions)))
        return asyncio.run(agent.run(Task(id="t", seed=seed), policy)), policy

    return run


GOOD = "<answer>Right</answer>"


@pytest.mark.parametrize(
    ("says", "turn_rewards", "counts"),
    [
        # counts: actions, invalid actions, format errors, effective actions
        ([GOOD], [2.0], (1, 0, 0, 1)),
        (["Right", GOOD], [-0.1, 2.0], (1, 0, 1, 1)),
        (["<answer>Jump</answer>", GOOD], [-0.1, 2.0], (2, 1, 0, 1)),
        (["<answer>Jump || Jump</answer>", GOOD], [-0.1, 2.0], (3, 2, 0, 1)),
        (["<answer>Jump || Right</answer>"], [1.9], (2, 1, 0, 1)),
        (["<answer>Left || Right</answer>", GOOD], [-0.5, 2.0], (3, 0, 0, 3)),
        (["<answer>Right || Jump</answer>"], [2.0], (1, 0, 0, 1)),
        (["<answer></answer>", "what?", GOOD], [-0.1, -0.1, 2.0], (1, 0, 2, 1)),
    ],
)
def test_what_each_turn_earns(says, turn_rewards, counts, play):
    section = EnvironmentAgentSection(format="answer", actions_per_turn=2, format_penalty=0.1)
    outcome, policy = play(section, says, seed=2)
    assert list(outcome.turn_rewards.values()) == pytest.approx(turn_rewards)
    assert list(outcome.turn_rewards) == [turn.index for turn in policy.turns]
    assert outcome.reward == pytest.approx(sum(turn_rewards))

    broken_turns = sum(
        not float(4 * reward).is_integer() for reward in turn_rewards
    )  # the environment pays quarters
    assert outcome.reward_parts == pytest.approx(
        {"environment": sum(turn_rewards) + 0.1 * broken_turns, "format": -0.1 * broken_turns}
    )
    assert (outcome.success, outcome.truncated) == (True, False)

    names = ("num_actions", "num_invalid_actions", "num_format_errors", "num_effective_actions")
    assert tuple(outcome.metrics[name] for name in names) == counts


def test_without_a_penalty_bad_form_is_free(play):
    outcome, _ = play(
        EnvironmentAgentSection(format="answer", format_penalty=0.0),
        ["Right", "<answer>Jump</answer>", GOOD],
        seed=2,
    )
    assert outcome.reward == 2.0
    assert outcome.reward_parts == {"environment": 2.0, "format": 0.0}


def test_parts_that_do_not_sum_to_the_reward_are_refused():
    with pytest.raises(
        ValueError,
        match=r"reward_parts .* sum to 1\.5, but reward is 1: give parts that sum to the reward",
    ):
        Attempt(reward=1.0, success=True, reward_parts={"answer": 1.0, "style": 0.5})

    assert (
        Attempt(reward=0.3, success=True, reward_parts={"answer": 0.1, "style": 0.2}).reward == 0.3
    )


def test_the_environment_may_end_badly(play):
    outcome, policy = play(ANSWER, ["<answer>Left</answer>"], seed=0)
    assert (outcome.success, outcome.truncated, outcome.reward, len(policy.turns)) == (
        False,
        False,
        -0.25,
        1,
    )
    assert outcome.ending == "at -1"  # which no prompt holds: nothing is asked after it


@pytest.mark.parametrize(
    ("section", "max_actions", "num_turns", "num_actions"),
    [
        (EnvironmentAgentSection(format="answer", max_turns=3), 6, 3, 3),
        (EnvironmentAgentSection(format="answer", max_turns=9), 4, 4, 4),
        (EnvironmentAgentSection(format="answer", max_turns=9, actions_per_turn=3), 4, 2, 4),
    ],
    ids=["turns", "actions", "actions-within-a-turn"],
)
def test_limits_truncate(section, max_actions, num_turns, num_actions, play):
    outcome, policy = play(
        section, ["<answer>Left || Right || Left</answer>"] * 9, seed=2, max_actions=max_actions
    )
    assert (outcome.truncated, outcome.success) == (True, False)
    assert (len(policy.turns), outcome.metrics["num_actions"]) == (num_turns, num_actions)


def test_a_full_context_ends_the_episode_like_any_other_limit(play):
    """What was earned until then counts. Where not even the first question fits, the attempt has
    failed."""
    outcome, policy = play(ANSWER, ["<answer>Left</answer>", GOOD] * 5, seed=1, context_length=115)
    assert 1 < len(policy.turns) < 6
    assert outcome.truncated
    assert outcome.reward == pytest.approx(-0.25 * len(policy.turns))


def test_the_conversation_that_the_policy_sees(play, chat):
    section = EnvironmentAgentSection(format="think_answer", system_prompt="Be brief.")
    _, policy = play(
        section,
        [
            "Right",
            "<think>ok</think><answer>Right</answer>",
            "<think></think><answer>Right</answer>",
        ],
        seed=1,
    )
    last = policy.turns[-1]
    whole = [*policy.conversation.prompt_ids(last.index), *last.completion_ids]
    trajectory_text = chat.tokenizer.decode(whole)
    told = "Think first, then answer with your action: <think>...</think><answer>...</answer>"
    assert trajectory_text == (
        f"<|system|>Be brief.<|end|><|user|>Walk Right to the end.\n{told}\nat 1<|end|>"
        "<|assistant|>Right<|end|><|user|>at 1<|end|>"
        "<|assistant|><think>ok</think><answer>Right</answer><|end|><|user|>at 2<|end|>"
        "<|assistant|><think></think><answer>Right</answer><|end|>"
    )


@pytest.mark.parametrize("memory", ["episode", "turn"])
def test_the_policy_reads_its_reward_where_the_recipe_says_so(memory, play, chat):
    section = EnvironmentAgentSection(format="plain", memory=memory, show_reward=True)
    _, policy = play(section, ["Jump", "Left", "Right", "Right", "Right"], seed=1)
    prompts = [chat.tokenizer.decode(turn.prompt_ids) for turn in policy.turns]
    assert "Reward" not in prompts[0]
    assert [prompt.rpartition("Reward: ")[2].partition("<|end|>")[0] for prompt in prompts[1:]] == [
        "-0.1\nat 1",
        "-0.25\nat 0",
        "-0.25\nat 1",
        "-0.25\nat 2",
    ]
    assert all(prompt.count("Reward") == 1 for prompt in prompts[1:])


@pytest.mark.parametrize("memory", ["episode", "turn"])
def test_a_demonstration_shows_the_rewards_that_the_policy_would_read(memory, play, chat):
    section = EnvironmentAgentSection(format="plain", memory=memory, show_reward=True)
    environment = Corridor(CorridorConfig())
    shown = demonstrate(environment, 0, section, 0.0).conversations
    _, policy = play(section, ["Right"] * 3, seed=0)
    last = policy.turns[-1]
    assert (
        chat.tokenizer.decode(policy.conversation.prompt_ids(last.index))
        == "".join(f"<|{message.role}|>{message.content}<|end|>" for message in shown[-1][:-1])
        + "<|assistant|>"
    )
    assert shown[-1][-2].content.endswith("Reward: -0.25\nat 2")


def test_an_agent_without_memory_sees_the_rules_and_the_newest_observation_each_turn(play, chat):
    outcome, policy = play(FORGETFUL, [GOOD, "no", GOOD], seed=1)
    told = "Walk Right to the end.\nAnswer with your action like this: <answer>...</answer>\nat "
    assert [turn.parent for turn in policy.turns] == [None] * 3
    seen = [chat.tokenizer.decode(turn.prompt_ids) for turn in policy.turns]
    assert seen == [f"<|user|>{told}{place}<|end|><|assistant|>" for place in (1, 2, 2)]
    assert outcome.turn_rewards == pytest.approx({0: -0.25, 1: -0.1, 2: 2.0})


def test_an_environment_that_breaks_is_closed_and_says_so(play):
    before = Corridor.closed
    with pytest.raises(EnvironmentFailure, match="collapsed"):
        play(ANSWER, ["<answer>break</answer>"])
    assert Corridor.closed == before + 1


def test_demonstrations_are_the_conversations_of_a_good_player():
    shown = demonstrate(Corridor(CorridorConfig()), 1, ANSWER, random_rate=0.0)
    assert shown.success

    (messages,) = shown.conversations
    assert [(m.role, m.content) for m in messages[1:]] == [
        ("assistant", GOOD),
        ("user", "at 2"),
        ("assistant", GOOD),
    ]

    (messages,) = demonstrate(Corridor(CorridorConfig()), 0, SEVERAL, random_rate=0.0).conversations
    assert [m.content for m in messages[1:]] == ["<answer>Right || Right || Right</answer>"]


def test_a_demonstration_for_an_agent_without_memory_is_one_conversation_a_turn():
    shown = demonstrate(Corridor(CorridorConfig()), 1, FORGETFUL, random_rate=0.0)
    assert [[m.content.splitlines()[-1] for m in messages] for messages in shown.conversations] == [
        ["at 1", GOOD],
        ["at 2", GOOD],
    ]
    assert [messages[0].content.splitlines()[0] for messages in shown.conversations] == [
        "Walk Right to the end."
    ] * 2


def test_demonstrations_with_random_actions_follow_their_seed():
    shown = [
        demonstrate(Corridor(CorridorConfig()), seed, ANSWER, random_rate=0.7)
        for seed in (0, 3, 6, 9, 0)
    ]
    assert shown[0] == shown[4]

    messages = [
        message for one in shown for conversation in one.conversations for message in conversation
    ]
    assert any("Left" in message.content for message in messages if message.role == "assistant")
    assert all(one.conversations[-1][-1].role == "assistant" for one in shown), (
        "it ends with what the player says"
    )


def test_a_demonstration_stops_at_the_agents_limit():
    shown = demonstrate(
        Corridor(CorridorConfig()),
        0,
        EnvironmentAgentSection(format="answer", max_turns=2),
        random_rate=0.0,
    )
    assert not shown.success
    assert [m.role for m in shown.conversations[0]] == ["user", "assistant", "user", "assistant"]


def test_a_demonstration_ends_where_the_task_is_lost():
    """Random pushes get the box stuck: up to there a solution existed, afterwards nothing is
    shown."""
    num_lost = 0
    for seed in range(8):
        environment = SokobanEnvironment(SokobanConfig())
        shown = demonstrate(environment, seed, LONG, random_rate=1.0)
        said = [
            message.content for message in shown.conversations[-1] if message.role == "assistant"
        ]

        environment.reset(seed=seed)
        over = False
        for action in said:
            assert environment.optimal_action() is not None
            _, _, terminated, truncated, _ = environment.step(action)
            over = terminated or truncated

        lost = environment.optimal_action() is None and not over
        assert lost or over

        num_lost += lost

    assert num_lost > 0


def test_without_a_solver_there_is_no_demonstration():
    assert demonstrate(Corridor(CorridorConfig(solvable=False)), 0, ANSWER, random_rate=1.0) is None


@pytest.mark.parametrize("answer_format", ["plain", "answer", "think_answer"])
def test_a_thought_that_the_template_opens_belongs_to_the_answer(answer_format, scripted_engine):
    chat = ChatFormat(tokenizer_with(QWQ))
    action = "Right" if answer_format == "plain" else GOOD
    says = [f"Left or <answer>Left</answer>?</think>\n\n{action}", "only a thought", action]
    engine = scripted_engine(chat.tokenizer, chat.end_of_turn_id, says)
    conversation = Conversation(
        engine, chat, SamplingParams(), name="a", seed=0, context_length=4096, timeout_s=300
    )

    section = EnvironmentAgentSection(format=answer_format, max_turns=3)
    agent = EnvironmentAgent(section, lambda: Corridor(CorridorConfig(max_actions=6)))
    outcome = asyncio.run(agent.run(Task(id="t", seed=0), Policy(conversation)))
    assert outcome.metrics["num_effective_actions"] == 1, (
        "the first answer alone closes its thought"
    )
    assert outcome.metrics["num_format_errors"] == 2

    shown = chat.text(chat.completion(Message("assistant", format_answer(["Right"], section))))
    reply = Reply(shown, True, 0, Message("assistant", shown), opening=chat.opening)
    read = reply.opening + shown if answer_format == "think_answer" else reply.answer
    assert parse_answer(read, section) == ["Right"], "what is demonstrated would be paid"
