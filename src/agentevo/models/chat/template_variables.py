"""The variables that a chat template reads, and which of them may be given values."""

from __future__ import annotations

from collections.abc import Collection

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentevo.config.template_variables import is_reserved_variable
from agentevo.errors import ModelError
from agentevo.models.chat.template_rendering import TemplateRenderer
from agentevo.runtime.registry import nearest


def variables_of(tokenizer: PreTrainedTokenizerBase, renderer: TemplateRenderer) -> frozenset[str]:
    """The variables that the tokenizer's chat template reads, without the reserved ones. Raises
    ModelError for a template that can't be parsed."""
    templates = tokenizer.chat_template
    texts = templates.values() if isinstance(templates, dict) else [templates or ""]
    try:
        names = {name for text in texts for name in renderer.variables(text)}
    except (TemplateError, RecursionError) as error:
        raise ModelError(f"the chat template can't be parsed: {error}") from error
    return frozenset(name for name in names if not is_reserved_variable(name))


def why_refused(names: Collection[str], known: Collection[str]) -> str | None:
    """Why a template that reads the variables `known` can't be given values for `names`, or
    None."""
    reserved = next((name for name in sorted(names) if is_reserved_variable(name)), None)
    if reserved is not None:
        return f"{reserved!r} is set by AgentEvo: leave it out"

    unknown = next((name for name in sorted(names) if name not in known), None)
    if unknown is None:
        return None

    guess = nearest(unknown, sorted(known))
    hint = f"did you mean {guess!r}? " if guess else ""
    variables = ", ".join(sorted(known)) or "no variables"
    return f"the chat template does not read {unknown!r}: {hint}It reads {variables}"
