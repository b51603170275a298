"""The sources of the answers that preference training compares: sampled groups, the environment's
solver, a file, or another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentevo.agents.environment_agent import demonstrate
from agentevo.config import RunConfig
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.models.compute.positions import context_length, row_limit
from agentevo.rollout.tasks import seed_of_task
from agentevo.runs.folder.run_folder import check_run_folder, read_store
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.players import check_solver, solo_environment
from agentevo.store.store import Store
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.pair_file import pairs_of_lines, read_pair_file
from agentevo.training.pairs import Pair, make_pairs
from agentevo.training.supervised import conversation_sample
from agentevo.types import Sample, Trajectory
from agentevo.types.images import ImageFile


def solver_answers(parts: Components) -> Callable[[str], list[Sample]] | None:
    """Task id -> the conversations of the environment's solver on it; None for a recipe whose pairs
    have another source."""
    config = parts.config
    preference = config.algorithm.preference()
    if preference is None or preference.pairs != "demonstrations" or config.data.given:
        return None

    solo = solo_environment(config, parts.note)
    failures: list[EnvironmentFailure] = []

    def demonstration_samples(task_id: str) -> list[Sample]:
        seed = seed_of_task(config.run.seed, task_id)
        try:
            shown = solo.call(
                lambda environment: demonstrate(environment, seed, config.environment_agent, 0.0)
            )
        except EnvironmentFailure as error:
            failures.append(error)
            if len(failures) == 1:
                parts.note(f"the solver failed on {task_id}, which has no pairs: {error}")
            return []

        conversations = [] if shown is None else shown.conversations
        return [
            conversation_sample(messages, parts.chat, f"{task_id} by the solver")
            for messages in conversations
        ]

    return demonstration_samples


def given_pairs(parts: Components) -> tuple[list[list[Pair]], Mapping[str, ImageFile]] | None:
    """The recipe's own pairs, by line or by group, and their images by digest; None if it has none.
    Raises ConfigError for pairs that can't be read."""
    algorithm = parts.config.algorithm.preference()
    if algorithm is None:
        return None

    data = parts.config.data
    if data.pairs is not None:
        lines = read_pair_file(data.pairs, algorithm.loss)
        limit = row_limit(context_length(parts.model.config), data.max_tokens)
        return pairs_of_lines(lines, parts.chat, algorithm.loss, limit), lines[0].images

    if data.pairs_from is None:
        return None

    folder = check_run_folder(data.pairs_from)
    check_tokenizer(folder, parts.tokenizer, "data.pairs_from", parts.config.model.name)

    async def read(store: Any) -> list[Trajectory]:
        return [
            row.trajectory async for row in store.trajectories(split="train", status="completed")
        ]

    trajectories = [t for t in read_store(folder, read) if t.num_completion_tokens()]
    groups: dict[str, list[Pair]] = {}
    for pair in make_pairs(trajectories, algorithm, parts.config.algorithm):
        groups.setdefault(pair.group_id, []).append(pair)

    if not groups:
        raise ConfigError(
            f"data.pairs_from: {folder}: its {len(trajectories)} training attempts give no pair "
            f"for {algorithm.loss}: "
            "give a run whose groups have different rewards, or lower algorithm.pair_margin"
        )

    samples = [s for pairs in groups.values() for pair in pairs for s in pair.samples]
    return list(groups.values()), stored_images(folder, samples)


def stored_images(folder: Path, samples: Sequence[Sample]) -> dict[str, ImageFile]:
    """The images of these samples, by digest, from the store of the run in the folder."""
    named = sorted({span.digest for sample in samples for span in sample.images})

    async def read(store: Store) -> dict[str, ImageFile]:
        return {digest: await store.image(digest) for digest in named}

    return read_store(folder, read) if named else {}


def check_preference(config: RunConfig) -> None:
    """Raises ConfigError, before anything is created, for a missing solver, lines of the file or
    other run."""
    algorithm = config.algorithm.preference()
    if algorithm is None:
        return

    if config.data.pairs is not None:
        read_pair_file(config.data.pairs, algorithm.loss)
    elif config.data.pairs_from is not None:
        check_run_folder(config.data.pairs_from)
        if config.data.pairs_from.resolve() == config.run_dir.resolve():
            raise ConfigError(
                f"data.pairs_from: {config.data.pairs_from} is this run's own folder: give it "
                "another one with run.dir"
            )
    elif algorithm.pairs == "demonstrations":
        shown = check_solver(
            config,
            "algorithm.pairs=demonstrations asks: set algorithm.pairs=best_worst",
        )
        if shown is not None and shown.images:
            raise ConfigError(
                "algorithm.pairs=demonstrations can't show the solver's images to the trainer yet: "
                "set algorithm.pairs=best_worst, or environment.observation=text"
            )


def check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, key: str, model: str) -> None:
    """Checks the tokenizer: stored attempts are token ids, which only their own tokenizer can
    decode. `key` names the folder in the recipe."""
    checkpoint = Checkpoints(folder / "checkpoints", 1).find("last")
    if AutoTokenizer.from_pretrained(checkpoint).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{key}: {folder} was sampled with another tokenizer than that of model.name={model}: "
            f"start from its model, for example model.name={checkpoint}"
        )
