"""A batch with images gives every sample what transformers gives it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from seeing import FILES, Seeing
from seeing_samples import (
    BY_DIGEST,
    CPU,
    TRAINED,
    branches,
    compare_packed,
    provider_of,
    sample_of,
)
from slow import soak
from tiny_vision import FAMILIES, write_tiny_vision

from agentevo.config import AlgorithmSection, RewardModelSection, TrainerSection
from agentevo.errors import TrainingError
from agentevo.models.compute.attention import Compute
from agentevo.models.compute.rows import row_settings
from agentevo.models.token_rows import token_logits
from agentevo.models.vision.processor import VisionPrompt
from agentevo.runs.audit.resampling import resample
from agentevo.training.batching import row_groups
from agentevo.training.batching.images import LEFT_OUT, token_sizes
from agentevo.training.batching.packing import PackedBatch, pack
from agentevo.training.batching.passes import micro_batches
from agentevo.training.batching.routing import merge_keys
from agentevo.training.batching.samples import trajectory_rows
from agentevo.training.distribute import check_spread
from agentevo.training.pairs import CandidateAnswer
from agentevo.training.preference import mismatch_answers
from agentevo.training.roles.token_rewards import TokenRewardModel
from agentevo.training.trainer import Trainer
from agentevo.types import Sample, SamplingParams, Trajectory, Turn
from agentevo.types.image_span import ImageSpan
from agentevo.types.images import ImageFile, image_file

TREES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "internvl", "llava", "gemma4")

Read = Callable[[str, Compute], Seeing]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """A tiny model of a family. The same object for every test."""
    known: dict[tuple[str, str], Seeing] = {}

    def get(family: str, compute: Compute) -> Seeing:
        if (family, compute) not in known:
            folder = write_tiny_vision(family, tmp_path_factory.mktemp(family))
            known[family, compute] = Seeing.read(folder, compute)
        return known[family, compute]

    return get


def assert_equal(
    seeing: Seeing, samples: list[Sample], prompts: list[VisionPrompt], *, merge: bool
) -> PackedBatch:
    """The batch, in which the model gives each sample its log-probs and gradients alone."""
    packed = compare_packed(seeing, samples, prompts, merge=merge)
    assert packed.difference < 1e-4
    assert packed.gradient_difference < 1e-4
    return packed.batch


@pytest.mark.slow
@pytest.mark.parametrize("family", [*TREES[:1], *soak(*TREES[1:])])
@pytest.mark.parametrize("merge", [True, *soak(False)])
def test_a_tree_with_images_is_as_its_samples_alone(family: str, merge: bool, read: Read) -> None:
    """The gradients of all branches add up in the tower."""
    seeing = read(family, "tree")
    assert row_settings(seeing.loaded.model) is None
    samples, prompts = branches(seeing)
    batch = assert_equal(seeing, samples, prompts, merge=merge)

    assert batch.images is not None
    assert batch.position_ids.shape == (3 if "qwen" in family else 1, 1, batch.num_distinct)
    assert sorted(batch.images.digests) == sorted(BY_DIGEST), "each image is encoded once"
    shared = 2 * (samples[0].images[0].end + len(" closely. "))
    assert (batch.num_distinct <= batch.num_logical - shared) == merge


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen2_vl", "gemma3", *soak(*sorted({*FAMILIES} - {"qwen2_vl", "gemma3"}))]
)
def test_rows_with_images_are_as_their_samples_alone(
    family: str, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different length share passes, and what several rows begin with is computed once
    where the model's state allows it: not where a layer has a window."""
    monkeypatch.setattr(row_groups, "SMALLEST_SAVING", 1)
    seeing = read(family, "rows")
    settings = row_settings(seeing.loaded.model)
    assert settings is not None and settings.pads
    assert settings.shares == (not family.startswith("gemma"))

    batch = assert_equal(seeing, *branches(seeing), merge=True)
    passes = batch.row_passes(True, shares=settings.shares)
    groups = list(zip(passes.groups, passes.images, strict=True))
    assert any(group.is_parent and images for group, images in groups) == settings.shares
    assert any(len(group.input_ids) > 1 and images for group, images in groups)


def test_the_same_ids_with_another_image_never_merge(read: Read) -> None:
    seeing = read("qwen2_vl", "tree")
    parts = ("look ", FILES[0], " closely")
    sample, _ = sample_of(seeing, "a", *parts)
    (span,) = sample.images
    other = msgspec.structs.replace(
        sample, images=(ImageSpan(span.offset, span.length, span.grid, "b" * 64),)
    )
    first, second, third = merge_keys([sample, other, sample])
    assert np.array_equal(first, third)
    differ = np.flatnonzero(first != second)
    assert differ.tolist() == list(range(span.offset, span.end)), "every token of the image"
    assert merge_keys([sample])[0].tolist() != sample.ids.tolist()

    text, _ = sample_of(seeing, "d", "only a text of words")
    assert merge_keys([text])[0] is text.ids


def attempt(seeing: Seeing, name: str = "a", **changes: Any) -> Trajectory:
    """Two turns, with an image in each prompt."""
    turns = []
    for index, file in enumerate(FILES[:2]):
        prompt = seeing.prompt("look ", file, f" turn {index}")
        turns.append(
            Turn(
                index=index,
                parent=index - 1 if index else None,
                prompt_ids=prompt.ids,
                completion_ids=[65, 66],
                logprobs=[-1.0, -1.0],
                versions=[0, 0],
                finish_reason="stop",
                images=prompt.spans,
                processor=seeing.processor.fingerprint,
            )
        )
    turns[1] = msgspec.structs.replace(turns[1], **changes)
    return Trajectory(id=name, task_id="t", group_id="g", turns=turns, reward=float(name == "a"))


def test_a_sample_has_the_images_of_its_path(read: Read) -> None:
    seeing = read("qwen2_vl", "tree")
    trajectory = attempt(seeing)
    (row,) = trajectory_rows(trajectory)
    first, second = row.sample.images
    assert (first, row.sample.processor) == (
        trajectory.turns[0].images[0],
        seeing.processor.fingerprint,
    )
    feature = seeing.processor.feature_id
    places = np.flatnonzero(row.sample.ids == feature)
    assert places.tolist() == [*range(first.offset, first.end), *range(second.offset, second.end)]

    with pytest.raises(TrainingError, match=r"trajectory a: .* eee.*: all turns"):
        trajectory_rows(attempt(seeing, processor="e" * 64))


def wrong_attempts(seeing: Seeing) -> dict[str, tuple[Trajectory, str]]:
    turn = attempt(seeing).turns[1]
    (span,) = turn.images
    cut = [*turn.prompt_ids[: span.end - 1]]
    other = FILES[2].part.sha256
    return {
        "cut": (attempt(seeing, "cut", prompt_ids=cut), "an image is never cut"),
        "settings": (attempt(seeing, "settings", processor="e" * 64), "the fingerprint eee"),
        "without": (attempt(seeing, "without", images=()), "stands for a feature of an image"),
        "sampled": (
            attempt(seeing, "sampled", completion_ids=[65, seeing.processor.feature_id]),
            "stands for a feature of an image",
        ),
        "boundary": (
            attempt(
                seeing,
                "boundary",
                completion_ids=[
                    65,
                    min(seeing.processor.vision_ids - {seeing.processor.feature_id}),
                ],
            ),
            "is never sampled and has no log-prob",
        ),
        "grid": (
            attempt(
                seeing,
                "grid",
                images=(ImageSpan(*span_fields(span), span.grid[::-1], span.digest),),
            ),
            "has the grid",
        ),
        "image": (
            attempt(seeing, "image", images=(ImageSpan(*span_fields(span), span.grid, other),)),
            "has the grid",
        ),
        "missing": (
            attempt(
                seeing, "missing", images=(ImageSpan(*span_fields(span), span.grid, "b" * 64),)
            ),
            "is missing: restore",
        ),
    }


def span_fields(span: ImageSpan) -> tuple[int, int]:
    return span.offset, span.length


def test_attempts_whose_images_can_not_be_shown_again_are_left_out(read: Read) -> None:
    """Each with its reason; the others are trained on."""
    seeing = read("qwen2_vl", "tree")
    wrong = wrong_attempts(seeing)
    provider = provider_of(seeing)
    for name, (trajectory, message) in wrong.items():
        kept, dropped, (warning,) = provider.admit([attempt(seeing), trajectory])
        assert [t.id for t in kept] == ["a"] and dropped == {name: LEFT_OUT}
        assert "1 of 2 attempts are not trained on, because their images" in warning
        assert f"{name}: turn 1: " in warning and message in warning, warning

    damaged = msgspec.structs.replace(FILES[0], data=FILES[1].data)
    provider = provider_of(seeing)
    provider.hold(BY_DIGEST | {FILES[0].part.sha256: damaged})
    _, _, (warning,) = provider.admit([attempt(seeing)])
    assert "has another SHA-256" in warning

    provider = provider_of(seeing)
    assert provider.admit([attempt(seeing)])[2] == []
    provider.hold({})  # its pixels are kept
    assert provider.admit([attempt(seeing)])[2] == []
    provider._kept.clear()
    _, dropped, (warning,) = provider.admit([attempt(seeing)])
    assert dropped == {"a": LEFT_OUT} and "is missing" in warning


@pytest.mark.slow
def test_a_trainer_learns_from_images_and_counts_what_it_leaves_out(read: Read) -> None:
    seeing = read("qwen2_vl", "tree")
    trainer = Trainer(
        copy.deepcopy(seeing.loaded.model),
        TrainerSection(),
        AlgorithmSection(old_logprobs="recomputed"),
    )
    trainer.begin()
    trainer.show(BY_DIGEST)
    wrong, _ = wrong_attempts(seeing)["settings"]
    other = attempt(seeing, "b", completion_ids=[67, 68])
    batch = trainer.prepare([attempt(seeing), other, wrong])
    assert batch.dropped == {"settings": LEFT_OUT} and len(batch.warnings) == 1
    assert [sample.trajectory_id for sample in batch.samples] == ["a", "b"]
    assert trainer.step(batch.samples)["actor/grad_norm"] > 0

    trainer.show({})
    sample, _ = sample_of(seeing, "c", "look ", image_of(40), " closely")
    with pytest.raises(TrainingError, match=r"sample of c: the image .* is missing"):
        trainer.step([msgspec.structs.replace(sample, advantages=np.ones(TRAINED))])


def image_of(size: int) -> ImageFile:
    from tiny_vision import png

    file = image_file(png(size, size, 9), "image/png")
    BY_DIGEST[file.part.sha256] = file
    return file


def test_micro_batches_count_patches(read: Read) -> None:
    seeing = read("qwen2_vl", "tree")
    provider = provider_of(seeing)
    samples, _ = branches(seeing)
    sizes = token_sizes(samples, provider)
    assert sizes is not None
    for sample, size in zip(samples, sizes, strict=True):
        patches = sum(int(np.prod(span.grid)) for span in sample.images)
        assert size.sum() == len(sample.ids) + patches
    assert token_sizes(samples[3:], provider) is None

    num_tokens = sum(len(sample.ids) for sample in samples)
    num_patches = sum(int(size.sum()) for size in sizes) - num_tokens
    whole = micro_batches(samples, num_tokens + num_patches, CPU, merge=False, images=provider)
    assert len(whole) == 1
    parts = micro_batches(samples, num_tokens, CPU, merge=False, images=provider)
    assert len(parts) > 1
    for indices, _ in parts:
        assert len(indices) == 1 or sum(int(sizes[i].sum()) for i in indices) <= num_tokens


def test_a_mismatched_answer_keeps_its_images_whole(read: Read) -> None:
    seeing = read("qwen2_vl", "tree")
    first, _ = sample_of(seeing, "a", "look ", FILES[0], " closely, please")
    later, _ = sample_of(seeing, "c", "here: ", FILES[2], " text")
    mask = later.loss_mask.copy()
    mask[2:] = True  # the image lies after the prompt
    mask &= ~np.isin(later.ids, [*provider_of(seeing).processor.vision_ids])
    later = msgspec.structs.replace(later, loss_mask=mask, group_id="h")
    answers = [CandidateAnswer("a", (first,)), CandidateAnswer("c", (later,))]
    (row,), (other,) = mismatch_answers(answers, 1000)
    assert [span.digest for span in row.images] == [f.part.sha256 for f in (FILES[0], FILES[2])]
    provider_of(seeing).check([row, other])

    size = row.images[1].end
    (row,), _ = mismatch_answers(answers, size - 1)
    assert len(row.images) == 1 and len(row.ids) == size - later.images[0].length
    provider_of(seeing).check([row])


def test_tokens_after_images_are_sampled_again(read: Read) -> None:
    """At temperature 0, the likeliest tokens by transformers."""
    seeing = read("qwen2_vl", "tree")
    prompt = seeing.prompt("look ", FILES[0], " closely")
    said: list[int] = []
    for _ in range(2):
        longer = VisionPrompt([*prompt.ids, *said], prompt.spans, prompt.images)
        logits = token_logits(seeing.loaded.model, seeing.plain_logits(longer))
        said.append(int(logits[-1].argmax()))

    turn = msgspec.structs.replace(
        attempt(seeing).turns[0],
        prompt_ids=prompt.ids,
        completion_ids=said,
        logprobs=[0.0, 0.0],
        temperature=0.0,
        images=prompt.spans,
    )
    trajectory = Trajectory(id="a", task_id="t", group_id="g", turns=[turn])
    resampled = resample(trajectory, 0, seeing.loaded, SamplingParams(), BY_DIGEST)
    assert (resampled.num_tokens, resampled.differences) == (2, [])
    (difference,) = resample(trajectory, 0, seeing.loaded, SamplingParams()).differences
    assert difference.kind == "record" and "is missing" in difference.what


def test_models_that_read_text_score_no_images(read: Read) -> None:
    seeing = read("qwen2_vl", "tree")
    samples, _ = branches(seeing)
    batch = pack(samples, CPU, images=provider_of(seeing))
    rewards = TokenRewardModel(torch.nn.Identity(), RewardModelSection())  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"reward_model.name: .* reads text only"):
        rewards.rewards(batch)


def test_models_that_see_are_divided_by_shards_only(read: Read) -> None:
    model = read("qwen2_vl", "tree").loaded.model
    check_spread(model, TrainerSection(parallel={"shard": 2}).parallel)
    section = TrainerSection(parallel={"shard": 2, "tensor": 2}).parallel
    with pytest.raises(
        TrainingError, match=r"trainer.parallel.tensor=2: .* by trainer.parallel.shard only"
    ):
        check_spread(model, section)
