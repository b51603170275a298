"""The keys of the entries of `agent.tools`, explained: `agent.tools.mcp.command` is that of one
kind, `agent.tools.timeout_s` that of all which have it."""

from __future__ import annotations

from dataclasses import replace

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
    of_kinds = {kind: ConfigKeys(model, {}, f"{PLACE}.{kind}.") for kind, model in KINDS.items()}
    path = key.removeprefix(PLACE).strip(".")
    if not path:
        return [_kinds()]

    if path.rpartition(".")[2] == "type":
        words = f"one of {', '.join(KINDS)}"
        meaning = "Which kind of tools it is, and with that which other keys the entry has."
        return [Explanation(key, meaning, words, "'function'", "", tuple(KINDS))]

    kind, _, rest = path.partition(".")
    if kind in KINDS:
        return of_kinds[kind].explain(key) if rest else [_kind(kind, of_kinds[kind])]

    found: list[Explanation] = []
    for kind, keys in of_kinds.items():
        if f"{PLACE}.{kind}.{path}" not in keys.names():
            continue

        (one,) = keys.explain(f"{PLACE}.{kind}.{path}")
        one = replace(one, key=key, option_of=(kind,))
        same = next((i for i, other in enumerate(found) if _equal(other, one)), None)
        if same is None:
            found.append(one)
        else:
            found[same] = replace(found[same], option_of=(*found[same].option_of, kind))

    if not found:
        known = [name.split(".", 3)[3] for keys in of_kinds.values() for name in keys.names()]
        guess = nearest(path, [*KINDS, *dict.fromkeys(known)])
        hint = f"did you mean {PLACE}.{guess}?" if guess else f"`config explain {PLACE}` lists them"
        raise UnknownNameError(f"{key}: unknown key; {hint}")

    return found


def _equal(first: Explanation, second: Explanation) -> bool:
    return replace(first, option_of=()) == replace(second, option_of=())


def _kinds() -> Explanation:
    meaning = (
        "What the agent may call, as a list: a name is a registered tool (`agentevo list tools`); "
        "a mapping has a `type` and the keys of that kind, and those at the end that all have."
    )
    keys = [
        Explanation(
            f"{PLACE}.{kind}",
            f"type: {kind}. {on_one_line(model.__doc__ or '')} "
            f"Keys: {', '.join(_own_names(model))}.",
            "section",
            "",
            "",
        )
        for kind, model in KINDS.items()
    ]
    shared = ConfigKeys(ToolSection, {}, f"{PLACE}.")
    keys += [one for name in shared.names() for one in shared.explain(name)]
    return Explanation(PLACE, meaning, "section", "", "", keys=tuple(keys))


def _own_names(model: type[ToolSection]) -> list[str]:
    return [name for name in model.model_fields if name not in {"type", *ToolSection.model_fields}]


def _kind(kind: str, keys: ConfigKeys) -> Explanation:
    names = [name for name in keys.names() if name.count(".") == 3 and not name.endswith(".type")]
    held = tuple(one for name in names for one in keys.explain(name))
    meaning = f"type: {kind}. {on_one_line(KINDS[kind].__doc__ or '')}"
    return Explanation(f"{PLACE}.{kind}", meaning, "section", "", "", keys=held)
