"""The names that a recipe can use, by kind, with a line about each: the tables of `agentevo
list`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path

Row = tuple[str, ...]


def registered(module: str, name: str) -> list[Row]:
    """Every name of the registry `name` of the module, with the first paragraph of its object's
    docstring."""
    registry = getattr(import_module(module), name)
    return [(item, _first_paragraph(registry.get(item))) for item in registry.names()]


def agents() -> list[Row]:
    """Built-in agents by their section, others by their own docstring."""
    from agentevo.config.agents import SECTIONS, agent_names
    from agentevo.config.agents import agents as registry

    return [
        (name, _first_paragraph(SECTIONS.get(name) or registry.get(name))) for name in agent_names()
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
    """Known models, the way in which each is computed, and whether it is on this machine. Then the
    model types of all other models, by way."""
    from agentevo.models.files.cache import cache_folder, is_complete
    from agentevo.models.files.known_models import known_models
    from agentevo.models.known_ways import known_ways, way_of

    way = way_of("llama") or ""  # known models and the tiny one are Llamas
    rows: list[Row] = [
        (
            "tiny",
            way,
            "created at the start with random weights; model.tiny sets its shape and tokenizer",
        )
    ]
    for name in known_models.names():
        model = known_models.get(name)
        is_here = is_complete(model, cache_folder(name))
        rows.append((name, way, f"{model.summary} ({'here' if is_here else 'not downloaded yet'})"))

    others = "a folder, or a model of the hub, whose config.json has the model_type"
    return rows + [
        ("ORG/NAME", way, f"{others} {', '.join(types)}") for way, types in known_ways().items()
    ]


def recipes() -> list[Row]:
    """Packaged recipes. The line is the first paragraph of the file's comment and, for a sweep, its
    number of runs."""
    from agentevo.config.sources import packaged_recipes
    from agentevo.config.sweep import load_sweep

    rows: list[Row] = []
    for name, path in packaged_recipes().items():
        sweep = load_sweep(name)
        runs = "" if sweep is None else f" (a sweep of {len(sweep.members)} runs)"
        rows.append((name, f"{first_comment(path)}{runs}".lstrip()))

    return rows


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
    auto = ("auto", "the first of bubblewrap and landlock that works on this machine")
    return [auto, *registered("agentevo.environments.sandbox", "sandboxes")]


LISTS: Mapping[str, Callable[[], list[Row]]] = {
    "environments": partial(registered, "agentevo.environments", "environments"),
    "agents": agents,
    "tools": partial(registered, "agentevo.config.tools", "tools"),
    "rewards": partial(registered, "agentevo.rewards", "rewards"),
    "algorithms": algorithms,
    "models": models,
    "recipes": recipes,
    "engines": partial(registered, "agentevo.inference.engines", "engines"),
    "transports": transports,
    "stores": stores,
    "sandboxes": sandboxes,
    "trackers": partial(registered, "agentevo.observability.trackers", "trackers"),
}
KINDS: Mapping[str, str] = {
    "environments": "what is played: environment.type",
    "agents": "the program that plays: agent.type",
    "tools": "what the tool agent may call: agent.tools",
    "rewards": "what an attempt is worth: rewards",
    "algorithms": "how training learns from attempts: algorithm.name, and its parts",
    "models": "the policy: model.name, and how it is computed (tree or rows)",
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


def _first_paragraph(item: object) -> str:
    """The first paragraph of an object's docstring, on one line."""
    return " ".join((inspect.getdoc(item) or "").strip().partition("\n\n")[0].split())
