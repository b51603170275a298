"""`agentevo doctor RECIPE`: play one group as training would, measure it (`group_checks`), judge
the numbers (`checks`).

The policy is the recipe's as it is before any training, or a checkpoint of it. The group's
trajectories go to a temporary store; the run's folder is neither created nor touched. Of a recipe
for `agentevo sft`, the conversations are read and encoded as training would.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from agentevo.config import RunConfig, SFTSection
from agentevo.config.named_agents import trained_agents
from agentevo.inference.conversations.conversation import Conversation
from agentevo.inference.embedded.kv_cache import kv_bytes_per_token
from agentevo.inference.engine import Engine
from agentevo.models.chat.chat_format import chat_of
from agentevo.models.compute.positions import context_length
from agentevo.models.compute.rows import describe_rows, shares_prefixes
from agentevo.models.files.load import LoadedModel
from agentevo.observability import LiveView
from agentevo.observability.attempt_facts import facts_of
from agentevo.rollout.group import RolloutGroup
from agentevo.rollout.sampler import Player, Sampler
from agentevo.runs.doctor import checks
from agentevo.runs.doctor import group_checks as measure
from agentevo.runs.doctor.checks import Check
from agentevo.runs.doctor.memory_estimate import Load, Sizes, engine_weights
from agentevo.runs.doctor.memory_measures import check_memory_room
from agentevo.runs.doctor.services import check_services, check_store_server, has_problem
from agentevo.runs.orchestration.agent_policies import players
from agentevo.runs.orchestration.components import (
    Components,
    check_memory,
    load_policy,
    open_components,
)
from agentevo.runs.orchestration.conversations import SFTData, check_sft_data, load_sft_data
from agentevo.runs.orchestration.players import check_named, find_agent
from agentevo.runs.orchestration.run_findings import recipe_of
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.seeds import derive_seed
from agentevo.training.batching.partition import split_by_tokens
from agentevo.training.supervised import plan_batches
from agentevo.training.tree import build_tree
from agentevo.types import Sample, Task, Trajectory
from agentevo.types.images import ImageFile

LARGEST_BATCHES = 8
"""The number of batches, those with most tokens, among which the largest in memory is sought."""


def check_recipe(config: RunConfig, checkpoint: Path | None = None) -> list[Check]:
    """Checks the servers that the recipe needs (`services`), and plays the group of
    the first training task with the recipe's settings. Raises like `train` for a model that can't
    be loaded."""
    services = [*check_services(config), *check_store_server(config)]
    if has_problem(services):
        advice = "fix these servers first"
        return [*services, Check("attempts", "wrong", "not played without these servers", advice)]
    check_named(config)
    check_memory(config)
    return [*services, *run_coroutine(_check(config, checkpoint))]


async def _check(config: RunConfig, checkpoint: Path | None) -> list[Check]:
    with tempfile.TemporaryDirectory(prefix="agentevo-doctor-") as folder:
        async with open_components(
            config, checkpoint=checkpoint, store_url=f"sqlite:///{folder}/store.sqlite"
        ) as parts:
            engine = measure.WatchedEngine(parts.engine)
            sampler = _WatchedSampler(
                _in(Path(folder), config),
                engine,
                parts.chat,
                find_agent(config, None),
                parts.store,
                _context_length(parts),
                note=parts.note,
                players=_watch_players(parts, engine),
                task_images=parts.tasks.images,
            )
            group = await _first_group(config, parts, sampler)
            sampling = sampler.sampling(config.sampling.temperature)

            results = [
                checks.judge_attempts(
                    len(group),
                    [
                        attempt.error or "no reason"
                        for attempt in group
                        if attempt.status == "failed"
                    ],
                )
            ]
            attempts_with_turns = [attempt for attempt in group if attempt.turns]
            if not attempts_with_turns:
                return [*results, checks.judge_logprobs(0, 0.0, config.model.dtype)]

            num_turns = sum(len(attempt.turns) for attempt in attempts_with_turns)
            results += [
                checks.judge_token_ids(
                    num_turns,
                    measure.count_other_contexts(attempts_with_turns, engine.requests),
                    len(attempts_with_turns),
                    measure.count_reencoded_differently(attempts_with_turns, parts.tokenizer),
                ),
                *_judge_drift(list(sampler.conversations.values())),
                checks.describe_computation(describe_rows(parts.model)),
                checks.judge_logprobs(
                    *measure.max_logprob_difference(
                        parts.model, attempts_with_turns, sampling, sampler.images
                    ),
                    config.model.dtype,
                ),
            ]
            before_cold_start = checkpoint is None and config.cold_start.episodes > 0
            return [
                *results,
                *_judge_play(config, group, before_cold_start),
                *_judge_sizes(parts, attempts_with_turns),
            ]


async def _first_group(
    config: RunConfig, parts: Components, sampler: _WatchedSampler
) -> list[Trajectory]:
    """The attempts at the first training task; with several agents, the main agent's. Under
    self-play, the first held-out task: no training task is proposed yet."""
    tasks = parts.tasks.train(1) if parts.tasks.proposals is None else parts.tasks.held_out()
    with closing(sampler):
        group = await sampler.sample(
            tasks[:1],
            attempts=config.trainer.group_size,
            temperature=config.sampling.temperature,
            split="doctor",
            step=1,  # rewards count from there on
            label="doctor",
        )

    if config.agents:
        return [attempt for attempt in group if attempt.agent == trained_agents(config)[0]]

    return group


def _watch_players(parts: Components, engine: Engine) -> dict[str, Player]:
    """The engines of several agents, with `engine` as the main policy's."""
    return {
        name: player._replace(engine=engine) if player.engine is parts.engine else player
        for name, player in players(parts.config, parts.policies).items()
    }


def _in(folder: Path, config: RunConfig) -> RunConfig:
    """The recipe of a run in that folder, so that the run's own folder stays unchanged."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})


class _WatchedSampler(Sampler):
    """A sampler that keeps the conversations of its attempts, by their names."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conversations: dict[str, Conversation] = {}

    @property
    def images(self) -> dict[str, ImageFile]:
        """The images of the attempts, by digest."""
        files: dict[str, ImageFile] = {}
        for conversation in self.conversations.values():
            files |= conversation.images.files
        return files

    def group(self, task: Task, **options: Any) -> RolloutGroup:
        """See Sampler.group."""
        group = super().group(task, **options)
        self.conversations |= {
            attempt.name: attempt.policy.conversation for attempt in group.attempts
        }
        return group


def _judge_drift(conversations: list[Conversation]) -> list[Check]:
    """Returns no check if no request contained a recorded reply."""
    extended = sum(conversation.drift.extended for conversation in conversations)
    branched = sum(conversation.drift.branched for conversation in conversations)
    if not extended + branched:
        return []
    return [checks.judge_drift(extended, branched, measure.drift_places(conversations))]


def _judge_play(config: RunConfig, group: list[Trajectory], before_cold_start: bool) -> list[Check]:
    """What attempts say about learning, and turns."""
    finished = [trajectory for trajectory in group if trajectory.status == "completed"]
    rewards = [trajectory.reward for trajectory in finished]
    results = [
        *checks.judge_play(facts_of(finished), rewards, recipe_of(config)),
        checks.judge_turns(
            len(group),
            sum(trajectory.truncated for trajectory in group),
            config.agent.max_turns,
            None if config.environment is None else config.max_actions,
        ),
    ]
    return [checks.before_cold_start(check) for check in results] if before_cold_start else results


def _judge_sizes(parts: Components, attempts_with_turns: list[Trajectory]) -> list[Check]:
    """Context, key-value memory, memory."""
    config = parts.config
    paths = [path for attempt in attempts_with_turns for path in measure.whole_paths(attempt)]
    max_turns = 1 if getattr(config.agent, "memory", None) == "turn" else config.agent.max_turns
    worst = measure.worst_case_tokens(
        attempts_with_turns, max_turns, config.sampling.max_new_tokens
    )
    per_step = build_tree(paths).num_nodes * config.trainer.groups_per_step
    longest = min(worst, _context_length(parts))
    together = config.trainer.groups_per_step * config.trainer.group_size
    kv_tokens = int(parts.engine.stats().get("engine/kv_capacity_tokens", together * longest))
    token_bytes = kv_bytes_per_token(parts.model)
    num_sampled = (
        sum(len(turn.completion_ids) for attempt in attempts_with_turns for turn in attempt.turns)
        * config.trainer.groups_per_step
    )

    def load_of(changed: RunConfig) -> Load:
        trainer = changed.trainer
        tokens = min(math.ceil(per_step / trainer.minibatches), trainer.micro_batch_tokens)
        rows = math.ceil(tokens * min(1.0, num_sampled / max(1, per_step)))
        is_single = tokens * trainer.minibatches >= per_step
        return Load(tokens, rows, parts.model.device.type == "cpu", is_single)

    def engine_of(changed: RunConfig, sizes: Sizes) -> float:
        room = kv_tokens * changed.engine.kv_cache_gb / config.engine.kv_cache_gb
        cache_bytes = min(int(room), together * longest) * token_bytes
        return cache_bytes + engine_weights(changed, sizes.trained_bytes)

    return [
        checks.judge_context(
            max(map(len, paths)),
            worst,
            _context_length(parts),
            is_tiny=config.model.name == "tiny",
        ),
        checks.judge_kv_cache(together, longest, kv_tokens, token_bytes, config.engine.max_running),
        check_memory_room(config, parts.model, load_of, engine_of),
    ]


def _context_length(parts: Components) -> int:
    return context_length(parts.model.config)


def check_sft_recipe(config: RunConfig) -> list[Check]:
    """The checks of a recipe for `agentevo sft`. Creates nothing. Raises like `sft` for data that
    can't be read and a model that can't be loaded."""
    check_sft_data(config)
    check_memory(config)
    loaded = load_policy(config, None)
    chat = None if config.environment is None else chat_of(loaded)
    context = context_length(loaded.model.config)
    view = LiveView(config.run.name)
    data = load_sft_data(config, loaded.tokenizer, chat, context, view, processor=loaded.processor)
    lengths = [
        len(row.ids) for rows in (*data.train.values(), *data.held_out.values()) for row in rows
    ]

    return [
        checks.judge_rows(
            sum(report.rows for report in data.reports),
            sum(len(report.bad) for report in data.reports),
        ),
        checks.judge_lengths(lengths, context),
        _judge_sft_memory(config, loaded, data),
    ]


def _judge_sft_memory(config: RunConfig, loaded: LoadedModel, data: SFTData) -> Check:
    sizes = data.sizes()
    batches = plan_batches(sizes, config.sft, derive_seed(config.run.seed, "sft-order"))
    largest = sorted(batches, key=lambda names: sum(sizes[name] for name in names), reverse=True)[
        :LARGEST_BATCHES
    ]
    samples = [data.batch(names) for names in largest]

    def load_of(changed: RunConfig) -> Load:
        on_cpu = loaded.model.device.type == "cpu"
        merge = shares_prefixes(loaded.model, changed.sft.prefix_merging)
        return max(_load(batch, changed.sft, merge=merge, on_cpu=on_cpu) for batch in samples)

    return check_memory_room(config, loaded.model, load_of, lambda changed, sizes: 0.0, "sft")


def _load(batch: list[Sample], section: SFTSection, *, merge: bool, on_cpu: bool) -> Load:
    """The load of the largest micro-batch. `merge`: see `pack`."""
    split = split_by_tokens([s.ids for s in batch], section.micro_batch_tokens, merge=merge)
    loads = []
    for part in split:
        nodes = build_tree([batch[i].ids for i in part], merge=merge).num_nodes
        rows = min(nodes, sum(batch[i].num_trained for i in part))
        loads.append(Load(nodes, rows, on_cpu, len(split) == 1))

    return max(loads)
