"""The names that `model.template` may give values to."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, JsonValue

_ARGUMENTS = {
    "messages", "conversations", "conversation", "tools", "documents", "chat_template",
    "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "processor_kwargs", "template_kwargs",
}  # fmt: skip


def is_reserved_variable(name: str) -> bool:
    """Whether a chat template's variable of this name is set by AgentEvo or by transformers: the
    messages, the tools, the tokenizer's special tokens (`bos_token`, ...)."""
    return name in _ARGUMENTS or name.endswith(("_token", "_tokens"))


def _check(values: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name in values:
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not the name of a variable")
        if is_reserved_variable(name):
            raise ValueError(f"{name!r} is set by AgentEvo: leave it out")

    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"a value can't be written as JSON ({error}): give finite numbers, and texts in Unicode"
        ) from error
    return values


TemplateVariables = Annotated[dict[str, JsonValue], AfterValidator(_check)]
"""Values by name. Names that no recipe may set are refused, and so are values that JSON does not
have."""
