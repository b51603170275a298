"""Which part of the policy is trained: the whole model, or LoRA adapters on a frozen base. Keys
have the same meaning as in PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentevo.runtime.section import Section, Texts, expand_home

ALL_LINEAR = "all-linear"
Rank = Annotated[int, Field(ge=1)]


class LoraSection(Section):
    """LoRA adapters (arXiv 2106.09685) by PEFT (`pip install 'agentevo[lora]'`): y = W x + scale *
    B A x with W frozen and A, B trained. Off while rank is 0 and adapter is null. Learning rates
    are usually about ten times those of full fine-tuning."""

    rank: int = Field(default=0, ge=0)
    """Rows of A and columns of B (PEFT's r). 0 trains the whole model."""
    alpha: int | None = Field(default=None, ge=1)
    """scale = alpha / rank (PEFT's lora_alpha). Default: twice the rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is zeroed in supervised training (cold_start). RL and
    evaluation use no dropout: their log-probs are those that tokens were sampled with."""
    targets: Texts = Field(default=(ALL_LINEAR,), min_length=1)
    """Names of the layers that get an adapter, such as [q_proj, v_proj] (PEFT's target_modules);
    `all-linear`: every linear layer except the output layer."""
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

        if ALL_LINEAR in self.targets and len(self.targets) > 1:
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
