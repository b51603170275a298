"""AgentRL's agent_config.yml: its browse agent and its scorer agent as `remote_models`,
`agent.browse` and a reward."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentevo.errors import ConfigError
from agentevo.parsing import ParseError, parse_yaml, read_text

PLACEHOLDER = re.compile(r"<[A-Z][A-Z0-9_ ]*>")
"""What an example file has where a value belongs."""
_FIELDS = {"question": "question", "labeled_answer": "answer", "pred_answer": "response"}
"""What a judge's template calls its parts, there and here."""
SCORE = (
    "\n\nEnd with <score>1</score> where you say Correct, and with <score>0</score> where you say "
    "Incorrect."
)
"""What a judge is asked in addition: a score is read from its tag."""
_BROWSE = (
    "min_prompt_length",
    "max_prompt_length",
    "browse_tools",
    "default_purpose",
    "status",
)


def read_helpers(path: Path, put: Callable[[str, Any], None], remarks: list[str]) -> None:
    """Puts what the file says into a recipe. Keys in it become names of environment variables.
    Raises ConfigError."""
    try:
        tree = parse_yaml(read_text(path))
    except ParseError as error:
        raise ConfigError(f"{path}: no YAML: {error}") from error

    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: needs the sections browse_agent and scorer_agent")

    models: dict[str, Any] = {}
    variables: dict[str, str] = {}
    browse = _section(tree, "browse_agent", path)
    if browse is not None:
        names = _models(path, "browse_agent", browse, "reader", models, variables)
        put("agent.browse", {"models": names} | {k: browse[k] for k in _BROWSE if k in browse})

    scorer = _section(tree, "scorer_agent", path)
    if scorer is not None:
        names = _models(path, "scorer_agent", scorer, "judge", models, variables)
        judge: dict[str, Any] = {"name": "agentcpm", "models": names, "place": "answer"}
        if isinstance(template := scorer.get("judge_prompt_template"), str):
            judge["judge_prompt_template"] = _template(template)
        put("rewards", [judge])

    put("remote_models", models)
    if variables:
        remarks.append(
            f"{path.name}: keys are read from environment variables: set "
            f"{', '.join(variables.values())} to those of the file"
        )


def _section(tree: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any] | None:
    section = tree.get(name)
    if section is not None and not (isinstance(section, Mapping) and section.get("models")):
        raise ConfigError(f"{path}: {name}: needs a list `models`")
    return section


def _models(
    path: Path,
    section: str,
    given: Mapping[str, Any],
    name: str,
    models: dict[str, Any],
    variables: dict[str, str],
) -> list[str]:
    """Adds the models of a section; their names. One key has one variable."""
    names = []
    rows = given["models"]
    for index, row in enumerate(rows if isinstance(rows, list) else []):
        where = f"{path}: {section}.models[{index}]"
        if not isinstance(row, Mapping) or not isinstance(row.get("model"), str):
            raise ConfigError(f"{where}: needs `model`, and may have `base_url` and `api_key`")

        one: dict[str, Any] = {"model": row["model"]}
        if PLACEHOLDER.search(f"{row['model']} {row.get('base_url')}"):
            raise ConfigError(f"{where}: model and base_url are to be filled in")
        if row.get("base_url"):
            one["base_url"] = str(row["base_url"])

        key = row.get("api_key")
        if key:
            number = f"_{index + 1}" if index else ""
            variable = variables.setdefault(str(key), f"{name.upper()}{number}_API_KEY")
            one["api_key"] = f"${{env:{variable}}}"

        if isinstance(timeout := given.get("timeout"), (int, float)):
            one["timeout_s"] = timeout
        if isinstance(retries := given.get("max_retries"), int) and retries > 0:
            one["max_tries"] = retries
        if isinstance(extra := given.get("extra_body"), Mapping):
            one["extra"] = dict(extra)

        names.append(name if not index else f"{name}_{index + 1}")
        models[names[-1]] = one

    if not names:
        raise ConfigError(f"{path}: {section}.models: needs at least one model")

    return names


def _template(text: str) -> str:
    """A judge's template with our names of its parts."""
    for theirs, ours in _FIELDS.items():
        text = text.replace(f"{{{theirs}}}", f"{{{ours}}}")
    return text.rstrip() + SCORE
