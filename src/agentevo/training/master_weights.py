"""Float32 copies of weights, which the optimizer steps, and which are rounded into the weights that
compute.

bfloat16 has 8 bits of precision: an update below 1/256 of a weight rounds to nothing, and so would
most of training. A master takes it up (Micikevicius et al., arXiv 1710.03740, section 3.1).
Gradients of micro-batches add up in float32 too.

    take_gradients() -> the optimizer steps `masters` -> give_weights()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class MasterWeights:
    """Of parameters on one device; made of what they are now. Whoever changes the parameters
    afterwards changes nothing that lasts."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, on_cpu: bool) -> None:
        self.parameters, self.on_cpu = parameters, on_cpu
        self.masters = [torch.nn.Parameter(self._place(parameter)) for parameter in parameters]
        """float32, in the order of `parameters`; on the CPU with `on_cpu`, else beside them."""

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        device = torch.device("cpu") if self.on_cpu else tensor.device
        copy = torch.empty(
            tensor.shape,
            dtype=torch.float32,
            device=device,
            pin_memory=self.on_cpu and tensor.device.type == "cuda",
        )
        return copy.copy_(tensor.detach())

    def take_gradients(self) -> None:
        """Hands the parameters' gradients over; they have none afterwards."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            grad, parameter.grad = parameter.grad, None
            master.grad = (
                self._place(grad) if grad is not None and grad.device != master.device else grad
            )

    @torch.no_grad()
    def give_weights(self) -> None:
        """Rounds the masters into the parameters, and drops their gradients."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
            master.grad = None

    def state_dict(self) -> list[torch.Tensor]:
        return [master.detach() for master in self.masters]

    @torch.no_grad()
    def load_state_dict(self, state: Sequence[torch.Tensor]) -> None:
        """The inverse of state_dict; the parameters, loaded already, stay what they are."""
        for master, saved in zip(self.masters, state, strict=True):
            master.copy_(saved)


def needs_masters(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether any is less exact than float32."""
    return any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in parameters)
