"""Turns that were drawn under a grammar are trained under it: the trainer's distribution is the one
that the engine drew from, in ratios, gradients, reference and entropy."""

from __future__ import annotations

import copy
from functools import cache

import msgspec
import pytest
import torch
from constrained import CALL, END, FACT, alone, complete, params, tiny_policy
from slow import soak

from agentevo.config import AlgorithmSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.inference.embedded.torch_engine import TorchEngine
from agentevo.models.grammar import Grammars, unpack_mask
from agentevo.runs.audit.resampling import resample
from agentevo.training.batching.constrained import masks_of
from agentevo.training.batching.packing import pack
from agentevo.training.batching.samples import trajectory_rows
from agentevo.training.kernels import cells, linear_logprobs
from agentevo.training.kernels.output_layer import (
    token_logprobs,
    token_logprobs_and_squares,
)
from agentevo.training.trainer import Trainer
from agentevo.types import Constraint, SamplingParams, Trajectory, Turn

CPU = torch.device("cpu")
PROMPT = list(range(40, 60))
STILL = TrainerSection(max_grad_norm=1e9, warmup_steps=0, learning_rate=1e-9)


def turn_of(index, parent, prompt, completion, asked) -> Turn:
    constraint = (
        Constraint(grammar=asked.grammar, end_ids=(END,), masks=completion.masks)
        if asked.grammar
        else None
    )
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=prompt,
        completion_ids=completion.ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        seed=asked.seed,
        constraint=constraint,
    )


@cache
def attempts() -> tuple[Trajectory, ...]:
    """One prompt, answered under two grammars and under none; and each answer is followed by a turn
    under another."""
    loaded = tiny_policy()
    engine = TorchEngine(loaded.model, loaded.tokenizer)
    grammars = (FACT, CALL, "", FACT)
    firsts = [params(grammar, seed) for seed, grammar in enumerate(grammars)]
    answers = complete(engine, [(PROMPT, first) for first in firsts])
    seconds = [
        params(grammar, 10 + seed) for seed, grammar in enumerate(grammars[1:] + grammars[:1])
    ]
    more = complete(
        engine,
        [([*PROMPT, *a.ids, 30, 31], second) for a, second in zip(answers, seconds, strict=True)],
    )

    return tuple(
        Trajectory(
            id=f"t{number}",
            task_id="task",
            group_id="group",
            attempt=number,
            turns=[
                turn_of(0, None, PROMPT, answers[number], firsts[number]),
                turn_of(1, 0, [30, 31], more[number], seconds[number]),
            ],
            reward=float(number % 2),
        )
        for number in range(len(grammars))
    )


def samples_of(trajectories=None):
    loaded = tiny_policy()
    trajectories = trajectories or attempts()
    masks, _ = masks_of(trajectories, Grammars.of(loaded.model, loaded.tokenizer))
    return [row.sample for t in trajectories for row in trajectory_rows(t, masks.get(t.id, {}))]


def by_hand(model, samples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, entropy and chance of two equal draws of every trained token, [M] each: one sample
    at a time, by a softmax over the allowed tokens alone."""
    logprobs = []
    entropies = []
    squares = []
    for sample in samples:
        logits = model(input_ids=torch.tensor([sample.ids.tolist()])).logits[0]
        for place in sample.loss_mask.nonzero()[0].tolist():
            row = logits[place - 1]
            kept = torch.ones(logits.shape[1], dtype=torch.bool)
            if sample.masks is not None and sample.masks.rows[place] >= 0:
                mask = sample.masks.table[sample.masks.rows[place]]
                kept = torch.from_numpy(unpack_mask(mask, len(row)))

            own = (torch.arange(len(row)) == int(sample.ids[place]))[kept]
            logp = row[kept].log_softmax(0)
            logprobs.append(logp[own].sum())
            entropies.append(-(logp.exp() * logp).sum())
            squares.append(logp.exp().square().sum())

    return torch.stack(logprobs), torch.stack(entropies), torch.stack(squares)


@pytest.mark.slow
@pytest.mark.parametrize("merge", [True, *soak(False)])
@pytest.mark.parametrize("path", ["linear", "frozen output layer", "logits", "small cells"])
def test_log_probs_entropy_and_gradient_are_those_of_a_softmax_over_the_allowed(
    path, merge, monkeypatch
):
    samples = samples_of()
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

    batch = pack(samples, CPU, merge=merge)
    logp, entropy = token_logprobs(model, batch)
    expected, of_entropy, of_squares = by_hand(plain, samples)
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
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_on_policy_the_ratio_is_one_and_a_frozen_reference_is_at_distance_0():
    loaded = tiny_policy()
    section = AlgorithmSection(kl_coef=0.1, old_logprobs="recomputed")
    for algorithm in (section, AlgorithmSection()):
        model = copy.deepcopy(loaded.model)
        trainer = Trainer(model, STILL, algorithm, grammars=Grammars.of(model, loaded.tokenizer))
        trainer.begin()
        prepared = trainer.prepare(attempts())
        metrics = prepared.metrics | trainer.step(prepared.samples)
        assert metrics["trainer/unmasked_tokens"] == 0
        assert metrics["actor/logprob_diff_max"] < 1e-5
        assert abs(metrics["actor/ppo_kl_first"]) < 1e-5

        if algorithm is section:
            assert metrics["rollout/logprob_gap_max"] < 1e-5
            assert abs(metrics["actor/kl_loss"]) < 1e-6

    plain = [
        msgspec.structs.replace(t, turns=[_free(turn) for turn in t.turns]) for t in attempts()
    ]
    free = Trainer(copy.deepcopy(loaded.model), STILL, AlgorithmSection())
    assert free.step(free.prepare(plain).samples)["actor/logprob_diff_max"] > 1


def _free(turn: Turn) -> Turn:
    return msgspec.structs.replace(turn, constraint=None)


def test_one_prompt_under_several_grammars_is_computed_once():
    batch = pack(samples_of(), CPU)
    assert batch.num_distinct < batch.num_logical - 2 * len(PROMPT)
    assert len(batch.logit_nodes) > len(batch.logit_nodes.unique())


def test_masks_that_can_not_be_made_again_make_a_turn_context_and_are_counted(caplog):
    first = attempts()[0]
    wrong = msgspec.structs.replace(first.turns[0].constraint, masks="0" * 32)
    turns = [msgspec.structs.replace(first.turns[0], constraint=wrong), first.turns[1]]
    altered = msgspec.structs.replace(first, turns=turns)
    loaded = tiny_policy()
    trainer = Trainer(
        loaded.model,
        STILL,
        AlgorithmSection(),
        grammars=Grammars.of(loaded.model, loaded.tokenizer),
    )
    prepared = trainer.prepare([altered, attempts()[1]])
    assert prepared.metrics["trainer/unmasked_tokens"] == len(turns[0].completion_ids)
    assert "same version of llguidance" in caplog.text

    sample = prepared.samples[0]
    assert sample.num_trained == len(turns[1].completion_ids)
    assert not sample.loss_mask[: len(PROMPT) + len(turns[0].completion_ids)].any()


def test_a_trainer_without_grammars_refuses_such_turns():
    with pytest.raises(TrainingError, match="sampled under a grammar"):
        Trainer(tiny_policy().model, STILL, AlgorithmSection()).prepare(attempts())


@pytest.mark.slow
def test_drawn_again_the_tokens_are_the_same():
    loaded = tiny_policy()
    sampling = SamplingParams(stop_token_ids=(END,))
    for trajectory in attempts():
        again = resample(trajectory, 0, loaded, sampling)
        assert again.num_tokens == trajectory.num_completion_tokens() and not again.differences

    first = attempts()[0]
    free = msgspec.structs.replace(first, turns=[_free(turn) for turn in first.turns])
    assert resample(free, 0, loaded, sampling).differences
