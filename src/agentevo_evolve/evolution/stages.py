"""The pipeline of an evolution, as a mapping (docs/pipelines.md): its stages and their inputs.

    try -> choose -> show          attempts that succeed, fine-tuned on (demonstrations: attempts,
                                   or those of a teacher)
    show                           demonstrations of made tasks, fine-tuned on (calls)
    improve: rl -> prompts -> more repeated: learning from reward; better texts for the same weights
                                   (prompts: attempts); tasks at the edge
    merge                          adapters and their base as one plain model

The first round's tasks exist before the pipeline does (evolve.py), so the held-out tasks are the
same in every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentevo.config import sources
from agentevo.rollout.task_files import DEMONSTRATIONS, HELD_OUT, TRAIN
from agentevo_evolve.evolution.schema import EvolveSection

TEXTS = "texts.yaml"
"""The agent's texts before any search."""


def stages_of(
    section: EvolveSection, recipe: Mapping[str, Any], folder: Path, words: Sequence[str]
) -> dict[str, Any]:
    """The stages. `recipe`: the recipe to train. `folder`: the folder of the first tasks. `words`:
    the command line of `agentevo data make` for further tasks, without --seed, --after and
    --out."""
    model = recipe.get("model")
    first = str(model.get("name", "tiny")) if isinstance(model, Mapping) else "tiny"

    stages: dict[str, Any] = {}
    shown = section.demonstrations
    if shown.source == "attempts":
        stages["try"] = {"kind": "sample", "config": {"trainer": {"steps": shown.steps}}}

    if shown.source == "teacher":
        options = {"player": shown.teacher, "tasks": [str(folder / TRAIN)], "attempts": shown.tries}
        stages["try"] = {"kind": "evaluate", "options": options}

    if "try" in stages:
        stages["choose"] = {"kind": "filter", "options": {"source": "${stages.try.folder}"}}

    if shown.source != "none":
        is_calls = shown.source == "calls"
        file = str(folder / DEMONSTRATIONS) if is_calls else "${stages.choose.file}"
        config = sources.overlay({"data": {"train": file}}, shown.config)
        stages["show"] = {"kind": "sft", "config": config}

    stages = {name: stage for name, stage in stages.items() if name not in section.skip}
    begin = "stages.show.checkpoint" if "show" in stages else first
    inner = dict[str, Any]()
    if "improve" not in section.skip:
        inner = _round(section, folder, f"${{previous.rl.checkpoint|{begin}}}", words)
        stages["improve"] = {"repeat": section.rounds, "stages": inner}
        if section.rounds > 1:
            gain = {"rounds_without_gain": section.patience, "min_gain": section.min_gain}
            stages["improve"]["stop"] = gain

    lora = model.get("lora") if isinstance(model, Mapping) else None
    is_merged = bool(lora) if section.merge is None else section.merge
    last = last_model(stages)
    if is_merged and last is not None and "merge" not in section.skip:
        stages["merge"] = {"kind": "merge", "options": {"source": f"${{{last}}}"}}
        if "prompts" in inner:  # a merge drops the texts that its model was trained with
            stages["merge"]["measure"] = False

    return stages


def _round(
    section: EvolveSection, folder: Path, model: str, words: Sequence[str]
) -> dict[str, Any]:
    """The stages of a round, which starts from the weights of `model`."""
    train = str(folder / TRAIN)
    more_tasks = section.new_tasks > 0 and section.rounds > 1
    own_tasks = f"${{previous.more.file|{train}}}" if more_tasks else train
    config: dict[str, Any] = {"tasks": {"train": own_tasks}}
    search = section.prompts.attempts > 0 and "prompts" not in section.skip
    if search:
        config["agent"] = {"texts": f"${{previous.prompts.file|{folder / TEXTS}}}"}

    inner: dict[str, Any] = {"rl": {"kind": "train", "model": model, "config": config}}
    if search:
        prompts_tree = {**config, "optimize": {"attempts": section.prompts.attempts}}
        inner["prompts"] = {
            "kind": "prompts",
            "model": "${stages.rl.checkpoint}",
            "config": sources.overlay(prompts_tree, section.prompts.config),
        }

    if more_tasks:
        inner["more"] = {
            "kind": "command",
            "options": {
                "run": [
                    "agentevo",
                    "data",
                    "make",
                    "--out",
                    "${stage.folder}/made",
                    "--after",
                    "${stages.rl.folder}",
                    "--seed",
                    "${round}",
                    *words,
                ],
                "file": f"made/{TRAIN}",
            },
            "when": f"${{round}} < {section.rounds}",
        }

    return inner


def last_model(stages: Mapping[str, Any]) -> str | None:
    """The reference to the output of the last stage that trains."""
    if "improve" in stages:
        return "stages.improve.rl.checkpoint"
    return "stages.show.checkpoint" if "show" in stages else None


def pipeline_of(
    section: EvolveSection,
    recipe: Mapping[str, Any],
    folder: Path,
    words: Sequence[str],
    *,
    name: str,
    seed: int,
) -> dict[str, Any]:
    """The pipeline file as a mapping. Its recipe is in the same folder."""
    return {
        "name": name,
        "description": "Made by `agentevo evolve` (docs/evolve.md).",
        "dir": str(folder.parent / "run"),
        "recipe": "recipe.yaml",
        "seed": seed,
        "seeds": list(section.seeds),
        "held_out": {"tasks": section.tasks.held_out},
        "budget": dict(section.budget),
        "stages": stages_of(section, recipe, folder, words),
    }


def recipe_of(
    section: EvolveSection,
    base_recipe: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    folder: Path,
) -> dict[str, Any]:
    """The recipe of all stages: the given recipe, with the tools and the first tasks. It gets a
    curriculum unless it sets one itself."""
    tree = {key: value for key, value in base_recipe.items() if key not in ("evolve", "run")}
    agent = tree.get("agent")
    tree["agent"] = {
        "type": "tool_agent",
        **(agent if isinstance(agent, Mapping) else {}),
        "tools": [dict(tool) for tool in tools],
    }
    tasks = tree.get("tasks")
    tree["tasks"] = {
        "curriculum": {},
        **(tasks if isinstance(tasks, Mapping) else {}),
        "train": str(folder / TRAIN),
        "eval": str(folder / HELD_OUT),
    }
    return tree
