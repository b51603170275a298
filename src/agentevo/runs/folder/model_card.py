"""Creates the model card of a checkpoint (its README.md on a hub) from the checkpoint's run.

The card has the base model, the algorithm, the results on held-out tasks and the part of the recipe
that defines how the weights were made. It contains nothing about the machine: no path, no address
of a server or database, and `***` in place of anything that looks like a secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agentevo import __version__
from agentevo.config import RunConfig, changed_to_yaml
from agentevo.models import checkpoint_manifest as manifest
from agentevo.models.files.known_models import known_models
from agentevo.models.files.resolve import HUB, HUB_NAME
from agentevo.observability.summary import read_summary
from agentevo.observability.trackers.secrets import without_secrets
from agentevo.runs.folder.run_folder import command_of, is_run_folder, run_config
from agentevo.runtime.console import format_duration
from agentevo.runtime.parsing import parse_yaml

SECTIONS = (
    "model",
    "environment",
    "agent",
    "rewards",
    "algorithm",
    "trainer",
    "sampling",
    "cold_start",
    "sft",
    "critic",
    "evaluation",
    "memory",
)
"""The sections of a recipe on which the weights depend and that contain nothing about a machine."""
HIDDEN_KEYS = frozenset({"tools", "mcp_servers", "command", "env", "sandbox", "adapter", "import"})
"""The keys in these sections that may contain something about a machine."""
FENCE = "````"
"""Four backticks, because a text of the recipe may contain three."""


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that saved the checkpoint. None for another model's folder."""
    folder = checkpoint.absolute().parent
    is_saved = folder.name == "checkpoints" and is_run_folder(folder.parent)
    return folder.parent if is_saved else None


def hub_name(model: str) -> str | None:
    """The name of a recipe's model on the hub. None for a model from elsewhere."""
    if model in known_models.names():
        return known_models.get(model).hub_name
    name = model.removeprefix(HUB)
    is_elsewhere = not model.startswith(HUB) and os.path.lexists(os.path.expanduser(model))
    return name if HUB_NAME.fullmatch(name) and not is_elsewhere else None


def model_card(checkpoint: Path, repo: str) -> str:
    """The card of a checkpoint, or of another model's folder, for the hub's repository with that
    name. Raises ConfigError for a run whose files are damaged."""
    run = run_of(checkpoint)
    is_adapter = (checkpoint / "adapter_config.json").is_file()
    config = None if run is None else run_config(run)
    base = None if config is None else hub_name(config.model.name)

    facts: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["agentevo", *_tags(run, config)],
    }
    if base is not None:
        facts["base_model"] = base

    title = repo.rpartition("/")[2] if config is None else config.run.name
    parts = [
        f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}---",
        f"# {' '.join(title.split())}",
        _origin(run, config, base, is_adapter=is_adapter),
        "## How to load it",
        _loading(repo, base, is_adapter=is_adapter),
    ]
    if run is not None and config is not None:
        parts += ["## Results", _results(run, checkpoint)]
        parts += ["## Recipe", f"{FENCE}yaml\n{_recipe(config)}{FENCE}"]

    return "\n\n".join(parts) + "\n"


def _tags(run: Path | None, config: RunConfig | None) -> list[str]:
    if run is None or config is None:
        return []
    if command_of(run) == "sft":
        return ["sft"]
    return ["reinforcement-learning", config.algorithm.name]


def _origin(
    run: Path | None, config: RunConfig | None, base: str | None, *, is_adapter: bool
) -> str:
    kind = "An adapter (LoRA)" if is_adapter else "A model"
    if run is None or config is None:
        return f"{kind} uploaded with [AgentEvo](https://pypi.org/project/agentevo) {__version__}."

    method = (
        "supervised fine-tuning"
        if command_of(run) == "sft"
        else f"reinforcement learning ({config.algorithm.name})"
    )
    base_model = f"`{base}`" if base is not None else f"`{_hide_place(config.model.name)}`"
    if config.environment is not None:
        method += f" in the environment `{config.environment.type}`"
    elif config.agent.type != "environment":
        method += f" of the agent `{config.agent.type}`"

    return f"{kind} trained from {base_model} with AgentEvo {__version__} by {method}."


def _loading(repo: str, base: str | None, *, is_adapter: bool) -> str:
    if not is_adapter:
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{repo}")\n'
            f'model = AutoModelForCausalLM.from_pretrained("{repo}")'
        )
    else:
        code = (
            "from peft import PeftModel\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'tokenizer = AutoTokenizer.from_pretrained("{repo}")\n'
            f'base = AutoModelForCausalLM.from_pretrained("{base or "THE BASE MODEL"}")\n'
            f'model = PeftModel.from_pretrained(base, "{repo}")'
        )
    return f"```python\n{code}\n```"


def _results(run: Path, checkpoint: Path) -> str:
    """A table of the checkpoint's step, the run's evaluations and its duration."""
    sealed = manifest.read(checkpoint)
    rows = [("step", str(sealed.step))]
    if sealed.value is not None:
        is_loss = sealed.value < 0
        kind = "held-out loss" if is_loss else "held-out success"
        value_text = f"{-sealed.value:.4g}" if is_loss else f"{sealed.value:.1%}"
        rows.append((f"{kind} of this checkpoint", value_text))

    path = run / "summary.json"
    if path.is_file():
        summary = read_summary(path)
        evaluation = summary["eval"]
        for key, label in (
            ("before", "held-out success before training"),
            ("after", "held-out success at the end of the run"),
            ("random", "a random player"),
            ("optimal", "an optimal player"),
        ):
            if evaluation.get(key) is not None:
                rows.append((label, f"{evaluation[key]:.1%}"))

        if evaluation.get("n") is not None:
            rows.append(("held-out tasks", str(evaluation["n"])))

        rows += [("steps of the run", str(summary["steps"])), ("seed", str(summary["seed"]))]
        trained = summary.get("tokens", {}).get("trained")
        if trained is not None:
            rows.append(("trained tokens", f"{trained:,}"))
        rows.append(("time", format_duration(summary["wall_s"])))

    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _recipe(config: RunConfig) -> str:
    """The values that differ from the defaults, in the sections that define how the weights were
    made."""
    changed = parse_yaml(changed_to_yaml(config))
    sections = {key: _hide_machine(changed[key]) for key in SECTIONS if key in changed}
    return yaml.safe_dump(without_secrets(sections), sort_keys=False, allow_unicode=True)


def _hide_machine(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hide_machine(item) for key, item in value.items() if key not in HIDDEN_KEYS}
    if isinstance(value, list):
        return [_hide_machine(item) for item in value]
    return _hide_place(value) if isinstance(value, str) else value


def _hide_place(text: str) -> str:
    """Shortens a path of this machine to its last name and an address to its scheme. Other texts
    stay unchanged."""
    if text.startswith(("/", "~", "./", "../")) and "\n" not in text:
        return Path(text).name
    return f"{text.partition('://')[0]}://..." if "://" in text and HUB not in text else text
