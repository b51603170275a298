"""Renders messages (as mappings) as text with a tokenizer's chat template, and lists the variables
that a template reads. Untrusted templates are processed in a separate process with limits of time,
memory and length.

Within `untrusted_templates`, every new ChatTemplate renders in the separate process. A template
that exceeded the time limit once is not rendered again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentevo.models.chat.template_worker import variables_in
from agentevo.runtime.json_worker import JsonWorker

RENDER_S = 20.0
"""The time limit for one rendering, which takes a millisecond on an idle machine."""


Render = Callable[
    [PreTrainedTokenizerBase, list[dict[str, Any]], Any, bool, Mapping[str, Any]], str
]
"""(tokenizer, messages, schemas of tools or None, whether to add the generation prompt, values of
the template's variables) -> text. Raises any exception of the template."""


@dataclass(frozen=True)
class TemplateRenderer:
    """What can be done with a template."""

    render: Render
    variables: Callable[[str], list[str]]
    """The variables that a template of this text reads. Raises TemplateError."""


def render_here(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    tools: Any,
    prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Renders in this process, for templates of models that the user has chosen."""
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **variables
    )
    return str(text)


class TemplateWorker:
    """Renders in a separate process, which starts with the first rendering."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: JsonWorker | None = None
        self._refusals: dict[str, str] = {}
        """Template -> why it is not rendered again."""

    def render(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: list[dict[str, Any]],
        tools: Any,
        prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """See Render. Raises TemplateError."""
        template = str(tokenizer.get_chat_template(tools=tools))
        request = {
            "template": template,
            "messages": messages,
            "tools": tools,
            "prompt": prompt,
            "values": {**tokenizer.special_tokens_map, **variables},
        }
        return str(self._ask(template, request, "render a conversation")["text"])

    def variables(self, template: str) -> list[str]:
        """See TemplateRenderer. Raises TemplateError."""
        answer = self._ask(template, {"template": template}, "read a chat template")
        return list(map(str, answer["variables"]))

    def _ask(self, template: str, request: dict[str, Any], purpose: str) -> dict[str, Any]:
        with self._lock:
            if template in self._refusals:
                raise TemplateError(self._refusals[template])
            if self._worker is None or not self._worker.is_alive:
                self._worker = JsonWorker("agentevo.models.chat.template_worker", "chat templates")
            try:
                answer = self._worker.ask(request, RENDER_S, purpose)
            except (TimeoutError, RuntimeError) as error:
                self._refusals[template] = f"{error}: the template is not rendered again"
                raise TemplateError(self._refusals[template]) from error

        if "problem" in answer:
            raise TemplateError(answer["problem"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._worker is not None:
                self._worker.end()
                self._worker = None


_HERE = TemplateRenderer(render_here, variables_in)
_renderer: ContextVar[TemplateRenderer] = ContextVar("agentevo template rendering", default=_HERE)


def current_renderer() -> TemplateRenderer:
    """The functions that process templates in this context."""
    return _renderer.get()


@contextmanager
def untrusted_templates() -> Iterator[None]:
    """Chat formats that are created in this context process their templates in a separate process,
    which ends with the block."""
    worker = TemplateWorker()
    before = _renderer.set(TemplateRenderer(worker.render, worker.variables))
    try:
        yield
    finally:
        _renderer.reset(before)
        worker.close()
