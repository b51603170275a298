"""Where the processes of a run are placed: `Fleet` is the request, and `Fleet.place` assigns it to
nodes.

A node is a machine, or the part of a machine that a cluster gives the job. The trainer gets whole
nodes, or their first devices. Engines get the remaining devices, and further nodes if those are not
enough. Samplers need no device and are spread over all nodes. Invariants: a device belongs to one
process; node 0 has the first rank of the trainer.
"""

from __future__ import annotations

from typing import Annotated

import pydantic
from pydantic import Field

from agentevo.errors import ConfigError
from agentevo.runtime.section import Section

MAX_NODES = 1024
Count = Annotated[int, Field(ge=0, le=4096)]


class FleetNode(pydantic.BaseModel, extra="forbid", frozen=True):
    """The processes of a machine."""

    trainer: int = 0
    """The number of the trainer's ranks."""
    trainer_devices: tuple[int, ...] = ()
    """The devices of these ranks, by number. Empty on a CPU."""
    engines: tuple[tuple[int, ...], ...] = ()
    """The devices of each engine. Empty tuples on a CPU."""
    samplers: int = 0


class Fleet(Section):
    """The numbers of nodes, devices and processes. Each kind of cluster adds its own keys
    (targets.py)."""

    trainer_nodes: int = Field(default=1, ge=1, le=MAX_NODES)
    """Number of nodes for the trainer's ranks."""
    gpus: Count = 0
    """Devices per node. With 0, processes use the CPU."""
    trainer_gpus: Count | None = None
    """Devices per trainer node that the trainer uses, with a rank on each. Default: all devices
    that the engines leave, if trainer and engines fit on one node; otherwise all devices."""
    engines: Count = 0
    """Number of engine processes. Without engines and samplers, the trainer samples itself."""
    gpus_per_engine: int = Field(default=1, ge=1)
    """Devices per engine."""
    engine_nodes: Count = 0
    """Nodes for engines only, if gpus is 0; otherwise the number follows from the devices."""
    samplers: Count = 0
    """Number of sampler processes; with engines, at least 1."""

    def place(self) -> tuple[FleetNode, ...]:
        """The nodes, those of the trainer first. Raises ConfigError if the processes don't fit."""
        self._check()
        num_gpus = self._num_trainer_gpus()
        engines = self._place_engines(num_gpus)
        if len(engines) > MAX_NODES:
            raise ConfigError(
                f"engines={self.engines}: that is {len(engines):,} nodes, {MAX_NODES:,} at most"
            )

        return tuple(
            FleetNode(
                trainer=max(num_gpus, 1) if number < self.trainer_nodes else 0,
                trainer_devices=tuple(range(num_gpus)) if number < self.trainer_nodes else (),
                engines=tuple(of_node),
                samplers=len(range(number, self.samplers, len(engines))),
            )
            for number, of_node in enumerate(engines)
        )

    def _place_engines(self, num_trainer_gpus: int) -> list[list[tuple[int, ...]]]:
        """The devices of each engine, for the engines of each node."""
        if not self.gpus:
            nodes: list[list[tuple[int, ...]]] = [
                [] for _ in range(self.trainer_nodes + self.engine_nodes)
            ]
            homes = nodes[self.trainer_nodes :] or nodes
            for number in range(self.engines):
                homes[number % len(homes)].append(())
            return nodes

        nodes = []
        engines_left = self.engines
        size = self.gpus_per_engine
        while engines_left or len(nodes) < self.trainer_nodes:
            first = num_trainer_gpus if len(nodes) < self.trainer_nodes else 0
            starts = range(first, self.gpus - size + 1, size)[:engines_left]
            nodes.append([tuple(range(start, start + size)) for start in starts])
            engines_left -= len(starts)
        return nodes

    def _num_trainer_gpus(self) -> int:
        if self.trainer_gpus is not None:
            return self.trainer_gpus
        free_gpus = self.gpus - self.engines * self.gpus_per_engine
        return free_gpus if self.trainer_nodes == 1 and free_gpus > 0 else self.gpus

    def _check(self) -> None:
        problem = ""
        if bool(self.engines) != bool(self.samplers):
            missing = "samplers" if self.engines else "engines"
            problem = (
                f"{missing}=0: engines and samplers need each other: set {missing} to 1 or more"
            )
        elif self.gpus and self.engine_nodes:
            problem = (
                f"engine_nodes={self.engine_nodes}: with gpus={self.gpus} the number of engine "
                "nodes follows from engines and gpus_per_engine: remove it"
            )
        elif self.engine_nodes > self.engines:
            problem = (
                f"engine_nodes={self.engine_nodes}: there are only {self.engines} engines, so "
                "some of these nodes would be idle: choose fewer"
            )
        elif self.gpus and self.gpus_per_engine > self.gpus:
            problem = (
                f"gpus_per_engine={self.gpus_per_engine}: an engine runs on one node, and a node "
                f"has gpus={self.gpus}: lower it"
            )
        elif self.trainer_gpus is not None and self.trainer_gpus > self.gpus:
            problem = (
                f"trainer_gpus={self.trainer_gpus}: a node has only gpus={self.gpus}: lower it"
            )
        elif self.gpus and self.trainer_gpus == 0:
            problem = "trainer_gpus=0: the trainer needs a device if gpus is above 0: raise it"

        if problem:
            raise ConfigError(problem)
