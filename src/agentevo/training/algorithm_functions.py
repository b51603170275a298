"""A loss and an advantage from functions of the user (config/algorithm_functions.py). Both
functions get copies, so they can't change other data. An exception of a function, or an invalid
result, is a TrainingError before the weights change, with the traceback on stderr.

A loss is split: a step's rows are spread over micro-batches and ranks, whose gradients add up. That
is exact only if the loss of a row depends only on its own trained tokens. `try_out` calls it on a
small batch, on each row alone and with padding, and refuses one that differs. An advantage sees the
whole step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentevo.algorithms.advantage_inputs import AdvantageTables, Inputs
from agentevo.algorithms.entries import FUNCTION
from agentevo.algorithms.estimators import bind_advantage
from agentevo.algorithms.loss_inputs import LossInputs, LossTables, Terms
from agentevo.config import AlgorithmSection
from agentevo.config.algorithm_functions import ADVANTAGES, POLICY_LOSSES
from agentevo.errors import ConfigError, OverreachError, TrainingError, describe_error
from agentevo.runtime.console import to_stderr
from agentevo.runtime.daemon_threads import call_in_thread
from agentevo.runtime.signals import Interrupt
from agentevo.runtime.tracebacks import traceback_of

LONGEST_S = 600.0
"""The time limit of an advantage for a step, in seconds."""
LONGEST_TRIAL_S = 60.0
"""The time limit of a function's trial, in seconds."""
OF_THE_STEP = frozenset({"pg_loss", "entropy", "kl_loss", "rollout_is_mean", "rollout_is_squares"})
"""Names of a step's metrics other than those of its loss."""
ROWS = ((5, ()), (3, (1,)), (6, (0, 4)), (1, ()))
"""Length and untrained places of each row of a trial."""


def bound_loss(section: AlgorithmSection) -> Callable[[LossInputs], Terms] | None:
    """The loss of `algorithm.loss_function`; None if it is not set."""
    if section.loss_function is None:
        return None
    return partial(_loss, POLICY_LOSSES.find(section.loss_function))


def bound_advantage(section: AlgorithmSection) -> Callable[[Inputs], Tensor] | None:
    """The advantage of `algorithm.advantage_function`; None if it is not set."""
    if section.advantage_function is None:
        return None
    return partial(_advantage, ADVANTAGES.find(section.advantage_function), LONGEST_S)


def try_out(section: AlgorithmSection) -> None:
    """Raises ConfigError if training can't use the function."""
    try:
        if section.loss_function is not None:
            loss = POLICY_LOSSES.find(section.loss_function)
            call_in_thread(partial(_try_loss, loss), "loss function", LONGEST_TRIAL_S)
        if section.advantage_function is not None:
            _try_advantage(ADVANTAGES.find(section.advantage_function))
    except (TrainingError, ValueError, TimeoutError) as error:
        raise ConfigError(f"{error} (in a trial before the run)") from error


def _loss(function: Callable[[LossInputs], Any], inputs: LossInputs) -> Terms:
    tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    copies: dict[str, Any] = {
        name: tensor.clone() for name, tensor in tensors.items() if isinstance(tensor, Tensor)
    }
    try:
        returned = _call_loss(function, replace(inputs, **copies))
        losses, measured = returned if isinstance(returned, tuple) else (returned, {})
        shape = inputs.logp.shape
        _check_tensor("the token losses", losses, (shape,), inputs.logp.device)
        if not isinstance(measured, Mapping):
            raise TrainingError(f"the metrics are {type(measured).__name__}")

        for metric, values in measured.items():
            if metric in OF_THE_STEP:
                raise TrainingError(f"a step already has a metric {metric!r}: use another name")
            _check_tensor(f"the metric {metric!r}", values, (shape,), inputs.logp.device)
    except Exception as error:
        raise _refusal(
            f"{POLICY_LOSSES.key}: {_name(function)}",
            error,
            "return a tensor of floats [S, T] like inputs.logp, or a pair of it and a mapping "
            "from metric names to such tensors",
        ) from error

    return losses, dict(measured)


def _advantage(function: Callable[[Inputs], Any], within_s: float, inputs: Inputs) -> Tensor:
    try:
        values = call_in_thread(
            lambda: function(copy.deepcopy(inputs)), "advantage function", within_s
        )
        shapes = (inputs.score.shape, inputs.mask.shape)
        _check_tensor("the advantages", values, shapes, inputs.mask.device)
        trained = values if values.dim() == 1 else values[inputs.mask]
        if not bool(torch.isfinite(trained).all()):
            raise TrainingError("an advantage is not finite")
    except Exception as error:
        raise _refusal(
            f"{ADVANTAGES.key}: {_name(function)}",
            error,
            "return a tensor of finite floats, [N] like inputs.score or [S, T] like inputs.rewards",
        ) from error

    return values.detach()


def _check_tensor(
    what: str, values: Any, shapes: tuple[torch.Size, ...], device: torch.device
) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TrainingError(f"{what} are {kind}")
    if values.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise TrainingError(f"{what} have the shape {list(values.shape)} in place of {expected}")
    if values.device != device:
        raise TrainingError(f"{what} are on {values.device}, the inputs on {device}")


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _call_loss(function: Callable[[LossInputs], Any], inputs: LossInputs) -> Any:
    try:
        return function(inputs)
    except Interrupt:
        raise
    except (SystemExit, KeyboardInterrupt) as error:
        raise OverreachError(error, "a loss function") from error


def _refusal(what: str, error: Exception, remedy: str) -> TrainingError:
    """The error of a step; stderr shows where it was raised."""
    if shown := traceback_of(error):
        to_stderr(f"{what}:\n{shown}")
    if isinstance(error, AttributeError) and isinstance(error.obj, LossInputs | Inputs):
        remedy = f"inputs has {', '.join(field.name for field in fields(error.obj))}"
    return TrainingError(
        f"{what}: {describe_error(error)}: {remedy} (the weights were not changed)"
    )


def _try_loss(function: Callable[[LossInputs], Any]) -> None:
    tables = _trial_tables()
    losses, gradients = _trial_of(function, tables)
    what = f"{POLICY_LOSSES.key}: {_name(function)}"
    if not bool(torch.isfinite(losses).all()):
        raise ValueError(f"{what}: a loss of a trained token is not finite")
    if not bool(torch.isfinite(gradients).all()):
        raise ValueError(f"{what}: a gradient of a trained token is not finite")
    if not bool(gradients.any()):
        raise ValueError(f"{what}: the loss does not depend on inputs.logp: it would train nothing")

    padded = {name: torch.nn.functional.pad(table, (0, 2)) for name, table in tables.items()}
    row_trials = [
        _trial_of(function, {name: table[[row]] for name, table in tables.items()})
        for row in range(len(ROWS))
    ]
    separate = (
        torch.cat([trial[0] for trial in row_trials]),
        torch.cat([trial[1] for trial in row_trials]),
    )
    wide = tuple(result[:, :-2] for result in _trial_of(function, padded))
    for how, results in (("alone", separate), ("with padding", wide)):
        pairs = zip((losses, gradients), results, strict=True)
        if not all(
            torch.allclose(together, result, rtol=1e-4, atol=1e-6) for together, result in pairs
        ):
            raise ValueError(
                f"{what}: a row {how} has another loss or gradient than together with other "
                f"rows, so micro-batches would change the update: compute each row from its own "
                f"tokens, "
                "where inputs.mask is True, and leave means over rows to algorithm.aggregation"
            )


def _trial_of(
    function: Callable[[LossInputs], Any], tables: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Losses and gradients of the log-probs, [S, T], 0 where nothing is trained."""
    logp = tables["logp"].clone().requires_grad_()
    inputs = LossTables(**{**tables, "logp": logp}).clean_inputs()
    losses = torch.where(inputs.mask, _loss(function, inputs)[0], 0.0)
    if not losses.requires_grad:
        return losses, torch.zeros_like(losses)

    (gradient,) = torch.autograd.grad(losses.sum(), logp)
    return losses.detach(), gradient


def _trial_tables() -> dict[str, Tensor]:
    """Rows of different lengths, with untrained places, advantages of both signs, and ratios near
    and far from 1."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(ROWS), max(length for length, _ in ROWS))
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, (length, untrained) in enumerate(ROWS):
        mask[row, :length] = True
        mask[row, list(untrained)] = False

    def draw(low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    logp = draw(-4.0, -0.1)
    old = logp + draw(-0.5, 0.5)
    return {
        "logp": logp,
        "old_logp": old,
        "advantages": draw(-1.5, 1.5),
        "mask": mask,
        "rollout_logp": old + draw(-0.1, 0.1),
        "proximal_logp": old,
    }


def _try_advantage(function: Callable[[Inputs], Any]) -> None:
    mask = _trial_tables()["mask"]
    generator = torch.Generator().manual_seed(1)
    bound = bind_advantage(FUNCTION, {}, function=partial(_advantage, function, LONGEST_TRIAL_S))
    bound(
        AdvantageTables(
            token_rewards=torch.rand(mask.shape, generator=generator, dtype=torch.float64),
            mask=mask,
            group_ids=["a", "a", "b", "b"],
            trajectory_ids=["a0", "a1", "b0", "b0"],
            turn_ids=torch.zeros(mask.shape, dtype=torch.int64),
        )
    )
