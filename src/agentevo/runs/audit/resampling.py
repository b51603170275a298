"""Samples recorded tokens again: the same context, weights, random number and filters must give the
same token with the same log-prob.

A request's n-th token uses the n-th number of the request's own Philox generator, whatever the
version. So a single pass over the tree can check all tokens that a version sampled for a
trajectory. As long as every token agrees, the result equals sampling them one after the other.

If the engine recorded its choices of experts, the pass replays them.

The pass sums in another order than the engine's many small ones. So a random number that falls
within rounding of the border between two tokens may give the neighbouring token. Such a tie counts
as agreement. The tolerances limit how far the number may be from the border.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from agentevo.errors import GrammarError
from agentevo.inference.embedded.sampling import draw, filter_logits, keep_allowed, penalise
from agentevo.models.compute.routers import OWN, RouterReplay, Routers, routers_of
from agentevo.models.files.load import LoadedModel
from agentevo.models.grammar import Grammars
from agentevo.models.token_rows import token_logits
from agentevo.training.batching.images import ImageProvider, path_images
from agentevo.training.batching.packing import pack
from agentevo.training.kernels.output_layer import all_logits
from agentevo.types import Sample, SamplingParams, Trajectory, Turn, path_of
from agentevo.types.images import ImageFile
from agentevo.types.penalties import PenaltyChanges, TokenPenalties
from agentevo.types.routed_experts import join_experts

PIECE_TOKENS = 512
"""The number of tokens of a turn that are sampled together, which limits the logits in memory."""


class Tolerance(NamedTuple):
    """The tolerance for rounding."""

    uniform: float
    """The distance of a random number from the token's interval of the cumulative distribution. At
    temperature 0, the distance of logits."""
    logprob: float


EXACT = Tolerance(uniform=1e-4, logprob=1e-3)
"""The tolerance for float32 weights."""
COARSE = Tolerance(uniform=2e-2, logprob=0.25)
"""The tolerance for all other weights."""


DifferenceKind = Literal["token", "logprob", "prompt", "end", "reward", "record"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference between a replay and the record."""

    kind: DifferenceKind
    turn: int
    position: int
    """The index of the token in the turn's completion, or in its prompt for the kind `prompt`, from
    0."""
    what: str
    version: int | None = None
    token: int | None = None
    """The token in the record."""
    probability: float | None = None
    """The probability of that token in the replay."""
    drawn: int | None = None
    drawn_probability: float | None = None

    @property
    def place(self) -> tuple[int, bool, int]:
        """A sort key by position. A turn's prompt comes before its completion."""
        return self.turn, self.kind != "prompt", self.position


class Resampled(NamedTuple):
    """The result of resampling the tokens of one version in one trajectory."""

    num_tokens: int
    num_ties: int
    differences: list[Difference]


class _ResampledPiece(NamedTuple):
    turn: Turn
    positions: list[int]
    """The indices of the tokens in the turn's completion."""


def tolerance_of(model: PreTrainedModel) -> Tolerance:
    return EXACT if all(p.dtype == torch.float32 for p in model.parameters()) else COARSE


@torch.no_grad()
def resample(
    trajectory: Trajectory,
    version: int,
    loaded: LoadedModel,
    sampling: SamplingParams,
    images: Mapping[str, ImageFile] = MappingProxyType({}),
) -> Resampled:
    """Samples with `loaded` every token of `trajectory` that `version` sampled. `sampling` has the
    filters of the run. `images`: the files of the images in its prompts, by digest."""
    model = loaded.model
    device = next(model.parameters()).device
    uniforms = {
        turn.index: request_uniforms(turn.seed, len(turn.completion_ids))
        for turn in trajectory.turns
    }
    tolerance = tolerance_of(model)

    provider = ImageProvider.of(model)
    if provider is not None:
        provider.hold(images)
        _, refused, why = provider.admit([trajectory])
        if refused:
            return Resampled(0, 0, [Difference(kind="record", turn=0, position=0, what=why[0])])

    grammars = Grammars.of(model, loaded.tokenizer)
    try:
        masks = {
            turn.index: grammars.masks_of(turn.constraint, turn.completion_ids)
            for turn in trajectory.turns
            if turn.constraint is not None
        }
    except GrammarError as error:
        return Resampled(0, 0, [Difference(kind="record", turn=0, position=0, what=str(error))])

    num_tokens = num_ties = 0
    differences: list[Difference] = []
    for piece in _pieces(trajectory, version):
        logits = _logits(trajectory, piece, model, device, provider)  # [positions, V]
        if piece.turn.index in masks:
            of_turn = masks[piece.turn.index]
            keep_allowed(logits, [of_turn.table[of_turn.rows[n]] for n in piece.positions])

        if piece.turn.penalties is not None:
            penalise(logits, _changes(trajectory, piece))

        changed = piece.turn.overrides.given() if piece.turn.overrides is not None else {}
        params = msgspec.structs.replace(
            sampling, **{"temperature": piece.turn.temperature, **changed}
        )
        numbers = [float(uniforms[piece.turn.index][position]) for position in piece.positions]
        tokens, logprobs = draw(logits.clone(), [params] * len(numbers), numbers)
        num_tokens += len(tokens)

        for row, position in enumerate(piece.positions):
            same = tokens[row] == piece.turn.completion_ids[position]
            if same and abs(logprobs[row] - piece.turn.logprobs[position]) <= tolerance.logprob:
                continue

            difference = _compare(
                piece.turn,
                position,
                logits[row],
                params,
                numbers[row],
                tokens[row],
                tolerance,
                loaded,
            )
            num_ties += difference is None
            differences += [difference] if difference is not None else []

    return Resampled(num_tokens, num_ties, differences)


def request_uniforms(seed: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1): the random numbers of an engine request, one for each token."""
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(count)


def _pieces(trajectory: Trajectory, version: int) -> Iterator[_ResampledPiece]:
    for turn in trajectory.turns:
        positions = [
            position for position, drawn_by in enumerate(turn.versions) if drawn_by == version
        ]
        for start in range(0, len(positions), PIECE_TOKENS):
            yield _ResampledPiece(turn, positions[start : start + PIECE_TOKENS])


def _changes(trajectory: Trajectory, piece: _ResampledPiece) -> list[PenaltyChanges]:
    """The effect of the turn's penalties at each position."""
    context = trajectory.context_ids(piece.turn.index)
    completion_ids = piece.turn.completion_ids
    parts = [(len(context), None), (len(completion_ids), piece.turn.penalties)]
    penalties = TokenPenalties.join(parts)
    ids = np.array([*context, *completion_ids])
    assert penalties is not None
    return list(penalties.changes(ids, np.array(piece.positions) + len(context)).values())


def _logits(
    trajectory: Trajectory,
    piece: _ResampledPiece,
    model: PreTrainedModel,
    device: torch.device,
    provider: ImageProvider | None,
) -> torch.Tensor:
    """[positions, tokens] float32, the logits that predict each position."""
    context = trajectory.context_ids(piece.turn.index)
    completion_ids = piece.turn.completion_ids
    ids = [*context, *completion_ids[: piece.positions[-1] + 1]]
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[[len(context) + position for position in piece.positions]] = True
    sample = Sample.given(trajectory.id, trajectory.group_id, ids, mask, piece.turn.temperature)
    spans, processor = path_images(trajectory.id, path_of(trajectory.turns, piece.turn.index))
    sample = msgspec.structs.replace(sample, images=spans, processor=processor)
    batch = pack([sample], device, images=provider)
    version = piece.turn.versions[piece.positions[0]]
    routed = version_rows(trajectory, piece.turn, version, routers_of(model))
    if routed is not None:
        rows = routed[: len(ids)][np.argsort(batch.plan.tree.paths[0])]
        batch = batch.with_routing(RouterReplay(torch.as_tensor(rows, device=device)))

    return token_logits(model, all_logits(model, batch))[batch.rows].float()


def version_rows(
    trajectory: Trajectory, turn: Turn, version: int, routers: Routers | None
) -> np.ndarray | None:
    """[T, layers, top_k] int64 of context and completion. A token has its recorded experts if that
    version sampled the token after it. All other tokens have OWN, because that version computed
    their keys and values again. None if nothing was recorded, or if the model can't replay it."""
    path = path_of(trajectory.turns, turn.index)
    if routers is None or any(path_turn.routed_experts is None for path_turn in path):
        return None

    parts = [path_turn.routed_experts for path_turn in path if path_turn.routed_experts is not None]
    rows = join_experts(parts).array().astype(np.int64)
    next_drawn_by = [  # a prompt's tokens were computed for the token that is sampled after them
        drawn_by
        for path_turn in path
        for drawn_by in (*[path_turn.versions[0]] * len(path_turn.prompt_ids), *path_turn.versions)
    ][1:]
    rows[np.array(next_drawn_by) != version] = OWN
    return np.concatenate([rows, np.full((1, *rows.shape[1:]), OWN)])


def _compare(
    turn: Turn,
    position: int,
    logits: torch.Tensor,
    params: SamplingParams,
    uniform: float,
    drawn: int,
    tolerance: Tolerance,
    loaded: LoadedModel,
) -> Difference | None:
    """None if the recorded token equals the replayed token within rounding, and has the recorded
    log-prob."""
    token = turn.completion_ids[position]
    version = turn.versions[position]
    if token >= len(logits):
        what = f"the record has token {token}, the vocabulary only {len(logits)}"
        return Difference(
            kind="token",
            turn=turn.index,
            position=position,
            version=version,
            token=token,
            what=what,
        )

    probabilities = _distribution(logits, params)
    distance = _distance(logits, probabilities, token, uniform, greedy=params.temperature == 0)

    recorded_probability = float(probabilities[token])
    drawn_probability = float(probabilities[drawn])
    properties: Mapping[str, float | int] = {
        "turn": turn.index,
        "position": position,
        "version": version,
        "token": token,
        "probability": recorded_probability,
        "drawn": drawn,
        "drawn_probability": drawn_probability,
    }
    place = f"turn {turn.index}, token {position}, version {version}"
    if distance > tolerance.uniform:
        tokenizer = loaded.tokenizer
        texts = [
            repr(str(tokenizer.decode([chosen]))) if chosen < len(tokenizer) else "no text"
            for chosen in (token, drawn)
        ]
        what = (
            f"{place}: the record has {token} ({texts[0]}, probability "
            f"{recorded_probability:.4%}), the replay samples {drawn} ({texts[1]}, "
            f"{drawn_probability:.4%})"
        )
        return Difference(kind="token", what=what, **properties)  # type: ignore[arg-type]

    replayed_logprob = 0.0 if params.temperature == 0 else float(probabilities[token].log())
    if abs(replayed_logprob - turn.logprobs[position]) > tolerance.logprob:
        what = (
            f"{place}: token {token} has the log-prob {turn.logprobs[position]:.5f} in the "
            f"record, {replayed_logprob:.5f} in the replay"
        )
        return Difference(kind="logprob", what=what, **properties)  # type: ignore[arg-type]

    return None


def _distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[V] float64, the distribution of the token. At temperature 0 the softmax, for readers."""
    if params.temperature > 0:
        logits = filter_logits(logits / params.temperature, params)
    return torch.softmax(logits.double(), dim=-1)


def _distance(
    logits: torch.Tensor, probabilities: torch.Tensor, token: int, uniform: float, *, greedy: bool
) -> float:
    """The distance of the random number from the interval of `token` (0: inside). At temperature 0,
    the distance of its logit from the highest."""
    if greedy:
        return float(logits.max() - logits[token])
    if not float(probabilities[token]) > 0:
        return 1.0
    end = float(probabilities[: token + 1].sum())
    return max(end - float(probabilities[token]) - uniform, uniform - end, 0.0)
