"""Log-probs of given tokens: how likely a text is under the policy that did not sample it.

    score(context, ids)[j] = log pi(ids[j] | context, ids[:j])

A request of this kind is a prompt that is computed once, in the same steps as all other requests,
and is answered with numbers in place of new tokens. It uses what is cached of its context. All of
its numbers come from one version of the weights. They are the ones that `generate` would give for
the same sampled tokens, to the last bit if the engine promises that (torch_engine.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as Tokens

import torch

from agentevo.inference.batch import StepBatch
from agentevo.inference.requests import EngineRequest
from agentevo.inference.sampling import summed_weights
from agentevo.inference.scheduler import Sequence
from agentevo.types import Completion, SamplingParams


def score_request(
    context_ids: Tokens[int],
    ids: Tokens[int],
    temperature: float,
    version: int | None,
) -> EngineRequest:
    """The request that computes the scores, for the running event loop. Its future gets a
    Completion of the given tokens."""
    future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    params = SamplingParams(temperature=temperature, max_new_tokens=0)
    input_ids = [*context_ids, *ids[:-1]]  # nothing is predicted from the last one
    return EngineRequest(input_ids, params, future, version=version, scored=list(ids))


def given_logprobs(logits: torch.Tensor, ids: Tokens[int], temperature: float) -> list[float]:
    """Natural log-probs of the tokens `ids` [n] under logits [n, V], which are overwritten. The
    sums are those of `sampling.draw`, so that a sampled token has the same log-prob."""
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature

    tokens = torch.tensor(ids, device=logits.device).unsqueeze(1)  # [n, 1]
    logits = logits.sub_(logits.amax(dim=-1, keepdim=True))
    below = logits.gather(1, tokens).squeeze(1).double()  # [n], of the likeliest token
    weights = logits.exp_()
    totals = summed_weights(weights)
    drawn = (weights.gather(1, tokens).squeeze(1).double() / totals).log().float()

    # A weight that a float32 holds only as a subnormal number has lost digits, or is 0.
    rare = below < -80
    return torch.where(rare, (below - totals.log()).float(), drawn).tolist()


def take_scores(
    batch: StepBatch, logits: torch.Tensor, version: int
) -> Iterator[tuple[Sequence, EngineRequest]]:
    """Records the scores that logits [n, V] give to the given tokens that a step of that version
    predicts. Yields the requests that have all of their scores now."""
    begin = 0
    for sequence, count in batch.scored:
        request = sequence.request
        assert request is not None and request.scored is not None

        rows = logits[begin : begin + count]
        begin = begin + count
        done = len(request.logprobs)
        ids = request.scored[done : done + count]
        request.logprobs += given_logprobs(rows, ids, request.params.temperature)
        request.versions += [version] * count
        if done + count == len(request.scored):
            yield sequence, request


def scored_completion(request: EngineRequest) -> Completion:
    """The answer to a request all of whose tokens have their scores."""
    assert request.scored is not None
    return Completion(
        ids=request.scored,
        logprobs=request.logprobs,
        versions=request.versions,
        finish_reason="length",
    )
