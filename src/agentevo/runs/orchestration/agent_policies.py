"""The policies of a rollout of several agents (config/named_agents.py): their models and engines,
and how weights reach the engines.

Every policy has its own model object and engine, so that nothing switches between adapters.
Parameters that are not trained and equal those of the main policy (the base under adapters) share
that policy's tensors. The main policy is the one of `Components.model`.

An agent that plays with earlier weights of another one gets them from RUN/earlier/AGENT. That
folder keeps every version with which the agent will still play.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentevo.config import RunConfig
from agentevo.config.named_agents import (
    by_rank,
    policy_of,
    trained_policies,
    with_model_of,
)
from agentevo.errors import CheckpointError, EngineError
from agentevo.inference.engine import UpdatableEngine
from agentevo.inference.engines import engines
from agentevo.inference.weights.transports import open_local
from agentevo.inference.weights.weight_transport import WeightSender
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.compute.positions import context_length
from agentevo.models.files.load import LoadedModel
from agentevo.models.files.model_copy import copy_policy
from agentevo.models.vision.parts import processor_of
from agentevo.rollout.sampler import Player

CHECKPOINTS = "agents"
"""Folder below a checkpoint for the policies other than the main one."""
EARLIER = "earlier"
SPARE = 2
"""Versions that are kept in addition to those of the lag: the newest one, and one for a run that is
resumed at the step before because its last step was not committed."""


@dataclass(eq=False)
class AgentPolicy:
    """A policy and the engine that samples from it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    engine: UpdatableEngine

    def player(self) -> Player:
        """The engine from which the agents of this policy sample their tokens."""
        generation = getattr(self.model, "generation_config", None)
        chat = ChatFormat(self.tokenizer, generation, processor=processor_of(self.model))
        return Player(self.engine, chat, context_length(self.model.config))


def checkpoint_of(checkpoint: Path | None, config: RunConfig, policy: str) -> Path | None:
    """The folder of this policy in a checkpoint. None for a policy that is not trained and
    therefore never saved."""
    trained = trained_policies(config)
    if checkpoint is None or not trained or policy == trained[0]:
        return checkpoint
    return checkpoint / CHECKPOINTS / policy if policy in trained else None


def make_policies(
    config: RunConfig,
    main: AgentPolicy,
    checkpoint: Path | None,
    load: Callable[[RunConfig, Path | None], LoadedModel],
    transport: str,
) -> dict[str, AgentPolicy]:
    """Every policy by name, including the main one; the policies with other agents' earlier weights
    come last. `load`: loads a recipe's model, or the checkpoint in its place. `transport`: how
    engines get the trained weights."""
    if not config.agents:
        return {}

    policies = {trained_policies(config)[0]: main}
    for name, section in config.agents.items():
        if name in policies or section.weights_of is not None or section.remote is not None:
            continue

        loaded = load(with_model_of(config, name), checkpoint_of(checkpoint, config, name))
        _share(loaded.model, main.model)
        is_own = transport != "shared" and name in trained_policies(config)
        policies[name] = AgentPolicy(
            loaded.model,
            loaded.tokenizer,
            make_engine(config, loaded, copy_policy(loaded.model) if is_own else loaded.model),
        )

    for name, section in config.agents.items():
        if section.is_earlier and section.weights_of is not None:
            source = policies[section.weights_of]
            earlier = copy_policy(source.model)
            policies[name] = AgentPolicy(
                earlier, source.tokenizer, make_engine(config, source, earlier)
            )

    return policies


def players(config: RunConfig, policies: Mapping[str, AgentPolicy]) -> dict[str, Player]:
    """The engine from which each agent samples, by the agent's name."""
    of_policy = {name: policy.player() for name, policy in policies.items()}
    return {name: of_policy[policy_of(config, name)] for name in by_rank(config)}


def make_engine(
    config: RunConfig, policy: LoadedModel | AgentPolicy, model: PreTrainedModel
) -> UpdatableEngine:
    """An engine that computes with `model`."""
    return engines.get(config.engine.type)(model, policy.tokenizer, config.engine)


@torch.no_grad()
def _share(model: PreTrainedModel, main: PreTrainedModel) -> None:
    """Replaces the model's tensors by the main model's if neither is trained and both are equal."""
    fixed = {name: p for name, p in main.named_parameters() if not p.requires_grad}
    modules = dict(model.named_modules())
    for name, parameter in list(model.named_parameters()):
        main_parameter = fixed.get(name)
        if (
            main_parameter is None
            or parameter.requires_grad
            or parameter.shape != main_parameter.shape
        ):
            continue
        if (
            parameter.dtype == main_parameter.dtype
            and parameter.device == main_parameter.device
            and torch.equal(parameter, main_parameter)
        ):
            owner, _, leaf = name.rpartition(".")
            setattr(modules[owner], leaf, main_parameter)


class EarlierVersions:
    """Lets agents play with earlier weights of a policy: keeps the versions that are still needed,
    and swaps them in."""

    def __init__(self, config: RunConfig, policies: Mapping[str, AgentPolicy]) -> None:
        self._config = config
        self._policies = policies
        self._loaded: dict[str, int] = {}

    async def advance(self, step: int, *, is_reloaded: bool) -> None:
        """The trained policies now have version `step`. `is_reloaded`: they were loaded, so weights
        that were swapped in before do not count. Raises CheckpointError."""
        for name, section in self._config.agents.items():
            if not section.is_earlier or section.weights_of is None:
                continue

            folder = WeightsFolder(self._config.run_dir / EARLIER / name)
            version = section.version_at(step)
            if section.version is None or step <= section.version:
                self._keep(folder, step, section.weights_of, (section.lag or 0) + SPARE)
            if not is_reloaded and self._loaded.get(name) == version:
                continue

            engine = self._policies[name].engine
            weights = self._weights(folder, name, version)
            deadline_s = self._config.engine.timeout_s
            if is_reloaded:
                await engine.begin(version, weights, deadline_s=deadline_s)
            else:
                in_flight = self._config.rollout.in_flight
                await engine.publish(version, weights, in_flight=in_flight, deadline_s=deadline_s)

            self._loaded[name] = version

    def _keep(self, folder: WeightsFolder, step: int, source: str, keep: int) -> None:
        try:
            folder.write(step, self._policies[source].model, keep=keep)
        except OSError as error:
            raise CheckpointError(
                f"{folder.path(step)} could not be written ({error}): make room there and resume"
            ) from error

    def _weights(self, folder: WeightsFolder, agent: str, version: int) -> dict[str, torch.Tensor]:
        try:
            return folder.read(version)
        except EngineError as error:
            raise CheckpointError(
                f"agents.{agent} plays with version {version} next, but its copy in "
                f"{folder.folder} is missing or changed ({error}): restore it from a copy, or "
                f"begin another "
                "run"
            ) from error


class AllWeights:
    """The transports of all trained policies' weights to their engines, as one WeightSender."""

    def __init__(self, senders: Sequence[WeightSender], earlier: EarlierVersions) -> None:
        self._senders = senders
        self._earlier = earlier

    async def begin(self, version: int) -> None:
        """See WeightSender.begin."""
        for sender in self._senders:
            await sender.begin(version)
        await self._earlier.advance(version, is_reloaded=True)

    async def publish(self, version: int) -> None:
        """See WeightSender.publish."""
        for sender in self._senders:
            await sender.publish(version)
        await self._earlier.advance(version, is_reloaded=False)

    async def look_after(self) -> None:
        """See WeightSender.look_after."""
        for sender in self._senders:
            await sender.look_after()


async def open_weights(
    config: RunConfig,
    main: AgentPolicy,
    policies: Mapping[str, AgentPolicy],
    transport: str,
    note: Callable[[str], None],
) -> WeightSender:
    """How trained weights reach the engines. Each engine now has its model's weights as version
    0."""
    senders = {}
    for name, policy in (policies or {"": main}).items():
        way = transport if not name or name in trained_policies(config) else "shared"
        senders[name] = open_local(way, policy.model, policy.engine, config, note)
        await senders[name].begin(0)

    if not policies:
        return senders[""]

    return AllWeights(
        [senders[name] for name in trained_policies(config)], EarlierVersions(config, policies)
    )
