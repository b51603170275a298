"""The passes of a model that is one stage of a pipeline: its receives and sends, and the
placeholders for the log-probs of the last stage.

All stages make the same calls with the same micro-batches. Where the others have no log-probs, they
have zeros as placeholders, and a loss of those, whose value is not used: its backward pass waits
for the gradient of the hidden states that this stage has sent.

A micro-batch's hidden states [1, N, H], for any N, and their gradient travel between neighbours
only. A stage waits for a send, and releases its tensor, only when so many later sends have followed
that the neighbour must have received it: no two stages wait for one another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from agentevo.training.collectives import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from agentevo.training.batching.packing import PackedBatch

_KEY = "_agentevo_stage"
"""Attribute of a decoder; copies of the model keep it."""


@dataclass(eq=False)
class Stage:
    """This process's place in a pipeline."""

    ranks: Ranks
    onwards: distributed.ProcessGroup
    """The group of the same processes, for hidden states only..."""
    back: distributed.ProcessGroup
    """...and the one for gradients only, so that neither waits for the other."""
    _sent: dict[int, deque[tuple[distributed.Work, torch.Tensor]]] = field(
        default_factory=lambda: {1: deque(), -1: deque()}
    )
    """Sends that may not have arrived, which are kept until then; by direction."""

    @classmethod
    def of(cls, mesh: DeviceMesh, dimension: str) -> Self:
        """The stage along one dimension of a mesh of all processes; all of them call this."""
        names = mesh.mesh_dim_names or ()
        pipelines = mesh.mesh.movedim(names.index(dimension), -1).flatten(0, -2).tolist()
        onwards, back = (distributed.new_subgroups_by_enumeration(pipelines)[0] for _ in range(2))
        return cls(
            Ranks.of(mesh, dimension),
            cast(distributed.ProcessGroup, onwards),
            cast(distributed.ProcessGroup, back),
        )

    @property
    def is_last(self) -> bool:
        return self.ranks.rank == self.ranks.size - 1

    @property
    def under_way(self) -> int:
        """The most micro-batches whose backward pass this stage waits for."""
        return self.ranks.size - self.ranks.rank

    def send(self, tensor: torch.Tensor, step: int) -> None:
        """Sends to the neighbour `step` stages away, 1 or -1; may return before the tensor has
        arrived."""
        group = self.onwards if step > 0 else self.back
        sent = self._sent[step]
        buffer = tensor.detach().contiguous()
        work = distributed.isend(buffer, group=group, group_dst=self.ranks.rank + step)
        sent.append((cast(distributed.Work, work), buffer))
        # The gradient of the micro-batch so many sends ago is here, or has been sent on.
        if len(sent) > (self.under_way if step > 0 else 2):
            sent.popleft()[0].wait()

    def receive(self, shape: torch.Size, like: torch.Tensor, step: int) -> torch.Tensor:
        """The tensor that the neighbour `step` stages away has sent, of that shape, and of the
        dtype and device of `like`."""
        group = self.back if step > 0 else self.onwards
        received = like.new_empty(shape)
        distributed.recv(received, group=group, group_src=self.ranks.rank + step)
        return received

    def __deepcopy__(self, memo: object) -> Self:
        """A copied model is computed by the same processes."""
        return self


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, empty: torch.Tensor, stage: Stage) -> torch.Tensor:
        ctx.stage = stage
        return stage.receive(empty.shape, empty, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        ctx.stage.send(grads[0], -1)
        return None, None


class _SentOn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, stage: Stage, tokens: int, nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.stage = stage
        ctx.shape = hidden.shape
        ctx.save_for_backward(hidden.new_empty(0))
        stage.send(hidden, 1)
        zeros = hidden.new_zeros(tokens + nodes, dtype=torch.float32)
        return zeros[:tokens].clone(), zeros[tokens:].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (like,) = ctx.saved_tensors
        return ctx.stage.receive(ctx.shape, like, 1), None, None, None


def receive_hidden(empty: torch.Tensor, stage: Stage) -> torch.Tensor:
    """The hidden states that the stage before sends, of the shape, dtype and device of `empty`;
    differentiable: their gradient goes back to it."""
    leaf = empty.detach().requires_grad_(torch.is_grad_enabled())
    out: torch.Tensor = _Received.apply(leaf, stage)
    return out


def be_stage(model: PreTrainedModel, stage: Stage) -> None:
    """Makes this process's passes of the model those of the stage from now on."""
    vars(model.base_model)[_KEY] = stage


def stage_of(model: nn.Module) -> Stage | None:
    """The stage of a model; None for a model that is no stage. Copies of a stage are stages as
    well."""
    decoder: Any = model.base_model
    return cast("Stage | None", vars(decoder).get(_KEY))


def sends_on(model: nn.Module) -> Stage | None:
    """The model's stage, where another stage makes the log-probs of its passes."""
    stage = stage_of(model)
    return None if stage is None or stage.is_last else stage


def passed_on(
    model: PreTrainedModel, stage: Stage, batch: PackedBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes this stage of a pass, and sends its output on. Returns zeros in place of the
    log-probs [M] and entropies [R] that the last stage makes."""
    decoder: Any = model.base_model
    inputs = {name: value for name, value in batch.inputs.items() if name != "logits_to_keep"}
    hidden = decoder(**inputs).last_hidden_state
    placeholders: tuple[torch.Tensor, torch.Tensor] = _SentOn.apply(
        hidden, stage, len(batch.targets), len(batch.logit_nodes)
    )
    return placeholders
