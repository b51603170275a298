"""Turns that were drawn under penalties and biases are trained under them: the trainer's
distribution is the one that the engine drew from, in ratios, gradients and entropy."""

from __future__ import annotations

import copy
import json
from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from constrained import END, FACT, alone, complete, params, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import soak

from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.errors import EngineError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.grammar import Grammars, unpack_mask
from agentevo.runs.audit.resampling import resample
from agentevo.store.blobs import pack_turns, unpack_turns
from agentevo.store.codec import _encode_turn
from agentevo.training.batching.constrained import masks_of
from agentevo.training.batching.packing import pack
from agentevo.training.batching.samples import trajectory_rows
from agentevo.training.kernels import cells, linear_logprobs
from agentevo.training.kernels.output_layer import token_logprobs, token_logprobs_and_squares
from agentevo.training.pairs import answer_of
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.trainer import Trainer
from agentevo.types import Constraint, SamplingParams, Trajectory, Turn
from agentevo.types.penalties import Penalties, PenaltyState, TokenPenalties
from examples import examples

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PROMPT = list(range(40, 60))
STILL = TrainerSection(max_grad_norm=1e9, warmup_steps=0, learning_rate=1e-9)
KINDS = {
    "presence": Penalties(presence=1.5),
    "frequency": Penalties(frequency=-0.7),
    "repetition": Penalties(repetition=1.8),
    "bias": Penalties(logit_bias=((41, 3.0), (70, 4.0), (90, -100.0))),
    "all": Penalties(presence=0.5, frequency=0.3, repetition=0.6, logit_bias=((45, 2.0),)),
    "none": None,
}


@cache
def attempts() -> tuple[Trajectory, ...]:
    """One prompt answered under each kind of penalties, one of them under a grammar besides; each
    answer is followed by a turn under the next kind."""
    loaded = tiny_policy()
    engine = TorchEngine(loaded.model, loaded.tokenizer)
    kinds = list(KINDS.values())

    def asked(number, kind):
        grammar = FACT if number == 4 else ""
        sharp = {"max_new_tokens": 24, "temperature": 0.8, "penalties": kind}
        return params(grammar, number, **sharp)

    firsts = [asked(number, kind) for number, kind in enumerate(kinds)]
    answers = complete(engine, [(PROMPT, first) for first in firsts])
    seconds = [asked(10 + n, kind) for n, kind in enumerate(kinds[1:] + kinds[:1])]
    prompts = [[*PROMPT, *a.ids, 30, 31] for a in answers]
    more = complete(engine, list(zip(prompts, seconds, strict=True)))

    return tuple(
        Trajectory(
            id=f"t{n}",
            task_id="task",
            group_id="group",
            attempt=n,
            turns=[
                turn_of(0, None, PROMPT, answers[n], firsts[n]),
                turn_of(1, 0, [30, 31], more[n], seconds[n]),
            ],
            reward=float(n % 2),
        )
        for n in range(len(kinds))
    )


def turn_of(index, parent, prompt, completion, asked) -> Turn:
    constraint = Constraint(grammar=asked.grammar, end_ids=(END,), masks=completion.masks)
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=prompt,
        completion_ids=completion.ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        temperature=asked.temperature,
        seed=asked.seed,
        constraint=constraint if asked.grammar else None,
        penalties=asked.penalties,
    )


def samples_of():
    loaded = tiny_policy()
    masks, _ = masks_of(attempts(), Grammars.of(loaded.model, loaded.tokenizer))
    return [row.sample for t in attempts() for row in trajectory_rows(t, masks.get(t.id, {}))]


def changed(logits, penalties, before, drawn):
    """The formulas of agentevo/penalties.py."""
    counts = torch.bincount(torch.tensor(drawn, dtype=torch.long), minlength=len(logits))
    seen = torch.zeros(len(logits), dtype=torch.bool)
    seen[[*before, *drawn]] = True
    bias = torch.zeros(len(logits))
    for token, added in penalties.logit_bias:
        bias[token] = added

    repeated = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    repeated = torch.where(seen, repeated, logits)
    return repeated - penalties.frequency * counts - penalties.presence * (counts > 0) + bias


def by_hand(model):
    """Log-prob, entropy and chance of two equal draws of every drawn token, [M] each."""
    logprobs = []
    entropies = []
    squares = []
    loaded = tiny_policy()
    grammars = Grammars.of(loaded.model, loaded.tokenizer)
    for trajectory in attempts():
        for turn in trajectory.turns:
            before = trajectory.context_ids(turn.index)
            said = list(turn.completion_ids)
            logits = model(input_ids=torch.tensor([before + said])).logits[0]
            masks = turn.constraint and grammars.masks_of(turn.constraint, said)
            for place, token in enumerate(said):
                row = logits[len(before) + place - 1]
                if turn.penalties is not None:
                    row = changed(row, turn.penalties, before, said[:place])

                if masks:
                    kept = torch.from_numpy(unpack_mask(masks.table[masks.rows[place]], len(row)))
                    row = row.masked_fill(~kept, -1e30)

                logp = (row / turn.temperature).log_softmax(0)
                logprobs.append(logp[token])
                entropies.append(-(logp.exp() * logp).sum())
                squares.append(logp.exp().square().sum())

    return torch.stack(logprobs), torch.stack(entropies), torch.stack(squares)


def test_the_engine_draws_from_the_changed_distribution_and_records_it():
    with torch.no_grad():
        expected = by_hand(alone())[0].tolist()
    drawn = [lp for t in attempts() for turn in t.turns for lp in turn.logprobs]
    assert drawn == pytest.approx(expected, abs=1e-5)
    banned = attempts()[3].turns[0]
    assert 90 not in banned.completion_ids and {41, 70} & set(banned.completion_ids)


@pytest.mark.parametrize("merge", [True, *soak(False)])
@pytest.mark.parametrize("path", ["linear", "frozen output layer", "logits", "small cells"])
def test_log_probs_entropy_and_gradient_are_those_of_the_changed_logits(path, merge, monkeypatch):
    model = copy.deepcopy(tiny_policy().model)
    plain = alone()
    if path == "logits":  # an output layer with a hook is more than one product
        model.lm_head.register_forward_hook(lambda *_: None)
    elif path == "frozen output layer":
        monkeypatch.setattr(linear_logprobs, "KEPT_BYTES", 0)
        for one in (model, plain):
            one.lm_head.weight.requires_grad_(False)
    elif path == "small cells":
        monkeypatch.setattr(cells, "CELL_BYTES", {})
        monkeypatch.setattr(cells, "OTHER_CELL_BYTES", 64)
        monkeypatch.setattr(cells, "CELL_ROWS", {"cpu": 3})

    batch = pack(samples_of(), CPU, merge=merge)
    logp, entropy = token_logprobs(model, batch)
    expected, of_entropy, of_squares = by_hand(plain)
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy[batch.rows], of_entropy, rtol=0, atol=1e-5)
    _, squares = token_logprobs_and_squares(model, batch)
    torch.testing.assert_close(squares[batch.rows], of_squares, rtol=0, atol=1e-5)

    weights = torch.linspace(-1, 2, len(logp))
    for of_token, entropies in ((logp, entropy[batch.rows]), (expected, of_entropy)):
        used = entropies.sum() * 0.1 if path != "frozen output layer" else 0.0
        ((weights * of_token).sum() + used).backward()

    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_on_policy_the_ratio_is_one_and_a_frozen_reference_is_at_distance_0():
    loaded = tiny_policy()
    section = AlgorithmSection(kl_coef=0.1, old_logprobs="recomputed")
    for algorithm in (section, AlgorithmSection()):
        model = copy.deepcopy(loaded.model)
        trainer = Trainer(model, STILL, algorithm, grammars=Grammars.of(model, loaded.tokenizer))
        trainer.begin()
        prepared = trainer.prepare(attempts())
        metrics = prepared.metrics | trainer.step(prepared.samples)
        assert metrics["actor/logprob_diff_max"] < 1e-5

        if algorithm is section:
            assert metrics["rollout/logprob_gap_max"] < 1e-5
            assert abs(metrics["actor/kl_loss"]) < 1e-6

    free = [
        msgspec.structs.replace(
            t, turns=[msgspec.structs.replace(turn, penalties=None) for turn in t.turns]
        )
        for t in attempts()
    ]
    model = copy.deepcopy(loaded.model)
    trainer = Trainer(
        model, STILL, AlgorithmSection(), grammars=Grammars.of(model, loaded.tokenizer)
    )
    assert trainer.step(trainer.prepare(free).samples)["actor/logprob_diff_max"] > 0.5


def test_answers_are_compared_under_the_models_own_distribution():
    """DPO applies neither the masks nor the penalties that an answer was drawn under."""
    answers = [answer_of(t) for t in attempts()]
    assert all(row.penalties is None and row.masks is None for a in answers for row in a.rows)

    model = copy.deepcopy(tiny_policy().model)
    section = AlgorithmSection(name="dpo", pairs_per_group=1)
    trainer = PreferenceTrainer(model, STILL, section, temperature=0.8)
    trainer.begin()
    (pair,) = trainer.prepare(attempts()).samples
    metrics = trainer.step([pair])

    def said_alone(answer):
        (row,) = answer.rows
        logits = alone()(input_ids=torch.as_tensor(row.ids)[None]).logits[0]
        logp = torch.log_softmax(logits[:-1] / 0.8, -1)
        return float(logp.gather(1, torch.as_tensor(row.ids)[1:, None])[row.loss_mask[1:], 0].sum())

    with torch.no_grad():
        assert metrics["preference/logps/chosen"] == pytest.approx(
            said_alone(pair.chosen), rel=1e-5
        )


def test_drawn_again_the_tokens_are_the_same_and_without_penalties_they_are_not():
    loaded = tiny_policy()
    sampling = SamplingParams(stop_token_ids=(END,))
    for trajectory in attempts():
        again = resample(trajectory, 0, loaded, sampling)
        assert again.num_tokens == trajectory.num_completion_tokens() and not again.differences

    first = attempts()[0]
    free = [msgspec.structs.replace(turn, penalties=None) for turn in first.turns]
    assert resample(msgspec.structs.replace(first, turns=free), 0, loaded, sampling).differences


def test_company_and_temperature_0_change_nothing():
    loaded = tiny_policy()
    engine = TorchEngine(loaded.model, loaded.tokenizer)
    for kind in KINDS.values():
        one = params("", 3, penalties=kind, max_new_tokens=12)
        by_itself = complete(engine, [(PROMPT, one)])
        beside = complete(
            engine, [(PROMPT, one), (PROMPT, params("", 4)), (PROMPT[:9], params("", 5))]
        )
        assert by_itself[0] == beside[0]

    greedy = params("", 3, penalties=KINDS["bias"], temperature=0.0, max_new_tokens=4)
    (said,) = complete(engine, [(PROMPT, greedy)])
    assert said.logprobs == [0.0] * len(said.ids)


def test_a_store_keeps_them():
    for trajectory in attempts():
        encoded = [_encode_turn(turn, turn.index) for turn in trajectory.turns]
        json.dumps([turn.get("penalties") for turn in encoded])
        for unpacked, turn in zip(unpack_turns(pack_turns(encoded)), trajectory.turns, strict=True):
            assert unpacked.penalties == turn.penalties


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"presence": 2.1}, "presence"),
        ({"frequency": float("nan")}, "frequency"),
        ({"repetition": 0.0}, "repetition"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": tuple((n, 1.0) for n in range(1025))}, "at most 1024"),
        ({"logit_bias": ((10**6, 1.0),)}, "token 1000000"),
    ],
)
def test_an_engine_refuses_what_no_distribution_follows_from(wrong, why):
    engine = TorchEngine(tiny_policy().model, tiny_policy().tokenizer)
    with pytest.raises(EngineError, match=why):
        complete(engine, [(PROMPT, params("", penalties=Penalties(**wrong)))])


@settings(max_examples=examples(50), deadline=None)
@given(
    ids=st.lists(st.integers(0, 9), min_size=6, max_size=20),
    trained=st.lists(st.booleans(), min_size=20, max_size=20),
    cut=st.integers(1, 4),
)
def test_changes_of_a_text_are_those_of_its_completion_on_its_way(ids, trained, cut):
    penalties = KINDS["all"]
    parts = [(cut, None), (len(ids) - cut, penalties)]
    places = np.array([p for p in range(cut, len(ids)) if trained[p]], dtype=np.int64)
    found = TokenPenalties.join(parts).changes(np.array(ids), places)
    assert list(found) == places.tolist()

    for place in places.tolist():
        state = PenaltyState(penalties, ids[:cut])
        for token in ids[cut:place]:
            state.take(token)
        for ours, theirs in zip(found[place], state.changes(), strict=True):
            assert sorted(ours.tolist()) == sorted(theirs.tolist())
