"""Float32 master weights: the optimizer steps these copies, and they are then rounded into the
weights that the model computes with.

bfloat16 has 8 bits of precision: an update below 1/256 of a weight rounds to zero, and most updates
are that small. A float32 master keeps them (Micikevicius et al., arXiv 1710.03740, section 3.1).
Gradients of micro-batches add up in float32 too.

    take_gradients() -> the optimizer steps `masters` -> give_weights()

The master of a parameter that FSDP has sharded is this process's part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentevo.runtime.devices import can_pin
from agentevo.training.sharding.layouts import local


class MasterWeights:
    """Float32 copies of parameters that are on one device, made from their present values. Later
    changes to the parameters themselves do not last: `give_weights` overwrites them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, on_cpu: bool) -> None:
        self.parameters = parameters
        self.on_cpu = on_cpu
        self.masters = [
            torch.nn.Parameter(self._place(local(parameter))) for parameter in parameters
        ]
        """The float32 copies, in the order of `parameters`: on the CPU with `on_cpu`, else on the
        parameters' own device."""

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A float32 copy of the tensor on the masters' device."""
        device = torch.device("cpu") if self.on_cpu else tensor.device
        copy = torch.empty(
            tensor.shape,
            dtype=torch.float32,
            device=device,
            pin_memory=self.on_cpu and can_pin(tensor.device),
        )
        return copy.copy_(tensor.detach())

    def take_gradients(self) -> None:
        """Moves the gradients from the parameters to their masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            grad = None if parameter.grad is None else local(parameter.grad)
            parameter.grad = None
            master.grad = (
                self._place(grad) if grad is not None and grad.device != master.device else grad
            )

    @torch.no_grad()
    def give_weights(self) -> None:
        """Writes the masters into the parameters, rounded, and drops the masters' gradients."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            local(parameter).copy_(master)
            master.grad = None

    def state_dict(self) -> list[torch.Tensor]:
        return [master.detach() for master in self.masters]

    @torch.no_grad()
    def load_state_dict(self, state: Sequence[torch.Tensor]) -> None:
        """The inverse of `state_dict`. The parameters, which are loaded already, keep their
        values."""
        for master, saved in zip(self.masters, state, strict=True):
            master.copy_(saved)


def needs_masters(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether any of the parameters is less precise than float32."""
    return any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in parameters)
