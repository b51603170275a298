"""One attention function for every transformers model, controlled by a plan.

`prepare(model)` makes the model call it. Each forward pass then carries `plan=...`, an object that
knows which token may attend to which:

    inference: `CacheAttention` (inference/embedded/cache_attention.py), new tokens against a
               key-value cache
    training:  `TreeAttention` (training/kernels/tree_attention.py), packed sequences that
               share prefixes

The tokens of all sequences are in one row [1, tokens] without padding, and only the plan separates
the sequences. Generation and training therefore use the same model module. If a model would then
compute something else than in transformers, it is refused (models/compute/trial.py).

Activation functions that compute every value by the same instructions at every position.

On a CPU, PyTorch computes functions like SiLU and GELU in vector registers. The
remainder at the end of a tensor, or of a thread's part, is computed by other instructions, whose
results differ in the last digits. A row's values would then depend on the row's position in the
batch. `Aligned` pads with zeros so that there is no remainder.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from agentevo.errors import ModelError
from agentevo.models.compute.fused import use_fused_layers
from agentevo.models.compute.fused_decoder import use_fused_decoder
from agentevo.models.compute.image_trial import try_out_images
from agentevo.models.compute.linear import use_fast_linear
from agentevo.models.compute.positions import limit_positions
from agentevo.models.compute.query_scales import name_positions, query_factors, scales_by_place
from agentevo.models.compute.rows import use_rows
from agentevo.models.compute.trial import REMEDY, PlanMissingError, check_layer_types, try_out
from agentevo.models.compute.windows import Chunk, Window
from agentevo.models.vision.parts import attention_of, language_modules, set_attention

Compute = Literal["auto", "tree", "rows"]
"""How a model is computed: see `prepare`."""
VECTOR_MULTIPLE = 64
"""A multiple of the length of one iteration of PyTorch's vector loops, in values."""
GRAIN = 32768
"""at::internal::GRAIN_SIZE: the minimum number of values that PyTorch gives each thread."""
GELU_GRAIN = 16384
"""The number of values beyond which PyTorch splits GELU among all threads."""


class Aligned:
    """Replaces the `forward` of one activation module in passes without gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        function: Any = type(self.module).forward
        if torch.is_grad_enabled() or x.device.type != "cpu" or not x.numel():
            return function(self.module, x)

        rows = x.reshape(-1, x.shape[-1])
        num_rows, width = rows.shape
        padding = -width % VECTOR_MULTIPLE
        total_rows = _even_rows(num_rows, width + padding, torch.get_num_threads())
        if not padding and total_rows == num_rows:
            return function(self.module, x)

        padded = pad(rows, (0, padding, 0, total_rows - num_rows))
        return function(self.module, padded)[:num_rows, :width].reshape(x.shape)


@cache
def _even_rows(rows: int, width: int, threads: int) -> int:
    """The fewest rows, at least `rows`, that PyTorch splits among threads at whole vectors."""
    for total_rows in itertools.count(rows):
        num_values = total_rows * width
        possible_parts = {
            min(threads, -(-num_values // GRAIN)),
            threads if num_values > GELU_GRAIN else 1,
        }
        if all(-(-num_values // num_parts) % VECTOR_MULTIPLE == 0 for num_parts in possible_parts):
            return total_rows
    raise AssertionError("unreachable: some number of rows always splits at whole vectors")


def align_activations(model: nn.Module) -> int:
    """Replaces the `forward` of every activation module of `model` by an `Aligned`, except in a
    vision tower and its projector. Returns the number of replaced modules."""
    num_replaced = 0
    for module in language_modules(model):
        if type(module).__module__.startswith(("transformers.activations", "torch.nn.modules.act")):
            module.forward = Aligned(module)
            num_replaced += 1
    return num_replaced


NAME = "agentevo"
OWN_MASK = (
    "the model makes an attention mask of its own, which AgentEvo's attention would ignore: "
    f"{REMEDY}"
)


class AttentionPlan(Protocol):
    """The attention pattern of one forward pass: which token attends to which."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: Window,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, Hkv, D] -> [T, H, D]. `sinks` [H]: a score of each head beside
        those of the keys, with a value of zeros (attention sinks, arXiv 2309.17453, learned as in
        gpt-oss). A pass calls this method in a fixed order, for most models once per layer."""
        ...


@dataclass(frozen=True)
class _WindowMask:
    """A placeholder for the mask of layers with a window."""

    window: int | Chunk

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModelError(OWN_MASK)


@torch.compiler.disable
def _attention(  # noqa: PLR0913, PLR0917 (transformers' attention interface)
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | _WindowMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    row_positions: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T,
    H, D]."""
    if plan is None:
        raise PlanMissingError(
            "this model was prepared for AgentEvo: call it with plan=..., or "
            "model.set_attn_implementation('sdpa') to use it alone"
        )

    window: Window = sliding_window
    if isinstance(attention_mask, _WindowMask):
        # As eager attention does: some models don't pass the window to the function.
        window = attention_mask.window
    elif attention_mask is not None:
        raise ModelError(OWN_MASK)

    if scales_by_place(module):
        if row_positions is None:
            raise ModelError(f"queries are scaled by their place in the row: {REMEDY}")
        factors = query_factors(module, row_positions)  # [1, T]
        query = (query * factors[:, None, :, None]).to(query.dtype)

    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    dim = query.shape[-1]
    value_dim = value.shape[-1]
    if dim != value_dim:  # DeepSeek's latent attention: zeros add nothing to scores and outputs
        query, key, value = (
            F.pad(x, (0, max(dim, value_dim) - x.shape[-1])) for x in (query, key, value)
        )

    out = plan.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        window,
        softcap,
        s_aux,
    )
    return out[..., :value_dim].unsqueeze(0).contiguous(), None  # some models call `view` on it


def _mask(
    *args: Any, config: Any = None, local_size: int | None = None, **kwargs: Any
) -> _WindowMask | None:
    """Builds no mask tensor, because the plan knows which token attends to which."""
    if local_size is None:
        return None
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return _WindowMask(Chunk(local_size) if chunked else local_size)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def prepare(
    model: PreTrainedModel, *, on_cpu: bool | None = None, compute: Compute = "auto"
) -> PreTrainedModel:
    """Chooses how the model is computed, in place; parameters stay the same objects.

    tree: its attention uses this module and, on a CPU, its linear layers use oneDNN. A vision
          tower keeps transformers' attention and layers.
    rows: its own forward pass, see models/compute/rows.py.
    auto: tree, or rows if the tree would compute something else than transformers
          (models/compute/trial.py, image_trial.py).

    `on_cpu`: whether the model will compute on a CPU, if it is elsewhere now. Raises ModelError for
    a model that can't be computed in this way.
    """
    limit_positions(model)
    implementation = attention_of(model)
    reason = "trainer.compute=rows"
    if compute != "rows":
        try:
            _use_tree(model)
        except ModelError as error:
            if compute == "tree":
                raise
            reason = str(error).removesuffix(REMEDY).rstrip(": ")
        else:
            if on_cpu is None:
                on_cpu = next(model.parameters()).device.type == "cpu"
            if on_cpu and use_fast_linear(model):
                use_fused_layers(model)
                use_fused_decoder(model)
                align_activations(model)
            return model

        set_attention(model, implementation)

    use_rows(model, reason)
    return model


def _use_tree(model: PreTrainedModel) -> None:
    """Makes the model's attention use this module. Raises ModelError for an architecture that does
    not use transformers' attention interface, or that would compute something else than in
    transformers."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(model).__name__} does not use transformers' attention interface, which "
            f"AgentEvo needs: {REMEDY}"
        )

    check_layer_types(model)
    name_positions(model)
    try_out(model, NAME)
    try_out_images(model, NAME)
