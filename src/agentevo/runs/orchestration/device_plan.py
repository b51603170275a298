"""The devices of this machine that the trainer and each engine of `agentevo train` use."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import NamedTuple

from agentevo.config import EngineSection, RunConfig
from agentevo.config.parallel import world_size
from agentevo.errors import ConfigError

_SGLANG_SIZES = ("--tp-size", "--tensor-parallel-size", "--tp")
"""SGLang's option for the number of devices that share a layer."""


class DevicePlan(NamedTuple):
    """Devices by their numbers among those that this process sees. Invariant: a device belongs to
    one process, except for one that the trainer shares with the only engine."""

    trainer: tuple[int, ...]
    """One device for each rank."""
    engines: tuple[tuple[int, ...], ...]
    """The devices of each engine."""

    def __str__(self) -> str:
        trainer = ", ".join(map(str, self.trainer))
        engines = "; ".join(
            f"engine-{n}: {', '.join(map(str, devices))}" for n, devices in enumerate(self.engines)
        )
        shared = set(self.trainer) & {device for engine in self.engines for device in engine}
        return f"devices: trainer: {trainer}; {engines}{' (shared with it)' if shared else ''}"


def plan_devices(count: int, ranks: int, engines: int, per_engine: int) -> DevicePlan:
    """The plan for `ranks` of a trainer and that many engines, of `per_engine` devices each, on a
    machine with `count` devices. The trainer has the first devices, and the engines follow. A
    single engine of one device shares the trainer's device where none is left. Raises ConfigError
    if they don't fit."""
    trainer = tuple(range(ranks))
    if engines == per_engine == 1 and ranks == count:
        return DevicePlan(trainer, ((trainer[-1],),))

    needed = ranks + engines * per_engine
    if needed > count:
        fitting = max(0, (count - ranks) // per_engine)
        remedy = "set rollout.engines=1 with one device, which then shares the trainer's"
        if fitting:
            remedy = f"set rollout.engines={fitting}"
        elif ranks > count:
            remedy = f"start at most {count} ranks of the trainer"

        raise ConfigError(
            f"rollout.engines={engines}: {engines} x {per_engine} devices for engines and {ranks} "
            f"for the trainer are {needed}, and this machine has {count}: {remedy}, or start "
            "engines on other machines with `agentevo serve` and train with `agentevo learn`"
        )

    firsts = range(ranks, needed, per_engine)
    return DevicePlan(trainer, tuple(tuple(range(n, n + per_engine)) for n in firsts))


def devices_per_engine(section: EngineSection) -> int:
    """The number of devices that share the layers of one engine. Raises ConfigError for invalid
    options of vLLM."""
    if section.type == "vllm":
        from agentevo.inference.vllm.options import read_options

        return read_options(section).tensor_parallel_size

    if section.type == "sglang":
        from agentevo.inference.sglang import options as sglang_options

        args = sglang_options.read_options(section).args
        for name, size in pairwise(args):
            if name in _SGLANG_SIZES and size.isdigit():
                return max(1, int(size))

    return 1


def plan_of(config: RunConfig) -> DevicePlan | None:
    """The plan for the engines that `agentevo train` starts; None if there are none, or the CPU
    computes. Raises ConfigError if they don't fit, ModelError without the device."""
    if not config.rollout.samplers:
        return None

    from agentevo.runtime.devices import all_of, find, is_accelerator

    device = find(config.model.device)
    if not is_accelerator(device):
        return None

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())
    per_engine = devices_per_engine(config.engine)
    return plan_devices(len(all_of(device)), ranks, config.rollout.engines, per_engine)
