"""Whether sequences can lie side by side in one row: only if tokens meet nowhere but in attention,
where the plan keeps them apart.

Found out by trying: in a pass in which every token attends to itself alone, copies of one token
must all predict the same, whatever lies around and before them. With a convolution, a recurrence, a
shift of tokens, or experts that drop what exceeds their capacity they don't.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from agentevo.errors import ModelError

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""The layer types that attention plans can compute. The others of transformers' `layer_types` are
recurrences and convolutions, or choose what a token sees by a rule that no plan knows (chunks,
indexes)."""
NUM_COPIES = 8
REMEDY = (
    "choose a Llama, Qwen2, Qwen3, Mistral, Gemma or similar decoder whose layers are "
    "attention and feed-forward"
)


class _Alone:
    """A plan by which every token sees itself only."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def check_layer_types(model: PreTrainedModel) -> None:
    """Raises ModelError for kinds of layers that no attention plan can do."""
    strange = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - LAYER_TYPES
    if strange:
        raise ModelError(
            f"{type(model).__name__} has layers of the kind {', '.join(sorted(strange))}, which "
            f"AgentEvo can't pack: {REMEDY}"
        )


def check_isolation(model: PreTrainedModel) -> None:
    """Raises ModelError for a model whose tokens meet outside of attention. It must be prepared;
    one on the device `meta` passes."""
    parameter = next(model.parameters())
    if parameter.is_meta:
        return
    ids = torch.linspace(2, model.config.get_text_config().vocab_size - 1, 2 * NUM_COPIES).long()
    ids[::2] = ids[NUM_COPIES]
    run: Any = model
    with (
        _evaluating(model),
        torch.enable_grad(),
    ):  # without gradient, fast layers would keep packed copies of the weights
        outputs = run(
            input_ids=ids.to(parameter.device)[None],
            position_ids=torch.zeros_like(ids, device=parameter.device)[None],
            use_cache=False,
            plan=_Alone(),
        )
    copies = outputs.logits.detach()[0, ::2].float()
    tolerance = 0.03 if parameter.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if not torch.allclose(
        copies, copies[:1].expand_as(copies), rtol=0, atol=tolerance * float(copies.abs().max())
    ):
        raise ModelError(
            f"{type(model).__name__}: what it predicts after a token depends on the tokens "
            "around it by another way than attention "
            "(convolution, recurrence, shifted tokens, or experts that drop tokens), so packed "
            f"sequences would mix: {REMEDY}"
        )


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Nothing drops out."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
