"""The names that a recipe can use, by kind, with a line about each: the tables of `agentevo
list`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path

Row = tuple[str, str]


def environments() -> list[Row]:
    from agentevo.environments import environments as registry

    return [
        (name, _first_paragraph(inspect.getdoc(registry.get(name)) or ""))
        for name in registry.names()
    ]


def agents() -> list[Row]:
    """Built-in agents by their section, others by their own docstring."""
    from agentevo.config.agents import SECTIONS, agent_names
    from agentevo.config.agents import agents as registry

    return [
        (name, _first_paragraph(inspect.getdoc(SECTIONS.get(name) or registry.get(name)) or ""))
        for name in agent_names()
    ]


def tools() -> list[Row]:
    """Registered functions and classes."""
    from agentevo.config.tools import tools as registry

    return [
        (name, _first_paragraph(inspect.getdoc(registry.get(name)) or ""))
        for name in registry.names()
    ]


def rewards() -> list[Row]:
    from agentevo.rewards import rewards as registry

    return [
        (name, _first_paragraph(inspect.getdoc(registry.get(name)) or ""))
        for name in registry.names()
    ]


def algorithms() -> list[Row]:
    """The presets, and below them the parts from which any preset is built."""
    from agentevo.algorithms.presets import PRESETS, TABLES

    rows = [(name, preset.meaning) for name, preset in PRESETS.items()]
    return rows + [
        (f"{kind}={name}", piece.meaning)
        for kind, entries in TABLES.items()
        for name, piece in entries.items()
    ]


def models() -> list[Row]:
    """Known models, and whether each is on this machine."""
    from agentevo.models.files.cache import cache_folder, is_complete
    from agentevo.models.files.known_models import known_models

    rows = [
        (
            "tiny",
            "created at the start with random weights; model.tiny sets its shape and tokenizer",
        )
    ]
    for name in known_models.names():
        model = known_models.get(name)
        rows.append(
            (
                name,
                f"{model.summary} "
                f"({'here' if is_complete(model, cache_folder(name)) else 'not downloaded yet'})",
            )
        )

    return rows


def recipes() -> list[Row]:
    """Packaged recipes. The line is the first paragraph of the file's comment and, for a sweep, its
    number of runs."""
    from agentevo.config.sources import packaged_recipes
    from agentevo.config.sweep import load_sweep

    rows = []
    for name, path in packaged_recipes().items():
        about = first_comment(path)
        sweep = load_sweep(name)
        rows.append(
            (
                name,
                about
                if sweep is None
                else f"{about} (a sweep of {len(sweep.members)} runs)".lstrip(),
            )
        )

    return rows


def engines() -> list[Row]:
    from agentevo.inference.engines import engines as registry

    return [
        (name, _first_paragraph(inspect.getdoc(registry.get(name)) or ""))
        for name in registry.names()
    ]


def transports() -> list[Row]:
    """How trained weights reach the engines."""
    from agentevo.inference.weights.transports import transports as registry

    return [(name, registry.get(name).about) for name in registry.names()]


def stores() -> list[Row]:
    from agentevo.store import stores as registry

    about = {
        "sqlite": "one file in the run's folder, or where store.url=sqlite:///PATH says",
        "postgresql": "a schema of a database: "
        "store.url=postgresql://USER@HOST/DATABASE?schema=NAME; pip install "
        "'agentevo[postgresql]'",
        "mongodb": "a database of a replica set: store.url=mongodb://HOST/DATABASE; pip install "
        "'agentevo[mongodb]'",
    }
    return [(name, about.get(name, "")) for name in sorted({*about, *registry.names()})]


def sandboxes() -> list[Row]:
    from agentevo.environments.sandbox import sandboxes as registry

    auto = ("auto", "the first of bubblewrap and landlock that works on this machine")
    kinds = [
        (name, _first_paragraph(inspect.getdoc(registry.get(name)) or ""))
        for name in registry.names()
    ]
    return [auto, *kinds]


def trackers() -> list[Row]:
    from agentevo.observability.trackers import trackers as registry

    return [
        (name, _first_paragraph(inspect.getdoc(registry.get(name)) or ""))
        for name in registry.names()
    ]


LISTS: Mapping[str, Callable[[], list[Row]]] = {
    "environments": environments,
    "agents": agents,
    "tools": tools,
    "rewards": rewards,
    "algorithms": algorithms,
    "models": models,
    "recipes": recipes,
    "engines": engines,
    "transports": transports,
    "stores": stores,
    "sandboxes": sandboxes,
    "trackers": trackers,
}
KINDS: Mapping[str, str] = {
    "environments": "what is played: environment.type",
    "agents": "the program that plays: agent.type",
    "tools": "what the tool agent may call: agent.tools",
    "rewards": "what an attempt is worth: rewards",
    "algorithms": "how training learns from attempts: algorithm.name, and its parts",
    "models": "the policy: model.name",
    "recipes": "complete recipes, for `agentevo train NAME`",
    "engines": "what generates: engine.type",
    "transports": "how trained weights reach the engines: rollout.transport",
    "stores": "where trajectories go: store.url",
    "sandboxes": "where a model's code runs: the key type of a sandbox",
    "trackers": "where a run's numbers go in addition to its folder: tracking.backends",
}
"""The kinds, with their purposes."""


def first_comment(path: Path) -> str:
    """The first paragraph of the comment that a file begins with."""
    lines = path.read_text(encoding="utf-8").lstrip().splitlines()
    comment = (line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return " ".join(takewhile(bool, comment))


def _first_paragraph(text: str) -> str:
    return " ".join(text.strip().partition("\n\n")[0].split())
