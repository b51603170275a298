import re
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.environments.coins import METALS, CoinsConfig, CoinsEnvironment
from examples import examples

seeds = st.integers(0, 2**31 - 1)


def environment(seed: int, **options: Any) -> tuple[CoinsEnvironment, str]:
    made = CoinsEnvironment(CoinsConfig(**options))
    return made, made.reset(seed=seed)[0]


@given(seed=seeds, num_coins=st.integers(2, 8), gap=st.integers(1, 4))
@settings(max_examples=examples(60), deadline=None)
def test_value_rule_is_what_is_shown(seed: int, num_coins: int, gap: int) -> None:
    made, shown = environment(seed, rule="value", num_coins=num_coins, max_value=20, min_gap=gap)
    values = {coin: int(value) for coin, value in re.findall(r"(\w+) = (\d+)", shown)}
    first, second = sorted(values.values(), reverse=True)[:2]
    assert len(values) == num_coins and len(set(values.values())) == num_coins
    assert min(values.values()) >= 1 and first <= 20 and first - second >= gap
    assert made.optimal_action() == max(values, key=lambda coin: values[coin])


@given(seed=seeds)
@settings(max_examples=examples(60), deadline=None)
def test_table_rule_is_what_is_shown(seed: int) -> None:
    made, shown = environment(seed, rule="table", num_coins=4)
    table = dict(re.findall(r"(\w+) = (\w+)", shown))
    lamp = re.search(r"lamp is (\w+)", shown)
    assert lamp and len(table) == 4 and made.optimal_action() == table[lamp.group(1)]


@given(seed=seeds)
@settings(max_examples=examples(60), deadline=None)
def test_match_rule_is_what_is_shown(seed: int) -> None:
    made, shown = environment(seed, rule="match")
    lamp = re.search(r"lamp is (\w+)", shown)
    assert lamp and made.optimal_action() == lamp.group(1)


def test_hidden_rule_is_one_mapping_for_all_seeds() -> None:
    found: dict[str, set[str]] = {}
    orders = set()
    for seed in range(200):
        made, shown = environment(seed, rule="hidden")
        lamp = re.search(r"lamp is (\w+)", shown)
        assert lamp
        found.setdefault(lamp.group(1), set()).add(str(made.optimal_action()))
        orders.add(shown.splitlines()[0])

    assert len(found) == 3 and all(len(coins) == 1 for coins in found.values())
    assert len(set.union(*found.values())) == 3
    assert len(orders) == 6  # so that the place in the list says nothing


def test_every_coin_is_best_equally_often() -> None:
    for rule in ("match", "hidden", "table", "value"):
        best = [environment(seed, rule=rule)[0].optimal_action() for seed in range(900)]
        for coin in set(best):
            assert best.count(coin) == pytest.approx(300, abs=60), rule


def test_only_the_exact_name_succeeds() -> None:
    for said, succeeds in (
        ("{}", True),
        ("{}.", False),
        ("The {} coin", False),
        ('"{}"', False),
        ("{} {}", False),
    ):
        made, _ = environment(7, rule="table")
        best = str(made.optimal_action())
        _, reward, terminated, _, info = made.step(said.format(best, best))
        assert info["success"] is succeeds and terminated is succeeds, said
        assert (reward == 1.0) is succeeds


def test_credit_grows_towards_the_exact_answer() -> None:
    rewards = []
    for said in ("I think that gold may be the right coin", "The gold coin.", "gold.", "gold"):
        made = next(
            made
            for made, _ in (environment(seed, rule="hidden") for seed in range(99))
            if made.optimal_action() == "gold"
        )
        rewards.append(made.step(said)[1])

    assert 0 < rewards[0] < rewards[1] < rewards[2] == 0.5 * 4 / 5 < rewards[3] == 1.0


def test_naming_two_coins_or_part_of_a_word_earns_nothing() -> None:
    for said in ("gold or silver", "golden", ""):
        assert environment(1, rule="hidden")[0].step(said)[1] == 0.0


def test_no_mention_credit_when_off() -> None:
    made, _ = environment(2, rule="hidden", mention_credit=0)
    assert made.step(f"{made.optimal_action()}!")[1] == 0.0


def test_another_coin_earns_its_share() -> None:
    made, shown = environment(3, rule="value", other_credit=0.5)
    values = {coin: int(value) for coin, value in re.findall(r"(\w+) = (\d+)", shown)}
    other = min(values, key=lambda coin: values[coin])
    _, reward, terminated, _, info = made.step(other)
    assert reward == pytest.approx(0.5 * values[other] / max(values.values()))
    assert terminated and info == {"valid": True, "effective": True, "success": False}

    made, _ = environment(3, rule="table", other_credit=0.3)
    other = next(coin for coin in METALS[:3] if coin != made.optimal_action())
    assert made.step(other)[1] == pytest.approx(0.3)


def test_prompt_is_short() -> None:
    for rule in ("match", "hidden", "table", "value"):
        for wording in ("terse", "plain", "story"):
            made, shown = environment(0, rule=rule, wording=wording)
            assert len(re.findall(r"\w+|[^\w\s]", f"{made.instructions}\n{shown}")) <= 50


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_coins": 1},
        {"num_coins": 9},
        {"max_value": 3, "min_gap": 2},
        {"rule": "luck"},
        {"other_credit": 1.0},
    ],
)
def test_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        CoinsConfig.model_validate(wrong)
