"""Computes log-probs of given tokens: how likely the policy is to sample a text that it did not
sample.

    score(context, ids)[j] = log pi(ids[j] | context, ids[:j])

Such a request is a prompt that is computed once, in the same steps as all other requests. Its
answer is log-probs instead of new tokens. It uses the cached part of its context. One version of
the weights computes all of its log-probs. They equal the log-probs that `generate` gives if it
samples the same tokens, to the last bit if the engine promises that (torch_engine.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

import torch

from agentevo.inference.embedded.batch import StepWork
from agentevo.inference.embedded.requests import EngineRequest
from agentevo.inference.embedded.sampling import summed_weights
from agentevo.inference.embedded.scheduler import Sequence
from agentevo.types import Completion, SamplingParams

if TYPE_CHECKING:
    from agentevo.models.vision.processor import ProcessedImage


def score_request(
    context_ids: Tokens[int],
    ids: Tokens[int],
    temperature: float,
    version: int | None,
    images: Mapping[str, ProcessedImage],
) -> EngineRequest:
    """Creates the request that computes the scores. `context_ids` and `images`: see
    EngineRequest.ids. It belongs to the running event loop, and its
    future gets a Completion of the given tokens."""
    future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    params = SamplingParams(temperature=temperature, max_new_tokens=0)
    input_ids = [*context_ids, *ids[:-1]]  # the last token predicts nothing
    return EngineRequest(
        input_ids, params, future, version=version, scored=list(ids), images=images
    )


def given_logprobs(logits: torch.Tensor, ids: Tokens[int], temperature: float) -> list[float]:
    """The natural log-probs of the tokens `ids` [n] under logits [n, V]. Overwrites the logits.
    Sums are computed as in `sampling.draw`, so a sampled token has the same log-prob."""
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature

    tokens = torch.tensor(ids, device=logits.device).unsqueeze(1)  # [n, 1]
    logits = logits.sub_(logits.amax(dim=-1, keepdim=True))
    below = logits.gather(1, tokens).squeeze(1).double()  # [n], the likeliest token's
    weights = logits.exp_()
    totals = summed_weights(weights)
    drawn = (weights.gather(1, tokens).squeeze(1).double() / totals).log().float()

    # A weight that is a subnormal float32 has lost digits, or is 0.
    rare = below < -80
    return torch.where(rare, (below - totals.log()).float(), drawn).tolist()


def take_scores(
    batch: StepWork, logits: torch.Tensor, version: int
) -> Iterator[tuple[Sequence, EngineRequest]]:
    """Records the scores of the given tokens that a step predicts, under logits [n, V]. `version`:
    the version of the step's weights. Yields the requests that now have all of their scores."""
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
    """The answer to a request whose tokens all have their scores."""
    assert request.scored is not None
    return Completion(
        ids=request.scored,
        logprobs=request.logprobs,
        versions=request.versions,
        finish_reason="length",
    )
