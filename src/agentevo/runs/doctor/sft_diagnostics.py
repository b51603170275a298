"""`agentevo doctor` on a recipe for `agentevo sft`: reads and encodes its conversations as training
would, and judges rows and memory."""

from __future__ import annotations

from agentevo.config import RunConfig, SFTSection
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.compute.positions import context_length
from agentevo.models.files.load import LoadedModel
from agentevo.observability import LiveView
from agentevo.runs.doctor import checks
from agentevo.runs.doctor.checks import Check
from agentevo.runs.doctor.memory_estimate import Load
from agentevo.runs.doctor.memory_measures import check_memory_room
from agentevo.runs.orchestration.components import check_memory, load_policy
from agentevo.runs.orchestration.conversations import SFTData, check_sft_data, load_sft_data
from agentevo.runtime.seeds import derive_seed
from agentevo.training.batching.partition import split_by_tokens
from agentevo.training.supervised import plan_batches
from agentevo.training.tree import build_tree
from agentevo.types import Sample

LARGEST_BATCHES = 8
"""The number of batches, those with most tokens, among which the largest in memory is sought."""


def check_sft_recipe(config: RunConfig) -> list[Check]:
    """The checks of a recipe for `agentevo sft`. Creates nothing. Raises like `sft` for data that
    can't be read and a model that can't be loaded."""
    check_sft_data(config)
    check_memory(config)
    loaded = load_policy(config, None)
    chat = (
        None
        if config.environment is None
        else ChatFormat(loaded.tokenizer, getattr(loaded.model, "generation_config", None))
    )
    context = context_length(loaded.model.config)
    data = load_sft_data(config, loaded.tokenizer, chat, context, LiveView(config.run.name))
    lengths = [
        len(row.ids) for rows in (*data.train.values(), *data.held_out.values()) for row in rows
    ]

    return [
        checks.judge_rows(
            sum(report.rows for report in data.reports),
            sum(len(report.bad) for report in data.reports),
        ),
        checks.judge_lengths(lengths, context),
        _judge_memory(config, loaded, data),
    ]


def _judge_memory(config: RunConfig, loaded: LoadedModel, data: SFTData) -> Check:
    sizes = data.sizes()
    batches = plan_batches(sizes, config.sft, derive_seed(config.run.seed, "sft-order"))
    largest = sorted(batches, key=lambda names: sum(sizes[name] for name in names), reverse=True)[
        :LARGEST_BATCHES
    ]
    samples = [data.batch(names) for names in largest]

    def load_of(changed: RunConfig) -> Load:
        on_cpu = loaded.model.device.type == "cpu"
        return max(_load(batch, changed.sft, on_cpu=on_cpu) for batch in samples)

    return check_memory_room(config, loaded.model, load_of, lambda changed, sizes: 0.0, "sft")


def _load(batch: list[Sample], section: SFTSection, *, on_cpu: bool) -> Load:
    """The load of the largest micro-batch."""
    merge = section.prefix_merging
    loads = []
    for part in split_by_tokens([s.ids for s in batch], section.micro_batch_tokens, merge=merge):
        nodes = build_tree([batch[i].ids for i in part], merge=merge).num_nodes
        loads.append(Load(nodes, min(nodes, sum(batch[i].num_trained for i in part)), on_cpu))
    return max(loads)
