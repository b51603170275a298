"""torch, imported when one of its names is first used.

The configuration reads the entries of this package (names, defaults, formulas), which stand beside
their functions, and programs without torch read the configuration. So every module of this package
imports torch from here, and uses it in function bodies and annotations only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class LazyTorch:
        """Has the names of torch."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch = LazyTorch()
