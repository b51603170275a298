"""A sampler whose policy is a remote model: the same agents, groups and scorers, without an
engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from agentevo.agents.agent import Agent
from agentevo.agents.policy import Policy
from agentevo.agents.remote_policy import RemoteModelPolicy, RemotePolicyConversation
from agentevo.config import RunConfig
from agentevo.inference.engine import Engine
from agentevo.inference.remote_models import RemoteConversations
from agentevo.rollout.sampler import Sampler
from agentevo.runtime.seeds import derive_seed
from agentevo.store.call_log import AttemptCalls, CallLog
from agentevo.types import SamplingOverrides, Task, Trajectory


class RemoteSampler(Sampler):
    """Samples from a remote model. It plays (`play`, `group`) and writes nothing to a store."""

    def __init__(
        self,
        config: RunConfig,
        model: str,
        agent: Agent,
        note: Callable[[str], None] = lambda text: None,
        calls: CallLog | None = None,
    ) -> None:
        """`model`: a name in the recipe's `remote_models`. The recipe has no named agents."""
        nothing = cast("Any", None)  # no engine samples tokens here, and no store keeps them
        super().__init__(config, nothing, nothing, agent, nothing, 0, calls=calls, note=note)
        self._model = model

    async def _score(
        self,
        trajectories: Sequence[Trajectory],
        unrewarded: Sequence[bool],
        calls: Mapping[str, AttemptCalls],
        *,
        task: Task,
        engines: Mapping[str, Engine],
    ) -> list[Trajectory]:
        """See Sampler. No reward can use an engine here."""
        return await self._scoring.score(trajectories, unrewarded, calls, task=task)

    def policy(
        self,
        name: str,
        temperature: float,
        engines: Mapping[str, Engine] = MappingProxyType({}),
        *,
        texts: Mapping[str, str] | None = None,
    ) -> Policy:
        """See Sampler.policy."""
        section = self._config.sampling
        sampling = SamplingOverrides(
            temperature=temperature,
            top_p=section.top_p if section.top_p < 1 else None,
            top_k=section.top_k or None,
            min_p=section.min_p or None,
            max_new_tokens=section.max_new_tokens,
            stop_strings=section.stop or None,
        )

        calls = AttemptCalls(self._calls, name)
        seed = derive_seed(self._config.run.seed, name)
        remote = RemoteConversations(self.remote_models, name=name, seed=seed, calls=calls)
        conversation = RemotePolicyConversation(
            remote, self._model, sampling, name=name, calls=calls
        )
        attempt_texts = self.texts(texts)
        return RemoteModelPolicy(conversation, self._gateway, remote, self._model, attempt_texts)
