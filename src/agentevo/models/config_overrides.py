"""Replaces keys of a model's configuration by those of a recipe (`model.config_overrides`).

The trainer, the engine, the processes that sample, and any program that loads a checkpoint have one
configuration. The model's config class creates it here, before a weight is read, and it is saved
with every complete model. An adapter's folder stores the overrides in OVERRIDES_FILE. The adapter
is refused over a base with other overrides.

Refused are keys that the class does not know, parameters that a kind of RoPE does not have, and
values that the class changes. So the model follows the recipe exactly.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from agentevo.errors import ModelError
from agentevo.runtime.files import write_atomic
from agentevo.runtime.parsing import read_json_object
from agentevo.runtime.registry import nearest

KEY = "model.config_overrides"
OVERRIDES_FILE = "config_overrides.json"
"""The file in an adapter's folder with the overrides of its base."""
ROPE = ("rope_parameters", "rope_scaling")
"""The keys of RoPE's parameters: the current name, and the name in older configurations, which
still works."""
_KEPT = ("rope_theta", "partial_rotary_factor")
"""The parameters of the RoPE that the model was trained with that stay if a recipe sets another
kind."""
_FIXED = frozenset(
    {"architectures", "auto_map", "dtype", "id2label", "label2id", "model_type", "torch_dtype"}
    | {"quantization_config", "transformers_version"}
)
"""Keys that describe the weights, or that have their own key in the recipe."""
_NOT_COMPUTED = {
    ("router_aux_loss_coef", "aux_loss_alpha", "router_z_loss_coef", "output_router_logits"): (
        "the loss is the recipe's (trainer.router_aux_loss_coef, sft.router_aux_loss_coef)"
    ),
    (
        "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "embd_pdrop",
        "attn_pdrop", "resid_pdrop", "router_jitter_noise",
    ): (
        "policies are trained without noise, so that sampled and recomputed log-probs agree"
    ),
    ("use_cache", "output_attentions", "output_hidden_states", "return_dict"): (
        "it says what a call returns, which engine and trainer decide"
    ),
    ("initializer_range", "init_std", "initializer_factor"): (
        "it affects new weights only, and these are loaded"
    ),
}  # fmt: skip
"""Common keys that have no effect in AgentEvo, and the reason."""
_RATIO = "implicit factor"
"""Matches transformers' remark that a context is not `factor` times the original one, which may be
intended."""


def model_config(folder: Path, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of the model in `folder` with the overrides. Raises ModelError for
    overrides that the model does not support, and OSError or ValueError for a config.json that
    can't be read."""
    saved = AutoConfig.from_pretrained(folder)
    if not overrides:
        return saved
    tree, _ = PretrainedConfig.get_config_dict(folder)
    return _override(saved, tree, overrides, KEY)


def check_same(folder: Path, overrides: Mapping[str, Any]) -> None:
    """Raises ModelError if the adapter in `folder` was made over a base of other overrides."""
    made_with = adapter_overrides(folder)
    if made_with != dict(overrides):
        raise ModelError(
            f"adapter {folder} was made with {KEY}={json.dumps(made_with)}, and the model that it "
            f"is loaded into has {json.dumps(dict(overrides))}: give the adapter's"
        )


def adapter_overrides(folder: Path) -> dict[str, Any]:
    """The overrides of the base of the adapter in `folder`."""
    path = folder / OVERRIDES_FILE
    return read_json_object(path) if path.is_file() else {}


def keep_overrides(folder: Path, overrides: Mapping[str, Any]) -> None:
    """Writes the overrides into an adapter's folder, if there are any."""
    if overrides:
        write_atomic(folder / OVERRIDES_FILE, json.dumps(dict(overrides), indent=2))


def _override(
    saved: PretrainedConfig, tree: Mapping[str, Any], overrides: Mapping[str, Any], where: str
) -> PretrainedConfig:
    kind = type(saved)
    _check_keys(saved, overrides, where)

    changed = dict(tree)
    rope = None
    for key, value in overrides.items():
        name = kind.attribute_map.get(key, key)
        saved_value = getattr(saved, name, None)
        if key in ROPE:
            rope = _rope(saved, value, f"{where}.{key}")
        elif isinstance(saved_value, PretrainedConfig):
            if not isinstance(value, dict):
                raise ModelError(f"{where}.{key}: give a mapping of its keys")
            changed[name] = _override(
                saved_value, tree.get(name, {}), value, f"{where}.{key}"
            ).to_dict()
        else:
            changed.pop(key, None)
            changed[name] = value

    if rope is not None:
        for name in (*ROPE, *_KEPT):
            changed.pop(name, None)
        changed["rope_parameters"] = rope

    with _remarks() as remarks:
        try:
            config = kind.from_dict(changed)
            config.validate()
        except Exception as error:  # a class's own checks may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ModelError(f"{where}: {kind.__name__} does not take it ({reason})") from error

    if remarks:
        raise ModelError(f"{where}: {kind.__name__} says: {remarks[0][:300]}")

    _check_effect(config, overrides, where)
    return config


def _check_keys(saved: PretrainedConfig, overrides: Mapping[str, Any], where: str) -> None:
    kind = type(saved)
    known_keys = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    known_keys |= {name for name in vars(saved) if not name.startswith("_")}
    known_keys |= set(ROPE) if "rope_parameters" in known_keys else set()
    known_keys -= _FIXED | set(_KEPT)
    for key in overrides:
        if (reason := _without_effect(key)) is not None:
            raise ModelError(f"{where}.{key} would change nothing: {reason}; remove it")

        if key in known_keys:
            continue

        if key in _KEPT:
            hint = f"it is one of {where}.rope_parameters"
        elif key in _FIXED:
            hint = "it says what the weights are, which no key changes"
        else:
            guess = nearest(key[:100], sorted(known_keys))
            hint = f"did you mean {guess}?" if guess else f"it has {', '.join(sorted(known_keys))}"

        raise ModelError(f"{where}.{key[:100]}: no key of {kind.__name__} to override: {hint}")

    if all(name in overrides for name in ROPE):
        raise ModelError(f"{where}: rope_scaling and rope_parameters are one: give one of them")


def _without_effect(key: str) -> str | None:
    """Why a key has no effect, or None."""
    return next((reason for keys, reason in _NOT_COMPUTED.items() if key in keys), None)


def _rope(saved: PretrainedConfig, override: Any, where: str) -> dict[str, Any]:
    """RoPE's parameters: another kind with the base frequency that the model was trained with or,
    without `rope_type`, other values for the model's kind."""
    if not isinstance(override, dict):
        raise ModelError(f"{where}: give a mapping, such as {{rope_type: yarn, factor: 4.0}}")

    saved_rope: dict[str, Any] = saved.rope_parameters or {}
    layers = saved.nested_rope_parameter_keys(saved_rope)
    if not layers:
        return _one_rope(saved_rope, override)

    wrong = [name for name in override if name not in layers]
    if wrong or not all(isinstance(entry, dict) for entry in override.values()):
        raise ModelError(
            f"{where}: this model has a RoPE for each kind of layer: give a mapping for one of "
            f"{', '.join(sorted(layers))}"
        )

    return {name: _one_rope(saved_rope[name] or {}, override.get(name, {})) for name in layers}


def _one_rope(saved_rope: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    is_new = "rope_type" in override or "type" in override
    changes = {"rope_type" if key == "type" else key: value for key, value in override.items()}
    base = {key: value for key, value in saved_rope.items() if not is_new or key in _KEPT}
    return base | changes


def _check_effect(config: PretrainedConfig, overrides: Mapping[str, Any], where: str) -> None:
    """Raises ModelError if the class replaced a key's value, as Qwen2 does with a window that is
    turned off."""
    for key, value in overrides.items():
        actual = getattr(config, key, None)
        if key not in ROPE and not isinstance(actual, PretrainedConfig) and actual != value:
            raise ModelError(
                f"{where}.{key}={json.dumps(value)} has no effect: {type(config).__name__} makes "
                f"it {actual!r}, by its other keys"
            )


@contextmanager
def _remarks() -> Iterator[list[str]]:
    """Collects what transformers only logs about RoPE's parameters: unknown ones, and values out of
    range."""
    remarks: list[str] = []

    class OverrideListener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if _RATIO not in (text := record.getMessage()):
                remarks.append(text)

    logger = logging.getLogger("transformers.modeling_rope_utils")
    listener = OverrideListener()
    listener.setLevel(logging.WARNING)
    level = logger.level
    propagates = logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield remarks
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagates
