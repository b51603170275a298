"""`explain`: every key has a meaning, a type, a default and, where it counts or measures something,
a unit."""

import re

import pytest

from agentevo.algorithms.describe import describe
from agentevo.algorithms.presets import (
    PREFERENCE_PRESETS,
    PRESETS,
    TABLES,
    resolve_preference,
    resolve_preset,
)
from agentevo.cli import listings
from agentevo.config import config_keys
from agentevo.errors import UnknownNameError
from agentevo_evolve import listings as evolve_listings


@pytest.mark.slow
def test_every_key_is_explained():
    for key in config_keys().names():
        for one in config_keys().explain(key):
            assert one.key == key
            assert len(one.meaning.split()) >= 2, f"{key} has no docstring under its field"
            if one.keys:
                is_list = one.type.startswith("list of names")
                assert one.type == "section" or is_list, f"{key}: {one.type}"
                assert all(inner.key.rpartition(".")[0] == key for inner in one.keys), key
            else:
                assert one.type, f"{key}: no type"
                assert one.default or may_have_no_default(one), f"{key}: no default"


def may_have_no_default(one):
    return one.key in (
        "environment.type",
        "remote_models.NAME.model",
        "tasks.self_play.family",
        "rewards.name",
        "tracking.backends.name",
    ) or (one.key.startswith(("environment.", "rewards.", "agent.")) and one.option_of)


def test_the_walk_meets_every_section_and_nested_key():
    assert {
        "run",
        "model.tiny.hidden_size",
        "environment.type",
        "trainer.group_size",
        "tracking.report",
    } <= set(config_keys().names())


@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ("agent.timeout_s", "seconds"),
        ("sampling.max_new_tokens", "tokens"),
        ("model.tiny.context_length", "tokens"),
        ("evaluation.every", "steps"),
        ("checkpoint.every", "steps"),
        ("trainer.groups_per_step", "groups per step"),
        ("engine.kv_cache_gb", "GiB"),
        ("run.threads", "threads"),
        ("environment.size", "cells"),
        ("trainer.learning_rate", ""),
        ("model.name", ""),
        ("tracking.report", ""),
    ],
)
def test_units(key, unit):
    found = [one.unit for one in config_keys().explain(key)]
    assert unit in found


@pytest.mark.parametrize(
    ("key", "type_", "default"),
    [
        ("trainer.group_size", "whole number, at least 1, at most 1048576", "8"),
        ("sampling.top_p", "number, above 0, at most 1", "1.0"),
        ("run.threads", "whole number, at least 1, at most 1024, or null", "null"),
        ("run.dir", "path, or null", "null"),
        ("model.dtype", "one of float32, bfloat16", "'float32'"),
        ("tracking.report", "true or false", "true"),
        ("trainer.betas", "list of 2 numbers, each at least 0, below 1", "[0.9, 0.95]"),
        ("sampling.stop", "list of texts, each at least 1 long", "[]"),
    ],
)
def test_types_and_defaults_in_words(key, type_, default):
    (one,) = config_keys().explain(key)
    assert (one.type, one.default) == (type_, default)


def test_an_environment_option_is_explained_for_the_types_that_have_it():
    (doors,) = config_keys().explain("environment.num_doors")
    assert doors.option_of == ("test_doors",)
    by_type = {
        kind: one.default
        for one in config_keys().explain("environment.max_actions")
        for kind in one.option_of
    }
    assert (by_type["test_doors"], by_type["test_ice"]) == ("10", "20")


def test_the_entries_of_rewards_are_explained():
    (section,) = config_keys().explain("rewards")
    options = {key.key: key.option_of for key in section.keys}
    assert list(options)[:3] == ["rewards.name", "rewards.weight", "rewards.timeout_s"]
    assert options["rewards.weight"] == (), "every reward has it"
    assert options["rewards.pattern"] == ("format",)
    (pattern,) = config_keys().explain("rewards.pattern")
    assert (pattern.type, pattern.default) == ("text", "")


def test_a_key_of_a_lists_entry_is_not_guessed_for_another_one():
    with pytest.raises(UnknownNameError, match="lists the sections"):
        config_keys().explain("trainer.ignore_case")


def test_environment_types_are_the_registered_ones():
    (one,) = config_keys().explain("environment.type")
    assert {"test_doors", "test_ice"} <= set(one.choices)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.step", "trainer.steps"),
        ("group_size", "trainer.group_size"),
        ("model.context_length", "model.tiny.context_length"),
        ("trainer.group-size", "trainer.group_size"),
        ("Trainer.Group_Size", "trainer.group_size"),
        ("enviroment", "environment"),
        ("num_doors", "environment.num_doors"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(key, meant):
    with pytest.raises(UnknownNameError, match=rf"{key}: unknown key; did you mean {meant}\?"):
        config_keys().explain(key)


def test_a_key_like_nothing_is_not_guessed():
    with pytest.raises(UnknownNameError, match="lists the sections"):
        config_keys().explain("qqq")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_explained_with_the_formulas_of_its_parts(name):
    text = "\n".join(describe(name))
    for kind, part in (
        [("preference_loss", resolve_preference(name, {}).loss)]
        if name in PREFERENCE_PRESETS
        else [
            (kind, getattr(resolve_preset(name, {}), kind))
            for kind in ("advantage", "policy_loss", "aggregation")
        ]
    ):
        assert text.count(f"algorithm.{kind}={part}\n") == 1
        words = " ".join(text.split())
        assert " ".join(TABLES[kind][part].formula.split()) in words
        assert f"Source: {TABLES[kind][part].source}" in words


@pytest.mark.slow
@pytest.mark.parametrize("rows", [listings.recipes, evolve_listings.pipelines])
def test_a_listed_recipe_is_described_in_whole_sentences(rows):
    for name, text in rows():
        assert re.search(r"[.)]$", text), f"{name}: {text}"
