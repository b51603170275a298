"""The likeliest tokens in the place of each drawn one: those of the distribution that was drawn
from, in each API's form."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from constrained import tiny_policy

from agentevo.agents import Policy
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.embedded.sampling import draw, draw_with_alternatives, filter_logits
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.chat.token_texts import TokenTexts
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import all_logits
from agentevo.types import Sample, SamplingParams
from agentevo.types.penalties import Penalties

TEMPERATURE = 0.7


def policy_of(opened) -> Policy:
    loaded = tiny_policy()
    chat = ChatFormat(loaded.tokenizer)
    sampling = SamplingParams(
        max_new_tokens=12, temperature=TEMPERATURE, stop_token_ids=chat.end_ids
    )
    conversation = Conversation(
        TorchEngine(loaded.model, loaded.tokenizer),
        chat,
        sampling,
        name="a",
        seed=5,
        context_length=512,
        timeout_s=300.0,
    )
    return Policy(conversation, opened.gateway)


@torch.no_grad()
def expected(turn, count):
    """[T, count] likeliest log-probs and tokens, computed over the whole turn."""
    model = tiny_policy().model
    ids = [*turn.prompt_ids, *turn.completion_ids]
    mask = [False] * len(turn.prompt_ids) + [True] * len(turn.completion_ids)
    batch = pack([Sample.given("a", "g", ids, mask)], torch.device("cpu"))
    logits = all_logits(model, batch)[batch.rows].double()
    return torch.log_softmax(logits / TEMPERATURE, dim=-1).topk(count)


def from_chat(body):
    return body["choices"][0]["logprobs"]["content"]


def from_responses(body):
    return body["output"][-1]["content"][0]["logprobs"]


CASES = {
    "chat": (
        "/chat/completions",
        {"messages": [{"role": "user", "content": "Go."}], "logprobs": True, "top_logprobs": 4},
        from_chat,
    ),
    "responses": (
        "/responses",
        {"input": "Go.", "include": ["message.output_text.logprobs"], "top_logprobs": 4},
        from_responses,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", CASES)
def test_they_are_of_the_distribution_that_was_drawn_from(api, stream, gateway_of):
    path, body, read = CASES[api]

    async def talk():
        async with gateway_of([]) as opened:
            policy = policy_of(opened)
            answer = await opened.post(policy, {**body, "stream": stream}, path)
            assert answer.status_code == 200, answer.text
            return answer, policy.conversation.turns[0]

    answer, turn = asyncio.run(talk())
    if stream:
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        last = json.loads(lines[-1][6:])
        told = read(last.get("response", last))
    else:
        told = read(answer.json())

    assert [one["logprob"] for one in told] == list(turn.logprobs)

    values, tokens = expected(turn, 4)
    texts = ChatFormat(tiny_policy().tokenizer).token_texts
    for place, one in enumerate(told):
        top = [alternative["logprob"] for alternative in one["top_logprobs"]]
        assert top == pytest.approx(values[place].tolist(), abs=1e-4)
        names = [alternative["token"] for alternative in one["top_logprobs"]]
        assert names == [text.text for text in texts(tokens[place].tolist())]


@pytest.mark.slow
def test_completions_tell_them_in_columns(gateway_of):
    async def talk():
        async with gateway_of([]) as opened:
            policy = policy_of(opened)
            answer = await opened.post(policy, {"prompt": "Go.", "logprobs": 3}, "/completions")
            return answer.json()["choices"][0]["logprobs"], policy.conversation.turns[0]

    told, turn = asyncio.run(talk())
    for token, logprob, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert top[token] >= logprob and len(top) in (3, 4)

    assert told["token_logprobs"] == list(turn.logprobs)


@pytest.mark.slow
def test_penalties_and_biases_of_a_request_are_drawn_under_and_recorded(gateway_of):
    """The distribution is the trainer's (training/test_penalised_turns.py)."""
    given = {
        "presence_penalty": 0.5,
        "frequency_penalty": 1,
        "repetition_penalty": 1.2,
        "logit_bias": {"70": 100, "71": -3},
    }
    told = Penalties(
        presence=0.5, frequency=1.0, repetition=1.2, logit_bias=((70, 100.0), (71, -3.0))
    )
    bodies = [(path, {**body, **given}) for path, body, _ in CASES.values()]
    bodies.append(("/completions", {"prompt": "Go.", **given}))
    neutral = {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
    bodies.append(("/completions", {"prompt": "Go.", **neutral}))

    async def talk():
        async with gateway_of([]) as opened:
            policy = policy_of(opened)
            for path, body in bodies:
                answer = await opened.post(policy, body, path)
                assert answer.status_code == 200, answer.text
            return policy.conversation.turns

    *turns, plain = asyncio.run(talk())
    assert [turn.penalties for turn in turns] == [told] * 3 and plain.penalties is None
    assert all(set(turn.completion_ids) == {70} for turn in turns)
    assert all(turn.overrides is None for turn in (*turns, plain))


@pytest.mark.parametrize("change", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_tokens_that_filters_leave_out_are_not_among_them(change):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingParams(temperature=0.8, top_logprobs=5, **change)
    tokens, logprobs, (top,) = draw_with_alternatives(logits.clone(), [params], [0.3])
    reference = torch.log_softmax(filter_logits(logits[0] / 0.8, params).double(), -1)
    values, order = reference.topk(5)
    possible = [value for value in values.tolist() if value > -float("inf")]
    assert [token for token, _ in top] == order.tolist()[: len(possible)]
    assert [logprob for _, logprob in top] == pytest.approx(possible, abs=1e-5)
    assert (tokens, logprobs) == draw(logits.clone(), [params], [0.3])


def test_at_temperature_0_only_the_drawn_token_can_come():
    logits = torch.randn(2, 50)
    both = [SamplingParams(temperature=t, top_logprobs=3) for t in (0.0, 1.0)]
    tokens, _, top = draw_with_alternatives(logits.clone(), both, [0.5, 0.5])
    assert top[0] == [(tokens[0], 0.0)] and len(top[1]) == 3


def test_the_bytes_of_a_part_of_a_character_are_its_own():
    texts = TokenTexts(tiny_policy().tokenizer)
    text = "aé€ 😀"
    ids = tiny_policy().tokenizer.encode(text, add_special_tokens=False)
    told = texts(ids)
    assert bytes(octet for token in told for octet in token.octets) == text.encode()
    assert any("�" in token.text for token in told)
