"""Agents that bring their own tasks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import agentevo
from agentevo.agents import Agent
from agentevo.config import build_config
from agentevo.config.agents import agents
from agentevo.errors import ConfigError
from agentevo.rollout.task_source import TaskSource

ROWS = [{"id": str(n), "query": f"Say {n}.", "answer": str(n)} for n in range(4)]


@pytest.fixture
def registered():
    """`registered(train, held_out)`: the name of an agent that brings them."""
    names = []

    def add(train, held_out=(), name="brings"):
        @agentevo.agent(name)
        class Brings:
            brings_tasks = True

            def __init__(self, config):
                self.config = config

            def tasks(self):
                if isinstance(train, Exception):
                    raise train
                return train, held_out

            async def run(self, task, policy):
                return 0.0

        names.append(name)
        return name

    yield add
    for name in names:
        agents._items.pop(name)


def config_of(name, **sections):
    return build_config({"agent": {"type": name}, **sections}, needs_environment=True)


def test_they_are_played_and_its_held_out_ones_evaluated(registered):
    source = TaskSource(config_of(registered(ROWS[:3], ROWS[3:])), None)
    assert [task.id for task in source.given()] == ["0", "1", "2", "3"]
    assert [(task.id, task.query) for task in source.held_out()] == [("3", "Say 3.")]
    assert sorted(task.id for task in source.train(1)) == ["0", "1", "2"]


def test_without_held_out_ones_the_last_are(registered):
    tasks = [agentevo.Task(id=str(n), query="?") for n in range(10)]
    source = TaskSource(config_of(registered(tasks)), None)
    assert [task.id for task in source.held_out()] == ["8", "9"]


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (ValueError("no disk"), r"Brings.tasks\(\): ValueError: no disk"),
        ("abc", "give a list of tasks"),
        ([*ROWS, ROWS[0]], "the id '0' is there 2 times"),
        ([{"answer": 1}], r"\[0\]: no query"),
    ],
)
def test_what_is_no_list_of_tasks_is_refused(registered, train, words):
    with pytest.raises(ConfigError, match=words):
        TaskSource(config_of(registered(train)), None)


def test_tasks_or_an_environment_beside_them_are_refused(registered, tmp_path):
    registered(ROWS)
    with pytest.raises(ConfigError, match="brings tasks of its own: leave out `environment`"):
        config_of("brings", environment={"type": "coins"})
    with pytest.raises(ConfigError, match="brings tasks of its own: leave out `tasks`"):
        config_of("brings", tasks="some.jsonl")


class Bare:
    brings_tasks = True

    def tasks(self):
        return ROWS[:3], ROWS[3:]

    async def run(self, task, policy):
        return 0.0


class OfAProtocol(Bare, Agent):
    pass


@dataclass
class WithoutFields(Bare):
    pass


class InitWithoutOptions(Bare):
    def __init__(self):
        self.made = True


class Taking(Bare):
    def __init__(self, config):
        assert config.type == "plain"


class _Meta(type):
    def __call__(cls, config):
        assert config.type == "plain"
        return super().__call__()


class MadeByMeta(Bare, metaclass=_Meta):
    pass


@pytest.mark.parametrize(
    "cls", [Bare, OfAProtocol, WithoutFields, InitWithoutOptions, Taking, MadeByMeta]
)
def test_a_class_is_made_with_options_where_it_takes_them(cls):
    agentevo.agent("plain")(cls)
    try:
        for _ in range(2):
            source = TaskSource(config_of("plain"), None)
            assert [task.id for task in source.held_out()] == ["3"]
    finally:
        agents._items.pop("plain")


def test_a_class_that_takes_more_is_refused_in_its_own_words():
    class Greedy(Bare):
        def __init__(self, config, more):
            pass

    agentevo.agent("plain")(Greedy)
    try:
        with pytest.raises(ConfigError, match="missing 1 required positional argument: 'more'"):
            TaskSource(config_of("plain"), None)
    finally:
        agents._items.pop("plain")


def test_a_class_without_the_method_is_refused():
    class Nothing:
        brings_tasks = True

        async def run(self, task, policy):
            return 0.0

    with pytest.raises(ConfigError, match="has no method `tasks\\(\\)`"):
        agentevo.agent("nothing")(Nothing)
