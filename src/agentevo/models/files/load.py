"""Loads model and tokenizer from a config section, and saves them to a folder.

`load_model` reads exactly what `save_model` wrote: the weights have the same bits (in the same
dtype), and the tokenizer encodes the same. The folder is in Hugging Face format, so every other
tool reads it too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agentevo.errors import ConfigError, ModelError
from agentevo.models.chat.model_template import set_template
from agentevo.models.checkpoint_manifest import verify_model
from agentevo.models.compute.adapters import add_adapter, check_quantize
from agentevo.models.compute.rows import accepted_inputs
from agentevo.models.config_overrides import model_config
from agentevo.models.files.cache import Progress
from agentevo.models.files.model_class import (
    class_of_type,
    has_image_processor,
    model_class,
    reads_images,
    remedy_for,
)
from agentevo.models.files.resolve import fetch
from agentevo.models.files.save import no_progress_bars
from agentevo.models.files.unused_tensors import remember_unused
from agentevo.models.files.weight_files import check_weight_files
from agentevo.models.tiny import make_tiny
from agentevo.models.tiny_vision import tiny_processor
from agentevo.models.token_rows import ban_tokens, causal_model, limit_to_tokens
from agentevo.models.vision.features import ARGUMENT
from agentevo.models.vision.parts import (
    SEEING_TYPES,
    forget_positions,
    freeze_parts,
    has_tower,
    set_processor,
    show_no_images,
)
from agentevo.models.vision.processor import VisionProcessor, load_processor
from agentevo.runtime.cpu_threads import check_threads
from agentevo.runtime.devices import find
from agentevo.runtime.parsing import read_json_object

if TYPE_CHECKING:
    from agentevo.config import ModelSection

TEMPLATE_FILE = "chat_template.json"
"""Older folders of vision-language models have their chat template here."""


@dataclass(frozen=True)
class LoadedModel:
    """A policy in memory."""

    model: PreTrainedModel
    """The model in eval mode, on its device, with transformers' own attention. With adapters, it is
    PEFT's model around it."""
    tokenizer: PreTrainedTokenizerBase
    name: str
    """The model's name in the recipe."""
    processor: VisionProcessor | None = None
    """Makes prompts with images. None for a text model."""


def load_model(
    section: ModelSection,
    *,
    corpus: Callable[[], Iterable[str]] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads the policy that the section names. `tiny` is created instead.

    `corpus` has the texts for the tiny policy's word tokenizer. `seed` decides the weights of a
    tiny policy or of fresh adapters. Other models use neither. Raises `ModelError` or
    `UnknownNameError`, with the remedy, if the model can't be found, read or put on the device.
    """
    loaded, folder = _load(section, corpus, seed, progress)
    set_template(loaded.tokenizer, section)
    return _with_processor(loaded, section, folder)


def _load(
    section: ModelSection,
    corpus: Callable[[], Iterable[str]] | None,
    seed: int,
    progress: Progress | None,
) -> tuple[LoadedModel, Path | None]:
    """The model, and the folder that it was read from."""
    device = find(section.device)
    if device.type == "cpu":
        check_threads(torch.get_num_threads())

    dtype: torch.dtype = getattr(torch, section.dtype)
    if section.name == "tiny":
        if corpus is None and section.tiny.tokenizer == "word":
            raise ModelError(
                "model.tiny.tokenizer=word takes its words from an environment or a file of tasks, "
                "and this run has neither: set model.tiny.tokenizer=byte"
            )

        model, tokenizer = make_tiny(section.tiny, corpus() if corpus else (), seed)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)

        limit_to_tokens(model, tokenizer)
        return LoadedModel(_place(model, device), tokenizer, section.name), None

    quantized = (
        {}
        if section.lora.quantize == "none"
        else _quantization_arguments(section.lora.quantize, dtype, device)
    )
    folder = fetch(section.name, progress)
    loaded = _from_pretrained(
        section.name,
        folder,
        dtype,
        device,
        quantized,
        section.config_overrides,
        images=section.vision.images,
    )
    if section.lora.enabled:
        loaded = replace(loaded, model=add_adapter(loaded.model, section.lora, seed))
    return loaded, folder


def _with_processor(loaded: LoadedModel, section: ModelSection, folder: Path | None) -> LoadedModel:
    """The model with its processor, and with the frozen parts of `model.vision`. Raises ModelError
    for such keys and a model without tower or image processor, and for a version of transformers
    whose models take no features."""
    if not section.vision.images:
        if has_tower(loaded.model):
            show_no_images(loaded.model)
            freeze_parts(loaded.model, section.vision.frozen)
        return loaded
    if section.name == "tiny" and section.tiny.vision:
        return _connect(loaded, tiny_processor(section, loaded.tokenizer), section)

    if folder is None or not has_tower(loaded.model) or not has_image_processor(folder):
        for key in section.vision.chosen:
            missing = "image processor" if has_tower(loaded.model) else "vision tower"
            raise ModelError(
                f"model.vision.{key} is for models that see, and model {section.name!r} has no "
                f"{missing}: remove it, or choose a model of the types "
                f"{', '.join(sorted(SEEING_TYPES))}"
            )
        return loaded

    if ARGUMENT not in accepted_inputs(loaded.model):
        raise ModelError(
            f"model {section.name!r}: this version of transformers passes no features of images "
            f"to its models ({ARGUMENT}): update it (pip install -U transformers)"
        )

    processor = load_processor(
        folder,
        causal_model(loaded.model).config,
        loaded.tokenizer,
        min_pixels=section.vision.min_pixels,
        max_pixels=section.vision.max_pixels,
    )
    return _connect(loaded, processor, section)


def _connect(loaded: LoadedModel, processor: VisionProcessor, section: ModelSection) -> LoadedModel:
    """The model with this processor, and with the frozen parts of `model.vision`."""
    set_processor(loaded.model, processor)
    ban_tokens(loaded.model, processor.vision_ids)
    forget_positions(loaded.model)
    freeze_parts(loaded.model, section.vision.frozen)
    return replace(loaded, processor=processor)


def load_base(name: str, overrides: Mapping[str, Any], *, images: bool = True) -> LoadedModel:
    """Loads a model with `overrides` of its configuration, in its own dtype, on the CPU. `images`:
    whether it is shown images."""
    device = torch.device("cpu")
    return _from_pretrained(name, fetch(name), "auto", device, {}, overrides, images=images)


def _quantization_arguments(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The arguments of from_pretrained for a base in 8 or 4 bits. 4 bits are NF4 with quantized
    constants (arXiv 2305.14314, section 3)."""
    check_quantize(kind)
    four = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }
    bits = (
        BitsAndBytesConfig(load_in_4bit=True, **four)
        if kind == "4bit"
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    return {"quantization_config": bits, "device_map": {"": device}}


def _keep_unpacked(model: PreTrainedModel) -> None:
    """Keeps 4-bit weights in the layout that supports gradients. On a CPU with avx512_bf16
    bitsandbytes packs a layer permanently in its first pass without gradients, and its product of
    packed weights has no backward pass."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            cast(Any, module).support_avx512bf16_for_cpu = False


def _from_pretrained(
    name: str,
    folder: Path,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device,
    quantized: dict[str, Any],
    overrides: Mapping[str, Any],
    *,
    images: bool = True,
) -> LoadedModel:
    options: dict[str, Any] = {"dtype": dtype, **quantized}
    if overrides:
        options["config"] = _config(name, folder, overrides)
    changed = f" with model.config_overrides={json.dumps(dict(overrides))}" if overrides else ""
    reader, kind = model_class(folder, images)
    model, tokenizer = _read_folder(f"model {name!r}{changed}", folder, reader, kind, **options)
    model.config_overrides = dict(overrides)
    _check_rows(name, model, tokenizer)
    limit_to_tokens(model, tokenizer)
    if not quantized:
        remember_unused(model, folder, overrides, reader)
    if quantized:  # already on the device; such weights can't be moved or converted
        _keep_unpacked(model)
        return LoadedModel(model.requires_grad_(False).eval(), tokenizer, name)

    return LoadedModel(_place(model, device), tokenizer, name)


def _check_rows(name: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"model {name!r}: its tokenizer has {len(tokenizer)} tokens, but the model has only "
            f"{rows}: they don't belong together"
        )


def hollow_model(section: ModelSection, folder: Path) -> PreTrainedModel:
    """The model that is saved in `folder`, with the section's settings but without adapters, on the
    device `meta`. Reads only config.json, and no weights. Raises ModelError."""
    shape = _config(section.name, folder, section.config_overrides)
    reader, kind = model_class(folder, section.vision.images)
    try:
        return make_hollow(section, shape, reader)
    except Exception as error:  # a damaged config.json may raise anything
        raise _unreadable(f"model {section.name!r}", folder, kind, error) from error


def make_hollow(
    section: ModelSection, shape: PretrainedConfig, reader: Any = None
) -> PreTrainedModel:
    """Creates the model of a configuration on the device `meta`, in the section's dtype and without
    adapters. `reader`: the class (models/files/model_class.py); by default that of the type.
    Raises any exception of the model's class."""
    if reader is None:
        reader = class_of_type(shape.model_type, section.vision.images)
    with torch.device("meta"):
        model: PreTrainedModel = reader.from_config(shape, dtype=getattr(torch, section.dtype))
    return model.eval()


def load_hollow(section: ModelSection, folder: Path, seed: int = 0) -> LoadedModel:
    """As `load_model`, but without weights: the tokenizer, and `hollow_model` with fresh adapters
    if the section has adapters. Raises ModelError for everything that loading would refuse, except
    problems with the weights."""
    model = hollow_model(section, folder)
    tokenizer = load_tokenizer(f"model {section.name!r}", folder)
    _check_rows(section.name, model, tokenizer)
    set_template(tokenizer, section)
    if section.lora.enabled and section.lora.adapter is None:
        model = add_adapter(model, section.lora, seed)
    return _with_processor(LoadedModel(model, tokenizer, section.name), section, folder)


def check_overrides(section: ModelSection, source: Path | str | None) -> None:
    """Raises ModelError for `config_overrides` that the model does not support, if its folder is on
    this machine. A hub's model is checked when it is loaded. `source`: the result of `resolve`;
    None if the model has not been downloaded."""
    if section.config_overrides and isinstance(source, Path):
        _config(section.name, source, section.config_overrides)


def _config(name: str, folder: Path, overrides: Mapping[str, Any]) -> PretrainedConfig:
    try:
        return model_config(folder, overrides)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {name!r}: the configuration in {folder} can't be read ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    """The message of a library's error, shortened, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def load_reward_model(
    name: str, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Loads a token-classification model with one output, in the policy's dtype and on its device.
    Raises ModelError if it can't be read, has other outputs or another vocabulary."""
    model, own_tokenizer = _read_folder(
        f"reward_model.name={name}",
        fetch(name, None),
        AutoModelForTokenClassification,
        "a token classifier",
        dtype=policy.dtype,
    )
    if model.config.num_labels != 1:
        raise ModelError(
            f"reward_model.name={name} has {model.config.num_labels} outputs per token, and a "
            "reward model needs one: train it with one"
        )

    if own_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"reward_model.name={name} has another vocabulary than the policy: it would read "
            "other words than the policy wrote"
        )

    return _place(model, policy.device)


def _read_folder(
    key: str, folder: Path, reader: Any, kind: str, **options: Any
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Reads a model with `reader` from a folder, and its tokenizer. Raises ModelError if the model
    is not `kind` or lacks weights, and TornError for a checkpoint whose files have changed."""
    verify_model(folder)
    check_weight_files(key, folder)
    try:
        with no_progress_bars(), torch.random.fork_rng(devices=[]):
            model, info = reader.from_pretrained(folder, output_loading_info=True, **options)
    except MemoryError:
        raise
    except Exception as error:  # a damaged config.json may raise anything
        raise _unreadable(key, folder, kind, error) from error

    tokenizer = load_tokenizer(key, folder)
    if info["missing_keys"] or info["mismatched_keys"]:
        bad_weights = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ModelError(
            f"{key}: {len(bad_weights)} weights are missing or of another shape (first: "
            f"{bad_weights[0]}): save or fetch it again"
        )

    return model, tokenizer


def load_tokenizer(key: str, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder. Raises ModelError, which begins with `key`."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a damaged tokenizer.json may raise anything
        raise ModelError(
            f"{key}: the tokenizer in {folder} can't be read ({_reason(error)}): save the model's "
            "own there with tokenizer.save_pretrained"
        ) from error

    has_own = (folder / "chat_template.jinja").is_file()  # which transformers reads
    if not has_own and (folder / TEMPLATE_FILE).is_file() and reads_images(folder):
        tokenizer.chat_template = _template_in(key, folder / TEMPLATE_FILE)
    return tokenizer


def _template_in(key: str, path: Path) -> str:
    try:
        template = read_json_object(path).get("chat_template")
    except ConfigError as error:
        raise ModelError(f"{key}: {error}") from error
    if not isinstance(template, str):
        raise ModelError(f"{key}: {path} has no text under chat_template: fetch it again")
    return template


def _unreadable(key: str, folder: Path, kind: str, error: Exception) -> ModelError:
    return ModelError(
        f"{key}: {folder} can't be read as {kind} ({_reason(error)}): {remedy_for(folder)}"
    )


def _place(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Moves the model to the device and dtype. Tensors that transformers keeps in float32 in a
    model of another dtype (position frequencies, a router's bias) stay in float32."""
    module: torch.nn.Module = model
    module.to(device=device).eval()
    return model
