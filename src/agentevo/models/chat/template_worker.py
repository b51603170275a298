"""The process that renders untrusted chat templates, for template_rendering.py.

A template is a program, which may loop forever, fill the memory or write endless text, in code that
a thread can't interrupt. A request is {"template", "messages", "tools", "prompt",
"special_tokens"}, and the answer {"text": ...}, or {"problem": ...}.
"""

from __future__ import annotations

from typing import Any

from agentevo.runtime.json_worker import serve_requests

MAX_MEMORY = 512 * 2**20
"""The maximum address space of the process, in bytes."""
MAX_PROBLEM = 2000
"""The maximum number of characters of a reported problem, because a template may raise any text."""


def main() -> None:
    """Answers requests until there are no more."""
    serve_requests(answer_to, prepare=_import_renderer, max_memory=MAX_MEMORY)


def _import_renderer() -> Any:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Renders one conversation as `tokenizer.apply_chat_template` does."""
    render = _import_renderer()
    try:
        (text,), _ = render(
            conversations=[request["messages"]],
            tools=request["tools"],
            chat_template=request["template"],
            add_generation_prompt=request["prompt"],
            **request["special_tokens"],
        )
    except MemoryError:
        return {"problem": f"it takes more than {MAX_MEMORY // 2**20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 (a template may raise anything)
        return {"problem": f"{error or type(error).__name__}"[:MAX_PROBLEM]}

    longest = longest_rendering(request)
    if len(text) > longest:
        return {
            "problem": f"it writes {len(text):,} characters, and at most {longest:,} are allowed"
        }
    return {"text": text}


def longest_rendering(request: dict[str, Any]) -> int:
    """The maximum number of characters of a rendering. Templates escape and wrap their input."""
    input_chars = len(repr(request["messages"])) + len(repr(request["tools"]))
    return len(request["template"]) + 4 * input_chars + 2**16


if __name__ == "__main__":
    main()
