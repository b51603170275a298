"""Presets are combinations of entries, and a recipe may choose any entry otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agentevo.algorithms.describe import describe, markdown
from agentevo.algorithms.importance import IMPORTANCE
from agentevo.algorithms.presets import POLICY_PRESETS, TABLES, hyper_parameters, resolve_preset
from agentevo.config import AlgorithmSection, build_config
from agentevo.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", POLICY_PRESETS)
def test_every_preset_resolves_and_is_explained(name):
    resolved = AlgorithmSection(name=name).resolve()
    assert resolved == resolve_preset(name, {})
    text = describe(name)[0]
    assert all(
        name in text for name in (resolved.advantage, resolved.policy_loss, resolved.aggregation)
    )


def test_what_a_recipe_chooses_wins_and_the_rest_is_the_presets():
    dapo = AlgorithmSection(name="dapo", clip_low=0.1, aggregation="seq-mean-token-mean").resolve()
    assert dict(dapo.loss_hyper) == {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 0.0}
    assert dapo.aggregation == "seq-mean-token-mean"
    swapped = AlgorithmSection(name="dr_grpo", advantage="rloo").resolve()
    assert (swapped.advantage, dict(swapped.advantage_hyper)) == ("rloo", {}), (
        "scale_by_std went with the advantage that has it"
    )


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"name": "gpro"}, "algorithm.name: got 'gpro'; did you mean grpo?"),
        (
            {"clip_low": 1.5},
            "policy loss ppo_clip: clip_low=1.5 is not possible: give a number at least 0 and at "
            "most 1",
        ),
        ({"tau_pos": 1.0}, "tau_pos belongs to policy loss sapo"),
        ({"name": "rloo", "scale_by_std": False}, "scale_by_std belongs to advantage grpo"),
        ({"name": "gspo", "aggregation": "token-mean"}, "Choose aggregation=seq-mean-token-mean"),
        ({"policy_loss": "dro"}, "policy loss dro needs beta: give a number above 0"),
        (
            {"aggregation": "seq-mean-token-sum-norm"},
            "aggregation seq-mean-token-sum-norm needs norm",
        ),
        (
            {"kl_target": 0.1},
            "algorithm.kl_target needs a KL, but its weight algorithm.kl_coef is 0",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(tree, said):
    with pytest.raises(ConfigError) as error:
        build_config(
            {"environment": {"type": "bandit"}, "model": {"name": "tiny"}, "algorithm": tree}
        )
    assert said in str(error.value)


def test_a_group_of_one_is_refused_only_where_a_group_is_compared():
    def build(name: str):
        tree = {
            "environment": {"type": "bandit"},
            "model": {"name": "tiny"},
            "algorithm": {"name": name},
            "trainer": {"group_size": 1},
        }
        return build_config(tree)

    assert build("reinforce_pp").trainer.group_size == 1
    with pytest.raises(ConfigError, match=r"algorithm\.name=grpo compares the members of a group"):
        build("grpo")


def test_every_hyper_parameter_is_a_key_with_a_meaning():
    assert set(hyper_parameters()) <= set(AlgorithmSection.model_fields)
    assert set(hyper_parameters()).isdisjoint(AlgorithmSection.__base__.model_fields)


def test_the_page_is_that_of_the_entries():
    written = DOCS.joinpath("algorithms.md").read_text(encoding="utf-8")
    assert written == markdown(), "run: python -m agentevo.algorithms > docs/algorithms.md"


def test_every_difference_from_a_peer_is_shown_by_a_test_on_its_numbers():
    folder = Path(__file__).parents[1] / "conformance"
    tests = set(
        re.findall(
            r"^def (test_\w+)",
            (folder / "test_peers_differences.py").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    page = DOCS.joinpath("coming_from.md").read_text(encoding="utf-8")
    page = page.split("\n## Where numbers differ from TRL and verl\n")[1]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    differences = rows[1:]
    assert {row[4].strip("`") for row in differences} == tests, (
        "each test has a line in the table, and each line a test"
    )

    known = {
        **TABLES,
        "kl controller": ["fixed", "adaptive"],
        "importance": dict.fromkeys(IMPORTANCE[0].choices),
    }
    for concerned, _, theirs, ours, _ in differences:
        kind = max((kind for kind in known if concerned.startswith(f"{kind} ")), key=len)
        assert set(concerned.removeprefix(f"{kind} ").split(", ")) <= set(known[kind]), concerned
        assert theirs and ours

    for peer in ("verl", "TRL"):
        recorded = json.loads(
            (folder / "peers" / f"{peer.lower()}.json").read_text(encoding="utf-8")
        )
        assert f"{peer} {recorded['versions'][peer.lower()]}" in page
