"""The policy as rewards use it: its log-probs of given tokens, and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from agentevo.agents.named_texts import Texts
from agentevo.agents.single_turn import opening_of
from agentevo.config import RunConfig
from agentevo.config.agents import SingleTurnSection
from agentevo.errors import EngineError, RequestTooLongError
from agentevo.inference.conversations.prompt_images import check_no_images
from agentevo.inference.engine import CANT_SCORE, Engine, ScoringEngine
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.rewards.baselines import BaselineScorers
from agentevo.rollout.group import InfrastructureFailure
from agentevo.runtime.event_loop import outside_scopes
from agentevo.types import Task
from agentevo.types.images import images_of_task

BASELINES = "reward_baselines.json"
"""The name of the file in the run's folder."""


class PolicyScores:
    """A ScoredPolicy over an engine. `agent` is the agent's name if the run has several agents."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        chat: ChatFormat,
        baselines: BaselineScorers,
        agent: str = "",
    ) -> None:
        self._config = config
        self._engine = engine
        self._chat = chat
        self.baselines = baselines
        self.agent = agent

    async def score(
        self, context_ids: Sequence[int], ids: Sequence[int]
    ) -> tuple[list[float], int]:
        """See ScoredPolicy.score. The temperature is the one that the recipe samples with. Raises
        BadRequestError for a context with images, and InfrastructureFailure if the engine fails,
        because that is not the attempt's failure."""
        check_no_images(context_ids, self._chat)
        if not isinstance(self._engine, ScoringEngine):
            raise EngineError(CANT_SCORE)

        try:
            with outside_scopes():  # the engine's tasks outlive the reward's
                scores = await self._engine.score(
                    list(context_ids),
                    list(ids),
                    temperature=self._config.sampling.temperature or 1.0,
                    deadline_s=self._config.engine.timeout_s,
                )
        except RequestTooLongError:
            raise
        except EngineError as error:
            raise InfrastructureFailure(
                f"a reward asked the engine: {type(error).__name__}: {error}"
            ) from error

        return scores.logprobs, scores.version

    def encode(self, text: str) -> list[int]:
        return self._chat.plain(text, begins=False)

    def text(self, ids: Sequence[int]) -> str:
        return self._chat.text(ids)

    def first_prompt(self, task: Task) -> list[int] | None:
        """See ScoredPolicy.first_prompt. Only the agent `single_turn` has a prompt before the
        attempt."""
        section = self._config.agent
        if not isinstance(section, SingleTurnSection) or self.agent or task.query is None:
            return None
        if images_of_task(task):
            return None
        texts = Texts(section.texts)
        return self._chat.first_prompt(
            opening_of(task, texts, section.system_prompt, section.instruction)
        )
