"""Tasks in, scored trajectories out.

This package has the name of the decorator `@agentevo.rollout` (api/loop/rollout.py), and importing
any module from it replaces the decorator. So the package can itself be called as the decorator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class _RolloutModule(ModuleType):
    def __call__(self, function: Callable[..., Any]) -> Any:
        return import_module("agentevo.api.loop.rollout").rollout(function)


sys.modules[__name__].__class__ = _RolloutModule
