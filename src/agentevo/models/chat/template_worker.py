"""The process that renders untrusted chat templates, for template_rendering.py.

A template is a program, which may loop forever, fill the memory or write endless text, in code that
a thread can't interrupt. A request is {"template", "messages", "tools", "prompt",
"values"}, and the answer {"text": ...}, or {"problem": ...}. A request with only the template asks
for the names of its variables: {"variables": [...]}.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def variables_in(template: str) -> list[str]:
    """The names that a chat template reads and that its caller may set. Functions that transformers
    offers to templates are not among them. A name that the template sets is one only if the
    template reads it before, in a test whether it is defined or to set it. Raises jinja2's
    TemplateError."""
    from jinja2 import meta, nodes
    from transformers.utils import chat_template_utils

    # transformers has no public name for the environment of its templates.
    environment = chat_template_utils._compile_jinja_template("").environment
    tree = environment.parse(template)
    names = meta.find_undeclared_variables(tree) - environment.globals.keys()

    assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    checks = [node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined")]
    checks += [node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    read = {check.node.name for check in checks if isinstance(check.node, nodes.Name)}
    read |= {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name)
        and any(name.name == node.target.name for name in node.node.find_all(nodes.Name))
    }
    first_uses: dict[str, str] = {}
    for node in _names_in_order(tree):
        first_uses.setdefault(node.name, node.ctx)
    return sorted(
        name
        for name in names
        if name not in assigned or (name in read and first_uses[name] == "load")
    )


def _names_in_order(node: Any) -> Iterator[Any]:
    """The names below a node of a template, in the order in which they are read and set."""
    from jinja2 import nodes

    children = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign | nodes.For):  # their first child is what they set
        children[:2] = children[1::-1]
    for child in children:
        if isinstance(child, nodes.Name):
            yield child
        yield from _names_in_order(child)


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Renders one conversation as `tokenizer.apply_chat_template` does, or lists the template's
    variables."""
    render = _import_renderer()
    try:
        if "messages" not in request:
            return {"variables": variables_in(request["template"])}
        (text,), _ = render(
            conversations=[request["messages"]],
            tools=request["tools"],
            chat_template=request["template"],
            add_generation_prompt=request["prompt"],
            **request["values"],
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
    given = ("messages", "tools", "values")
    input_chars = sum(len(repr(request[key])) for key in given)
    return len(request["template"]) + 4 * input_chars + 2**16


if __name__ == "__main__":
    main()
