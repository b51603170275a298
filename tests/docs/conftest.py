"""A folder for what a page prints, whose Python is forgotten afterwards."""

import sys
from pathlib import Path

import pytest

# What registers later would be forgotten with a test's.
import agentevo.agents
import agentevo.inference.weights.transports
import agentevo.store.mongodb
import agentevo.store.postgresql
import agentevo.store.sqlite  # noqa: F401
from agentevo.runtime.registry import Registry

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder of a test. What files in it and in recipes register is forgotten."""
    before = dict(sys.modules)
    for module in list(before.values()):
        if not module.__name__.startswith("agentevo"):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, Registry):
                monkeypatch.setattr(value, "_items", dict(value._items))

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    monkeypatch.chdir(tmp_path)
    yield tmp_path

    for name in sys.modules.keys() - before.keys():
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith((str(tmp_path), str(RECIPES))):
            del sys.modules[name]
