"""Explanations of algorithms and their entries for people, by name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from agentevo.algorithms.entries import AlgorithmEntry, Hyperparameter, Value
from agentevo.algorithms.presets import (
    POLICY_PRESETS,
    PREFERENCE_PRESETS,
    PRESETS,
    TABLES,
    Preset,
    resolve_parts,
    resolve_preference,
)

PAGE_WIDTH = 100
"""The maximum number of characters in a line of prose on the page."""
INTRODUCTION = """# Algorithms

<!-- Made by `python -m agentevo.algorithms > docs/algorithms.md`: edit src/agentevo/algorithms. -->

This page lists every algorithm that you can train with: presets, and the parts that they combine.
You choose a preset in the recipe, and may replace any part or hyper-parameter of it:

```yaml
algorithm: {name: dapo, clip_high: 0.3, aggregation: seq-mean-token-mean}
```

Two commands list all presets and parts, and explain one with formula, defaults and sources:

```bash
agentevo list algorithms
agentevo config algorithm.dapo
```

A preset is a combination of an advantage, a policy loss, an aggregation and other keys of the
section `algorithm`. You can add further keys of the section, such as `kl_coef`, `entropy_coef`,
`importance` and `drop_truncated`; `agentevo config algorithm` lists them.

Each part below has its formula, its source, its hyper-parameters (default, range, meaning) and its
names in other frameworks. Each function is tested against a slow version of its formula in
`tests/conformance`. Where the numbers of TRL and verl differ, see
[Coming from other frameworks](coming_from.md).
"""
PREFERENCES = """These presets train by a preference loss, on pairs from each step's groups or on
given pairs (`data.pairs`, `data.pairs_from`); see
[Train on preferences](sft.md#train-on-preferences):
"""
KIND_TEXTS: Mapping[str, str] = {
    "advantage": """## Advantages

Key: `algorithm.advantage`. A trajectory is the record of one attempt at a task. Symbols:

- `s_i`: the score of trajectory i, which is the sum of its rewards at trained tokens
- `mu_g`, `std_g`: mean and unbiased standard deviation of the scores of its group
- `n`: number of trajectories in the group
- `t`: index of a trained token; `k`: index of a turn
- `r`: reward; `V`: value of the critic; `returns`: the target of the critic, if there is one
- `whiten`: shift and scale the batch's trained tokens to mean 0 and variance 1
""",
    "policy_loss": """## Policy losses

Key: `algorithm.policy_loss`. A formula is the loss of one token, or of one sequence where stated.
Symbols:

- `l`: log-prob now, which carries the gradient; `o`: log-prob under the policy before the update
- `p`: log-prob under the proximal policy; `q`: log-prob as sampled by the engine
- `A`: advantage; `r = exp(l - o)`; `sg`: stop-gradient
""",
    "aggregation": """## Aggregations

Key: `algorithm.aggregation`. `l_it` is the loss of token t of sequence i, and `m_it` is 1 where the
token is trained, else 0.
""",
    "kl": """## KL estimators

Key: `algorithm.kl`; its weight is `algorithm.kl_coef` (0). `d = logp - ref_logp`, and `sg` is
stop-gradient.
""",
    "preference_loss": """## Preference losses

Key: `algorithm.preference_loss`. `chosen` and `rejected` are the summed log-probs of the two
answers, and `ref_` marks the reference policy's. `n_c` is the length of the chosen answer.
""",
}
"""Key of the section `algorithm` -> heading and symbols of its part of the page."""
FUNCTIONS = Path(__file__).parent / "functions.md"
"""The file with the page's text about functions that users write."""

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
    """Texts about the preset `name`, each entry `name`, and each entry that the preset combines.
    The list is empty for an unknown name."""
    preset = PRESETS.get(name)
    parts = preset.parts if preset is not None else {}
    return ([_preset_text(preset)] if preset is not None else []) + [
        "\n".join(_entry_section(f"algorithm.{key}={entry_name}", table[entry_name]))
        for key, table in TABLES.items()
        for entry_name in dict.fromkeys([name, parts.get(key, "")])
        if entry_name in table
    ]


def _preset_text(preset: Preset) -> str:
    lines = [f"### algorithm.name={preset.name}", "", *_wrap(f"{preset.meaning}."), ""]
    for key, (entry, hyper) in resolve_parts(preset.name, {}).items():
        lines.append(f"- {key}: {entry}{_settings_text(hyper)}")

    if preset.name in PREFERENCE_PRESETS:
        lines.append(f"- pairs: {_pairs_text(preset)}")
    lines += [f"- {key}: {_value_text(value)}" for key, value in preset.keys.items()]
    return "\n".join([*lines, f"- source: {preset.source}"])


def _pairs_text(preset: Preset) -> str:
    return resolve_preference(preset.name, {}).pairs or "single answers"


def _source_text(need: str) -> str:
    return f" ({SOURCES[need]})" if need in SOURCES else ""


def _settings_text(hyper: Mapping[str, Value]) -> str:
    return (
        f" ({', '.join(f'{key}={_value_text(value)}' for key, value in hyper.items())})"
        if hyper
        else ""
    )


def _value_text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def markdown() -> str:
    """The text of docs/algorithms.md: every preset and every entry."""
    lines = [
        INTRODUCTION,
        "## Presets",
        "",
        "| `algorithm.name` | advantage | policy loss | aggregation | other keys | source |",
        "|---|---|---|---|---|---|",
        *(_preset_row(preset) for preset in POLICY_PRESETS.values()),
        "",
        PREFERENCES,
        "| `algorithm.name` | preference loss | pairs | other keys | source |",
        "|---|---|---|---|---|",
        *(_preset_row(preset) for preset in PREFERENCE_PRESETS.values()),
    ]
    for kind, entries in TABLES.items():
        lines += ["", KIND_TEXTS[kind].rstrip()]
        for entry in entries.values():
            lines += ["", *_entry_section(entry.name, entry)]

    return "\n".join([*lines, "", FUNCTIONS.read_text(encoding="utf-8")])


def _preset_row(preset: Preset) -> str:
    main_part, *other_parts = preset.parts.values()
    pairs = [_pairs_text(preset)] if preset.name in PREFERENCE_PRESETS else []
    keys = ", ".join(f"{key}={_value_text(value)}" for key, value in preset.keys.items())
    cells = [
        preset.name,
        main_part + _settings_text(preset.hyper),
        *other_parts,
        *pairs,
        keys,
        preset.source,
    ]
    return f"| {' | '.join(cells)} |"


def _entry_section(title: str, entry: AlgorithmEntry) -> list[str]:
    lines = [
        f"### {title}",
        "",
        *_wrap(f"{entry.meaning[0].upper()}{entry.meaning[1:]}."),
        "",
    ]
    for equation in re.split(r"(?<=;) ", entry.formula):
        lines += _wrap(f"    {equation}", indent=" " * 8)

    lines += ["", *_wrap(f"Source: {entry.source}.")]
    bullets = [_hyper_text(hyper) for hyper in entry.hyper]
    bullets += [f"needs {need}{_source_text(need)}" for need in entry.needs]
    bullets += [f"{peer}: {text}" for peer, text in entry.peers.items()]
    if bullets:
        lines.append("")
    for bullet in bullets:
        lines += _wrap(f"- {bullet}", indent="  ")
    return lines


def _hyper_text(hyper: Hyperparameter) -> str:
    if hyper.default is None:
        return f"`{hyper.name}` (required, {hyper.range}): {hyper.meaning}"
    return f"`{hyper.name}={_value_text(hyper.default)}` ({hyper.range}): {hyper.meaning}"


def _wrap(text: str, *, indent: str = "", width: int = PAGE_WIDTH) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
