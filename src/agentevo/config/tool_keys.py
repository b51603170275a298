"""Explains the keys of the entries of `agent.tools`: `agent.tools.mcp.command` belongs to one kind,
`agent.tools.timeout_s` to all kinds that have it."""

from __future__ import annotations

from agentevo.config.field_words import on_one_line
from agentevo.config.keys import ConfigKeys, Explanation
from agentevo.config.tool_entries import KINDS
from agentevo.config.tools import ToolSection
from agentevo.errors import UnknownNameError
from agentevo.registry import nearest

PLACE = "agent.tools"


def explain_tools(key: str) -> list[Explanation]:
    """`agent.tools` itself, with its kinds and the keys that all of them have; a kind, with its
    keys; or a key of one or of several. Raises UnknownNameError."""
    path = key.removeprefix(PLACE).strip(".")
    if not path:
        return [_explain_kinds()]

    if path.rpartition(".")[2] == "type":
        words = f"one of {', '.join(KINDS)}"
        meaning = "The kind of the entry, which decides its other keys."
        return [Explanation(key, meaning, words, "'function'", "", tuple(KINDS))]

    kind, _, inner = path.partition(".")
    if kind in KINDS:
        keys = ConfigKeys(KINDS[kind], {}, f"{PLACE}.{kind}.")
        return keys.explain(key) if inner else [_explain_kind(kind, keys)]

    keys = ConfigKeys(KINDS, {}, f"{PLACE}.")
    if key in keys.names():
        return keys.explain(key)

    key_names = [name.removeprefix(f"{PLACE}.") for name in keys.names()]
    guess = nearest(path, [*KINDS, *key_names])
    hint = f"did you mean {PLACE}.{guess}?" if guess else f"`agentevo config {PLACE}` lists them"
    raise UnknownNameError(f"{key}: unknown key; {hint}")


def _explain_kinds() -> Explanation:
    meaning = (
        "The tools that the agent may call, as a list. A name is a registered tool (`agentevo "
        "list tools`). A mapping has a `type`, the keys of that kind, and the common keys at the "
        "end."
    )
    keys = [
        Explanation(
            f"{PLACE}.{kind}",
            f"type: {kind}. {on_one_line(model.__doc__ or '')} "
            f"Keys: {', '.join(_specific_names(model))}.",
            "section",
            "",
            "",
        )
        for kind, model in KINDS.items()
    ]
    shared = ConfigKeys(ToolSection, {}, f"{PLACE}.")
    keys += [explanation for name in shared.names() for explanation in shared.explain(name)]
    return Explanation(PLACE, meaning, "section", "", "", keys=tuple(keys))


def _specific_names(model: type[ToolSection]) -> list[str]:
    return [name for name in model.model_fields if name not in {"type", *ToolSection.model_fields}]


def _explain_kind(kind: str, keys: ConfigKeys) -> Explanation:
    names = [name for name in keys.names() if name.count(".") == 3 and not name.endswith(".type")]
    explanations = tuple(explanation for name in names for explanation in keys.explain(name))
    meaning = f"type: {kind}. {on_one_line(KINDS[kind].__doc__ or '')}"
    return Explanation(f"{PLACE}.{kind}", meaning, "section", "", "", keys=explanations)
