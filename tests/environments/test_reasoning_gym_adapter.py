import random

import pytest

from agentevo.environments import make, mean_baselines
from agentevo.environments.reasoning_gym_adapter import ReasoningGymConfig
from agentevo.errors import ConfigError
from agentevo.types import Baselines

pytest.importorskip("reasoning_gym")
SUMS = ReasoningGymConfig(dataset="chain_sum", options={"min_terms": 2, "max_terms": 2})


def test_reference_answer_succeeds_and_another_does_not() -> None:
    environment = make(SUMS)
    questions = set()
    for seed in range(20):
        shown, _ = environment.reset(seed=seed)
        questions.add(shown)
        answer = environment.optimal_action()
        assert answer is not None
        assert environment.step(answer) == (
            shown,
            1.0,
            True,
            False,
            {"valid": True, "effective": True, "success": True},
        )
        assert environment.reset(seed=seed)[0] == shown

        _, reward, terminated, _, info = environment.step("a thousand")
        assert reward < 1 and terminated and not info["success"]

    assert len(questions) > 15


def test_empty_answers_are_invalid_and_baselines_unknown() -> None:
    environment = make(SUMS)
    environment.reset(seed=1)
    assert environment.step("  ")[4]["valid"] is False
    assert mean_baselines(SUMS, range(3)) == Baselines(random=None, optimal=1.0)
    assert environment.random_action(random.Random(1)).lstrip("-").isdigit()


@pytest.mark.parametrize(
    "dataset",
    ["countdown", "basic_arithmetic", "knights_knaves", "sokoban", "simple_equations", "maze"],
)
def test_datasets_of_many_kinds_work(dataset: str) -> None:
    environment = make(ReasoningGymConfig(dataset=dataset))
    shown, _ = environment.reset(seed=7)
    assert len(shown) > 10
    answer = environment.optimal_action()
    assert answer is None or environment.step(answer)[4]["success"]


def test_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        make(ReasoningGymConfig(dataset="chain_sums"))
    with pytest.raises(ConfigError, match="num_words"):
        make(ReasoningGymConfig(dataset="chain_sum", options={"num_words": 3}))
    with pytest.raises(ConfigError, match="min_terms"):
        make(ReasoningGymConfig(dataset="chain_sum", options={"min_terms": -1}))
    with pytest.raises(ConfigError, match="must not set seed"):
        make(ReasoningGymConfig(dataset="chain_sum", options={"seed": 3}))
