"""What is wrong with an entry of a list, such as `rewards` or `agent.tools`."""

from __future__ import annotations

import pydantic
from pydantic_core import ErrorDetails

from agentevo.registry import nearest


def entry_problem(place: str, model: type[pydantic.BaseModel], error: ErrorDetails) -> str:
    """One pydantic error of the entry at `place`, as `key: what is wrong; what is allowed`."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        guess = nearest(key, list(model.model_fields))
        hint = f"; did you mean {guess}?" if guess else f"; it has {', '.join(model.model_fields)}"
        return f"{place}.{key}: unknown key{hint}"
    if error["type"] == "missing":
        meaning = " ".join((model.model_fields[key].description or "").split())
        return f"{place}.{key}: missing; {meaning}"
    reason = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    return f"{place}.{key}: got {error['input']!r}; {reason}" if key else f"{place}: {reason}"
