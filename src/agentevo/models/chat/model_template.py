"""The chat template of a model's section, and the values of the template's variables.

A template reads the messages, the tools and the tokenizer's special tokens, and often switches of
its own, such as `enable_thinking` or `reasoning_effort`. `model.template` gives values to these.
They are written before the template's text as assignments that apply if a rendering gives no other
value. So every rendering uses them, in this process or from a checkpoint, and one request can still
replace them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from agentevo.config.model import CHAT_TEMPLATES, PLAIN
from agentevo.errors import ModelError, shown
from agentevo.models.chat.chat_template import TEMPLATE_ERRORS
from agentevo.models.chat.template_rendering import current_renderer
from agentevo.models.chat.template_variables import variables_of, why_refused

if TYPE_CHECKING:
    from agentevo.config import ModelSection

TEMPLATES = Path(__file__).parent / "templates"


def set_template(tokenizer: PreTrainedTokenizerBase, section: ModelSection) -> None:
    """Gives a model's tokenizer the section's chat template and the values of its variables. Raises
    ModelError for a variable that the template does not read."""
    if section.chat_template is not None:
        template = template_text(section.chat_template)
        if section.chat_template == PLAIN and begins_texts_with_bos(tokenizer):
            template = "{{- bos_token -}}" + template
        tokenizer.chat_template = template

    if section.template:
        _set_variables(tokenizer, section.template)


def begins_texts_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its bos_token at the beginning of a text."""
    start = tokenizer.bos_token_id
    return start is not None and tokenizer.encode("")[:1] == [start]


def template_text(template: str) -> str:
    """The text of a recipe's chat template: the value itself, or the text of a template that
    AgentEvo ships."""
    if template in CHAT_TEMPLATES:
        return (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return template


def _set_variables(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any]) -> None:
    if not tokenizer.chat_template:
        raise ModelError(
            "model.template: the tokenizer has no chat template: set model.chat_template, or leave "
            "model.template out"
        )

    problem = why_refused(values, variables_of(tokenizer, current_renderer()))
    if problem is not None:
        raise ModelError(f"model.template: {problem}")

    fails_already = _rendering_problem(tokenizer) is not None
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        tokenizer.chat_template = {
            name: _with_values(template, values) for name, template in templates.items()
        }
    else:
        tokenizer.chat_template = _with_values(templates, values)

    problem = _rendering_problem(tokenizer)
    if problem is not None and not fails_already:
        raise ModelError(
            f"model.template: with {shown(dict(values))}, the chat template fails ({problem}): "
            "give values of the types that it expects"
        )


def _rendering_problem(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Why the template can't render a question; None if it can."""
    try:
        question = {"role": "user", "content": "1+1?"}
        current_renderer().render(tokenizer, [question], None, True, {})
    except TEMPLATE_ERRORS as error:
        return str(error)
    return None


def _with_values(template: str, values: Mapping[str, Any]) -> str:
    """The template after the assignments. A template that has them already stays unchanged."""
    assignments = "".join(
        f"{{%- if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}"
        for name, value in sorted(values.items())
    )
    start = assignments + "\n"  # templates are rendered with trim_blocks, which removes the break
    return template if template.startswith(start) else start + template


def _literal(value: Any) -> str:
    """A JSON value as a Jinja expression. Texts are escaped, so that no marks in a value decide
    which notation the template seems to use."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return "'" + "".join(map(_escape_char, value)) + "'"
        case Mapping():
            items = (f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
            return "{ " + ", ".join(items) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_literal, value)) + "]"
        case _:
            return json.dumps(value)


def _escape_char(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\U{ord(char):08x}"
