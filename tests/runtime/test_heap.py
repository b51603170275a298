"""What lives as long as a run is not searched for garbage, and is again after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import agentevo
from agentevo.runtime.heap import lasting_heap


class Node:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """conftest.py freezes the heap."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.slow
def test_garbage_of_before_goes_at_once_and_of_within_as_always() -> None:
    before = weakref.ref(Node())
    with lasting_heap():
        assert before() is None
        within = weakref.ref(Node())
        gc.collect()
        assert within() is None


@pytest.mark.soak
def test_what_became_garbage_meanwhile_goes_after_it_also_when_it_fails() -> None:
    node = Node()
    known = weakref.ref(node)
    with suppress(ValueError), lasting_heap():
        del node
        gc.collect()
        assert known() is not None
        raise ValueError

    gc.collect()
    assert known() is None


@pytest.mark.soak
def test_of_two_blocks_that_overlap_the_last_thaws() -> None:
    first = lasting_heap()
    second = lasting_heap()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_freeze_count() > 1000

    second.__exit__(None, None, None)
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_a_heap_that_somebody_has_frozen_stays_as_it_is() -> None:
    gc.freeze()
    known = gc.get_freeze_count()
    gone = 1000  # objects of other threads that go meanwhile; what is frozen is far more
    with lasting_heap(), lasting_heap():
        assert known - gone < gc.get_freeze_count() <= known
    assert gc.get_freeze_count() > known - gone > 0


@pytest.mark.slow
def test_a_training_leaves_nothing_frozen_behind(tmp_path: Path) -> None:
    counts: list[int] = []

    async def agent(task: Any, policy: Any) -> float:
        counts.append(gc.get_freeze_count())
        await policy.generate([{"role": "user", "content": task.query}])
        return 1.0

    agentevo.train(
        agent,
        [{"query": "What is up?"}, {"query": "And what is not?"}],
        model={"name": "tiny", "tiny": {"tokenizer": "byte"}},
        run={"dir": str(tmp_path / "run")},
        trainer={"steps": 1, "groups_per_step": 1, "group_size": 2},
        sampling={"max_new_tokens": 4},
        evaluation={"every": 0, "samples": 0},
        tracking={"report": False},
    )
    assert min(counts) > 1000
    assert gc.get_freeze_count() == 0
