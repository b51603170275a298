"""The rules for which configuration keys a resumed run may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentevo.config import RunConfig, sources, with_defaults
from agentevo.config.interpolation import escape_tree
from agentevo.errors import ConfigError
from agentevo.runs.folder.run_folder import command_of
from agentevo.runtime.credentials import is_same_place, without_passwords
from agentevo.runtime.paths import short

FIXED_SECTIONS = ("model", "environment", "agent", "agents", "rewards", "cold_start", "data")
"""Keys that a resumed run can't change, because it would be another run."""
FIXED_KEYS = ("run.seed", "memory.optimizer", "store.url")
"""Single keys that a resumed run can't change."""
QUEUED_KEYS = (
    "trainer.groups_per_step",
    "trainer.group_size",
    "tasks.weights",
    "tasks.stages",
    "tasks.curriculum",
    "tasks.from_environment",
    "sampling.temperature",
)
"""Keys that a resumed run can't change if sampling runs concurrently with training. Tasks are
queued for their values, and groups that wait in the store have that size and temperature."""
SEPARATE_PROCESS_KEYS = ("rollout.weights.url",)
"""Keys that a resumed run can't change if its engines and samplers are separate processes, or have
used that URL."""
KINDS = {
    "loop": "the run of a program's own loop (`agentevo.open_model`)",
    "train": "a run of `agentevo train`",
    "sft": "a run of `agentevo sft`",
}
UNIMPORTANT_KEYS = (
    "run.dir",
    "run.name",
    "run.overwrite",
    "import",
    "tasks.train",
    "tasks.eval",
    "data.train",
    "data.eval",
)
"""Keys that say where data is, and not what it is. The run's folder, the user's code, tasks and
conversations may have been moved. (A check of their own refuses other tasks and conversations.)"""


def check_resume(
    config: RunConfig, command: str = "train", *, started_separately: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Raises ConfigError for a folder that can't be resumed, or only as another run. Returns the
    changed keys as a map from a key to its (old, new) values. `started_separately`: whether its
    engines and samplers are separate processes, as those of `learn`."""
    folder = config.run_dir
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{short(folder)}: there is no run to resume: leave --resume out, or give "
            "its folder with "
            "run.dir"
        )

    first_command = command_of(folder) or command
    if first_command != command:
        raise ConfigError(
            f"{short(folder)} is a run of `agentevo {first_command}`: resume it with `agentevo "
            f"{first_command} RECIPE "
            "--resume`, or give another run.dir"
            if "loop" not in (first_command, command)
            else f"{short(folder)} is {KINDS.get(first_command, KINDS['train'])}: resume it with "
            f"its own command, or give another folder"
        )

    changed = changes(config)
    has_samplers = config.rollout.staleness > 0 or config.rollout.samplers > 0
    is_concurrent = started_separately or (command != "loop" and has_samplers)
    refused = [
        key
        for key in ("rollout.staleness", "rollout.samplers")
        if command != "loop" and 0 in changed.get(key, ())
    ]
    if is_concurrent and "wait" in changed.get("rollout.policy", ()):
        refused.append("rollout.policy")

    if refused:
        raise ConfigError(
            f"{short(folder)} was started with {refused[0]}={changed[refused[0]][0]!r}, "
            "and its tasks are queued for that: resume it with that value, or give another run.dir"
        )

    fixed = FIXED_SECTIONS if command == "train" else (*FIXED_SECTIONS, command)
    has_apart_keys = started_separately or any(
        changed.get(key, (None,))[0] is not None for key in SEPARATE_PROCESS_KEYS
    )
    fixed_keys = (
        *FIXED_KEYS,
        *QUEUED_KEYS * is_concurrent,
        *SEPARATE_PROCESS_KEYS * has_apart_keys,
    )
    for key, values in changed.items():
        before, after = (without_passwords(repr(value)) for value in values)
        if _is_in(key, (*fixed_keys, *fixed)):
            raise ConfigError(
                f"{short(folder)} was started with {key}={before} and not {after}: "
                "resume it with the "
                "same recipe and overrides, or give another "
                "run.dir"
            )

    return changed


def note_changes(changed: Mapping[str, tuple[Any, Any]], note: Callable[[str], None]) -> None:
    """Reports the keys that have new values from now on."""
    for key, (was, now) in changed.items():
        note(without_passwords(f"from now on with {key}={now!r}, which was {was!r}"))


def is_fixed(key: str) -> bool:
    """Whether no resume may change the key."""
    return _is_in(key, (*FIXED_KEYS, *FIXED_SECTIONS))


def _is_in(key: str, sections: Iterable[str]) -> bool:
    """Whether a changed key is one of these keys, or lies in the section that one of them names."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def changes(
    config: RunConfig, before: Mapping[str, Any] | None = None
) -> dict[str, tuple[Any, Any]]:
    """The differences of `config` from the configuration with which its folder was last run, or
    from the given tree, as a map from a key to its (old, new) values. Another password for the same
    store is not a difference."""
    if before is None:
        before = sources.read_yaml(config.run_dir / "config.yaml")

    before = sources.leaves(with_defaults(before))
    now = sources.leaves(escape_tree(config.model_dump(mode="json")))
    keys = [
        key
        for key in {**before, **now}
        if before.get(key) != now.get(key)
        and key not in UNIMPORTANT_KEYS
        and not (key == "store.url" and is_same_place(str(before.get(key)), str(now.get(key))))
    ]
    return {key: (before.get(key), now.get(key)) for key in keys}
