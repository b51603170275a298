"""Renders messages (as mappings) as text with a tokenizer's chat template. Untrusted templates are
rendered in a separate process with limits of time, memory and length.

Within `untrusted_templates`, every new ChatTemplate renders in the separate process. A template
that exceeded the time limit once is not rendered again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agentevo.runtime.json_worker import JsonWorker

RENDER_S = 20.0
"""The time limit for one rendering, which takes a millisecond on an idle machine."""


Render = Callable[[PreTrainedTokenizerBase, list[dict[str, Any]], Any, bool], str]
"""(tokenizer, messages, schemas of tools or None, whether to add the generation prompt) -> text.
Raises any exception of the template."""


def render_here(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any, prompt: bool
) -> str:
    """Renders in this process, for templates of models that the user has chosen."""
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=prompt
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
    ) -> str:
        """See Render. Raises TemplateError."""
        template = str(tokenizer.get_chat_template(tools=tools))
        request = {
            "template": template,
            "messages": messages,
            "tools": tools,
            "prompt": prompt,
            "special_tokens": tokenizer.special_tokens_map,
        }
        with self._lock:
            if template in self._refusals:
                raise TemplateError(self._refusals[template])
            answer = self._ask(template, request)

        if "problem" in answer:
            raise TemplateError(answer["problem"])
        return str(answer["text"])

    def _ask(self, template: str, request: dict[str, Any]) -> dict[str, Any]:
        if self._worker is None or not self._worker.is_alive:
            self._worker = JsonWorker("agentevo.models.chat.template_worker", "chat templates")
        try:
            return self._worker.ask(request, RENDER_S, "render a conversation")
        except (TimeoutError, RuntimeError) as error:
            self._refusals[template] = f"{error}: the template is not rendered again"
            raise TemplateError(self._refusals[template]) from error

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._worker is not None:
                self._worker.end()
                self._worker = None


_render: ContextVar[Render] = ContextVar("agentevo template rendering", default=render_here)


def current_render() -> Render:
    """The function that renders templates in this context."""
    return _render.get()


@contextmanager
def untrusted_templates() -> Iterator[None]:
    """Chat formats that are created in this context render their templates in a separate process,
    which ends with the block."""
    worker = TemplateWorker()
    before = _render.set(worker.render)
    try:
        yield
    finally:
        _render.reset(before)
        worker.close()
