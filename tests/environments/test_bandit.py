import pydantic
import pytest

from agentevo.environments.bandit import BanditConfig, BanditEnvironment


def test_rewards_and_success() -> None:
    environment = BanditEnvironment(BanditConfig())
    high = []
    for seed in range(2000):
        environment.reset(seed=seed)
        assert environment.step("phoenix")[1:3] == (0.1, True)
        environment.reset(seed=seed)
        _, reward, terminated, truncated, info = environment.step("DRAGON")
        assert (terminated, truncated, info["success"]) == (True, False, True)
        high.append(reward)

    assert set(high) == {0.0, 1.0}
    assert sum(high) / 2000 == pytest.approx(0.25, abs=0.04)  # 4 standard errors


def test_low_arm_is_no_success() -> None:
    environment = BanditEnvironment(BanditConfig())
    environment.reset(seed=1)
    assert not environment.step("Phoenix")[4]["success"]


def test_arms_come_in_either_order() -> None:
    environment = BanditEnvironment(BanditConfig(low_arm="Trader", high_arm="Librarian"))
    shown = [environment.reset(seed=seed)[0] for seed in range(200)]
    share = sum(text.index("Trader") < text.index("Librarian") for text in shown) / 200
    assert 0.35 < share < 0.65
    assert environment.optimal_action() == "Librarian"


@pytest.mark.parametrize(
    "wrong",
    [{"low_arm": "dragon"}, {"high_probability": 0.05}, {"high_probability": 1.5}, {"low_arm": ""}],
)
def test_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        BanditConfig.model_validate(wrong)
