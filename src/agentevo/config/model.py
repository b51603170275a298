"""The section `model` of a recipe: the policy that is trained, its adapters, its chat template, and
the shape of a policy with random weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from agentevo.config.template_variables import TemplateVariables
from agentevo.config.vision import VISION_PARTS, VisionSection
from agentevo.errors import shown
from agentevo.runtime.device_names import DeviceName
from agentevo.runtime.section import Section, Texts, expand_home

ALL_LINEAR = "all-linear"
Rank = Annotated[int, Field(ge=1)]


class LoraSection(Section):
    """LoRA adapters (arXiv 2106.09685) by PEFT (`pip install 'agentevo[lora]'`): y = W x + scale *
    B A x with W frozen and A, B trained. Keys mean the same as in PEFT. Off while rank is 0 and
    adapter is null. Learning rates are usually about ten times those of full fine-tuning."""

    rank: int = Field(default=0, ge=0)
    """Rows of A and columns of B (PEFT's r). 0 trains the whole model."""
    alpha: int | None = Field(default=None, ge=1)
    """scale = alpha / rank (PEFT's lora_alpha). Default: twice the rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is zeroed in supervised training (cold_start). RL and
    evaluation use no dropout: their log-probs are those that tokens were sampled with."""
    targets: Texts = Field(default=(ALL_LINEAR,), min_length=1)
    """Names of the layers that get an adapter, such as [q_proj, v_proj] (PEFT's target_modules);
    `all-linear`: every linear layer except the output layer. In a model that sees, a name reaches
    layers of the language model, or, if it has none of that name, of tower and projector. `tower`
    and `projector`: every linear layer there, for example [all-linear, projector]."""
    exclude: Texts = ()
    """Names of layers that get no adapter, although targets includes them (PEFT's
    exclude_modules)."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Decoder layers that get adapters, from 0 (PEFT's layers_to_transform). Empty: all. Needs
    the names of layers in targets."""
    rank_pattern: dict[str, Rank] = Field(default={})
    """Other ranks for some layers: name (or regular expression) -> rank."""
    alpha_pattern: dict[str, Rank] = Field(default={})
    """Other alphas for some layers: name (or regular expression) -> alpha."""
    rslora: bool = False
    """scale = alpha / sqrt(rank) (arXiv 2312.03732)."""
    dora: bool = False
    """Train the magnitude of each output separately from its direction (arXiv 2402.09353). Steps
    are slower; generation costs the same."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """Initial values of A and B. At first, the policy always equals the base. `default`: A
    uniform, B zero; `gaussian`: A normal, B zero; `orthogonal`: both random with B A = 0 (even
    ranks)."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which bias vectors of the base are trained as well: none, all, or those of layers with
    adapters."""
    modules_to_save: Texts = ()
    """Names of modules that are trained in full and saved with the adapter."""
    adapter: Annotated[Path | None, expand_home("give the folder of a saved adapter, or null")] = (
        None
    )
    """Folder of a saved adapter (adapter_config.json) to start from, instead of a new one. It
    brings its own rank and other settings."""
    quantize: Literal["none", "8bit", "4bit"] = "none"
    """Keep the base in 8 or 4 bits (QLoRA, arXiv 2305.14314) by bitsandbytes: less memory, more
    time. Also on a CPU. In 8 bits, the rounding of a token's activations depends on the other
    tokens in the computation, so sampled and recomputed log-probs differ (by tenths of a nat), and
    the default of `algorithm.importance` is token_tis. In 4 bits they agree up to the dtype's
    rounding."""

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        fields = type(self).model_fields
        option_keys = [key for key in fields if key not in ("rank", "adapter", "quantize")]
        chosen = [
            key
            for key in option_keys
            if getattr(self, key) != fields[key].get_default(call_default_factory=True)
        ]
        if self.adapter is not None and (self.rank or chosen):
            idle_keys = ", ".join([*(["rank"] if self.rank else []), *chosen])
            raise ValueError(
                f"adapter={self.adapter} brings its own settings, so {idle_keys} would do nothing: "
                "remove it, or remove adapter"
            )

        if not self.enabled and (chosen or self.quantize != "none"):
            idle_keys = ", ".join([*chosen, *(["quantize"] if self.quantize != "none" else [])])
            raise ValueError(
                f"{idle_keys} is for adapters, but there are none while rank is 0: set rank=16, or "
                "remove it"
            )

        if ALL_LINEAR in self.targets and not {ALL_LINEAR, *VISION_PARTS} >= set(self.targets):
            raise ValueError(
                f"targets: {ALL_LINEAR} includes the others: give it alone, or names only"
            )

        if self.layers and ALL_LINEAR in self.targets:
            raise ValueError(
                "layers needs targets by name: set "
                "targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
            )

        if self.init == "orthogonal" and any(
            rank % 2 for rank in (self.rank, *self.rank_pattern.values())
        ):
            raise ValueError(
                "init=orthogonal needs even ranks: raise odd ones by 1, or set init=default"
            )

        return self

    @property
    def enabled(self) -> bool:
        """Whether adapters are trained instead of the whole model."""
        return self.rank > 0 or self.adapter is not None


MAX_TINY_PARAMETERS = 1_000_000_000
"""A larger policy with random weights is probably a typing error."""


class TinyModel(Section):
    """Shape of the tiny policy, a model with random weights that each run creates
    (`model.name=tiny`): a Llama, or a Qwen2-VL with `vision`."""

    hidden_size: int = Field(default=192, ge=16)
    """Width of the residual stream, in units."""
    num_layers: int = Field(default=4, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Attention heads; must divide hidden_size."""
    context_length: int = Field(default=2048, ge=32)
    """Maximum length of a sequence, in tokens."""
    tokenizer: Literal["word", "byte"] = "word"
    """`word`: one token per word and symbol of the environment's texts; `byte`: one token per byte,
    for any text."""

    vision: bool = False
    """Whether the policy sees. Each square of 16 x 16 pixels of an image is a token, and images of
    more than 65,536 pixels are scaled down."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_heads "
                f"{self.num_heads}: "
                f"choose for example hidden_size={64 * self.num_heads}"
            )

        if self.num_parameters > MAX_TINY_PARAMETERS:
            raise ValueError(
                f"hidden_size={self.hidden_size} and num_layers={self.num_layers} make "
                f"{self.num_parameters:,} parameters, and a tiny policy has at most "
                f"{MAX_TINY_PARAMETERS:,}: choose smaller values, or a pretrained model"
            )

        return self

    @property
    def intermediate_size(self) -> int:
        """Width of the blocks' inner layers, in units."""
        return -(-self.hidden_size // 12) * 32

    @property
    def num_parameters(self) -> int:
        """Number of weights in the blocks, without the token embeddings."""
        per_unit = 4 * self.hidden_size + 3 * self.intermediate_size + 2
        return self.num_layers * self.hidden_size * per_unit


PLAIN = "plain"
CHAT_TEMPLATES = ("hermes", PLAIN, "deepseek_v32", "deepseek_v4")
"""Chat templates that AgentEvo ships, by name (models/chat/templates)."""
MAX_TEMPLATE = 2**20
"""Bytes of a chat template's file."""


class ModelSection(Section):
    """The policy that is trained."""

    name: str = "smollm2-135m-instruct"
    """A local folder, a known small model (`agentevo list models`), a Hugging Face hub name, a
    ModelScope name (`modelscope:OWNER/NAME@REVISION`), or `tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of weights and computation. On a CPU, float32 is the best choice and the
    fastest."""
    chat_template: str | None = None
    """Chat template that replaces the tokenizer's: `hermes` (ChatML with tools, for models whose
    template does not support tools), `plain` (questions and answers as plain text, for base models
    without a template), a Jinja file, which is copied into the run's config.yaml, or the template
    itself. It is saved with the checkpoints."""
    template: TemplateVariables = Field(default_factory=dict)
    """Values for variables of the chat template, for example `{enable_thinking: false}` or
    `{reasoning_effort: low}`. Every rendering uses them; a request to the gateway can replace them
    with `chat_template_kwargs`. Variables that the template does not read are refused. They are
    saved with the checkpoints, as a part of the template."""
    device: DeviceName = "auto"
    """The device: an NVIDIA or AMD GPU (`cuda`), a Huawei Ascend (`npu`), an Intel GPU (`xpu`), an
    Apple GPU (`mps`), or the `cpu`. `auto` uses the first available of cuda, npu and xpu, else the
    CPU."""
    config_overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """New values for keys of the model's config.json, for example `{rope_scaling: {rope_type: yarn,
    factor: 4.0, original_max_position_embeddings: 8192}, max_position_embeddings: 32768}`. Keys
    that the model's transformers class does not have are refused. The values are saved with the
    checkpoints."""
    tiny: TinyModel = TinyModel()
    """Shape of the tiny policy, used when name is `tiny`."""
    lora: LoraSection = LoraSection()
    """LoRA adapters instead of full fine-tuning."""
    vision: VisionSection = VisionSection()
    """For models that see: which parts are trained, and the size of images."""

    @field_validator("chat_template")
    @classmethod
    def _template_is_read(cls, value: str | None) -> str | None:
        if value is None or value in CHAT_TEMPLATES:
            return value
        is_text = "{%" in value or "{{" in value
        template = value if is_text else _template_of(os.path.expanduser(value))
        if "${" in template:
            raise ValueError("the template has ${ in it, which a recipe would fill in: write $ {")
        return template

    @model_validator(mode="after")
    def _lora_fits(self) -> Self:
        if self.config_overrides and self.name == "tiny":
            raise ValueError("config_overrides works only with pretrained models: set tiny.* keys")

        if self.vision.chosen and self.name == "tiny" and not self.tiny.vision:
            raise ValueError(
                "vision is for models that see, and the tiny policy reads text only: set "
                "tiny.vision=true, or another name"
            )

        if self.lora.enabled and self.name == "tiny":
            raise ValueError(
                "lora needs a pretrained base model, and the tiny policy's weights are random: "
                "set lora.rank=0, or another name"
            )

        return self


def _template_of(path: str) -> str:
    """The template in a file. Raises ValueError if it can't be a chat template."""
    template_names = ", ".join(CHAT_TEMPLATES)
    if not os.path.isfile(path):  # pathlib's raises for what can be no path
        raise ValueError(
            f"{shown(path)} is not a file: give a Jinja file, or a template's name "
            f"({template_names})"
        )

    try:
        with open(path, "rb") as file:
            text = file.read(MAX_TEMPLATE + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{shown(path)} can't be read: {error}") from error

    if len(text) > MAX_TEMPLATE or ("{%" not in text and "{{" not in text):
        raise ValueError(
            f"{shown(path)} is not a Jinja template: give one that writes the messages"
        )

    return text
