"""Named texts: which one an agent gets, and what an attempt says of them."""

import json

import pytest

import agentevo
from agentevo.agents import FunctionAgent, Policy
from agentevo.agents.named_texts import TextKeeper, Texts, as_examples, examples_of
from agentevo.agents.single_turn import SingleTurnAgent
from agentevo.config import build_config
from agentevo.config.agents import SingleTurnSection
from agentevo.config.texts import MAX_CHARS, check_texts, digest_of_text, read_texts
from agentevo.errors import BadRequestError, ConfigError
from agentevo.inference.conversations.conversation import Conversation
from agentevo.rollout.group import GroupAttempt
from agentevo.runtime.event_loop import run_coroutine
from agentevo.store.codec import content_digest, decode_stored, encode_trajectories
from agentevo.types import Message, SamplingParams, Task, ToolCall

SHOWN = [Message("user", "2 + 2?"), Message("assistant", "4")]


@pytest.fixture
def played(loaded, chat, scripted_engine):
    """The trajectory of an agent that is played with these texts."""

    def play(agent, texts):
        engine = scripted_engine(loaded.tokenizer, chat.end_of_turn_id, ["left"] * 4)
        conversation = Conversation(
            engine, chat, SamplingParams(), name="a", seed=1, context_length=256, timeout_s=300
        )
        policy = Policy(conversation, texts=texts)
        attempt = GroupAttempt(agent, Task(id="t", query="left?"), policy, name="a", limit_s=300)
        (trajectory,) = run_coroutine(attempt.run(task_id="t", group_id="g", number=0))
        assert trajectory.status == "completed", trajectory.error
        return trajectory

    return play


def test_a_function_gets_the_given_text_or_its_own_and_the_attempt_says_which(played):
    heard = []

    async def with_policy(task, policy):
        heard.append(policy.text("system", "own"))
        heard.append(policy.text("other", "its own"))
        await policy.generate([*policy.examples(), Message("user", "left")])
        return 1.0

    def blocking(task, policy):
        heard.append(policy.text("system", "own"))
        heard.append(agentevo.text("system", "own"))  # the same attempt's, on a thread of its own
        policy.generate([*policy.examples(), *agentevo.examples(), Message("user", "left")])
        return 1.0

    given = {"system": "given {braces} ${x}", "examples": as_examples([SHOWN])}
    first = played(FunctionAgent(with_policy), Texts(given))
    assert heard == [given["system"], "its own"]
    assert first.texts == {
        "system": digest_of_text(given["system"]),
        "other": digest_of_text("its own"),
        "examples": digest_of_text(given["examples"]),
    }
    assert first.turns[0].messages[:2] == SHOWN

    heard.clear()
    second = played(FunctionAgent(blocking), Texts({"system": "x"}))
    assert heard == ["x", "x"]
    assert second.texts == {"system": digest_of_text("x")}
    assert agentevo.text("system", "own") == "own" and agentevo.examples() == []


def test_a_built_in_agent_takes_its_texts_by_name(played):
    agent = SingleTurnAgent(SingleTurnSection(system_prompt="own", instruction="Say it."))
    player = FunctionAgent(agent.run, agent)
    texts = Texts({"system": "given", "examples": as_examples([SHOWN])})
    trajectory = played(player, texts)
    asked = trajectory.turns[0].messages[:-1]
    assert asked == [Message("system", "given"), *SHOWN, Message("user", "left?\nSay it.")]
    assert set(trajectory.texts) == {"system", "instruction", "examples"}
    assert texts.declared["examples"].kind == "examples"
    assert played(player, Texts({"system": ""})).turns[0].messages[0] == Message("system", "")


def test_one_name_is_one_text_of_an_attempt():
    texts = Texts()
    texts.text("system", "a")
    assert texts.text("system", "a") == "a"

    with pytest.raises(BadRequestError, match="another default"):
        texts.text("system", "b")
    with pytest.raises(BadRequestError, match="another default"):
        texts.examples("system")
    with pytest.raises(BadRequestError, match="is not a valid name"):
        texts.text("two words", "a")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x" * (MAX_CHARS + 1), "characters"),
        ("a\x1b[2Jb", "control character"),
        ("a\x00", "control character"),
        ("\ud800", "surrogate"),
        (7, "int"),
    ],
)
def test_hostile_texts_are_refused(text, why):
    with pytest.raises(ValueError, match=why):
        check_texts({"system": text})


def test_a_recipe_names_a_file_of_texts_and_refuses_what_its_agent_never_asks_for(tmp_path):
    (tmp_path / "texts.yaml").write_text(
        "system: 'Say {it}: ${env:HOME} and $1'\nrules: |\n  Go.\n"
    )
    tree = {"environment": {"type": "coins"}, "agent": {"texts": "texts.yaml"}}
    config = build_config(tree, folder=tmp_path)
    assert config.agent.texts == {"system": "Say {it}: ${env:HOME} and $1", "rules": "Go.\n"}

    with pytest.raises(ConfigError, match=r"sytem.*did you mean system"):
        build_config({**tree, "agent": {"texts": {"sytem": "x"}}}, folder=tmp_path)
    with pytest.raises(ConfigError, match="no file"):
        build_config({**tree, "agent": {"texts": "other.yaml"}}, folder=tmp_path)

    (tmp_path / "texts.yaml").write_text("- system")
    with pytest.raises(ConfigError, match="NAME: TEXT"):
        read_texts(tmp_path / "texts.yaml")


def test_descriptions_of_tools_are_texts():
    schema = {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Counts.",
            "parameters": {
                "type": "object",
                "properties": {"thing": {"type": "string", "description": "What."}},
            },
        },
    }
    texts = Texts({"tools.count": "Counts things.", "tools.count.thing": "One word."})
    (changed,) = texts.of_tools([schema])
    assert changed["function"]["description"] == "Counts things."
    assert changed["function"]["parameters"]["properties"]["thing"]["description"] == "One word."
    assert schema["function"]["description"] == "Counts."  # that of others stays
    assert set(texts.digests) == {"tools.count", "tools.count.thing"}

    unchanged = Texts()
    assert unchanged.of_tools([schema]) == [schema]
    assert {name: one.default for name, one in unchanged.declared.items()} == {
        "tools.count": "Counts.",
        "tools.count.thing": "What.",
    }
    assert unchanged.digests == {}


def test_examples_are_conversations_with_their_calls():
    call = ToolCall("count", json.dumps({"thing": "cups"}), "c1")
    talk = [
        Message("user", "How many?"),
        Message("assistant", "", (call,)),
        Message("tool", "3", tool_call_id="c1", name="count"),
        Message("assistant", "3"),
    ]
    assert examples_of("examples", as_examples([talk, SHOWN])) == [talk, SHOWN]

    for wrong in ("no json", "{}", "[1]", "[[]]", '[[{"role": "user"}]]'):
        with pytest.raises(BadRequestError, match="examples"):
            Texts({"examples": wrong}).examples()


def test_the_store_keeps_digests_and_the_folder_the_texts(played, tmp_path):
    async def run(task, policy):
        policy.text("system", "own")
        await policy.generate([Message("user", "left")])
        return 1.0

    keeper = TextKeeper(tmp_path)
    trajectory = played(FunctionAgent(run), Texts({}, keeper))
    digest = digest_of_text("own")
    assert (tmp_path / "texts" / f"{digest}.txt").read_text() == "own"

    (row,) = encode_trajectories([trajectory], "train", 1)
    columns = {**row.row, "written_at": 0.0}
    assert decode_stored(columns, row.data).trajectory.texts == {"system": digest}

    without = played(FunctionAgent(run), Texts({"system": "x"}))
    assert content_digest(without) != content_digest(trajectory)

    TextKeeper(tmp_path / "nowhere")("text")
    assert not (tmp_path / "nowhere").exists()
