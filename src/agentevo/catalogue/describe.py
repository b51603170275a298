"""Explanations of algorithms and their entries for people, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentevo.catalogue import CatalogueEntry, Value
from agentevo.catalogue.advantages import ADVANTAGES
from agentevo.catalogue.aggregations import AGGREGATIONS
from agentevo.catalogue.kl import KL
from agentevo.catalogue.policy_losses import POLICY_LOSSES
from agentevo.catalogue.preference import PREFERENCE_LOSSES
from agentevo.catalogue.preference_presets import (
    PREFERENCE_PRESETS,
    PreferencePreset,
    resolve_preference,
)
from agentevo.catalogue.presets import PRESETS, Preset, resolve_preset

ENTRIES: Mapping[str, Mapping[str, CatalogueEntry]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "kl": KL,
    "preference_loss": PREFERENCE_LOSSES,
}
"""Key of the configuration -> the entries of that kind."""

FUNCTIONS = Path(__file__).parent / "functions.md"
"""The page's text about functions of the user."""

SOURCES = {
    "values": "of the critic, see the section critic",
    "process_rewards": "of a model that learns them, see the section process_reward",
    "baseline_rewards": "of a greedy attempt at each task, which the step adds",
    "reward_parts": "of the environment agent, or Outcome.reward_parts of an agent function",
    "proximal_logp": "recomputed at the start of the step",
    "rollout_logp": "of the engine",
}
"""Input that an entry needs -> where it comes from in a run."""


def describe(name: str) -> list[str]:
    """A text for the preset of that name, for each entry of that name, and for each entry that the
    preset consists of; empty for an unknown name."""
    texts = []
    parts: dict[str, str] = {}
    if name in PRESETS:
        algorithm = resolve_preset(name, {})
        texts.append(_preset(PRESETS[name]))
        parts = {
            "advantage": algorithm.advantage,
            "policy_loss": algorithm.policy_loss,
            "aggregation": algorithm.aggregation,
        }

    if name in PREFERENCE_PRESETS:
        texts.append(_preference_preset(PREFERENCE_PRESETS[name]))
        parts["preference_loss"] = resolve_preference(name, {}).loss

    return texts + [
        _entry(kind, entries[shown])
        for kind, entries in ENTRIES.items()
        for shown in dict.fromkeys([name, parts.get(kind, "")])
        if shown in entries
    ]


def _preset(preset: Preset) -> str:
    parts = resolve_preset(preset.name, {})
    lines = [f"algorithm.name={preset.name}", f"  {preset.meaning}"]
    for kind, name, hyper in (
        ("advantage", parts.advantage, parts.advantage_hyper),
        ("policy_loss", parts.policy_loss, parts.loss_hyper),
        ("aggregation", parts.aggregation, parts.aggregation_hyper),
    ):
        lines.append(f"  {kind:<12} {name}{_settings(hyper)}")

    lines += [f"  besides      {key}={_show(value)}" for key, value in preset.keys.items()]
    return "\n".join([*lines, f"  source       {preset.source}"])


def _preference_preset(preset: PreferencePreset) -> str:
    parts = resolve_preference(preset.name, {})
    lines = [
        f"algorithm.name={preset.name}",
        f"  {preset.meaning}",
        f"  preference_loss {parts.loss}{_settings(parts.hyper)}",
    ]
    lines += [f"  {'pairs':<12} {parts.pairs}"] if parts.pairs is not None else []
    lines += [f"  {key:<12} {_show(value)}" for key, value in preset.keys.items()]
    return "\n".join([*lines, f"  source       {preset.source}"])


def _entry(kind: str, entry: CatalogueEntry) -> str:
    lines = [
        f"algorithm.{kind}={entry.name}",
        f"  {entry.meaning}",
        f"  formula      {entry.formula}",
        f"  source       {entry.source}",
    ]
    for hyper in entry.hyper:
        default = "must be given" if hyper.default is None else f"default {_show(hyper.default)}"
        lines.append(f"  algorithm.{hyper.name}: {hyper.meaning}; {hyper.range}; {default}")

    if entry.needs:
        lines.append(
            f"  needs        {', '.join(f'{need}{_from_where(need)}' for need in entry.needs)}"
        )

    lines += [f"  {peer:<12} {text}" for peer, text in entry.peers.items()]
    return "\n".join(lines)


def _from_where(need: str) -> str:
    return f" ({SOURCES[need]})" if need in SOURCES else ""


def _settings(hyper: Mapping[str, Value]) -> str:
    return (
        f" ({', '.join(f'{key}={_show(value)}' for key, value in hyper.items())})" if hyper else ""
    )


def _show(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def markdown() -> str:
    """docs/algorithms.md: every preset and every entry."""
    lines = [
        "# Algorithms",
        "",
        "Made by `python -m agentevo.catalogue > docs/algorithms.md`; the same texts come from "
        "`agentevo config explain algorithm.NAME`.",
        "Each function is checked against a slow version of its formula in `tests/conformance`; "
        "where TRL's and verl's numbers differ from ours stands in [peers.md](peers.md).",
        "",
        "## Presets",
        "",
        "A preset is a combination of an advantage, a policy loss, an aggregation and other keys "
        "of the recipe's algorithm section, each",
        "of which can be chosen otherwise in a recipe.",
        "",
        "| `algorithm.name` | advantage | policy loss | aggregation | besides | source |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_preset_row(preset) for preset in PRESETS.values()]
    lines += [
        "",
        "Presets that train by a preference loss, on pairs made from each step's groups or given "
        "(`data.pairs`, `data.pairs_from`):",
        "",
        "| `algorithm.name` | preference loss | pairs | other keys | source |",
        "|---|---|---|---|---|",
    ]
    lines += [_preference_row(preset) for preset in PREFERENCE_PRESETS.values()]
    for kind, entries in ENTRIES.items():
        lines += ["", f"## {kind}", ""]
        for entry in entries.values():
            lines += _entry_section(entry)

    page = "\n".join(lines).replace("\n\n\n", "\n\n")
    return f"{page}\n\n{FUNCTIONS.read_text(encoding='utf-8')}"


def _preset_row(preset: Preset) -> str:
    parts = resolve_preset(preset.name, {})
    besides = ", ".join(f"{key}={_show(value)}" for key, value in preset.keys.items())
    cells = (
        preset.name,
        parts.advantage + _settings(preset.hyper),
        parts.policy_loss,
        parts.aggregation,
        besides,
        preset.source,
    )
    return f"| {' | '.join(cells)} |"


def _preference_row(preset: PreferencePreset) -> str:
    resolved = resolve_preference(preset.name, {})
    keys = ", ".join(f"{key}={_show(value)}" for key, value in preset.keys.items())
    return (
        f"| {preset.name} | {resolved.loss}{_settings(preset.hyper)} | "
        f"{resolved.pairs or 'single answers'} | {keys} | {preset.source} |"
    )


def _entry_section(entry: CatalogueEntry) -> list[str]:
    lines = [
        f"### {entry.name}",
        "",
        f"{entry.meaning}. Source: {entry.source}.",
        "",
        f"    {entry.formula}",
        "",
    ]
    if entry.hyper:
        settings = [
            f"`{hyper.name}` ({hyper.range}; "
            + ("no default" if hyper.default is None else f"default {_show(hyper.default)}")
            + ")"
            for hyper in entry.hyper
        ]
        lines += [f"Hyper-parameters: {', '.join(settings)}.", ""]

    return lines + [f"- {peer}: {text}" for peer, text in entry.peers.items()]
