"""The optimizer of one model: AdamW, its learning rate schedule, gradient clipping, and the
rejection of numbers that are not finite.

The learning rate warms up linearly and then follows the schedule. Gradients add up in float32, and
the optimizer steps float32 numbers: the weights themselves, or their float32 masters. bfloat16 has
8 bits of precision: an update below 1/256 of a weight rounds to zero, and most updates are that
small. A master keeps them (Micikevicius et al., arXiv 1710.03740, section 3.1).

With `memory.optimizer=adamw_8bit`, the two moments take 8 bits a number (Dettmers et al., arXiv
2110.02861), by torchao, which only this module imports.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.tensor import DTensor

from agentevo.config import MemorySection, TrainerSection
from agentevo.errors import CheckpointError, TrainingError
from agentevo.models.compute.parts import Stored, WeightPart
from agentevo.runtime.devices import can_pin
from agentevo.runtime.extras import load_extra
from agentevo.training.parallel import loss_share, stages, sum_gradients
from agentevo.training.phases import phase
from agentevo.training.sharding.layouts import (
    ShardLayout,
    clip,
    gradient_norm,
    kept,
    local,
    part_of,
)


def adamw_8bit(
    groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """AdamW with 8-bit moments over groups of float32 parameters. Tensors of fewer than 4096
    numbers keep float32 moments. Raises MissingExtraError."""
    optimizer: torch.optim.Optimizer = _optimizer_class()(groups, lr=lr, betas=betas)
    return optimizer


def check_8bit() -> None:
    """Raises MissingExtraError without torchao."""
    _optimizer_class()


def step_8bit(optimizer: torch.optim.Optimizer) -> None:
    """Makes one optimizer step. torchao compiles its arithmetic once per shape of parameter; on a
    CPU it runs uncompiled, which needs no compiler."""
    on_cpu = any(
        parameter.device.type == "cpu"
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
        optimizer.step()


def _optimizer_class() -> Callable[..., torch.optim.Optimizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its compiled extensions, which are not needed here
        module = load_extra("torchao.optim", "8bit", "memory.optimizer=adamw_8bit")
    optimizer: Callable[..., torch.optim.Optimizer] = module.AdamW8bit
    return optimizer


class MasterWeights:
    """What the optimizer steps in place of parameters that are on one device: float32 weights with
    their present values. Later changes to a parameter of another dtype do not last: `give_weights`
    overwrites them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, on_cpu: bool) -> None:
        self.parameters = parameters
        self.on_cpu = on_cpu
        self.masters = [self._master_of(parameter) for parameter in parameters]
        """The float32 weights of this process, in the order of `parameters`: copies on the CPU with
        `on_cpu`, else on the parameters' own device. There, the master of a float32 parameter has
        the parameter's own memory."""

    def _master_of(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        weights = local(parameter).detach()
        shares = not self.on_cpu and weights.dtype == torch.float32
        return torch.nn.Parameter(weights if shares else self._place(weights))

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
            weights = local(parameter)
            if weights.data_ptr() != master.data_ptr():
                weights.copy_(master)
            master.grad = None


def needs_masters(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether any of the parameters is less precise than float32."""
    return any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in parameters)


class Grouped(Protocol):
    """Anything that belongs to a group: a sample or a pair."""

    @property
    def group_id(self) -> str: ...


T = TypeVar("T", bound=Grouped)


def learning_rate(
    section: TrainerSection, step: int, total_steps: int, peak: float | None = None
) -> float:
    """The learning rate of optimizer step `step` (counted from 0) out of `total_steps`. `peak`
    replaces the section's own peak."""
    highest = section.learning_rate if peak is None else peak
    if step < section.warmup_steps:
        return highest * (step + 1) / section.warmup_steps
    done = min(1.0, (step - section.warmup_steps) / max(1, total_steps - section.warmup_steps))
    return highest * decay(section.schedule, done, section.min_lr_ratio)


def decay(schedule: str, done: float, min_ratio: float) -> float:
    """The factor on the peak learning rate once the share `done` of the steps after the warm-up is
    over: 1 at first, `min_ratio` at the end."""
    if schedule == "constant":
        return 1.0
    share = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return min_ratio + (1.0 - min_ratio) * share


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    kind: str = "adamw",
) -> torch.optim.Optimizer:
    """AdamW over the parameters that need a gradient, with weight decay on matrices only. `kind` is
    MemorySection.optimizer."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    filled = [g for g in groups if g["params"]]
    return (
        adamw_8bit(filled, lr, betas)
        if kind == "adamw_8bit"
        else torch.optim.AdamW(filled, lr=lr, betas=betas, fused=True)
    )


_OTHER = "they belong to another model, or to other trained parameters: remove the key"


class Optimization:
    """`begin`, then backward passes that add up, then `finish`: one optimizer step.

    The optimizer and its masters are made at the first `begin` (or when the first state is saved or
    loaded): until then other code may change the weights.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        section: TrainerSection,
        *,
        memory: MemorySection | None = None,
        learning_rate: float | None = None,
        key: str = "trainer",
        layouts: Mapping[torch.nn.Parameter, ShardLayout] = MappingProxyType({}),
    ) -> None:
        """`key` is the recipe's section that has this learning rate; error messages name it.
        `layouts`: how the processes divide parameters that they have slices of
        (sharding/layouts.py)."""
        self.section = section
        self.memory = memory or MemorySection()
        self.key = key
        self.peak = section.learning_rate if learning_rate is None else learning_rate
        self.parameters = [p for p in parameters if p.requires_grad]
        self.layouts = layouts
        self.steps = 0
        self._waiting: deque[torch.Tensor] = deque()
        """Losses of micro-batches that are under way in later stages of the pipeline."""
        self.leave_out(0)

    @property
    def sharded(self) -> bool:
        """Whether several processes hold the parameters in parts; these are the masters then."""
        return any(isinstance(parameter, DTensor) for parameter in self.parameters)

    @property
    def is_partly_sharded(self) -> bool:
        """Whether some parameters are whole on each process beside those in parts. One call of
        torch takes parameters of one of these kinds only."""
        return self.sharded and not all(isinstance(p, DTensor) for p in self.parameters)

    @cached_property
    def masters(self) -> MasterWeights | None:
        """The master weights; None if the optimizer steps the parameters themselves."""
        offloads = self.memory.offload_optimizer
        return (
            MasterWeights(self.parameters, on_cpu=offloads)
            if offloads or needs_masters(self.parameters) or self.is_partly_sharded
            else None
        )

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        for parameter in self.parameters:
            parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)
        stepped = self.parameters if self.masters is None else self.masters.masters
        return make_optimizer(
            stepped, self.peak, self.section.weight_decay, self.section.betas, self.memory.optimizer
        )

    def leave_out(self, steps: int) -> None:
        """Shortens the schedule by this number of the run's steps, in which the model is not
        trained."""
        self.total_steps = (
            (self.section.steps - steps) * self.section.epochs * self.section.minibatches
        )

    def begin(self, lr: float | None = None) -> float:
        """Clears the gradients and returns the learning rate of the step: `lr` if given, otherwise
        the schedule's."""
        if lr is None:
            lr = learning_rate(self.section, self.steps, self.total_steps, self.peak)

        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

        self._clear_gradients()
        return lr

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @phase("backward")
    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of the loss. Raises TrainingError, before any weight changes, if the
        loss is not finite."""
        ahead = 0 if (pipeline := stages()) is None else pipeline.size - 1 - pipeline.rank
        if ahead:  # the last stage knows the loss (sharding/pipeline.py)
            self._waiting.append(loss)
            if len(self._waiting) > ahead:
                self._waiting.popleft().backward()
            return

        if not torch.isfinite(loss):
            self._clear_gradients()
            raise TrainingError(
                "the loss is not finite, the weights were not changed: lower "
                f"{self.key}.learning_rate, or check rewards and data"
            )

        (loss * loss_share()).backward()

    @phase("optimizer")
    def finish(self) -> float:
        """Sums the gradients over ranks, clips their L2 norm to max_grad_norm, and steps. Returns
        the norm before clipping. Raises TrainingError if it is not finite."""
        while self._waiting:
            self._waiting.popleft().backward()

        sum_gradients(self.parameters, self.layouts)
        norm = self._clip()
        if not math.isfinite(norm):
            self._clear_gradients()
            raise TrainingError(
                "the gradient is not finite, the weights were not changed: lower "
                f"{self.key}.learning_rate"
            )

        self._step()
        self.steps += 1
        return norm

    def _clip(self) -> float:
        largest = self.section.max_grad_norm
        if not self.layouts and not self.is_partly_sharded:
            return float(torch.nn.utils.clip_grad_norm_(self.parameters, largest))
        norm = gradient_norm(self.parameters, self.layouts)
        clip(self.parameters, norm, largest)
        return float(norm)

    def _step(self) -> None:
        if self.masters is not None:
            self.masters.take_gradients()

        if self.memory.optimizer == "adamw_8bit":
            step_8bit(self.optimizer)
        else:
            self.optimizer.step()

        if self.masters is not None:
            self.masters.give_weights()

    def state_dict(self) -> dict[str, Any]:
        masters: list[torch.Tensor | WeightPart] | None = None
        if self.masters is not None or self.sharded:
            masters = [self._kept(m, p) for m, p in self._stepped_parameters()]

        state = self.optimizer.state_dict()
        moments = {
            index: {
                name: self._kept(value, self._parameter_of(index))
                for name, value in of_parameter.items()
            }
            for index, of_parameter in state["state"].items()
        }
        return {
            "kind": self.memory.optimizer,
            "optimizer": {**state, "state": moments},
            "masters": masters,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, for parameters that are loaded already. Raises
        CheckpointError for the state of another kind of optimizer."""
        kind = state.get(
            "kind", "adamw"
        )  # older checkpoints do not name the optimizer, and have no masters
        if kind != self.memory.optimizer:
            raise CheckpointError(
                f"the checkpoint's optimizer is {kind}, not {self.memory.optimizer}: resume with "
                f"memory.optimizer={kind}"
            )

        moments = {
            index: {
                name: self._part(value, self._parameter_of(index))
                for name, value in of_parameter.items()
            }
            for index, of_parameter in state["optimizer"]["state"].items()
        }
        self.optimizer.load_state_dict({**state["optimizer"], "state": moments})

        masters = state.get("masters")
        if masters is not None and (self.masters is not None or self.sharded):
            with torch.no_grad():
                for (master, parameter), stored_master in zip(
                    self._stepped_parameters(), masters, strict=True
                ):
                    master.copy_(self._part(stored_master, parameter))

        self.steps = state["steps"]

    def carry_on(self, state: dict[str, Any]) -> None:
        """Takes the moments of another run's `state_dict`; learning rate, decay and schedule are
        this run's own, from the beginning. Raises CheckpointError if they belong to other
        parameters."""
        group_settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        steps = self.steps
        try:
            self.load_state_dict(state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"trainer.optimizer_from: {error}: {_OTHER}") from error

        for parameter, moments in self.optimizer.state.items():
            shapes = {tuple(moment.shape) for moment in moments.values() if torch.is_tensor(moment)}
            if not shapes <= {tuple(parameter.shape), ()}:
                raise CheckpointError(f"trainer.optimizer_from: moments of other shapes: {_OTHER}")

        for group, settings in zip(self.optimizer.param_groups, group_settings, strict=True):
            group.update(settings)

        self.steps = steps

    def _stepped_parameters(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """The tensors that the optimizer steps, each with the model's parameter that it
        represents."""
        masters = self.parameters if self.masters is None else self.masters.masters
        return list(zip(masters, self.parameters, strict=True))

    def _parameter_of(self, index: int) -> torch.nn.Parameter:
        """The model's parameter of an index in the optimizer's state."""
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        return next(
            parameter
            for master, parameter in self._stepped_parameters()
            if master is stepped[index]
        )

    def _kept(self, value: Any, parameter: torch.nn.Parameter) -> Any:
        """The part of a tensor, divided like the parameter, that a checkpoint keeps (`kept`); other
        values are unchanged."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        return kept(value, parameter, self.layouts.get(parameter))

    def _part(self, value: Any, parameter: torch.nn.Parameter) -> Any:
        """The inverse of `_kept`."""
        if not isinstance(value, torch.Tensor | Stored) or not value.shape:
            return value
        part = part_of(value, parameter, self.layouts.get(parameter))
        return part if self.masters is None else local(part)


def minibatches(items: Sequence[T], section: TrainerSection) -> Iterator[list[T]]:
    """The items of each optimizer step of an RL step: `epochs` passes over the items in
    `minibatches` parts. Groups stay whole."""
    groups = sorted({item.group_id for item in items})
    for _ in range(section.epochs):
        for part in range(min(section.minibatches, len(groups))):
            chosen = set(groups[part :: section.minibatches])
            yield [item for item in items if item.group_id in chosen]


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it; the counts `trainer/...` are
    summed."""
    by_name: dict[str, list[float]] = {}
    for update in updates:
        for key, value in update.items():
            by_name.setdefault(key, []).append(value)

    return {
        key: sum(values) if key.startswith("trainer/") else sum(values) / len(values)
        for key, values in by_name.items()
    }
