"""Runs the passes of one stage of a pipeline. The stage receives and sends hidden states, and
returns placeholders for the log-probs, which only the last stage computes.

All stages make the same calls with the same micro-batches. The stages before the last one use zeros
as placeholders, and compute a loss of them whose value is not used. The backward pass of this loss
waits for the gradient of the hidden states that the stage has sent.

A micro-batch's hidden states [1, N, H], for any N, and their gradient travel only between
neighbours. A stage waits for the end of a send, and releases the tensor, only after enough later
sends that the neighbour must have received it. So two stages never wait for each other.
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
"""The attribute of a decoder with its stage. Copies of the model keep it."""


@dataclass(eq=False)
class Stage:
    """This process's place in a pipeline."""

    ranks: Ranks
    forward_group: distributed.ProcessGroup
    """A group of the pipeline's processes for hidden states only."""
    backward_group: distributed.ProcessGroup
    """A group for gradients only, so that gradients and hidden states do not wait for each
    other."""
    _sent: dict[int, deque[tuple[distributed.Work, torch.Tensor]]] = field(
        default_factory=lambda: {1: deque(), -1: deque()}
    )
    """Direction -> sends that may not have arrived yet."""

    @classmethod
    def of(cls, mesh: DeviceMesh, dimension: str) -> Self:
        """This process's stage along `dimension` of a mesh of all processes. All processes must
        call this method."""
        names = mesh.mesh_dim_names or ()
        pipelines = mesh.mesh.movedim(names.index(dimension), -1).flatten(0, -2).tolist()
        forward_group, backward_group = (
            distributed.new_subgroups_by_enumeration(pipelines)[0] for _ in range(2)
        )
        return cls(
            Ranks.of(mesh, dimension),
            cast(distributed.ProcessGroup, forward_group),
            cast(distributed.ProcessGroup, backward_group),
        )

    @property
    def is_last(self) -> bool:
        return self.ranks.rank == self.ranks.size - 1

    @property
    def max_in_flight(self) -> int:
        """The largest number of micro-batches whose backward pass this stage waits for."""
        return self.ranks.size - self.ranks.rank

    def send(self, tensor: torch.Tensor, step: int) -> None:
        """Sends a tensor to the neighbour `step` stages away (1 or -1). May return before the
        tensor has arrived."""
        group = self.forward_group if step > 0 else self.backward_group
        sent = self._sent[step]
        buffer = tensor.detach().contiguous()
        work = distributed.isend(buffer, group=group, group_dst=self.ranks.rank + step)
        sent.append((cast(distributed.Work, work), buffer))
        # The neighbour received the oldest send: this stage has its gradient, or has sent it on.
        if len(sent) > (self.max_in_flight if step > 0 else 2):
            sent.popleft()[0].wait()

    def receive(self, shape: torch.Size, like: torch.Tensor, step: int) -> torch.Tensor:
        """Receives a tensor from the neighbour `step` stages away. It has the shape `shape`, and
        the dtype and device of `like`."""
        group = self.backward_group if step > 0 else self.forward_group
        received = like.new_empty(shape)
        distributed.recv(received, group=group, group_src=self.ranks.rank + step)
        return received

    def __deepcopy__(self, memo: object) -> Self:
        """Returns the same stage, because the same processes compute a copied model."""
        return self


class _ReceiveHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, empty: torch.Tensor, stage: Stage) -> torch.Tensor:
        ctx.stage = stage
        return stage.receive(empty.shape, empty, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        ctx.stage.send(grads[0], -1)
        return None, None


class _SendHidden(torch.autograd.Function):
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
    """Receives the hidden states from the previous stage. They have the shape, dtype and device of
    `empty`. In the backward pass, their gradient is sent to the previous stage."""
    leaf = empty.detach().requires_grad_(torch.is_grad_enabled())
    out: torch.Tensor = _ReceiveHidden.apply(leaf, stage)
    return out


def set_stage(model: PreTrainedModel, stage: Stage) -> None:
    """Makes the model this process's stage of a pipeline."""
    vars(model.base_model)[_KEY] = stage


def stage_of(model: nn.Module) -> Stage | None:
    """The stage of a model or of its copy, or None."""
    decoder: Any = model.base_model
    return cast("Stage | None", vars(decoder).get(_KEY))


def sending_stage(model: nn.Module) -> Stage | None:
    """The model's stage if it is not the last one of its pipeline, else None."""
    stage = stage_of(model)
    return None if stage is None or stage.is_last else stage


def run_stage(
    model: PreTrainedModel, stage: Stage, batch: PackedBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes this stage of a pass, and sends its output to the next stage. Returns zeros in place
    of the log-probs [M] and entropies [R] that the last stage computes."""
    decoder: Any = model.base_model
    inputs = {name: value for name, value in batch.inputs.items() if name != "logits_to_keep"}
    hidden = decoder(**inputs).last_hidden_state
    placeholders: tuple[torch.Tensor, torch.Tensor] = _SendHidden.apply(
        hidden, stage, len(batch.targets), len(batch.logit_nodes)
    )
    return placeholders
