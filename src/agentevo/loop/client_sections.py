"""What a client may say of how its model is trained at a server: nothing that is code, a file of
the server, or a value of the server's environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from agentevo.config.sections import CHAT_TEMPLATES
from agentevo.errors import ConfigError, shown
from agentevo.models.known import known_models
from agentevo.models.resolve import HUB

SECTIONS = (
    "agent",
    "agents",
    "algorithm",
    "checkpoint",
    "critic",
    "engine",
    "memory",
    "model",
    "process_reward",
    "reward_model",
    "rollout",
    "sampling",
    "tracking",
    "trainer",
)
"""What a client may say of a model. `run` takes the seed besides."""
AGENT = ("max_turns", "timeout_s")
"""What it may say of the agent, which is its own function."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_sections(sections: Mapping[str, Any]) -> None:
    """Raises ConfigError for what a client may not say, the same whatever the server has."""
    for key, value in sections.items():
        only_seed = key == "run" and isinstance(value, dict) and not value.keys() - {"seed"}
        if key not in SECTIONS and not only_seed:
            raise ConfigError(
                f"{key}: a server takes {', '.join(SECTIONS)} and run.seed: it keeps the run "
                "in its own folder, and runs no code of a client's"
            )

    for place, text in _texts("", sections):
        if "${" in text:
            raise ConfigError(
                f"{place}: a server fills in no ${{...}} of a client's: give the value itself"
            )

    agent = sections.get("agent")
    if isinstance(agent, Mapping) and (others := agent.keys() - {*AGENT}):
        raise ConfigError(
            f"agent.{min(others)}: the agent is the client's own function: a server takes "
            f"agent.{' and agent.'.join(AGENT)}"
        )

    tracking = sections.get("tracking")
    if isinstance(tracking, Mapping) and tracking.get("backends"):
        raise ConfigError(
            "tracking.backends: a server sends nothing where a client says: log what `train` "
            "returns in your own program, or ask who runs the server"
        )

    _check_model("model", sections.get("model"))
    _check_model("reward_model", sections.get("reward_model"))

    agents = sections.get("agents")
    for name, one in agents.items() if isinstance(agents, Mapping) else ():
        if isinstance(one, Mapping):
            _check_model(f"agents.{name}.model", one.get("model"))


def only_from_the_hub(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Checked sections in which org/name means the hub's model, and never a folder of that name
    where the server happens to work."""
    given = dict(sections)
    for key in ("model", "reward_model"):
        if key in given:
            given[key] = _hub_model(given[key])

    agents = given.get("agents")
    if isinstance(agents, Mapping):
        given["agents"] = {
            name: {**one, "model": _hub_model(one["model"])}
            if isinstance(one, Mapping) and "model" in one
            else one
            for name, one in agents.items()
        }

    return given


def _hub_model(section: Any) -> Any:
    if isinstance(section, Mapping) and "name" in section:
        return {**section, "name": _hub_model(section["name"])}
    is_hub_name = isinstance(section, str) and _HUB_NAME.fullmatch(section)
    return f"{HUB}{section}" if is_hub_name else section


def _texts(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """(place, text) of every key and text within a value."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield place or "a section", str(key)
            yield from _texts(f"{place}.{key}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(place, item)


def _is_template(text: str) -> bool:
    return "{%" in text or "{{" in text


def _check_model(place: str, section: Any) -> None:
    """Raises ConfigError for a model by a path."""
    options = section if isinstance(section, Mapping) else {"name": section}
    lora = options.get("lora")
    if isinstance(lora, Mapping) and lora.get("adapter") is not None:
        raise ConfigError(f"{place}.lora.adapter: a server takes no file of a client's choice")

    template = options.get("chat_template")
    if isinstance(template, str) and template not in CHAT_TEMPLATES and not _is_template(template):
        raise ConfigError(
            f"{place}.chat_template: a server reads no file of a client's choice: give "
            f"{', '.join(CHAT_TEMPLATES)} or the template itself"
        )

    name = options.get("name")
    if name is None or name in ("tiny", *known_models.names()):
        return

    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"{place}.name: {shown(name)} is no known model: a server takes "
            f"{', '.join(known_models.names())}, tiny and org/name, and no path"
        )
