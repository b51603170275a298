"""Checks by a trial pass whether AgentEvo computes the same as the model in transformers.

A model's name and config say little about what its layers do, and transformers adds new models
every month. So `try_out` runs a short text twice. The first pass is transformers' own: the text
alone, with the model's eager attention. The second is that of training and the engine: in one row
with another text, with a token at the last position that the model supports, and with the second
half computed from a cache. The log-probs must agree.

These features cause a difference: attention in both directions, positions that are counted rather
than given, frequencies that depend on the longest text of a pass, biases and masks that an
attention function does not receive, convolutions, recurrences, shifted tokens, experts that drop
tokens. The short text can't detect features that begin only at some length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from agentevo.errors import ModelError
from agentevo.models.compute.positions import context_length
from agentevo.models.compute.windows import Window, first_seen
from agentevo.models.token_rows import causal_model
from agentevo.models.vision.parts import processor_of, set_attention

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""The layer types that attention plans can compute. The others of transformers' `layer_types` are
recurrences and convolutions, or attention patterns that no plan supports (indexes)."""
EAGER = "eager"
"""The model's own attention, computed by the formula."""
TEXT_TOKENS = 14
"""The number of tokens of the text."""
OTHER_TOKENS = 9
"""The number of tokens of each other text of the trial."""
CACHED_TOKENS = 6
"""The number of tokens of the text that the second pass reads from its cache."""
FARTHEST_POSITION = 1 << 16
"""The last position to try if the model has no limit."""
TOLERANCE = 1e-3
"""The largest root mean square difference of log-probs in float32, relative to their standard
deviation."""
ROUGH_TOLERANCE = 0.1
"""The same in half precision or quantized, where rounding alone may send a token to another
expert."""
REMEDY = (
    "choose a Llama, Qwen2, Qwen3, Mistral, Gemma or similar decoder whose layers are "
    "attention and feed-forward"
)


class PlanMissingError(ModelError):
    """A prepared model's attention was called without a plan."""


class KeyValueSize(NamedTuple):
    """The sizes of the tensors that one call of attention stores for a token."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass
class _SelfOnlyPlan:
    """A plan in which every token attends only to itself."""

    sizes: list[KeyValueSize] = field(default_factory=list)
    """The sizes of each call so far."""
    routing: Any = None
    """See models/compute/routers.py."""

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
        self.sizes.append(KeyValueSize(k.shape[1], k.shape[2], v.shape[2]))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


class PackedTextsPlan:
    """A plan in which a token sees the preceding tokens of its text, in this pass and in the pass
    `before`."""

    def __init__(self, tokens: Sequence[TrialToken], before: PackedTextsPlan | None = None) -> None:
        self.tokens = tokens
        self.before = before
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hidden: dict[Window, torch.Tensor] = {}

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
        self.kept.append((k, v))
        sources = list(self.tokens)
        if self.before is not None:
            old_k, old_v = self.before.kept[len(self.kept) - 1]
            k = torch.cat([old_k, k])
            v = torch.cat([old_v, v])
            sources = [*self.before.tokens, *sources]

        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)

        scores = scores.masked_fill(self._hides(sources, window).to(q.device), float("-inf"))
        if sinks is not None:
            beside = sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, beside], dim=-1)

        weights = scores.softmax(-1)[..., : len(sources)]
        return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)

    def _hides(self, sources: Sequence[TrialToken], window: Window) -> torch.Tensor:
        """[T, sources]: which tokens a token does not see. The sources of all layers are the
        same."""
        if window not in self._hidden:
            hidden = [[not query.sees(key, window) for key in sources] for query in self.tokens]
            self._hidden[window] = torch.tensor(hidden)
        return self._hidden[window]


class TrialToken(NamedTuple):
    """A token of a pass of the trial."""

    text: int
    """The number of its text."""
    place: int
    """The number of tokens before it in its text."""
    id: int

    def sees(self, key: TrialToken, window: Window) -> bool:
        first = 0 if window is None else first_seen(self.place, window)
        return self.text == key.text and first <= key.place <= self.place


def check_layer_types(model: PreTrainedModel) -> None:
    """Raises ModelError for kinds of layers that attention plans do not support."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    strange = kinds - LAYER_TYPES
    if kinds >= {"sliding_attention", "chunked_attention"}:  # their masks look alike
        strange = kinds - {"full_attention"}
    if strange:
        raise ModelError(
            f"{model_name(model)} has layers of the kind {', '.join(sorted(strange))}, which "
            f"AgentEvo can't pack: {REMEDY}"
        )


def key_value_sizes(model: PreTrainedModel) -> list[KeyValueSize]:
    """The sizes that each call of attention stores for a token, in the order of a pass of a
    prepared model."""
    plan = _SelfOnlyPlan()
    with evaluating(model):
        pass_logits(model, [TrialToken(0, 0, 0)], plan, [0])
    return plan.sizes


def pass_alone(model: PreTrainedModel, count: int, routing: Any) -> None:
    """Runs a pass of a prepared model over `count` tokens, each of which attends only to itself.
    `routing` receives the calls of its routers (models/compute/routers.py)."""
    last = model.config.get_text_config().vocab_size - 1
    ids = torch.linspace(min(2, last), last, count).long().tolist()
    with evaluating(model):
        pass_logits(
            model,
            [TrialToken(number, 0, id) for number, id in enumerate(ids)],
            _SelfOnlyPlan(routing=routing),
            [0],
        )


def try_out(model: PreTrainedModel, implementation: str) -> None:
    """Raises ModelError if AgentEvo would compute the model differently from transformers.
    Afterwards the model has the attention `implementation`, which is AgentEvo's. A model on the
    device `meta` is not checked."""
    if next(model.parameters()).is_meta:
        set_attention(model, implementation)
        return

    text, *other_texts = trial_texts(model)
    with evaluating(model):
        reference = _own_logits(model, text)
        set_attention(model, implementation)
        far = min(context_length(model.config), FARTHEST_POSITION) - 1
        difference = logprob_difference(_packed_logits(model, text, other_texts, far), reference)
        if not difference <= trial_tolerance(model):
            cause = _cause(model, implementation, text, other_texts, reference)
            raise ModelError(f"{model_name(model)}: {cause or _unlike(difference)}: {REMEDY}")


def _cause(
    model: PreTrainedModel,
    implementation: str,
    text: list[int],
    other_texts: list[list[int]],
    reference: torch.Tensor,
) -> str | None:
    """Why the two computations differ, if the cause can be found."""
    tolerance = trial_tolerance(model)
    set_attention(model, implementation)
    repeated = [TrialToken(number, 0, text[3]) for number in range(OTHER_TOKENS)]
    around = [
        TrialToken(OTHER_TOKENS + number, 0, id) for number, id in enumerate(text[:OTHER_TOKENS])
    ]
    mixed = [token for pair in zip(repeated, around, strict=True) for token in pair]
    copies = pass_logits(model, mixed, _SelfOnlyPlan(), list(range(0, len(mixed), 2)))
    if not logprob_difference(copies, copies[:1].expand_as(copies)) <= tolerance:
        return (
            "what it predicts after a token depends on the tokens around it by another way than "
            "attention (convolution, recurrence, shifted tokens, or experts that drop tokens), "
            "so packed sequences would mix"
        )

    if logprob_difference(_packed_logits(model, text, other_texts, None), reference) <= tolerance:
        return "what it predicts depends on the longest sequence of a pass"

    changed = _own_logits(model, [*text[:-1], other_texts[0][0]])
    if not logprob_difference(changed[:-1], reference[:-1]) <= tolerance:
        return (
            "a token sees those after it (is_decoder in its config.json is false, or it is no "
            "causal language model)"
        )

    positioned = _own_logits(model, text, position_ids=list(range(TEXT_TOKENS)))
    if not logprob_difference(positioned, reference) <= tolerance:
        return (
            "its positions do not begin at 0, so training and the engine would use other "
            "positions than transformers"
        )

    return None


def _unlike(difference: float) -> str:
    return (
        "in one row with others, from a cache, a text gets other log-probs than transformers' own "
        f"pass gives it alone (by {difference:.2g} of their spread)"
    )


def trial_texts(model: PreTrainedModel) -> list[list[int]]:
    """The text that is compared, and two others. They show no images."""
    last = model.config.get_text_config().vocab_size - 1
    ids = torch.linspace(min(2, last), last, TEXT_TOKENS + 2 * OTHER_TOKENS).long().tolist()
    processor = processor_of(model)
    if processor is not None:
        plain = [id for id in range(min(2, last), last + 1) if id not in processor.vision_ids]
        ids = [plain[number * (len(plain) - 1) // (len(ids) - 1)] for number in range(len(ids))]
    return [
        ids[OTHER_TOKENS : OTHER_TOKENS + TEXT_TOKENS],
        ids[:OTHER_TOKENS],
        ids[OTHER_TOKENS + TEXT_TOKENS :],
    ]


def _own_logits(model: PreTrainedModel, text: list[int], **lists: list[int]) -> torch.Tensor:
    """The logits [TEXT_TOKENS, V] by transformers alone. `lists` has further arguments, with one
    number per token."""
    set_attention(model, EAGER)
    device = next(model.parameters()).device
    inputs = {
        name: torch.tensor([numbers], device=device)
        for name, numbers in {"input_ids": text, **lists}.items()
    }
    return run_pass(model, "transformers' own pass", **inputs, use_cache=False)


def _packed_logits(
    model: PreTrainedModel, text: list[int], other_texts: list[list[int]], far: int | None
) -> torch.Tensor:
    """The logits [TEXT_TOKENS, V] of the text in two passes. The second pass reads the keys of the
    first one from a cache. `far`: the position of an extra token in the passes."""
    first, second = (
        [TrialToken(n, place, id) for place, id in enumerate(ids)]
        for n, ids in enumerate(other_texts, 1)
    )
    tokens = [TrialToken(0, place, id) for place, id in enumerate(text)]
    far_tokens = [] if far is None else [TrialToken(3, far, text[0])]
    plan = PackedTextsPlan([*first, *tokens[:CACHED_TOKENS], *far_tokens])
    first_logits = pass_logits(
        model, plan.tokens, plan, list(range(OTHER_TOKENS, OTHER_TOKENS + CACHED_TOKENS))
    )
    later = PackedTextsPlan([*far_tokens, *tokens[CACHED_TOKENS:], *second], before=plan)
    start = len(far_tokens)
    rest_logits = pass_logits(
        model, later.tokens, later, list(range(start, start + TEXT_TOKENS - CACHED_TOKENS))
    )
    return torch.cat([first_logits, rest_logits])


def pass_logits(
    model: PreTrainedModel,
    tokens: Sequence[TrialToken],
    plan: Any,
    rows: list[int],
    **arguments: Any,
) -> torch.Tensor:
    """The logits [rows, V] of a pass under a plan, requested in the same way as in training and the
    engine. `arguments`: further ones of the model; without `position_ids`, they are the places."""
    device = next(model.parameters()).device
    # Models that score every token, such as reward models, have no `logits_to_keep`.
    scores = causal_model(model).get_output_embeddings() is None
    options = {} if scores else {"logits_to_keep": torch.tensor(rows, device=device)}
    logits = run_pass(
        model,
        "a pass over sequences side by side",
        **{
            "input_ids": torch.tensor([[token.id for token in tokens]], device=device),
            "position_ids": torch.tensor([[token.place for token in tokens]], device=device),
            "use_cache": False,
            "plan": plan,
            **options,
            **arguments,
        },
    )
    logits = logits[rows] if scores else logits
    if len(logits) != len(rows):
        raise ModelError(
            f"{model_name(model)} gives logits of {len(logits)} tokens instead of the {len(rows)} "
            f"requested ones (logits_to_keep): {REMEDY}"
        )

    return logits


def run_pass(model: PreTrainedModel, what: str, **inputs: Any) -> torch.Tensor:
    run: Any = model
    try:
        with torch.enable_grad():  # otherwise fast layers keep packed weights
            return run(**inputs).logits.detach()[0].float()
    except PlanMissingError as error:
        raise ModelError(
            f"{model_name(model)} does not pass its arguments on to its attention, so AgentEvo can't "
            f"set which token may see which: {REMEDY}"
        ) from error
    except ModelError as error:
        raise ModelError(f"{model_name(model)}: {error}") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ModelError(f"{model_name(model)}: {what} fails ({reason}): {REMEDY}") from error


def logprob_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square difference of log-probs, relative to the standard deviation of the
    expected ones. If there is one output per token, of scores instead of log-probs."""
    axis = -1 if logits.shape[-1] > 1 else 0
    if axis == -1:
        logits = logits.log_softmax(-1)
        expected = expected.log_softmax(-1)
    spread = (expected - expected.mean(axis, keepdim=True)).square().mean().sqrt()
    return float((logits - expected).square().mean().sqrt() / spread.clamp_min(1e-12))


def trial_tolerance(model: PreTrainedModel) -> float:
    rough = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    return ROUGH_TOLERANCE if rough or getattr(model, "is_quantized", False) else TOLERANCE


def model_name(model: PreTrainedModel) -> str:
    return type(causal_model(model)).__name__


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """While the context is open, the model is in eval mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
