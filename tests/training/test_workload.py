"""What is counted of an update, against counting by hand, and the marks of its phases."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentevo.config import AlgorithmSection, CriticSection, SFTSection, TrainerSection
from agentevo.models.compute.attention import prepare
from agentevo.observability.profile_table import PREFIX
from agentevo.training.batching.packing import pack
from agentevo.training.batching.passes import micro_batches
from agentevo.training.pairs import CandidateAnswer, Pair
from agentevo.training.phases import phase
from agentevo.training.preference import PreferenceTrainer
from agentevo.training.supervised import SupervisedTrainer
from agentevo.training.trainer import Trainer
from agentevo.training.workload import FlopCounter, speed_metrics
from agentevo.types import Sample

CPU = torch.device("cpu")
SHARED = [5, 9, 60, 3, 41, 8]
SEQUENCES = [[*SHARED, 1, 2], [*SHARED, 7, 7, 7], [4, 4]]


def _model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def samples(samples_of: Callable[..., list[Sample]]) -> list[Sample]:
    return samples_of(SEQUENCES)


@pytest.mark.slow
def test_logical_work_is_that_of_each_sample_alone(samples: list[Sample]):
    """By PyTorch's count of passes of one sequence each; what eager attention computes of the
    masked half is taken off."""
    model = LlamaForCausalLM._from_config(_model().config, attn_implementation="eager")
    counted = 0
    for sample in samples:
        places = torch.tensor([i - 1 for i, m in enumerate(sample.loss_mask) if m])
        with FlopCounterMode(display=False) as mode:
            model(
                input_ids=torch.tensor([sample.ids]), use_cache=False, logits_to_keep=places
            ).logits.sum().backward()
        size = len(sample.ids)
        counted += mode.get_total_flops() - 2 * 3 * 4 * 32 * (size * (size - 1) // 2)

    counter = FlopCounter(model)
    counter.count_training(samples, pack(samples, CPU))
    assert counter.take()["trainer/logical_flops"] == pytest.approx(counted, rel=0.01)


def test_distinct_work_counts_what_is_shared_once(samples: list[Sample]):
    counter = FlopCounter(_model())
    batch = pack(samples, CPU)
    counter.count_training(samples, batch)
    found = counter.take()
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    nodes = 6 + 2 + 3 + 2
    pairs = (6 * 7 // 2) + (7 + 8) + (7 + 8 + 9) + (1 + 2)
    assert (
        found["trainer/distinct_flops"]
        == 6 * (weights * nodes + 64 * 32 * len(batch.logit_nodes)) + 3 * 2 * 4 * 32 * pairs
    )
    assert found["trainer/distinct_flops"] < found["trainer/logical_flops"]
    assert counter.take() == {"trainer/distinct_flops": 0.0, "trainer/logical_flops": 0.0}, (
        "it begins anew"
    )


def test_one_sample_is_the_same_either_way(samples: list[Sample]):
    counter = FlopCounter(_model())
    counter.count_training(samples[:1], pack(samples[:1], CPU))
    found = counter.take()
    assert found["trainer/distinct_flops"] == found["trainer/logical_flops"]


def test_passes_without_gradient_are_a_third(samples: list[Sample]):
    counter = FlopCounter(_model())
    batch = pack(samples, CPU)
    counter.count_training(samples, batch)
    trained = counter.take()
    counter.count_inference(batch)
    counter.stood_for(samples)
    assert counter.take() == {key: pytest.approx(value / 3) for key, value in trained.items()}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [64, 4096])
def test_updates_say_what_they_needed(samples: list[Sample], micro_batch_tokens: int):
    section = TrainerSection(steps=1, epochs=2, micro_batch_tokens=micro_batch_tokens)
    rl = Trainer(prepare(_model()), section, AlgorithmSection()).step(samples)
    supervised = SupervisedTrainer(
        prepare(_model()), SFTSection(micro_batch_tokens=micro_batch_tokens), 1
    ).step(samples)
    counter = FlopCounter(_model())
    counter.count_training(samples, pack(samples, CPU))
    once = counter.take()
    for key, value in once.items():
        assert supervised[key] == value
        assert rl[key] == 2 * value, "two epochs"


def test_speeds():
    trained = {
        "trainer/distinct_tokens": 10.0,
        "trainer/logical_tokens": 40.0,
        "trainer/distinct_flops": 3e6,
        "trainer/logical_flops": 9e6,
    }
    assert speed_metrics(trained, 2.0, 1e7) == {
        "perf/tokens_per_s_distinct": 5.0,
        "perf/tokens_per_s_logical": 20.0,
        "perf/mfu": 0.15,
        "perf/mfu_logical": 0.45,
    }
    assert speed_metrics({}, 2.0, 1e7) == {}
    assert speed_metrics(trained, 0.0, 1e7) == {}


@pytest.mark.slow
def test_phases_are_marked_where_they_happen(samples: list[Sample]):
    trainer = Trainer(prepare(_model()), TrainerSection(steps=2), AlgorithmSection())
    trainer.step(samples)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.step(samples)

    spans = [
        (event.name.removeprefix(PREFIX), event.time_range)
        for event in profiler.events()
        if event.name.startswith(PREFIX)
    ]
    assert [name for name, _ in sorted(spans, key=lambda span: span[1].start)] == [
        "plan",
        "forward",
        "backward",
        "optimizer",
    ]


def test_without_a_profiler_a_phase_leaves_no_mark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.profiler, "record_function", None)
    with phase("forward"):
        pass


def _with_columns(samples: list[Sample]) -> list[Sample]:
    return [
        msgspec.structs.replace(
            s, columns={name: [0.5] * sum(s.loss_mask) for name in ("values", "returns")}
        )
        for s in samples
    ]


@pytest.mark.slow
def test_a_critic_of_its_own_is_as_much_again(samples: list[Sample]):
    found = {}
    for trunk in ("own", "shared"):
        trainer = Trainer(
            prepare(_model()),
            TrainerSection(steps=1),
            AlgorithmSection(name="ppo"),
            critic=CriticSection(trunk=trunk),
        )
        trainer.begin()
        found[trunk] = trainer.step(_with_columns(samples))

    for key in ("trainer/distinct_flops", "trainer/logical_flops"):
        assert found["own"][key] == 2 * found["shared"][key]

    pretrained = Trainer(
        prepare(_model()),
        TrainerSection(steps=2),
        AlgorithmSection(name="ppo"),
        critic=CriticSection(pretrain_steps=1),
    )
    pretrained.begin()
    assert (
        pretrained.step(_with_columns(samples))["trainer/distinct_flops"]
        == found["shared"]["trainer/distinct_flops"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [64, 4096])
def test_preferences_are_a_training_pass_and_one_of_the_reference(
    samples_of: Callable[..., list[Sample]], micro_batch_tokens: int
):
    """Whatever is computed twice because the answers don't fit in one micro-batch does not
    count."""
    rows = samples_of([[*range(2, 40), *range(20)], [*range(2, 40), *range(30, 55)]], group_size=2)
    pair = Pair("g0", CandidateAnswer("a", (rows[0],)), CandidateAnswer("b", (rows[1],)))
    counter = FlopCounter(_model())
    found = {}
    batches = micro_batches(rows, micro_batch_tokens, CPU)
    assert len(batches) == (2 if micro_batch_tokens == 64 else 1)

    for indices, batch in batches:
        counter.count_training([rows[i] for i in indices], batch)

    once = counter.take()
    for name in ("dpo", "orpo"):
        section = TrainerSection(steps=1, micro_batch_tokens=micro_batch_tokens)
        trainer = PreferenceTrainer(prepare(_model()), section, AlgorithmSection(name=name))
        trainer.begin()
        found[name] = trainer.step([pair])

    for key, value in once.items():
        assert found["orpo"][key] == value, "it has no reference"
        assert found["dpo"][key] == pytest.approx(value * 4 / 3)
