"""What an integration says where its framework is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from agentevo.errors import MissingExtraError
from agentevo.integrations import verifiers


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "agentevo.integrations.langchain", raising=False)
    monkeypatch.setitem(sys.modules, "langchain.agents", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentevo\[langchain\]'"):
        importlib.import_module("agentevo.integrations.langchain")


def test_an_environment_of_verifiers_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for made in (
        lambda: verifiers.world("gsm8k"),
        lambda: verifiers.world(object()),
        lambda: verifiers.VerifiersAgent(verifiers.VerifiersSection(id="gsm8k")),
    ):
        with pytest.raises(MissingExtraError, match="pip install verifiers"):
            made()
