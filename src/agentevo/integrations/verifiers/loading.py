"""Finds an environment of verifiers of either generation by its name."""

from __future__ import annotations

import importlib
import importlib.util
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

from agentevo.agents import Policy
from agentevo.errors import ConfigError, MissingExtraError, describe_error, shown
from agentevo.types import Outcome, Task

OURS = ("agentevo", "verifiers")
"""Modules that are not environments."""


class VerifiersWorld(Protocol):
    """A loaded environment."""

    name: str

    def tasks(self) -> tuple[list[Task], list[Task]]:
        """Training and held-out tasks; there may be no held-out ones. Raises ConfigError without
        training tasks."""

    async def play(self, task: Task, policy: Policy) -> Outcome:
        """Plays one attempt. Raises the environment's errors."""


def load(name: str, args: Mapping[str, Any], max_tasks: int) -> VerifiersWorld:
    """The installed environment of that name. Raises MissingExtraError without the package,
    ConfigError for an unknown name, for another generation than the package's, and for an error of
    its own code."""
    _check_package()
    try:
        with _signals_kept():
            module = _module(name)
            if hasattr(module, "load_environment"):
                if not _has_classic():
                    raise ConfigError(
                        f"verifiers: {name!r} has a `load_environment`, which this version of "
                        "verifiers no longer supports: pip install 'verifiers<0.4'"
                    )

                import verifiers

                from agentevo.integrations.verifiers.classic import ClassicWorld

                return ClassicWorld(verifiers.load_environment(name, **args), name, max_tasks)

            if _has_classic():
                raise ConfigError(
                    f"verifiers: {name!r} has no `load_environment`; if it is a taskset, it "
                    "needs a later version: pip install 'verifiers>=0.4'"
                )

            from agentevo.integrations.verifiers.tasksets import load_taskset_world

            return load_taskset_world(name, args, max_tasks)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"verifiers: the environment {name!r} can't be loaded with the options "
            f"{shown(dict(args))}: {describe_error(error)}"
        ) from error


def wrap(environment: Any, max_tasks: int) -> VerifiersWorld:
    """An environment object of a program. Raises ConfigError for anything else."""
    _check_package()
    if _has_classic():
        import verifiers

        from agentevo.integrations.verifiers.classic import ClassicWorld

        if isinstance(environment, verifiers.Environment):
            name = environment.env_id or type(environment).__name__
            return ClassicWorld(environment, name, max_tasks)
    elif _found("verifiers.v1") is not None:
        from verifiers.v1 import Env

        from agentevo.integrations.verifiers.tasksets import TasksetWorld

        if isinstance(environment, Env):
            return TasksetWorld(environment, environment.config.env_id, max_tasks)

    raise ConfigError(
        f"world: {shown(environment)} is no environment of verifiers: give what "
        "`load_environment` returns, or its name"
    )


def _check_package() -> None:
    if _found("verifiers") is None:
        raise MissingExtraError(
            "agentevo.integrations.verifiers needs the package 'verifiers': pip install verifiers"
        )


def _has_classic() -> bool:
    return _found("verifiers.envs") is not None


def _module(name: str) -> ModuleType:
    """The module of an environment: my_env for `owner/my-env@1.0`."""
    module = name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_")
    bundled = f"verifiers.v1.tasksets.{module}"
    for place in (bundled, module, module.lower()):
        if module.isidentifier() and module not in OURS and _found(place) is not None:
            return importlib.import_module(place)

    raise ConfigError(
        f"verifiers: no environment {name!r} is installed (there is no module {module!r}): install "
        "its package, such as with `prime env install OWNER/NAME`, or give import=[./my_env.py] "
        "the folder of a file of your own"
    )


def _found(module: str) -> object | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keeps the run's handlers of SIGINT and SIGTERM: environments before 0.4 install their own,
    which end the process immediately."""
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            if signal.getsignal(kind) is not handler:
                signal.signal(kind, handler)
