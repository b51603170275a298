"""Cold start: the environment's solver plays, and the policy learns to write its answers. RL then
begins with a policy that knows the format and the basics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from agentevo.config import RunConfig
from agentevo.errors import ConfigError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.compute.adapters import dropping_out
from agentevo.observability import LiveView
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.players import solver_episodes
from agentevo.runs.orchestration.rank_trainers import PolicyTrainers
from agentevo.runs.orchestration.rollout_sources import StopAskedError
from agentevo.runtime.seeds import derive_seed
from agentevo.training.supervised import conversation_sample, train_supervised
from agentevo.types import Sample
from agentevo.types.images import ImageFile


class SolverSamples(NamedTuple):
    """The solver's answers to train on."""

    samples: list[Sample]
    images: dict[str, ImageFile]
    """Maps a digest to an image of the samples."""


def solver_samples(
    config: RunConfig,
    chat: ChatFormat,
    episodes: int,
    random_action_rate: float,
    view: LiveView,
    stop: Callable[[], bool] = lambda: False,
) -> SolverSamples:
    """Samples of the solver's answers in `episodes` episodes, on seeds that nothing else uses.
    Raises as `solver_episodes`, StopAskedError when `stop()` is true after an episode, and
    ConfigError for images that the model can't see."""
    samples: list[Sample] = []
    images: dict[str, ImageFile] = {}
    played = solver_episodes(
        config,
        episodes,
        random_action_rate,
        note=view.note,
        remedy="set cold_start.episodes=0",
    )
    for index, shown in played:
        if stop():
            raise StopAskedError("stopped while the solver played")

        if shown.images and chat.processor is None:
            raise ConfigError(
                "environment: its observations have images, and the model reads text alone: choose "
                "a vision-language model, or observations as text (environment.observation=text)"
            )

        images |= shown.images
        samples.extend(
            conversation_sample(messages, chat, f"demonstration-{index}", shown.images)
            for messages in shown.conversations
        )
        if index % 50 == 0:
            view.phase("demonstrating", f"episode {index}/{episodes}")

    return SolverSamples(samples, images)


def cold_start(
    parts: Components,
    view: LiveView,
    stop: Callable[[], bool],
    trainers: PolicyTrainers,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """Trains the model in place and returns the metrics of the supervised phase. `warn` and raises:
    see `train_supervised` and `solver_samples`. A stop during training ends it before its next
    step."""
    config = parts.config
    section = config.cold_start
    samples, images = solver_samples(
        config, parts.chat, section.episodes, section.random_action_rate, view, stop
    )
    seed = derive_seed(config.run.seed, "cold-start")
    with dropping_out(parts.model, seed):
        losses = train_supervised(
            samples,
            section,
            config.trainer,
            make=trainers.cold_start,
            seed=seed,
            progress=lambda done, total, loss: view.phase(
                "cold start", f"{done}/{total}, loss {loss:.3f} nats per token"
            ),
            stop=stop,
            warn=warn,
            images=images,
        )

    if not losses:
        return {}

    num_episodes = len({sample.trajectory_id for sample in samples})
    passes = len(losses) / math.ceil(num_episodes / section.batch_episodes)
    return {
        "cold_start/loss_first": losses[0],
        "cold_start/loss_last": losses[-1],
        "cold_start/tokens": sum(sample.num_trained for sample in samples) * passes,
    }
