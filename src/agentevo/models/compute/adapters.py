"""LoRA adapters over a frozen base. PEFT implements them, and only this module imports PEFT.

    add_adapter     a fresh one, trained
    load_adapter    a saved one, next to any others
    use_adapter     which one computes from now on
    merge_adapter   base + adapter -> a plain model folder (`models/files/merge.py`)

With a fresh adapter the policy equals the base. The base's parameters need no gradient. Other
trained parts (biases, whole modules) are saved with the adapters in PEFT's format.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel

from agentevo.config.model import ALL_LINEAR
from agentevo.config.vision import VISION_PARTS
from agentevo.errors import ModelError
from agentevo.models.checkpoint_manifest import verify_model
from agentevo.models.compute.linear import FastLinear, drop_packed, use_fast_linear
from agentevo.models.config_overrides import check_same, keep_overrides
from agentevo.models.token_rows import causal_model
from agentevo.models.vision.parts import has_tower, part_of
from agentevo.runtime.devices import seeded_by
from agentevo.runtime.extras import load_extra

if TYPE_CHECKING:
    from agentevo.config import LoraSection

CONFIG_FILE = "adapter_config.json"
ADAPTER = "default"
"""PEFT's name of a model's first adapter."""
_WARNS_OF_KERNELS = "bitsandbytes.backends.cpu.ops"
FRESH_INITS = (True, False, "gaussian", "orthogonal")
"""The values of PEFT's init_lora_weights that do not change the base."""


def peft() -> ModuleType:
    """Imports PEFT. Raises MissingExtraError if it is not installed. PEFT imports bitsandbytes,
    which warns on some CPUs that it lacks a kernel for packed weights. The warning is suppressed,
    because AgentEvo never packs them (models/files/load.py)."""
    logging.getLogger(_WARNS_OF_KERNELS).setLevel(logging.ERROR)
    return load_extra("peft", "lora", "model.lora")


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether PEFT's adapters surround the model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def check_lora(section: LoraSection) -> None:
    """Checks before anything is created that the packages are installed and that the folder has an
    adapter."""
    if not section.enabled:
        return
    peft()
    if section.adapter is not None:
        read_adapter_config(section.adapter)
    if section.quantize != "none":
        check_quantize(section.quantize)


def check_quantize(kind: str) -> None:
    """Raises MissingExtraError if bitsandbytes is not installed."""
    load_extra("bitsandbytes", "qlora", f"model.lora.quantize={kind}")


def add_adapter(model: PreTrainedModel, section: LoraSection, seed: int) -> PreTrainedModel:
    """Adds a fresh adapter to the model, or the saved adapter that the section names. Only the
    adapter is trained.

    The fresh weights depend only on `seed`, and other random generators do not change. Raises
    ModelError for layers that the model does not have.
    """
    if section.adapter is not None:
        return load_adapter(model, section.adapter, trainable=True)

    library = peft()
    special = _special_linears(model)
    targets, unreached = _vision_targets(model, section)
    for name in section.targets:
        if any(layer == name or layer.endswith(f".{name}") for layer in special):
            raise ModelError(
                f"model.lora: {name} returns more than a matrix product, so no adapter can be "
                "added to it: leave it out of model.lora.targets"
            )

    config = library.LoraConfig(
        task_type="CAUSAL_LM",
        r=section.rank,
        lora_alpha=section.alpha or 2 * section.rank,
        lora_dropout=section.dropout,
        target_modules=ALL_LINEAR if ALL_LINEAR in targets else targets,
        exclude_modules=[*section.exclude, *special, *unreached] or None,
        layers_to_transform=list(section.layers) or None,
        rank_pattern=dict(section.rank_pattern),
        alpha_pattern=dict(section.alpha_pattern),
        use_rslora=section.rslora,
        use_dora=section.dora,
        init_lora_weights=True if section.init == "default" else section.init,
        bias=section.bias,
        modules_to_save=list(section.modules_to_save) or None,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                seed
            )  # torch.manual_seed would also reseed every GPU
            adapted = library.get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"model.lora: {_one_line(error)}") from error

    _check_names(adapted, section)
    _check_ties(adapted)
    return adapted.eval()


def load_adapter(
    model: PreTrainedModel, folder: Path, name: str = ADAPTER, *, trainable: bool = False
) -> PreTrainedModel:
    """Adds the adapter that is saved in `folder` to the model under `name`, and activates it. Other
    adapters of the model stay.

    Raises ModelError for a folder without an adapter, for a kind other than LoRA, or for an adapter
    of another base.
    """
    library = peft()
    verify_model(folder)
    config = read_adapter_config(folder)
    check_same(folder, _overrides_of(model))

    if is_adapted(model) and name in adapter_names(model):
        raise ModelError(
            f"adapter {folder}: the model has one called {name!r} already: give it another name"
        )

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            if is_adapted(model):
                adapted: Any = model
                adapted.load_adapter(folder, adapter_name=name, is_trainable=trainable)
            else:
                adapted = library.PeftModel.from_pretrained(
                    model, folder, adapter_name=name, is_trainable=trainable, config=config
                )
    except (ValueError, RuntimeError, KeyError, UserWarning) as error:
        raise ModelError(
            f"adapter {folder} does not fit this base ({_one_line(error)}): set model.name to its "
            f"base, {config.base_model_name_or_path}"
        ) from error

    _check_ties(adapted)
    if any(
        type(module) is FastLinear for module in adapted.modules()
    ):  # the model is prepared already, so the new matrices have to be too
        use_fast_linear(adapted)

    use_adapter(adapted, name)
    return adapted.eval()


def adapter_names(model: PreTrainedModel) -> list[str]:
    """Names of the model's adapters; empty for a plain model."""
    return list(model.peft_config) if is_adapted(model) else []


def num_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """The numbers of trained and of all parameters. Quantized weights count as stored, so several
    weights may count as one."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad), sum(
        p.numel() for p in model.parameters()
    )


def use_adapter(model: PreTrainedModel, name: str) -> None:
    """Activates only the adapter `name`. This does not change which parameters are trained. For an
    engine, call `publish(version, adapter=name)` instead.

    Raises ModelError for an unknown name.
    """
    names = adapter_names(model)
    if name not in names:
        raise ModelError(
            f"the model has no adapter {name!r} (it has: {', '.join(names) or 'none'}): load it "
            "with load_adapter"
        )

    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    adapted: Any = model
    adapted.set_adapter(name)

    for parameter, needed in trained:
        parameter.requires_grad_(needed)

    drop_packed(model)


@contextmanager
def dropping_out(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """While the context is open, the adapters' dropout is active, with random numbers from `seed`.
    For supervised training."""
    layers = [module for module in model.modules() if hasattr(module, "lora_dropout")]
    with seeded_by(next(model.parameters()).device, seed):
        for layer in layers:
            layer.train()
        try:
            yield
        finally:
            for layer in layers:
                layer.eval()


def write_adapter(
    model: PreTrainedModel, folder: Path, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Writes the active adapter into an existing folder, in PEFT's format. `weights`: name ->
    tensor that is written instead of the model's."""
    adapted: Any = model
    name = adapted.active_adapter
    # Never save the base's embeddings: by default PEFT would ask the hub whether they have changed.
    adapted.save_pretrained(
        folder, selected_adapters=[name], save_embedding_layers=False, state_dict=weights
    )
    keep_overrides(folder, _overrides_of(model))

    if name != ADAPTER:  # PEFT writes adapters of other names into a subfolder
        for file in (folder / name).iterdir():
            file.rename(folder / file.name)
        (folder / name).rmdir()


def _overrides_of(model: PreTrainedModel) -> dict[str, Any]:
    """The `model.config_overrides` with which the model, or the base of its adapters, was
    loaded."""
    adapted: Any = model
    base = adapted.get_base_model() if is_adapted(model) else adapted
    return getattr(base, "config_overrides", {})


def read_adapter_config(folder: Path) -> Any:
    """The adapter's settings. Raises ModelError if there is no LoRA adapter, or one that fits no
    plain base."""
    if not is_adapter_folder(folder):
        raise ModelError(
            f"{folder} holds no adapter (no {CONFIG_FILE}): give the folder that PEFT's "
            "save_pretrained wrote"
        )

    try:
        config = peft().PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"adapter {folder}: {CONFIG_FILE} can't be read ({_one_line(error)}): save it again"
        ) from error

    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise ModelError(
            f"adapter {folder} is of kind {config.peft_type}, and only LoRA is supported"
        )

    if config.init_lora_weights not in FRESH_INITS:
        raise ModelError(
            f"adapter {folder} began with init_lora_weights={config.init_lora_weights!r}, which "
            "changes the base: "
            "save it by PEFT with path_initial_model_for_weight_conversion, which makes it a "
            "plain LoRA adapter"
        )

    return config


def _special_linears(model: PreTrainedModel) -> list[str]:
    """Linear layers with an architecture's own `forward`, such as PhiMoE's routers. An adapter
    can't be added to them, because their output is not a plain product."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and type(module).__module__.startswith("transformers.models.")
        and "forward" in vars(type(module))
    ]


def _vision_targets(model: PreTrainedModel, section: LoraSection) -> tuple[list[str], list[str]]:
    """For a model that sees, the targets with the names of layers in place of `tower` and
    `projector`, and the names of the layers there that get no adapter. A name reaches tower and
    projector only if the language model has no module of that name. Other models keep their
    targets. Raises ModelError for a part without linear layers and for an unknown name."""
    if not has_tower(model):
        return list(section.targets), []

    modules = dict(model.named_modules())
    parts = {name: part_of(model, name) for name in modules}
    reached: set[str] = set()
    for target in section.targets:
        if target in VISION_PARTS:
            layers = {
                name for name, part in parts.items() if part == target and _is_linear(modules[name])
            }
            if not layers:
                raise ModelError(
                    f"model.lora.targets: the {target} of {type(model).__name__} has no linear "
                    "layers: train it in full by model.lora.modules_to_save"
                )
            reached |= layers
        elif target != ALL_LINEAR:
            named = {name for name in modules if _ends_with(name, target)}
            if not named:
                raise _no_module(model, [target])
            reached |= named if all(parts[name] for name in named) else set()

    left_out = [
        name
        for name, part in parts.items()
        if part is not None
        and name not in reached
        and (
            isinstance(modules[name], torch.nn.Linear)
            or any(_ends_with(name, target) for target in section.targets)
        )
    ]
    if ALL_LINEAR in section.targets:
        return [ALL_LINEAR], left_out
    names = [name for name in section.targets if name not in VISION_PARTS]
    return [*names, *sorted(reached)], left_out


def _is_linear(module: torch.nn.Module) -> bool:
    """Whether an adapter can be added to this layer. The one within PyTorch's own attention is no
    module that is called."""
    return isinstance(module, torch.nn.Linear) and not isinstance(
        module, NonDynamicallyQuantizableLinear
    )


def _ends_with(name: str, key: str) -> bool:
    return name == key or name.endswith(f".{key}")


def _check_names(model: Any, section: LoraSection) -> None:
    """Raises ModelError for a name that matches no module; PEFT accepts a list if any of its names
    matches."""
    parts = {
        part
        for name, _ in model.get_base_model().named_modules()
        for part in (name, *name.split("."))
    }
    words = {ALL_LINEAR, *(VISION_PARTS if has_tower(model) else ())}
    targets = [
        *(name for name in section.targets if name not in words),
        *section.modules_to_save,
    ]
    unknown = [
        name
        for name in targets
        if not any(part == name or part.endswith(f".{name}") for part in parts)
    ]
    if unknown:
        raise _no_module(model, unknown)


def _no_module(model: Any, names: list[str]) -> ModelError:
    return ModelError(
        f"model.lora: the model has no module {', '.join(names)}: its linear layers are "
        f"{', '.join(_linear_names(model))}"
    )


def _linear_names(model: Any) -> list[str]:
    """The last components of the names of linear layers."""
    names = (
        name.split(".")
        for name, module in causal_model(model).named_modules()
        if isinstance(module, torch.nn.Linear)
    )
    return sorted(
        {
            parts[-2] if parts[-1] == "base_layer" else parts[-1]
            for parts in names
            if not {"lora_A", "lora_B"} & set(parts)
        }
    )


def _check_ties(model: Any) -> None:
    """Raises ModelError for an adapter on one of two layers that share one matrix. Such an adapter
    could not be merged, and would compute different results after saving."""
    inner = model.get_base_model()
    embedding = inner.get_input_embeddings()
    output = inner.get_output_embeddings()
    wrapped = [layer for layer in (embedding, output) if type(layer).__module__.startswith("peft.")]
    if wrapped and getattr(inner.config.get_text_config(), "tie_word_embeddings", False):
        raise ModelError(
            "model.lora: this model's input and output embeddings are one matrix: leave them out "
            "of targets and modules_to_save"
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
