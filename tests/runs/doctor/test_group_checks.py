"""What the doctor measures: honest attempts pass, and each kind of falsehood shows."""

import asyncio
import math

import msgspec
import pytest
from seeing_policies import BLUE, RED, play_two_turns, seeing_policy

from agentevo.agents import Policy
from agentevo.config import ModelSection, TinyModel
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.embedded.earlier_weights import EarlierWeights
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.compute.attention import prepare
from agentevo.models.files.load import load_model
from agentevo.runs.doctor import group_checks as checks
from agentevo.runs.doctor import memory_measures
from agentevo.runs.doctor.memory_estimate import Load, engine_weights, sizes_of, total
from agentevo.types import Completion, Message, SamplingParams, Trajectory, Turn
from agentevo.types.image_span import ImageSpan

SAMPLING = SamplingParams(temperature=1.3, max_new_tokens=6)


@pytest.fixture(scope="module")
def loaded():
    section = ModelSection(
        name="tiny",
        tiny=TinyModel(
            hidden_size=32, num_layers=2, num_heads=2, context_length=256, tokenizer="byte"
        ),
    )
    found = load_model(section, seed=1)
    prepare(found.model)
    return found


@pytest.fixture(scope="module")
def group(loaded):
    """Three attempts of three turns, and the engine that watched."""
    chat = ChatFormat(loaded.tokenizer)
    engine = checks.WatchedEngine(TorchEngine(loaded.model, loaded.tokenizer))

    async def attempt(number: int) -> Trajectory:
        conversation = Conversation(
            engine,
            chat,
            SAMPLING,
            name=f"a{number}",
            seed=number,
            context_length=256,
            timeout_s=300,
        )
        policy = Policy(conversation)
        messages = [Message("user", "left or right?")]
        for _ in range(3):
            reply = await policy.generate(messages)
            messages = [*messages, reply.message, Message("user", "and now?")]

        return Trajectory(
            id=f"a{number}", task_id="t", group_id="t", attempt=number, turns=policy.turns
        )

    async def play() -> list[Trajectory]:
        return list(await asyncio.gather(*(attempt(number) for number in range(3))))

    return asyncio.run(play()), engine.requests


def change_turn(trajectory: Trajectory, index: int, **fields) -> Trajectory:
    turns = list(trajectory.turns)
    turns[index] = msgspec.structs.replace(turns[index], **fields)
    return msgspec.structs.replace(trajectory, turns=turns)


@pytest.mark.slow
def test_honest_attempts_pass(loaded, group):
    trajectories, requests = group
    assert sum(requests.values()) == 9
    assert checks.count_other_contexts(trajectories, requests) == 0
    num_tokens, difference = checks.max_logprob_difference(loaded.model, trajectories, SAMPLING)
    assert num_tokens == sum(trajectory.num_completion_tokens() for trajectory in trajectories)
    assert difference < 1e-4


def test_the_model_serves_the_engine_again_after_the_check(loaded, group):
    trajectories, _ = group
    checks.max_logprob_difference(loaded.model, trajectories[:1], SAMPLING)
    engine = TorchEngine(loaded.model, loaded.tokenizer)
    completion = asyncio.run(engine.generate([5, 6, 7], SAMPLING, deadline_s=300))
    assert len(completion.ids) == len(completion.logprobs) > 0


def test_a_wrong_logprob_shows(loaded, group):
    trajectories, _ = group
    logprobs = trajectories[1].turns[2].logprobs
    wrong = change_turn(trajectories[1], 2, logprobs=[logprobs[0] + 0.25, *logprobs[1:]])
    assert checks.max_logprob_difference(loaded.model, [trajectories[0], wrong], SAMPLING)[
        1
    ] == pytest.approx(0.25, abs=1e-3)

    broken = change_turn(
        trajectories[1], 0, logprobs=[math.nan, *trajectories[1].turns[0].logprobs[1:]]
    )
    assert math.isnan(
        checks.max_logprob_difference(loaded.model, [broken, trajectories[0]], SAMPLING)[1]
    )


def test_every_turn_of_a_branched_attempt_is_compared_once(loaded, group):
    trajectory = group[0][0]
    branched = change_turn(
        trajectory, 2, parent=0, logprobs=[value - 5.0 for value in trajectory.turns[2].logprobs]
    )
    num_tokens, difference = checks.max_logprob_difference(loaded.model, [branched], SAMPLING)
    assert num_tokens == branched.num_completion_tokens()
    assert difference > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "idefics3"])
def test_attempts_with_images_are_compared_with_their_images(name):
    policy = seeing_policy(name)
    engine = TorchEngine(policy.model, policy.processor.tokenizer)
    (first, answer), (second, other_answer) = asyncio.run(play_two_turns(policy, engine))
    length = len(first.ids) + len(answer.ids)
    turns = [
        turn_of(0, None, first.ids, answer, [image.span for image in first.images]),
        turn_of(
            1,
            0,
            second.ids[length:],
            other_answer,
            [i.span.shifted(-length) for i in second.images[len(first.images) :]],
        ),
    ]
    trajectory = Trajectory(id="a", task_id="t", group_id="t", attempt=0, turns=turns)
    files = {image.file.part.sha256: image.file for image in second.images}
    sampling = SamplingParams(temperature=1.0, max_new_tokens=10)

    num_tokens, difference = checks.max_logprob_difference(
        policy.model, [trajectory], sampling, files
    )
    assert num_tokens == len(answer.ids) + len(other_answer.ids)
    assert difference < 1e-4

    files[RED.part.sha256] = BLUE
    assert checks.max_logprob_difference(policy.model, [trajectory], sampling, files)[1] > 1e-3


def turn_of(
    index: int,
    parent: int | None,
    prompt_ids: list[int],
    completion: Completion,
    images: list[ImageSpan],
) -> Turn:
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=prompt_ids,
        completion_ids=completion.ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        seed=0,
        images=tuple(images),
    )


def test_an_edited_prompt_shows_in_every_turn_after_it(group):
    trajectories, requests = group
    prompt = trajectories[0].turns[1].prompt_ids
    edited = change_turn(trajectories[0], 1, prompt_ids=[prompt[0] + 1, *prompt[1:]])
    assert checks.count_other_contexts([edited, *trajectories[1:]], requests) == 2


def test_one_request_does_not_answer_for_two_turns(group):
    trajectories, requests = group
    assert checks.count_other_contexts([*trajectories, trajectories[0]], requests) == 3


def test_reencoding_is_noticed_where_text_does_not_give_the_ids_back(loaded, group):
    trajectories, _ = group
    whole = change_turn(
        trajectories[0], 0, completion_ids=loaded.tokenizer.encode("left", add_special_tokens=False)
    )
    whole = msgspec.structs.replace(whole, turns=whole.turns[:1])
    half_a_character = loaded.tokenizer.encode("é", add_special_tokens=False)[:1]

    assert checks.count_reencoded_differently([whole], loaded.tokenizer) == 0
    assert (
        checks.count_reencoded_differently(
            [change_turn(whole, 0, completion_ids=half_a_character)], loaded.tokenizer
        )
        == 1
    )


def test_paths_of_a_tree_are_its_leaves(group):
    trajectory = group[0][0]
    branched = change_turn(trajectory, 2, parent=0)
    assert [len(checks.whole_paths(one)) for one in (trajectory, branched)] == [1, 2]
    turns = trajectory.turns
    assert [turn.index for turn in checks.leaves(branched)] == [1, 2]
    assert len(checks.whole_paths(trajectory)[0]) == sum(
        len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns
    )


def test_worst_case_is_every_turn_at_its_limits(group):
    trajectories, _ = group
    first = len(trajectories[0].turns[0].prompt_ids)
    added = max(
        len(turn.prompt_ids) for trajectory in trajectories for turn in trajectory.turns[1:]
    )
    assert checks.worst_case_tokens(trajectories, 5, 100) == first + 500 + 4 * added


def test_weights_that_the_engine_keeps_beside_the_trainer_s_take_memory(
    loaded, small_config, tmp_path
):
    """What the estimate counts is what the engine allocates: copies of what is trained."""
    earlier = EarlierWeights(loaded.model)
    for version in range(5):
        earlier.keep(version, 3)

    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for version in range(2, 5)
        for p in earlier.model_serving(version, 5)[1].parameters()
    }
    copy = sizes_of(loaded.model).trained_bytes

    def kept(*overrides: str) -> float:
        return engine_weights(small_config(tmp_path, *overrides), copy)

    assert kept() == 0
    assert kept("rollout.staleness=3") == sum(storages.values())
    assert kept("rollout.staleness=3", "rollout.policy=mask") == 0
    assert kept("rollout.staleness=3", "rollout.samplers=1") == 0
    assert kept("rollout.staleness=1", "rollout.sharing=overlap") == 2 * copy


@pytest.mark.slow
def test_every_measure_is_a_valid_change_that_never_takes_more(
    loaded, small_config, tmp_path, monkeypatch
):
    judged = []
    monkeypatch.setattr(memory_measures, "judge_memory", lambda *facts: judged.append(facts))
    monkeypatch.setattr(memory_measures.devices, "memory", lambda device: (1.0, 1.0))
    words = "algorithm.name=ppo", "trainer.micro_batch_tokens=4096"
    config = small_config(tmp_path, *words)

    def load_of(changed) -> Load:
        return Load(changed.trainer.micro_batch_tokens, 100, on_cpu=True)

    memory_measures.check_memory_room(config, loaded.model, load_of, lambda *_: 0.0)
    ((needed, _, turned),) = judged
    assert needed["weights"] == 0, "they are loaded"
    assert next(iter(turned)) == "trainer.micro_batch_tokens=2048"
    assert {change.partition("=")[0] for change in turned} >= {
        "memory.checkpointing",
        "memory.optimizer",
        "critic.trunk",
    }

    for change, needed_after in turned.items():
        assert small_config(tmp_path, *words, *change.split())
        assert needed_after < total(needed), change

    overlap = small_config(tmp_path, "rollout.staleness=1", "rollout.sharing=overlap")

    def engine_of(changed, sizes) -> float:
        return engine_weights(changed, sizes.trained_bytes)

    memory_measures.check_memory_room(overlap, loaded.model, load_of, engine_of)
    assert {"rollout.policy=mask", "rollout.sharing=turns"} <= judged[-1][2].keys()
