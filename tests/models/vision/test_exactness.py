"""Log-probs and gradients of sequences with images equal those of transformers' plain forward pass
of each sequence alone, in float32: rows, continued passes, shared prefixes, and the token tree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from seeing import (
    FILES,
    TOLERANCE,
    Seeing,
    gradient_difference,
    group_of,
    log_prob_difference,
    measure,
    second_turn_difference,
)
from slow import slow, soak
from tiny_vision import FAMILIES, VARIANTS, write_tiny_vision

from agentevo.errors import ModelError
from agentevo.models.compute.attention import Compute, prepare
from agentevo.models.compute.row_states import state_of
from agentevo.models.compute.rows import (
    accepted_inputs,
    describe_rows,
    row_settings,
    run_groups,
    run_rows,
)
from agentevo.models.vision.features import encoder_outputs, image_arguments, position_ids
from agentevo.training.kernels.tree_attention import TreeAttention
from agentevo.training.tree import build_tree

NAMES = (*FAMILIES, *VARIANTS)
ROWS = ("qwen3_5", "qwen3_5_linear", "gemma3", "gemma4_vision")
TREES = tuple(name for name in NAMES if name not in ROWS)
CAUSAL = tuple(name for name in NAMES if name not in ("gemma3", "gemma4_vision"))
"""Those in which no token of an image sees a later one."""
SAMPLED = ("qwen3_5_linear", "gemma4_vision", "idefics3")
"""Recurrent layers, layers that hand keys on, images in tiles."""


def names(known: tuple[str, ...], *quick: str, whole: bool = False) -> list:
    """CI runs SAMPLED, or all if `whole`; `make soak` runs all."""
    others = [name for name in known if name not in quick]
    sampled = [name for name in others if whole or name in SAMPLED]
    return [*quick, *slow(*sampled), *soak(*(name for name in others if name not in sampled))]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Compute], Seeing]:
    """`seeing(name, compute)`: a tiny model. The same object for every test."""
    folders: dict[str, Path] = {}
    read: dict[tuple[str, Compute], Seeing] = {}

    def get(name: str, compute: Compute = "rows") -> Seeing:
        if name not in folders:
            folders[name] = write_tiny_vision(name, tmp_path_factory.mktemp(name))
        if (name, compute) not in read:
            read[name, compute] = Seeing.read(folders[name], compute)
        return read[name, compute]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", names(NAMES, "qwen3_vl", "gemma3", whole=True))
def test_rows_with_any_number_of_images_are_those_alone(
    name: str, seeing: Callable[..., Seeing]
) -> None:
    model = seeing(name)
    prompts = [
        model.prompt("no image at all"),
        model.prompt("look: ", FILES[1], " seen"),
        model.prompt(FILES[2], " and ", FILES[0], "?"),
    ]
    features = [part for prompt in prompts for part in model.features(prompt)]
    with torch.no_grad():
        logits = run_rows(model.loaded.model, group_of(model, prompts), features).logits[0]
        expected = torch.cat([model.plain_logits(prompt) for prompt in prompts])
    assert log_prob_difference(logits, expected) < TOLERANCE


@pytest.mark.parametrize("name", names(NAMES, "qwen3_vl", "gemma3"))
def test_a_second_turn_with_a_new_image_continues_from_the_first(
    name: str, seeing: Callable[..., Seeing]
) -> None:
    """And single tokens after it, as the engine draws them."""
    assert second_turn_difference(seeing(name)) < TOLERANCE


@pytest.mark.parametrize("name", names(NAMES, "qwen3_vl", "gemma3"))
def test_a_shared_prefix_with_an_image_is_computed_once(
    name: str, seeing: Callable[..., Seeing]
) -> None:
    """The gradient of its image sums over the rows that continue from it. Rows whose layers have
    windows can't continue together."""
    model = seeing(name)
    start = ("begin ", FILES[0], " go")
    prompts = [model.prompt(*start, FILES[1], " left"), model.prompt(*start, "right")]
    prefix = model.prompt(*start)
    length = len(prefix.ids)
    parent = group_of(model, [prefix])._replace(is_parent=True)
    rest = group_of(model, prompts, length)._replace(parent=0, start=length)
    first, second = model.features(prompts[0])
    groups = ([parent, rest], [[first], [second]])
    if name.startswith("gemma"):
        with pytest.raises(ModelError, match="sliding windows"):
            run_groups(model.loaded.model, *groups)
        return

    outputs = run_groups(model.loaded.model, *groups)
    logits = torch.cat([output.logits[0] for output in outputs])
    expected = [model.plain_logits(prompt) for prompt in prompts]
    alone = torch.cat([expected[0], expected[1][length:]])
    assert log_prob_difference(logits.detach(), alone.detach()) < TOLERANCE
    found = torch.autograd.grad(measure(logits), model.watched(model.loaded.model))
    wanted = torch.autograd.grad(measure(alone), model.watched(model.plain))
    assert gradient_difference(found, wanted) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", names(TREES, "qwen3_vl", "smolvlm"))
@pytest.mark.parametrize("through_gradients", [True, False])
def test_the_tree_computes_sequences_that_share_an_image(
    name: str, through_gradients: bool, seeing: Callable[..., Seeing]
) -> None:
    """Tokens of different images differ, although their ids are the same."""
    model = seeing(name, "tree")
    start = ("begin ", FILES[0], " go")
    prompts = [model.prompt(*start, FILES[1], " left"), model.prompt(*start, "right")]
    length = len(model.prompt(*start).ids)
    feature = model.processor.feature_id
    keyed = []
    for prompt in prompts:
        keys = np.array(prompt.ids)
        for number, span in enumerate(prompt.spans):
            place = slice(span.offset, span.offset + span.length)
            keys[place] = np.where(keys[place] == feature, 10_000 + number, keys[place])
        keyed.append(keys.tolist())

    tree = build_tree(keyed)
    assert tree.num_nodes == sum(len(ids) for ids in keyed) - length
    ids = torch.from_numpy(np.where(tree.ids >= 10_000, feature, tree.ids))[None]
    positions = torch.zeros(len(model.positions(prompts[0])), 1, tree.num_nodes, dtype=torch.int64)
    for prompt, path in zip(prompts, tree.paths, strict=True):
        positions[:, 0, path] = model.positions(prompt)

    with torch.set_grad_enabled(through_gradients):
        features = model.features(prompts[0])
        logits = model.loaded.model(
            input_ids=ids,
            position_ids=position_ids(positions),
            plan=TreeAttention(tree, torch.device("cpu")),
            use_cache=False,
            **image_arguments(model.loaded.model, ids, features),
        ).logits[0]
        expected = [model.plain_logits(prompt) for prompt in prompts]
    for path, alone in zip(tree.paths, expected, strict=True):
        assert log_prob_difference(logits[path].detach(), alone.detach()) < TOLERANCE

    if through_gradients:
        shared = torch.cat([logits[tree.paths[0]], logits[tree.paths[1]][length:]])
        found = torch.autograd.grad(measure(shared), model.watched(model.loaded.model))
        alone = torch.cat([expected[0], expected[1][length:]])
        wanted = torch.autograd.grad(measure(alone), model.watched(model.plain))
        assert gradient_difference(found, wanted) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", names(NAMES, "qwen3_vl", "gemma3"))
def test_the_way_to_compute_is_the_one_that_is_exact(
    name: str, seeing: Callable[..., Seeing]
) -> None:
    model = seeing(name, "auto").loaded.model
    settings = row_settings(model)
    assert (settings is None) == (name in TREES)
    if settings is not None:
        assert settings.pads and settings.shares == name.startswith("qwen3_5")
    if "gemma" in name and settings is not None:
        assert "see each other in both directions" in describe_rows(model)


@pytest.mark.slow
def test_without_an_image_no_trial_says_tree(tmp_path: Path) -> None:
    model = Seeing.read(write_tiny_vision("llava", tmp_path), "rows").plain
    prepare(model)
    assert "no image processor beside the model" in describe_rows(model)
    with pytest.raises(ModelError, match="no image processor beside the model"):
        prepare(Seeing.read(tmp_path, "rows").plain, compute="tree")


@pytest.mark.slow
@pytest.mark.parametrize("name", names(CAUSAL, "qwen3_vl", "smolvlm"))
def test_a_pass_may_end_inside_an_image(name: str, seeing: Callable[..., Seeing]) -> None:
    model = seeing(name)
    prompt = model.prompt("look: ", FILES[1], " seen")
    (features,) = model.features(prompt)
    places = model.types(prompt.ids).nonzero()[:, 0]
    count = len(places) // 2 + 1
    cut = int(places[count])
    with torch.no_grad():
        group = group_of(model, [prompt], 0, cut)
        output = run_rows(model.loaded.model, group, [features.rows(0, count)], use_cache=True)
        rest = group_of(model, [prompt], cut)
        later = run_rows(
            model.loaded.model,
            rest,
            [features.rows(count, len(places))],
            past_key_values=state_of(output, accepted_inputs(model.loaded.model)),
        )
        expected = model.plain_logits(prompt)
    found = torch.cat([output.logits[0], later.logits[0]])
    assert log_prob_difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("name", names(NAMES, "qwen3_vl", "gemma3"))
def test_an_image_has_the_same_features_in_any_company(
    name: str, seeing: Callable[..., Seeing]
) -> None:
    model = seeing(name)
    prompt = model.prompt(*FILES)
    with torch.no_grad():
        together = model.features(prompt)
        for number, file in enumerate(FILES):
            (alone,) = model.features(model.prompt(file))
            for one, other in zip(
                (together[number].pooled, *together[number].levels),
                (alone.pooled, *alone.levels),
                strict=True,
            ):
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_another_number_of_features_than_tokens_is_refused(
    seeing: Callable[..., Seeing],
) -> None:
    """No class of transformers notices an image that is left out."""
    model = seeing("idefics3")
    prompt = model.prompt("look: ", FILES[1], " seen")
    (features,) = model.features(prompt)
    group = group_of(model, [prompt])
    for wrong in ([], [features.rows(1, len(features.pooled))], [features, features]):
        with pytest.raises(ModelError, match=r"feature tokens \(<image>\) and .* features"):
            run_rows(model.loaded.model, group, wrong)
    assert not encoder_outputs([])


def test_rows_with_images_need_the_types_of_their_tokens(seeing: Callable[..., Seeing]) -> None:
    model = seeing("gemma3")
    prompt = model.prompt("look: ", FILES[1], " seen")
    group = group_of(model, [prompt])._replace(types=None)
    with pytest.raises(ModelError, match="need the types of their tokens"):
        run_rows(model.loaded.model, group, model.features(prompt))
