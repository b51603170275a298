"""The sampling settings of a conversation's requests: the conversation's defaults, what the call
overrides, and a seed that is derived from the conversation's seed and the request's number."""

from __future__ import annotations

import msgspec

from agentevo.errors import BadRequestError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.runtime.seeds import derive_seed
from agentevo.types import SamplingOverrides, SamplingParams
from agentevo.types.penalties import Penalties


class RequestSampling:
    """See the module. `defaults` are the settings of every call, `seed` is the conversation's."""

    def __init__(self, defaults: SamplingParams, seed: int, chat: ChatFormat) -> None:
        self._defaults = defaults
        self._seed = seed
        self._chat = chat
        self._num_requests = 0

    def make_params(
        self, number: int, overrides: SamplingOverrides | None, room: int
    ) -> SamplingParams:
        """The settings of the request for a call's completion `number`, of at most `room` tokens.
        If the call gives a seed, the first completion uses it, and the seeds of the others are
        derived from it. Raises BadRequestError."""
        override_values = {} if overrides is None else overrides.given()
        self._check_penalties(override_values.get("penalties"))
        longest = min(override_values.pop("max_new_tokens", self._defaults.max_new_tokens), room)

        seed = derive_seed(self._seed, "turn", self._num_requests)
        if "seed" in override_values:
            first = override_values.pop("seed")
            seed = derive_seed(first, "completion", number) if number else first

        self._num_requests += 1
        return msgspec.structs.replace(
            self._defaults, **override_values, seed=seed, max_new_tokens=longest
        )

    def find_changes(self, params: SamplingParams) -> SamplingOverrides | None:
        """The settings of a request that differ from the defaults, for its turn's record."""
        changed = {
            name: getattr(params, name)
            for name in ("temperature", "top_p", "top_k", "min_p")
            if getattr(params, name) != getattr(self._defaults, name)
        }
        return SamplingOverrides(**changed) if changed else None

    def _check_penalties(self, penalties: Penalties | None) -> None:
        """Raises BadRequestError for penalties that leave no token to sample."""
        if penalties is None:
            return

        problem = penalties.problem
        size = len(self._chat.tokenizer)
        if problem is None and penalties.last_token >= size:
            problem = f"logit_bias names token {penalties.last_token}: the model has {size}"
        if problem is not None:
            raise BadRequestError(f"penalties: {problem}")
