"""Records the choices of a mixture's routers in one pass and replays them in another ("rollout
routing replay", arXiv 2510.11370, section 3).

`enable_routing(model)` replaces each router's `forward` with a `_Router`, and each decoder layer's
`forward` with a `RoutedLayer`. The plan of a pass decides what happens to the routers' choices:

    plan.routing = Recording(...)       records the routers' own choices
    plan.routing = RouterReplay(...)    replaces the choices by recorded ones

A `Recording` with a `replay` does both, token by token, if an engine computes context again.

A layer that is recomputed in the backward pass gets the same plan, so it chooses the same experts.
If a plan has no `routing`, the model's own routers decide.

This module does not reimplement any router's code. The code runs unchanged, except for one call of
`torch.topk`: the call whose indices the router returns. This module answers that call with the
recorded experts s and their scores x[s], instead of the highest scores. The router therefore
computes the weights from the present logits and normalises them as its architecture does, and the
gradient of the weights flows into the router:

    g_i = exp(z_i) / sum of exp(z_j) over j in s        (softmax, norm_topk_prob)

If the router agrees with the record, these are the same operations on the same numbers, to the last
bit. A trial pass, when the model is loaded, checks that a router is of this kind; any other router
is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentevo.errors import ModelError, TrainingError
from agentevo.models.compute.linear import PackedWeights
from agentevo.models.compute.rows import row_settings
from agentevo.models.compute.trial import pass_alone

KEY = "trainer.routing_replay"
ROUTER_NAMES = ("gate", "router")
"""The names that architectures use for the router, which chooses among the module `experts` of the
same layer."""
OWN = -1
"""The mark in a row of `RouterReplay` for tokens whose experts the router itself chooses. No loss
depends on predictions at these tokens."""
TRIAL_TOKENS = 8
"""The number of tokens in a trial pass of a model's routers."""


class Routing(Protocol):
    """Answers the calls of a pass's routers."""

    def answer_call(self, router: _Router, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The router's return value for these arguments."""
        ...


class Chooser(ABC):
    """A Routing that decides which experts are chosen."""

    def answer_call(self, router: _Router, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Routing.answer_call."""
        with _RouterChoice(self, router.layer, router.number):
            return router.own_answer(args, kwargs)

    @abstractmethod
    def choose(self, layer: int, own_choice: torch.Tensor) -> torch.Tensor:
        """Maps `own_choice` [T, K], the experts that router `layer` would choose, to the experts
        that the router must choose."""


class Routers(NamedTuple):
    """The properties that the routers of a model share."""

    layers: int
    top_k: int
    num_experts: int


_ROUTING: ContextVar[Routing | None] = ContextVar("routing", default=None)
"""The routing of the layer that is computed now."""
_TOPK = (torch.topk, torch.Tensor.topk)


class Recording(Chooser):
    """Records the chosen experts of one pass. The routers choose them or, for some tokens, a
    replay."""

    def __init__(self, routers: Routers, replay: RouterReplay | None = None) -> None:
        self.routers = routers
        self.replay = replay
        self._chosen: dict[int, torch.Tensor] = {}

    def choose(self, layer: int, own_choice: torch.Tensor) -> torch.Tensor:
        """See Chooser.choose."""
        chosen = own_choice if self.replay is None else self.replay.choose(layer, own_choice)
        self._chosen[layer] = chosen
        return chosen

    def rows(self) -> np.ndarray:
        """[T, layers, K] uint16 on the CPU. Raises ModelError if a router was not called."""
        chosen = _stack_layers(self._chosen, self.routers.layers)
        experts: np.ndarray = chosen.to(torch.int16).cpu().numpy().astype(np.uint16)
        return experts


class RouterReplay(Chooser):
    """Makes the routers choose recorded experts in one pass, or only notes the tokens for which
    the routers' own choices differ from the record."""

    def __init__(self, rows: torch.Tensor, *, apply: bool = True) -> None:
        """`rows`: [T, layers, K] int64, with OWN for the tokens that the router decides. If `apply`
        is false, the router decides all tokens."""
        self.rows = rows
        self.apply = apply
        self._differs: dict[int, torch.Tensor] = {}
        self._is_divided = False

    def choose(self, layer: int, own_choice: torch.Tensor) -> torch.Tensor:
        """See Chooser.choose. Raises TrainingError if the number of tokens differs from the
        recorded one."""
        recorded = self.rows[:, layer]
        if recorded.shape != own_choice.shape:
            raise TrainingError(
                f"{KEY}: router {layer} chooses {own_choice.shape[1]} experts for "
                f"{own_choice.shape[0]} tokens, and {recorded.shape[1]} for {recorded.shape[0]} "
                f"are recorded: this is a defect of AgentEvo; set {KEY}=none until it is fixed"
            )

        chosen = torch.where(recorded == OWN, own_choice, recorded)
        self._differs[layer] = (chosen.sort(-1).values != own_choice.sort(-1).values).any(-1)
        return chosen if self.apply else own_choice

    def differs(self) -> torch.Tensor | None:
        """[T, layers] bool: whether the router would have chosen other experts than the recorded
        ones. None if the pass is split among several processes. Raises ModelError if a router was
        not called."""
        return None if self._is_divided else _stack_layers(self._differs, self.rows.shape[1])

    def stretch(self, first: int, length: int) -> RouterReplay:
        """The replay for a process that has only these tokens of the pass. The router decides for
        tokens after the end of the record."""
        self._is_divided = True
        rows = self.rows[first : first + length]
        padding = rows.new_full((length - len(rows), *rows.shape[1:]), OWN)
        return RouterReplay(torch.cat([rows, padding]), apply=self.apply)


def _stack_layers(by_layer: dict[int, torch.Tensor], layers: int) -> torch.Tensor:
    if len(by_layer) != layers:
        raise ModelError(
            f"{KEY}: {len(by_layer)} of the model's {layers} routers ran in a pass: set "
            f"{KEY}=none for this model"
        )
    return torch.stack([by_layer[layer] for layer in range(layers)], dim=1)


class _RouterChoice(TorchFunctionMode):
    """Answers call `number` of topk in a router with the choice of `chooser`."""

    def __init__(self, chooser: Chooser, layer: int, number: int) -> None:
        super().__init__()
        self.chooser = chooser
        self.layer = layer
        self.number = number
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)

        self.calls += 1
        result = func(*args, **kwargs)
        if self.calls - 1 != self.number:
            return result

        chosen = self.chooser.choose(self.layer, result.indices)
        if chosen is result.indices:
            return result

        scores = args[0] if args else kwargs["input"]
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class _Router:
    """Replaces the `forward` of one router."""

    def __init__(self, router: nn.Module, layer: int) -> None:
        self.router = router
        self.layer = layer
        self.number = 0
        """The index of the call of topk that chooses experts. A trial determines this index and
        `routers`."""
        self.routers: Routers | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routing = _ROUTING.get()
        return (
            self.own_answer(args, kwargs)
            if routing is None
            else routing.answer_call(self, args, kwargs)
        )

    def own_answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The router's return value without any replay."""
        return type(self.router).forward(self.router, *args, **kwargs)


class RoutedLayer(PackedWeights):
    """Replaces the `forward` of a decoder layer that has routers."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _ROUTING.set(getattr(kwargs.get("plan"), "routing", None))
        try:
            return type(self.layer).forward(self.layer, *args, **kwargs)
        finally:
            _ROUTING.reset(token)

    def drop(self) -> None:
        """See PackedWeights.drop. Does nothing: this layer packs nothing."""


def routers_of(model: nn.Module) -> Routers | None:
    """The routers of a model after `enable_routing`, or of a copy of such a model."""
    stand_ins = (vars(module).get("forward") for module in model.modules())
    return next((stand_in.routers for stand_in in stand_ins if isinstance(stand_in, _Router)), None)


def enable_routing(model: PreTrainedModel) -> PreTrainedModel:
    """Lets passes of the model record and replay the choices of its routers, in place. Call this
    after `agentevo.models.compute.attention.prepare` and before `keep_activations`. Raises
    ModelError for a model without experts, and for routers that can't be replayed. The model
    then stays unchanged."""
    if row_settings(model) is not None:
        raise _refusal(model, "it computes rows by transformers' own code (trainer.compute)")
    layer_of_router = _find_routers(model)
    routers = [_Router(router, number) for number, router in enumerate(layer_of_router)]
    stand_ins: list[tuple[nn.Module, Any]] = [(wrapper.router, wrapper) for wrapper in routers]
    stand_ins += [(layer, RoutedLayer(layer)) for layer in dict.fromkeys(layer_of_router.values())]
    replaced = next((module for module, _ in stand_ins if "forward" in vars(module)), None)
    if replaced is not None:
        raise _refusal(
            model, f"the forward method of its {type(replaced).__name__} is already replaced"
        )

    for module, stand_in in stand_ins:
        module.forward = stand_in

    trial = _RouterTrial()
    try:
        with _TopkCounter() as counter:
            pass_alone(model, TRIAL_TOKENS, trial)
        facts = trial.facts(len(routers), counter.calls)
        if isinstance(facts, str):
            raise _refusal(model, facts)
    except BaseException:
        for module, _ in stand_ins:
            del module.forward
        raise

    for wrapper in routers:
        wrapper.routers = facts

    return model


def _find_routers(model: PreTrainedModel) -> dict[nn.Module, nn.Module]:
    """Router -> the decoder layer that contains it, in the order of the model's modules."""
    layer_of_router: dict[nn.Module, nn.Module] = {}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for block in layer.modules():
                names = [
                    name for name in ROUTER_NAMES if isinstance(block._modules.get(name), nn.Module)
                ]
                if "experts" in block._modules and len(names) == 1:
                    layer_of_router[block.get_submodule(names[0])] = layer

    if not layer_of_router:
        raise _refusal(model, "it has no block with both experts and a router")

    return layer_of_router


def _refusal(model: nn.Module, why: str) -> ModelError:
    inner: Any = model
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return ModelError(
        f"{KEY}: the routing of {type(inner).__name__} can't be replayed, because {why}: set "
        f"{KEY}=none, or choose a mixture such as Mixtral, Qwen3-MoE or DeepSeek-V3"
    )


class _TopkCounter(TorchFunctionMode):
    """Counts calls of topk, and stores their results."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[torch.Tensor, Any]] = []

    @property
    def calls(self) -> int:
        return len(self.results)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.results.append((args[0] if args else (kwargs or {})["input"], result))
        return result


class _ForcedChoice(Chooser):
    """Chooses the experts `experts` [T, K]."""

    def __init__(self, experts: torch.Tensor) -> None:
        self.experts = experts

    def choose(self, layer: int, own_choice: torch.Tensor) -> torch.Tensor:
        """See Chooser.choose."""
        return self.experts


class _RouterTrial:
    """Finds in one pass of the model how each router chooses, and checks that the router accepts
    other choices."""

    def __init__(self) -> None:
        self.calls = 0
        """The number of topk calls in routers."""
        self.problem = ""
        self._found: dict[int, Routers] = {}

    def facts(self, layers: int, calls: int) -> Routers | str:
        """The common properties of `layers` routers, or the reason why they can't be replayed.
        `calls`: the number of topk calls in the whole pass."""
        if self.problem:
            return self.problem
        if len(self._found) != layers:
            return f"only {len(self._found)} of its {layers} routers run"
        if calls != self.calls:
            return "it also chooses experts outside its routers"

        kinds = {routers._replace(layers=layers) for routers in self._found.values()}
        return kinds.pop() if len(kinds) == 1 else "its routers choose different numbers of experts"

    def answer_call(self, router: _Router, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Routing.answer_call. Returns the router's own answer."""
        with _TopkCounter() as counter:
            answer = router.own_answer(args, kwargs)

        outputs = _tensors(answer)
        places = [
            place
            for place, (_, top) in enumerate(counter.results)
            if any(x.shape == top.indices.shape and torch.equal(x, top.indices) for x in outputs)
        ]
        name = type(router.router).__name__
        if not places:
            self.problem = f"its {name} returns no experts that topk has chosen"
            return answer

        router.number = places[-1]
        scores, top = counter.results[router.number]
        problem = _forcing_problem(router, args, kwargs, top.indices, scores.shape[-1], outputs)
        if problem:
            self.problem = f"its {name} {problem}"

        self.calls += (1 + len(_SHIFTS)) * counter.calls
        self._found[router.layer] = Routers(1, top.indices.shape[1], scores.shape[-1])
        return answer


_SHIFTS = (0, 1, 2)
"""A trial forces a router to choose its own experts, shifted by each of these numbers."""


def _forcing_problem(
    router: _Router,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chosen: torch.Tensor,
    num_experts: int,
    outputs: list[torch.Tensor],
) -> str:
    """Forces a router to choose other experts than `chosen`, its own choice, which gave `outputs`.
    Returns the problem, or an empty text."""
    weights = _weights(outputs, chosen)
    if weights is None:
        return "returns no weights of the chosen experts"

    for shift in _SHIFTS:
        forced = ((chosen + shift) % num_experts).flip(-1)
        forced_outputs = _tensors(_ForcedChoice(forced).answer_call(router, args, kwargs))
        forced_weights = _weights(forced_outputs, forced)
        if forced_weights is None or not any(torch.equal(x, forced) for x in forced_outputs):
            return "chooses again among the results of topk"
        if not (torch.isfinite(forced_weights) & (forced_weights != 0)).all():
            return "gives no weight to experts of groups that it would not have chosen"

        tolerance = 1e-5 if forced_weights.dtype == torch.float32 else 2e-2
        if shift == 0 and not torch.allclose(forced_weights.flip(-1), weights, rtol=tolerance):
            return "does not compute its weights from the scores of the experts that it chooses"

    return ""


def _tensors(answer: Any) -> list[torch.Tensor]:
    parts = answer if isinstance(answer, tuple | list) else ()
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _weights(outputs: Sequence[torch.Tensor], chosen: torch.Tensor) -> torch.Tensor | None:
    """The last floating-point tensor that has the shape of the chosen experts."""
    candidates = [x for x in outputs if x.is_floating_point() and x.shape == chosen.shape]
    return candidates[-1] if candidates else None
