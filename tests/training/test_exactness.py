"""Three ways to compute one update agree to 1e-5 in float32: everything merged into one token tree,
sequences packed side by side, and one sequence at a time through the unpatched transformers model
with its own eager attention.

Tries are random: branches at any depth of branches, duplicates, sequences that begin others, single
tokens, tokens trained by several branches; a window of 24 tokens is passed by the longer ones.
"""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch
from adapted_models import adapted
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from slow import slow, soak

from agentevo.config import AlgorithmSection, CriticSection, LoraSection, TrainerSection
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.rows import row_settings, shares_prefixes
from agentevo.training.batching import row_groups
from agentevo.training.batching.packing import pack
from agentevo.training.batching.passes import micro_batches, token_tables
from agentevo.training.kernels.output_layer import token_logprobs
from agentevo.training.roles.critic import Critic
from agentevo.training.roles.reference import Reference
from agentevo.training.trainer import Trainer
from agentevo.training.tree import build_tree

CPU = torch.device("cpu")
ARCHITECTURES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
    "granite-swa",
    "llama4",
    "qwen3-next",
    "lfm2",
    "mamba",
    "bloom",
]
"""The last four compute rows."""
QUICK = ("qwen3-moe", "lfm2")
GRPO = AlgorithmSection(aggregation="token-mean", entropy_coef=0.02, clip_high=0.28)
TOLERANCE = 1e-5

letter = st.sampled_from([5, 6, 7])
branch = st.tuples(st.integers(0, 8), st.integers(0, 40), st.lists(letter, max_size=6))


def grown(stem: list[int], branches) -> list[list[int]]:
    """Each branch leaves an earlier sequence at some place and goes on in its own way, or stops
    there."""
    sequences = [stem]
    for parent, depth, tail in branches:
        one = sequences[parent % len(sequences)]
        sequences.append([*one[: 1 + depth % len(one)], *tail])
    return sequences


tries = st.builds(
    grown,
    st.lists(st.integers(2, 96), min_size=27, max_size=32),
    st.lists(branch, min_size=1, max_size=6),
)
STEM = list(range(40, 68))
DEEP = [
    [*STEM, 5, 5, 5],
    [*STEM, 5, 5, 6, 6],
    [*STEM, 5, 5, 6, 7, 7],
    [*STEM, 5, 5, 6, 7, 5, 5],
    [*STEM, 5, 7],
    [*STEM[:9], 6, 6],
    [*STEM, 5, 5, 6, 6],
    STEM,
    [40],
    [40],
    [8],
    [8, 9],
]
"""Branches three deep, duplicates, beginnings of others, single tokens."""


def few(examples: int):
    """Settings for costly examples, the same ones each time; a failing one is shown as found."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
    )


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to the size of what is wanted."""
    return float((found - wanted).norm() / wanted.norm())


def alone_logprobs(model, samples) -> list[torch.Tensor]:
    """Of each sample's trained tokens, [T] float32."""
    found = []
    for sample in samples:
        rows = torch.log_softmax(
            model(input_ids=torch.tensor([sample.ids]), use_cache=False).logits[0]
            / sample.temperature,
            -1,
        )
        places = torch.tensor(sample.loss_mask).nonzero()[:, 0]
        found.append(rows[places - 1, torch.tensor(sample.ids)[places]].detach())

    return found


def logprobs_agree(table: torch.Tensor, wanted: list[torch.Tensor]) -> None:
    """table: [S, T]"""
    for row, logp in zip(table, wanted, strict=True):
        torch.testing.assert_close(row[: len(logp)], logp, rtol=TOLERANCE, atol=TOLERANCE)
        assert not row[len(logp) :].any()


def check_update(model, alone, samples, tokens: int, slow_loss, gradient) -> None:
    """Log-probs, loss and gradient, merged and packed. The rate is too small to change a weight, so
    the model serves many examples."""
    alone.zero_grad()
    loss = slow_loss(alone, samples, GRPO)
    loss.backward()
    wanted = gradient(alone)
    logprobs = alone_logprobs(alone, samples)
    for merge in (True, False):
        tables = token_tables(
            samples,
            tokens,
            CPU,
            lambda batch: {"logp": token_logprobs(model, batch)[0]},
            merge=merge,
        )
        logprobs_agree(tables["logp"], logprobs)
        section = TrainerSection(
            max_grad_norm=1e9, learning_rate=1e-30, micro_batch_tokens=tokens, prefix_merging=merge
        )
        metrics = Trainer(model, section, GRPO).step(samples)
        assert distance(gradient(model), wanted) < TOLERANCE

        found = metrics["actor/pg_loss"] - GRPO.entropy_coef * metrics["actor/entropy"]
        assert found == pytest.approx(float(loss.detach()), rel=TOLERANCE, abs=TOLERANCE)

        shares = shares_prefixes(model, merge)
        distinct = build_tree([s.ids for s in samples], merge=shares).num_nodes
        assert metrics["trainer/distinct_tokens"] >= distinct
        if tokens > 64:
            assert metrics["trainer/distinct_tokens"] == distinct


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *slow("gpt-oss"),
        *soak(*(name for name in ARCHITECTURES if name not in (*QUICK, "gpt-oss"))),
    ],
)
def test_updates_of_random_tries(name, random_model, samples_of, slow_loss, gradient, monkeypatch):
    one = copy.deepcopy(random_model(name))

    @few(4)
    @given(
        tries, st.sampled_from([64, 16384]), st.sampled_from([1.0, 0.8]), st.sampled_from([1, 128])
    )
    @example(DEEP, 16384, 1.0, 1)
    @example(DEEP, 64, 0.7, 1)
    def any_trie(sequences, tokens, temperature, smallest_saving):
        monkeypatch.setattr(row_groups, "SMALLEST_SAVING", smallest_saving)
        check_update(
            one.model,
            one.alone,
            samples_of(sequences, len(sequences), temperature),
            tokens,
            slow_loss,
            gradient,
        )

    any_trie()
    assert (row_settings(one.model) is not None) == (name in ARCHITECTURES[-4:])
    gates = [p.grad for key, p in one.model.named_parameters() if "gate.weight" in key]
    assert all(grad is not None and grad.any() for grad in gates), "the router learns too"
    assert bool(gates) == (name in ("mixtral", "qwen3-moe", "qwen3-next"))


@pytest.mark.slow
def test_an_update_of_samples_drawn_at_two_temperatures(
    random_model, samples_of, slow_loss, gradient
):
    """A resumed run may sample at another one than the attempts that it finds. Neither shares a
    pass with the other."""
    one = copy.deepcopy(random_model("llama"))
    sequences = [[5, 6, 7, 6], [5, 6, 7, 5], [5, 6, 5], [5, 6, 7, 6, 5, 5]]
    samples = [
        msgspec.structs.replace(sample, temperature=(0.6, 1.0)[number % 2])
        for number, sample in enumerate(samples_of(sequences, 3))
    ]
    one.alone.zero_grad()
    slow_loss(one.alone, samples, GRPO).backward()

    section = TrainerSection(max_grad_norm=1e9, learning_rate=1e-30)
    metrics = Trainer(one.model, section, GRPO).step(samples)
    assert distance(gradient(one.model), gradient(one.alone)) < TOLERANCE

    parts = (samples[::2], samples[1::2])
    distinct = [build_tree([s.ids for s in part], merge=True).num_nodes for part in parts]
    assert metrics["trainer/distinct_tokens"] == sum(distinct)


@pytest.mark.slow
def test_output_layers_tied_to_the_embeddings_and_not(random_model):
    """Both kinds are among the architectures."""
    tied = {name: random_model(name).alone.config.tie_word_embeddings for name in ARCHITECTURES}
    assert tied["llama"] and tied["gemma2"] and not tied["qwen2"] and not tied["mistral"]
    for name, is_tied in tied.items():
        model = random_model(name).model
        assert (
            model.get_output_embeddings().weight is model.get_input_embeddings().weight
        ) == is_tied


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", *soak("gpt-oss", "gemma2", "mistral", "qwen3-moe", "llama4")]
)
def test_updates_of_adapters(name, random_model, samples_of, slow_loss, gradient):
    """And the reference that is the base under them."""
    bare = random_model(name).alone
    dense = name in ("llama", "gemma2", "mistral")
    targets = ("all-linear",) if dense else ("q_proj", "v_proj")
    alone = adapted(bare, LoraSection(rank=4, targets=targets), by=0.1)
    model = prepare(copy.deepcopy(alone))
    reference = Reference(model, AlgorithmSection(reference="base", kl_coef=0.1))

    @few(2)
    @given(tries, st.sampled_from([64, 16384]))
    @example(DEEP, 16384)
    def any_trie(sequences, tokens):
        samples = samples_of(sequences, len(sequences))
        check_update(model, alone, samples, tokens, slow_loss, gradient)
        for merge in (True, False):
            tables = token_tables(
                samples, tokens, CPU, lambda batch: {"ref": reference.logprobs(batch)}, merge=merge
            )
            logprobs_agree(tables["ref"], alone_logprobs(bare, samples))

    any_trie()


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["own", "shared"])
@pytest.mark.parametrize("name", ["llama", *slow("gemma2"), *soak("qwen3-moe", "qwen3", "mistral")])
def test_values_and_gradients_of_a_critic(name, trunk, random_model, samples_of):
    """Sum over trained tokens of (value - advantage)^2, in trunk and head."""
    one = copy.deepcopy(random_model(name))
    critic = Critic(one.model, CriticSection(trunk=trunk), TrainerSection())
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(3))
    head = copy.deepcopy(critic.head)
    trunks = one.alone.model, critic.model.model
    modules = [*trunks, head, critic.head]

    @few(2)
    @given(tries, st.sampled_from([64, 16384]), st.booleans())
    @example(DEEP, 16384, True)
    @example(DEEP, 16384, False)
    def any_trie(sequences, tokens, merge):
        for module in modules:
            module.zero_grad()

        samples = samples_of(sequences, len(sequences))
        for sample in samples:
            places = torch.tensor(sample.loss_mask).nonzero()[:, 0]
            values = head(
                trunks[0](input_ids=torch.tensor([sample.ids]), use_cache=False).last_hidden_state[
                    0
                ]
            )[places - 1, 0]
            (values - torch.tensor(sample.advantages)).square().sum().backward()

        batches = micro_batches(samples, tokens, CPU, merge=merge)
        for _, batch in batches:
            (batch.table(critic.values(batch)) - batch.advantages).square().sum().backward()

        wanted, found = (
            [p.grad for module in side for p in module.parameters()]
            for side in (modules[::2], modules[1::2])
        )
        together = [
            torch.cat([grad.flatten() for grad in side if grad is not None])
            for side in (found, wanted)
        ]
        assert distance(*together) < TOLERANCE

    any_trie()


def test_a_token_trained_by_several_branches_has_their_summed_weight(
    random_model, samples_of, gradient
):
    """The same sequence with weights 2 and -1/2 is the sequence with weight 3/2, at the cost of
    one."""
    model = copy.deepcopy(random_model("qwen3").model)
    (sample,) = samples_of([STEM])

    def differentiated(weights: list[float], merge: bool) -> torch.Tensor:
        model.zero_grad()
        batch = pack([sample] * len(weights), CPU, merge=merge)
        assert batch.num_distinct == len(STEM) * (1 if merge else len(weights))
        (torch.tensor(weights)[batch.samples] * token_logprobs(model, batch)[0]).sum().backward()
        return gradient(model)

    wanted = differentiated([1.5], True)
    assert distance(differentiated([2.0, -0.5], True), wanted) < TOLERANCE
    assert distance(differentiated([2.0, -0.5], False), wanted) < TOLERANCE
