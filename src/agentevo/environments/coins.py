"""Coins: read the observation and name the best coin. One turn, one word: the smallest task that
still needs reading.

`rule` decides which coin is best, in order of difficulty:

    match    each coin has a colour, the lamp has one of them: take that coin
             (copy one word of the observation)
    hidden   the lamp's colour decides, by a mapping that is never shown
             (remember a few associations from reward alone)
    table    the lamp's colour decides, by a mapping shown each time   (look up)
    value    each coin's value is shown: take the highest              (compare)

Success needs exactly the coin's name, in upper or lower case. An instruction-tuned model starts
near 0%, because it writes more than the name. `mention_credit` gives a small reward that grows as
the rest of the reply gets shorter, so that the policy can learn.
"""

from __future__ import annotations

import random
import re
from typing import ClassVar, Literal

import pydantic

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment, choose, stream
from agentevo.types import Baselines

COLOURS = ("red", "green", "blue", "white", "black", "yellow", "pink", "brown")
METALS = ("gold", "silver", "copper", "bronze", "iron", "tin", "zinc", "lead")
WORDINGS = {
    "terse": "Answer with one word, no punctuation.",
    "plain": "Answer with the name of one coin and nothing else.",
    "story": "A trader lets you take a coin. Say only its name.",
}


class CoinsConfig(EnvironmentConfig):
    """The observation, the rule for the best coin, and the reward for other coins."""

    type: Literal["coins"] = "coins"
    max_actions: int = pydantic.Field(default=1, ge=1)
    """The number of actions after which an unfinished episode is truncated. With more than 1, a
    player that named no coin can try again."""
    rule: Literal["match", "hidden", "table", "value"] = "value"
    """The rule for the best coin. The module describes the rules."""
    num_coins: int = pydantic.Field(default=3, ge=2, le=8)
    """The number of coins."""
    max_value: int = pydantic.Field(default=9, ge=2)
    """Rule `value`: the largest value. Values are different whole numbers from 1."""
    min_gap: int = pydantic.Field(default=1, ge=1)
    """Rule `value`: the smallest difference between the best and the second best value."""
    names: Literal["metals", "colours"] = "metals"
    """The kind of the coins' names. The rule `match` always uses colours."""
    wording: Literal["terse", "plain", "story"] = "terse"
    """The wording of the task."""
    other_credit: float = pydantic.Field(default=0.2, ge=0, lt=1)
    """The reward for another coin than the best. With the rule `value`, it is multiplied by the
    coin's share of the best value."""
    mention_credit: float = pydantic.Field(default=0.5, ge=0, lt=1)
    """The factor of the reward for an answer that is not a coin's name but mentions exactly one
    coin. The reward is this factor, times that coin's reward, times the name's share of the
    answer's letters. With 0, only exact names get a reward."""

    @pydantic.model_validator(mode="after")
    def _check_values_fit(self) -> CoinsConfig:
        needed = self.num_coins - 1 + self.min_gap
        if self.max_value < needed:
            raise ValueError(
                f"max_value={self.max_value} is too low for num_coins={self.num_coins}, "
                f"min_gap={self.min_gap}: take at least {needed}"
            )
        return self


@environments.register("coins")
class CoinsEnvironment(EpisodicEnvironment):
    """Name the best coin."""

    Config: ClassVar[type[EnvironmentConfig]] = CoinsConfig
    config: CoinsConfig

    @property
    def instructions(self) -> str:
        goals = {
            "match": "Take the coin of the lamp's colour.",
            "hidden": "The lamp tells which coin to take.",
            "table": "The lamp tells which coin to take.",
            "value": "Take the coin worth most.",
        }
        return f"{goals[self.config.rule]} {WORDINGS[self.config.wording]}"

    def start(self, seed: int) -> None:
        config = self.config
        rng = stream(config, seed, "world")
        self._values: list[int] = []
        coloured = config.rule == "match" or config.names == "colours"
        coins, lamps = (COLOURS, METALS) if coloured else (METALS, COLOURS)
        order = rng.sample(range(config.num_coins), config.num_coins)
        self._coins = [coins[index] for index in order]
        if config.rule == "match":
            self._lamps = self._coins
        elif config.rule == "hidden":
            self._lamps = [lamps[index] for index in order]
        else:
            self._lamps = rng.sample(lamps[: config.num_coins], config.num_coins)

        if config.rule == "value":
            top = rng.randint(config.num_coins - 1 + config.min_gap, config.max_value)
            self._values = [
                top,
                *rng.sample(range(1, top - config.min_gap + 1), config.num_coins - 1),
            ]
            rng.shuffle(self._values)
            self._best = self._values.index(top)
        else:
            self._best = rng.randrange(config.num_coins)

    def observe(self) -> str:
        rule = self.config.rule
        if rule == "value":
            return ", ".join(
                f"{coin} = {value}" for coin, value in zip(self._coins, self._values, strict=True)
            )

        lamp = f"The lamp is {self._lamps[self._best]}."
        if rule == "table":
            return (
                ", ".join(
                    f"{lamp} = {coin}" for lamp, coin in zip(self._lamps, self._coins, strict=True)
                )
                + "\n"
                + lamp
            )

        return f"Coins: {', '.join(self._coins)}.\n{lamp}"

    def _worth(self, coin: int) -> float:
        if coin == self._best:
            return 1.0
        share = self._values[coin] / self._values[self._best] if self._values else 1.0
        return self.config.other_credit * share

    def act(self, action: str) -> ActionResult:
        chosen = choose(action, self._coins)
        if chosen is not None:
            return ActionResult(
                reward=self._worth(chosen), terminated=True, success=chosen == self._best
            )

        mentioned = [
            index
            for index, coin in enumerate(self._coins)
            if re.search(rf"\b{coin}\b", action, re.IGNORECASE)
        ]
        if len(mentioned) != 1:
            return INVALID

        share = len(self._coins[mentioned[0]]) / len(action)
        return INVALID._replace(
            reward=self.config.mention_credit * self._worth(mentioned[0]) * share
        )

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(self._coins)

    def optimal_action(self) -> str | None:
        return self._coins[self._best]

    def baselines(self, max_actions: int | None = None) -> Baselines:
        return Baselines(random=1 / self.config.num_coins, optimal=1.0)
