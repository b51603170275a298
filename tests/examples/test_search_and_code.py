"""The comparisons with and without search, and of code with calls: their worlds, that the
demonstrations are what the agents show, and both commands at a tiny size."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentevo.agents import CodeAgent, Policy, SingleTurnAgent, ToolAgent
from agentevo.agents.code_agent import system_message
from agentevo.agents.tools.search import CorpusSearch
from agentevo.config.agents import CodeAgentSection, SingleTurnSection, ToolAgentSection
from agentevo.inference.conversations.conversation import Conversation
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.tiny_tokenizer import byte_tokenizer, word_tokenizer
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import SamplingParams, Task

FOLDER = Path(__file__).parents[2] / "examples" / "search_and_code"
sys.path.insert(0, str(FOLDER))

import arms  # noqa: E402
import code_or_calls  # noqa: E402
import files  # noqa: E402
import search_r1  # noqa: E402
from world import TOP_K, World, reading  # noqa: E402

sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def world():
    return World(seed=0)


def some(world, count, **of_which):
    return list(itertools.islice(world.questions(**of_which), count))


@pytest.mark.slow
def test_no_question_that_is_trained_on_has_anything_of_the_held_out_part(world):
    """Neither whom it names, nor who leads to the answer, nor the answer."""
    trained = some(world, 1500, held_out=False, seed=0) + some(world, 800, held_out=False, seed=1)
    held_out = {entity.name for entity in world.entities if entity.held_out}
    assert len(world.entities) == 2000 and len(held_out) == 400

    names = re.compile("|".join(held_out))
    for question in trained:
        assert not any(one.held_out for one in question.path)
        said = json.dumps(question.task()) + "".join(one.name for one in question.path)
        assert not names.search(said)

    for question in some(world, 400, held_out=True, seed=0):
        assert all(one.name in held_out for one in question.path)


def test_a_held_out_name_is_new_and_its_syllables_are_not(world):
    names = [entity.name for entity in world.entities]
    assert len(set(names)) == len(names)
    known, new = (
        {
            part
            for entity in world.entities
            if entity.held_out is which
            for part in syllables(entity.name)
        }
        for which in (False, True)
    )
    assert new <= known


def syllables(name):
    return re.findall("[A-Z][a-z]+", name)


def test_what_is_read_before_says_nothing_of_the_held_out_part(world):
    held_out = {entity.name for entity in world.entities if entity.held_out}
    for row in itertools.islice(reading(world, 0), 300):
        facts, again = (message["content"] for message in row["messages"])
        assert not held_out & set(re.findall(r"\w+", facts))
        said, again = (text.strip(" .").split(", ") for text in (facts.split(": ")[1], again))
        assert len(said) == 3 and sorted(said) == sorted(again)


def test_questions_differ_and_are_the_same_for_the_same_seed(world):
    asked = [one.task() for one in some(world, 500, held_out=True, seed=3)]
    assert len({one["id"] for one in asked}) == 500
    assert {one["hops"] for one in asked[:250]} == {1, 2}
    again = [one.task() for one in some(World(seed=0), 500, held_out=True, seed=3)]
    assert asked == again
    assert len(some(World(seed=0, size=50), 10**6, held_out=True, seed=0)) < 500


def test_a_search_for_a_name_finds_its_passage(world, tmp_path):
    tool = CorpusSearch(corpus=str(world.write_corpus(tmp_path / "corpus.jsonl")), top_k=TOP_K)
    sought = world.entities[::10]
    assert all(f"Of {one.name}: " in tool.search(one.name) for one in sought)


def test_a_table_is_answered_by_the_tools_as_by_the_question():
    asked = list(itertools.islice(files.questions("a"), 300))
    assert {one.kind for one in asked} == set(files.KINDS)
    for question in asked:
        task = Task(id="t", metadata={"folder": question.files})
        tools = files.Folder(task)
        assert tools.list_files() == list(question.files)

        if question.kind == "find":
            named = [name for name in question.files if question.about[0] in tools.read_file(name)]
            assert named == [question.answer]
        else:
            assert str(getattr(tools, question.kind)(question.numbers)) == question.answer

    others = {json.dumps(one.files) for one in itertools.islice(files.questions("b"), 300)}
    assert not others & {json.dumps(one.files) for one in asked if one.kind != "find"}


@pytest.fixture
def played(scripted_engine):
    """What an agent shows to a policy that says what a demonstration says, as text."""

    def play(agent, task, row):
        tokenizer = byte_tokenizer(16384)
        chat = ChatFormat(tokenizer)
        shown = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False
        )
        words = [one.split("<|end|>")[0] for one in shown.split("<|assistant|>")[1:]]
        engine = scripted_engine(tokenizer, chat.end_of_turn_id, words)
        conversation = Conversation(
            engine, chat, SamplingParams(), name="a", seed=1, context_length=16384, timeout_s=300
        )
        policy = Policy(conversation)

        async def work():
            await agent.run(task, policy)
            if hasattr(agent, "close"):
                await agent.close()

        run_coroutine(work())
        assert len(engine.requests) == len(words)
        return tokenizer.decode(engine.requests[-1][0]) + words[-1], shown

    return play


@pytest.mark.parametrize("place", [0, 1], ids=["1hop", "2hop"])
def test_demonstrations_about_the_world_are_what_the_agents_show(played, world, tmp_path, place):
    corpus = world.write_corpus(tmp_path / "corpus.jsonl")
    tool = CorpusSearch(corpus=str(corpus), top_k=TOP_K)
    question = some(world, 2, held_out=False, seed=0)[place]
    task = Task(id="t", query=question.text, answer=question.answer)
    searching = ToolAgent(ToolAgentSection(**search_r1.searching(corpus)))
    said, shown = played(searching, task, search_r1.shown_search(question, tool))
    assert said.count("<|assistant|>") == question.num_hops + 1
    assert shown.startswith(said)

    said, shown = played(
        SingleTurnAgent(SingleTurnSection()), task, search_r1.shown_answer(question)
    )
    assert shown.startswith(said)


def test_a_hasty_demonstration_answers_with_what_the_first_search_taught(world, tmp_path):
    corpus = world.write_corpus(tmp_path / "corpus.jsonl")
    tool = CorpusSearch(corpus=str(corpus), top_k=TOP_K)
    one, two = some(world, 2, held_out=False, seed=0)
    assert search_r1.shown_search(one, tool, hasty=True) == search_r1.shown_search(one, tool)

    hasty = search_r1.shown_search(two, tool, hasty=True)["messages"]
    assert hasty[:3] == search_r1.shown_search(two, tool)["messages"][:3]
    assert hasty[3]["content"].endswith(f"<answer> {two.path[1].name} </answer>")
    assert len(hasty) == 4


@pytest.mark.parametrize("place", range(3), ids=files.KINDS)
def test_demonstrations_about_files_are_what_the_agents_show(played, place):
    question = list(itertools.islice(files.questions("a"), 3))[place]
    task = Task(id="t", query=question.text, metadata={"folder": question.files})
    schemas = code_or_calls.tool_schemas()
    calling = ToolAgent(ToolAgentSection(**code_or_calls.CALLS))
    said, shown = played(calling, task, code_or_calls.shown_calls(question, schemas))
    assert shown.startswith(said)

    section = CodeAgentSection(**code_or_calls.CODE)
    row = code_or_calls.shown_code(question, system_message(section, schemas))
    said, shown = played(CodeAgent(section), task, row)
    assert shown.startswith(said)


def test_the_table_is_of_all_results(tmp_path):
    for seed, share in ((0, 0.5), (1, 1.0)):
        folder = tmp_path / f"search-{seed}"
        folder.mkdir()
        results = {"search, SFT": {"1hop": share, "2hop": 0.0, "all": share / 2}}
        (folder / "result.json").write_text(json.dumps({"results": results}))
    last = arms.table(tmp_path, search_r1.KINDS).splitlines()[-1]
    assert last == "| search, SFT | 75% ± 35 | 0% ± 0 | 38% ± 18 | 25%, 50% |"


@pytest.mark.slow
def test_no_word_of_a_demonstration_falls_apart(world, tmp_path):
    """Every arm's policy has the words of all arms."""
    corpus = world.write_corpus(tmp_path / "corpus.jsonl")
    tool = CorpusSearch(corpus=str(corpus), top_k=TOP_K)
    tokenizer = word_tokenizer(search_r1._texts(world), 2048)
    for question in some(world, 100, held_out=True, seed=0):
        row = search_r1.shown_search(question, tool)
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
        words = set(re.findall("[A-Z]?[a-z]+", re.sub(r"<\|\w+\|>", " ", text)))
        assert {word for word in words if len(word) > 1} <= {
            piece.strip(" <|>/") for piece in pieces
        }


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (
            "search_r1",
            [
                "no search, SFT",
                "no search, SFT and RL",
                "search, SFT",
                "search, SFT and RL",
                "search, SFT and RL, found text trained",
            ],
        ),
        ("code_or_calls", ["code, SFT", "code, SFT and RL"]),
    ],
)
def test_a_comparison_runs_by_one_command(script, lines, tmp_path):
    sizes = "--reading 16 --demonstrations 16 --epochs 1 --steps 1 --groups 2 --held-out 4"
    shape = "--questions 12 --hidden-size 32 --num-layers 1 --seeds 0"
    words = [*sizes.split(), *shape.split()]
    words += ["--only", "code"] if script == "code_or_calls" else []
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), *words, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr

    rows = [row.split("|")[1].strip() for row in done.stdout.splitlines() if row[:1] == "|"]
    assert sorted(rows[2:]) == sorted(lines)
