"""Parameters that `make test` or CI leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """`["llama", *slow("qwen2", "mistral")]`: further values of a test whose first ones say most of
    what all of them say; `make test-all` takes them too."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def soak(*values: Any) -> list[Any]:
    """Further values that CI leaves out, too: only `make soak` takes them."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]
