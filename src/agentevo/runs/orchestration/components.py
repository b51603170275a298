"""The parts of a run: model, engine, agent, sampler and store, built once from the
configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.agents import Agent, AgentFunction
from agentevo.config import (
    EnvironmentAgentSection,
    LoraSection,
    ModelSection,
    RunConfig,
)
from agentevo.config.agents import brings_tasks
from agentevo.config.memory import offload_refusal
from agentevo.config.named_agents import trained_policies
from agentevo.config.routing import balance_keys, needs_routers
from agentevo.errors import ConfigError
from agentevo.inference.engine import UpdatableEngine
from agentevo.inference.weights.weight_transport import WeightSender
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.compute.activations import keep_activations
from agentevo.models.compute.adapters import is_adapter_folder
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.compiled import compile_layers
from agentevo.models.compute.positions import context_length
from agentevo.models.compute.routers import enable_routing
from agentevo.models.compute.rows import row_settings
from agentevo.models.files.load import LoadedModel, load_model
from agentevo.models.files.model_copy import copy_policy
from agentevo.models.vision.parts import processor_of
from agentevo.observability.tracing import open_tracing
from agentevo.rollout.sampler import Sampler
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runs.orchestration.agent_policies import (
    CHECKPOINTS,
    AgentPolicy,
    make_engine,
    make_policies,
    open_weights,
    players,
)
from agentevo.runs.orchestration.players import corpus_of, find_agent
from agentevo.runtime.console import to_stderr
from agentevo.runtime.devices import compiles, find, is_accelerator
from agentevo.runtime.seeds import derive_seed
from agentevo.store.call_log import CallLog, call_log
from agentevo.store.store import Store
from agentevo.training.optimization import check_8bit
from agentevo.training.router_balance import check_balance
from agentevo.types import Task

if TYPE_CHECKING:
    from agentevo.inference.serving.run_engines import RunEngines


@dataclass(eq=False)
class Components:
    """The parts of a run. The trainer trains the model. The engine computes with the model, or has
    weights of its own."""

    config: RunConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    engine: UpdatableEngine
    weights: WeightSender
    """How trained weights reach `engine`."""
    store: Store
    tasks: TaskSource
    agent: Agent | None
    """None if no task is attempted: supervised fine-tuning without an environment."""
    calls: CallLog
    note: Callable[[str], None] = to_stderr
    """Receives messages for the user."""
    checkpoint: Path | None = None
    """The checkpoint from which the model was loaded; None for the recipe's own model."""
    policies: Mapping[str, AgentPolicy] = field(default_factory=dict)
    """By name, the policies of a rollout of several agents, including the main one; empty if
    there is only one policy."""
    run_engines: RunEngines | None = None
    """Equals `engine` where this process makes no engine and the run's other engines evaluate."""

    @property
    def engines(self) -> list[UpdatableEngine]:
        """The engines of all policies, the main one's first."""
        policy_engines = (policy.engine for policy in self.policies.values())
        return [self.engine, *(engine for engine in policy_engines if engine is not self.engine)]

    @property
    def trained(self) -> list[tuple[PreTrainedModel, UpdatableEngine]]:
        """Every trained model and its engine; the main one first."""
        names = trained_policies(self.config)
        secondary = [(self.policies[name].model, self.policies[name].engine) for name in names[1:]]
        return [(self.model, self.engine), *secondary]

    @property
    def saved_beside(self) -> dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
        """Folder below a checkpoint -> the trained policy, other than the main one, that is saved
        there."""
        return {
            f"{CHECKPOINTS}/{name}": (self.policies[name].model, self.policies[name].tokenizer)
            for name in trained_policies(self.config)[1:]
        }

    def engine_stats(self) -> dict[str, float]:
        """Counters of all engines, added up."""
        totals = Counter[str]()
        for engine in self.engines:
            totals.update(engine.stats())
        return dict(totals)

    @property
    def plays(self) -> bool:
        """Whether there are tasks to attempt."""
        return self.agent is not None

    @cached_property
    def chat(self) -> ChatFormat:
        """Raises ModelError for a chat template that can't be continued turn by turn."""
        generation = getattr(self.model, "generation_config", None)
        return ChatFormat(self.tokenizer, generation, processor=processor_of(self.model))

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler, which lets the agent attempt tasks."""
        if self.agent is None:
            raise ConfigError("there are no tasks to attempt: give the recipe an environment")

        context = context_length(self.model.config)
        return Sampler(
            self.config,
            self.engine,
            self.chat,
            self.agent,
            self.store,
            context,
            calls=self.calls,
            note=self.note,
            players=players(self.config, self.policies),
            get_tasks=self.tasks.given,
            task_images=self.tasks.images,
        )


def checkpoint_section(section: ModelSection, checkpoint: Path) -> ModelSection:
    """The recipe's model as a checkpoint has it: a whole model, or an adapter over the recipe's own
    base. Its chat template is the checkpoint's, with the recipe's values of the variables. No file
    of a checkpoint says which parts are frozen, or that no images are shown: the recipe does."""
    if not is_adapter_folder(checkpoint):
        return ModelSection(
            name=str(checkpoint),
            dtype=section.dtype,
            device=section.device,
            template=section.template,
            vision=section.vision,
        )

    if section.name == "tiny":
        raise ConfigError(
            f"{checkpoint} is an adapter, and model.name=tiny can't be its base: set model.name "
            f"to the base model of the adapter"
        )

    return section.model_copy(
        update={"lora": LoraSection(adapter=checkpoint, quantize=section.lora.quantize)}
    )


def check_memory(config: RunConfig) -> None:
    """Raises ConfigError, before anything is created, for keys of the section `memory` that this
    machine can't support: it has no GPU to offload from, or no torchao."""
    if not is_accelerator(find(config.model.device)):
        for key in config.memory.offloads:
            raise ConfigError(offload_refusal(key))
    if config.memory.optimizer == "adamw_8bit":
        check_8bit()


def load_policy(
    config: RunConfig, checkpoint: Path | None = None, *, for_part: bool = False
) -> LoadedModel:
    """The recipe's model, or the checkpoint in its place (see `checkpoint_section`), with its
    tokenizer, on its device, with this package's attention and, where the recipe asks for it, with
    routers that can replay. `for_part`: `spread` will divide the model and move this process's part
    to the device; until then the weights are memory-mapped files and not held in memory."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)

    section = config.model if checkpoint is None else checkpoint_section(config.model, checkpoint)
    has_words = (
        config.environment is not None or config.tasks.given or brings_tasks(config.agent.type)
    )
    corpus = (lambda: corpus_of(config)) if has_words else None
    on_cpu = find(section.device).type == "cpu"
    if for_part and config.trainer.parallel.is_spread and section.lora.quantize == "none":
        section = section.model_copy(update={"device": "cpu"})

    loaded = load_model(section, corpus=corpus, seed=derive_seed(config.run.seed, "model"))
    model = prepare(loaded.model, on_cpu=on_cpu, compute=config.trainer.compute)
    for key in balance_keys(config):
        check_balance(model, key)
    if needs_routers(config):
        model = enable_routing(model)
    if _compiles(config, model.device) and row_settings(model) is None:
        model = compile_layers(model)

    return replace(loaded, model=keep_activations(model, config.memory))


def _compiles(config: RunConfig, device: torch.device) -> bool:
    """See `torch_compile` of the section trainer."""
    return (
        config.trainer.torch_compile
        and compiles(device.type)
        and not config.model.lora.enabled
        and not config.memory.offload_activations
        and not config.trainer.parallel.is_spread
    )


@asynccontextmanager
async def open_components(  # noqa: PLR0913 (the ways in which commands begin)
    config: RunConfig,
    *,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    checkpoint: Path | None = None,
    store_url: str | None = None,
    loaded: LoadedModel | None = None,
    transport: str = "shared",
    note: Callable[[str], None] = to_stderr,
    may_play: bool = True,
    traced: bool = False,
    uses_run_engines: bool = False,
) -> AsyncIterator[Components]:
    """Builds everything; closes the store at the end. `checkpoint` replaces the recipe's model, see
    `checkpoint_section`; `loaded`: the result of an earlier `load_policy`; `transport`: how the
    engine gets the trained weights (`local_transport`); `note` shows a message to the user;
    `may_play=False`: a program's own loop plays, and this process does not; `traced`: its calls go
    where the recipe's `tracing` says; `uses_run_engines`: this process makes no engine and asks the
    run's other ones."""
    loaded = load_policy(config, checkpoint) if loaded is None else loaded
    run_engines = None
    if uses_run_engines:
        from agentevo.inference.serving.run_engines import RunEngines  # needs websockets

        run_engines = RunEngines(config)

    engine = run_engines or make_engine(
        config, loaded, loaded.model if transport == "shared" else copy_policy(loaded.model)
    )
    main = AgentPolicy(loaded.model, loaded.tokenizer, engine)
    policies = make_policies(config, main, checkpoint, load_policy, transport)
    needs_environment = agent is None and isinstance(config.agent, EnvironmentAgentSection)
    plays = may_play and (config.environment is not None or not needs_environment)
    player = find_agent(config, agent) if plays else None
    async with AsyncExitStack() as stack:
        for policy in policies.values() or [main]:
            stack.push_async_callback(policy.engine.close)

        url = store_url or config.store_url
        store = await stack.enter_async_context(await open_run_store(url))

        tracing = None
        if traced:
            opening = open_tracing(config, process="trainer", notify=note, is_remote=False)
            tracing = await stack.enter_async_context(opening)

        calls = await stack.enter_async_context(call_log(url, notify=note, tracing=tracing))
        weights = await open_weights(config, main, policies, transport, note)
        parts = Components(
            config=config,
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            engine=engine,
            weights=weights,
            calls=calls,
            store=store,
            tasks=TaskSource(config, tasks),
            agent=player,
            note=note,
            checkpoint=checkpoint,
            policies=policies,
            run_engines=run_engines,
        )

        if player is not None:
            stack.push_async_callback(player.close)

        if parts.plays:
            # Refuses templates that can't be continued, before anything is computed.
            stack.callback(parts.sampler.close)

        yield parts
