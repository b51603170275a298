"""Merges an adapter and its base into one plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from agentevo.errors import ModelError
from agentevo.models.compute.adapters import load_adapter, read_adapter_config
from agentevo.models.config_overrides import adapter_overrides
from agentevo.models.files.load import load_base
from agentevo.models.files.model_class import has_image_processor
from agentevo.models.files.save import save_model
from agentevo.models.vision.parts import has_tower, set_processor
from agentevo.models.vision.processor import load_processor


def merge_adapter(folder: Path, out: Path, base: str | None = None) -> Path:
    """Writes base + adapter to `out` as a plain model folder in the base's dtype; returns `out`.

    `base`: the path of the base, if it is no longer the one that the adapter names. Raises
    ModelError before anything is written.
    """
    config = read_adapter_config(folder)
    name = base or config.base_model_name_or_path
    if not name:
        raise ModelError(f"adapter {folder} does not name its base: give it with --base")

    images = has_image_processor(folder)
    loaded = load_base(str(name), adapter_overrides(folder), images=images)
    merged = load_adapter(loaded.model, folder)
    adapted: Any = merged

    tokenizer: PreTrainedTokenizerBase = loaded.tokenizer
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder)

    if has_tower(loaded.model) and images:
        set_processor(loaded.model, load_processor(folder, loaded.model.config, tokenizer))

    return save_model(adapted.merge_and_unload(safe_merge=True), tokenizer, out)
