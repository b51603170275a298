"""Tasks in, scored trajectories out.

This room has the name of the decorator `@agentevo.rollout` (loop/rollout.py), and importing any
module of it puts it in the decorator's place. So it is the decorator too: it can be called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class _RolloutModule(ModuleType):
    def __call__(self, function: Callable[..., Any]) -> Any:
        return import_module("agentevo.loop.rollout").rollout(function)


sys.modules[__name__].__class__ = _RolloutModule
