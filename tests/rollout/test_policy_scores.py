"""Rewards that ask the policy, through a sampler, with a real engine."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import sys

import pytest
import torch
from seeing_chats import seeing_chat

from agentevo.agents.single_turn import SingleTurnAgent
from agentevo.config import EngineSection, build_config
from agentevo.errors import AgentEvoError, BadRequestError, EngineError, EngineUnavailableError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.rewards import Score, reward, rewards
from agentevo.rewards.baselines import BaselineScorers
from agentevo.rollout import sampler as sampler_module
from agentevo.rollout.policy_scores import BASELINES, PolicyScores
from agentevo.rollout.sampler import Sampler
from agentevo.rollout.scoring import Scoring
from agentevo.runtime.event_loop import TaskScope, run_coroutine
from agentevo.store import open_store
from agentevo.types import QUERY_MESSAGES, Task

TASKS = [Task(id=f"t{i}", query=f"{word}?", answer=word) for i, word in enumerate(("left", "red"))]


@pytest.fixture
def own_rewards(monkeypatch):
    monkeypatch.setattr(rewards, "_items", dict(rewards._items))


@pytest.fixture
def play(tiny_policy, tmp_path):
    """`play(step, **tree)` -> (trajectories, engine): one pass over TASKS by a tiny policy whose
    every reply states one answer."""
    loaded = tiny_policy(tokenizer="byte", context_length=256)

    def run(step=1, *, engine=None, version=0, given=TASKS, **tree):
        config = build_config(
            {
                "run": {"dir": str(tmp_path / "run")},
                "rewards": [{"name": "rlpr", "place": "hashes", "format_weight": 0.0}],
                "sampling": {"max_new_tokens": 6},
                "agent": {"type": "single_turn"},
                "engine": {"timeout_s": 300},
            }
            | tree,
            needs_environment=False,
        )
        (tmp_path / "run").mkdir(exist_ok=True)
        chat = ChatFormat(loaded.tokenizer)
        own = engine or stating(TorchEngine(loaded.model, loaded.tokenizer), chat)

        async def work():
            if version:
                await own.publish(version)

            async with await open_store(f"sqlite:///{tmp_path / 'store'}") as store:
                agent = SingleTurnAgent(config.agent)
                sampler = Sampler(config, own, chat, agent, store, 256, get_tasks=lambda: given)
                found = await sampler.sample(
                    TASKS, attempts=2, temperature=1.0, split="train", step=step, label="train"
                )
                sampler.close()
                return found

        return asyncio.run(work()), own

    return run


def test_ids_that_do_not_say_which_image_are_not_scored():
    chat = seeing_chat()
    tree = {"agent": {"type": "single_turn"}, "rewards": [{"name": "rlpr", "place": "hashes"}]}
    config = build_config(tree, needs_environment=False)
    policy = PolicyScores(config, None, chat, None)
    with pytest.raises(BadRequestError, match="do not say which image"):
        asyncio.run(policy.score([65, chat.processor.feature_id], [66]))

    content = [{"type": "image", "sha256": "a" * 64}]
    shown = {QUERY_MESSAGES: [{"role": "user", "content": content}]}
    assert policy.first_prompt(Task(id="q", query="what?", metadata=shown)) is None
    assert policy.first_prompt(Task(id="q", query="what?"))


def stating(engine, chat):
    """The engine, whose completions begin with `#### `: what a tiny policy does not know."""
    draw = engine.generate

    async def generate(prompt_ids, sampling, **more):
        completion = await draw(prompt_ids, sampling, **more)
        completion.ids[:5] = chat.plain("#### ", begins=False)
        return completion

    engine.generate = generate
    return engine


def probability(model, chat, context, text):
    ids = chat.plain(text, begins=False)
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + ids]), use_cache=False).logits[0].double()
    rows = torch.log_softmax(logits[len(context) - 1 : -1], dim=-1)
    return rows.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).exp().mean().item()


@pytest.mark.slow
def test_a_real_policy_says_what_a_forward_pass_says(play, tmp_path):
    found, engine = play()
    chat = ChatFormat(engine.tokenizer)
    kept = json.loads((tmp_path / "run" / BASELINES).read_text())
    assert sorted(one["task"] for one in kept.values()) == ["t0", "t0", "t1", "t1"]
    assert {one["version"] for one in kept.values()} == {0}

    answers = {task.id: task.answer for task in TASKS}
    for one in found:
        (turn,) = one.turns
        answer = answers[one.task_id]
        context = [*turn.prompt_ids, *turn.completion_ids[:5]]
        here = probability(engine.model, chat, context, answer)

        before = []
        for opening in ("####", "#### "):
            directly = [*turn.prompt_ids, *chat.plain(opening, begins=False)]
            before.append(probability(engine.model, chat, directly, answer))

        baselines = [base["logprobs"] for base in kept.values() if base["task"] == one.task_id]
        means = [sum(map(math.exp, base)) / len(answer) for base in baselines]
        assert sorted(means) == pytest.approx(sorted(before), 1e-4)
        assert one.status == "completed", one.error
        assert one.reward == pytest.approx(min(max(here - max(before), 0), 1), abs=1e-5)


@pytest.mark.slow
def test_the_baselines_of_a_run_are_those_of_its_beginning(play, tmp_path):
    """Of tasks that come later, too; a resumed run reads them."""
    _, engine = play()
    first = (tmp_path / "run" / BASELINES).read_text()
    play(2, engine=engine, version=3)
    assert (tmp_path / "run" / BASELINES).read_text() == first

    (tmp_path / "run" / BASELINES).unlink()
    play(3, engine=engine, given=())
    kept = json.loads((tmp_path / "run" / BASELINES).read_text())
    assert {one["version"] for one in kept.values()} == {3}, "where nobody knew the task before"


def test_a_reward_that_has_ended_leaves_the_engine_to_the_others(tiny_policy):
    """Though its request was what set the engine going."""
    loaded = tiny_policy(tokenizer="byte", context_length=256)
    section = EngineSection(prefill_tokens=16)
    engine = TorchEngine(loaded.model, loaded.tokenizer, section)
    config = build_config({"engine": {"timeout_s": 300}}, needs_environment=False)
    policy = PolicyScores(config, engine, ChatFormat(loaded.tokenizer), BaselineScorers())

    async def work():
        short = TaskScope()
        long = TaskScope()
        first = short.start(policy.score([20, 21, 22], [23]))
        other = long.start(policy.score(list(range(20, 220)), [23]))
        await first
        short.cancel()
        assert not other.done()
        return await other

    logprobs, _ = run_coroutine(work())
    assert len(logprobs) == 1


@pytest.mark.slow
def test_an_engine_that_fails_is_no_attempts_failure(play, monkeypatch):
    """The group is made again, and in the end the run hears of it."""
    monkeypatch.setattr(sampler_module, "RETRIES", sampler_module.RETRIES.__class__(max_failures=2))
    _, engine = play()
    asked = []

    async def score(*args, **options):
        asked.append(args)
        raise EngineUnavailableError("nobody is there")

    engine.score = score
    with pytest.raises(EngineError, match=r"failed 2 times.*nobody is there"):
        play(2, engine=engine)

    assert asked


@pytest.mark.slow
def test_a_reward_of_ones_own_asks_the_policy(play, own_rewards):
    class Sure:
        def __init__(self, config):
            self.config = config

        async def score(self, trajectory, task, policy):
            logprobs, _ = await policy.score(
                trajectory.turns[0].prompt_ids, policy.encode(str(task.answer))
            )
            return Score(sum(logprobs))

    reward("sure")(Sure)
    found, _ = play(rewards=["sure"])
    assert all(one.status == "completed" and one.reward < 0 for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda: sys.exit(0), r"the reward 'asks' failed: SystemExit\(0\): a reward can't end"),
        (lambda: [][1], "the reward 'asks' failed: IndexError"),
        (None, "the reward 'asks' failed: no score within"),
    ],
)
def test_what_a_reward_does_before_it_scores_ends_the_run_with_a_reason(
    play, own_rewards, does, said
):
    class Asks:
        def __init__(self, config):
            self.config = config

        async def prepare(self, tasks, policy):
            return await asyncio.Event().wait() if does is None else does()

        async def score(self, trajectory, task, policy):
            return Score(0.0)

    reward("asks")(Asks)
    with pytest.raises(AgentEvoError, match=said):
        play(rewards=[{"name": "asks", "timeout_s": 300.0 if does else 0.05}])


@pytest.mark.slow
def test_where_no_engine_is_at_hand_the_score_has_failed(play):
    found, _ = play()
    config = build_config({"rewards": ["rlpr"]}, needs_environment=False)
    (judged,) = asyncio.run(Scoring(config.rewards).score(found[:1], [True], {}, task=TASKS[0]))
    assert judged.status == "failed"
    assert "'rlpr' failed: it needs the policy's engine" in judged.error
