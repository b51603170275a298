"""Named texts of one attempt: they replace an agent's own prompts, tool descriptions or examples.

    policy.text("system", "You are a clerk.")     the text of that name, or the agent's own
    policy.examples()                             example messages; none by default
    agentevo.text("system", "You are a clerk.")   the same, for an agent that takes no policy

The texts come from the recipe (`agent.texts`) or from `agentevo optimize`, which runs the same
function with other texts. The trajectory records the digest of every text that the agent requested,
and the run's folder keeps the text itself as RUN/texts/DIGEST.txt.

The text of examples is a list of conversations as JSON, each a list of messages in OpenAI's form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentevo.config.texts import MAX_TEXTS, digest_of_text, text_problem
from agentevo.data.messages import messages_of
from agentevo.errors import BadRequestError
from agentevo.inference.remote_models.openai_chat import as_openai
from agentevo.runtime.files import create_atomic
from agentevo.runtime.parsing import ParseError, parse_json
from agentevo.types import Message

Kind = Literal["text", "examples", "tool"]
FOLDER = "texts"
"""The folder, in a run's folder, of the texts that its attempts were played with."""
_current: ContextVar[Texts | None] = ContextVar("agentevo texts", default=None)


@dataclass(frozen=True)
class Declared:
    """A text that an agent requested: its default, and its kind."""

    default: str
    kind: Kind


@dataclass
class Texts:
    """The named texts of one attempt, shared by all its agents. See the module. `keep` is called
    with each text before it is used."""

    overrides: Mapping[str, str] = field(default_factory=dict)
    keep: Callable[[str], None] = lambda text: None
    on_declared: Callable[[str, Declared], object] = lambda name, declared: None
    """Called with each requested text."""
    declared: dict[str, Declared] = field(default_factory=dict)
    """Name -> each text that was requested."""
    digests: dict[str, str] = field(default_factory=dict)
    """The texts that were not empty: name -> digest."""

    def text(self, name: str, default: str | None = None, kind: Kind = "text") -> str:
        """The text of that name, or the agent's `default`, which can contain anything. Raises
        BadRequestError for a wrong name, and for a name with two defaults."""
        default_text = "" if default is None else default
        problem = text_problem(name, "" if isinstance(default_text, str) else default_text)
        if problem is not None:
            raise BadRequestError(f"the text {problem}")

        before = self.declared.get(name)
        if before is None:
            if len(self.declared) == MAX_TEXTS:
                raise BadRequestError(f"an attempt used more than {MAX_TEXTS} named texts")
            self._declare(name, Declared(default_text, kind))
        elif before.kind != kind or (before.default != default_text and name not in self.overrides):
            raise BadRequestError(
                f"the text {name} was used before with another default or as {before.kind}: in an "
                "attempt, one name is one text"
            )

        content = self.overrides.get(name, default_text)
        if content:
            digest = digest_of_text(content)
            if self.digests.get(name) != digest:
                self.keep(content)
                self.digests[name] = digest

        return content

    def replacing(self, name: str, default: str | None) -> str | None:
        """As `text`, but for an agent without a default: None if no text is given. An empty text
        counts as given."""
        content = self.text(name, default)
        return content if content or default is not None or name in self.overrides else None

    def examples(self, name: str = "examples") -> list[Message]:
        """The example messages of that name, one conversation after the other. Raises
        BadRequestError for a text that is not a list of conversations."""
        text = self.text(name, None, "examples")
        return [message for conversation in examples_of(name, text) for message in conversation]

    def all_given(self) -> Mapping[str, str]:
        """All given texts. They are recorded as used, for a program that gets all texts at once."""
        for name in self.overrides:
            self.text(name)
        return self.overrides

    def of_tools(self, schemas: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The tools' schemas (in OpenAI's form) with the given descriptions: the texts
        `tools.NAME`, and `tools.NAME.PARAMETER` for parameters. Other descriptions are
        unchanged."""
        return [self._of_tool(schema) for schema in schemas]

    def _of_tool(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        function = schema.get("function", {})
        name = f"tools.{function.get('name', '')}"
        changed = dict(function)
        if description := self._description(name, function.get("description")):
            changed["description"] = description

        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(parameters, Mapping) and isinstance(properties, Mapping):
            described = {
                key: {**value, "description": text}
                for key, value in properties.items()
                if isinstance(value, Mapping)
                and (text := self._description(f"{name}.{key}", value.get("description")))
            }
            if described:
                changed["parameters"] = {**parameters, "properties": {**properties, **described}}

        return schema if changed == function else {**schema, "function": changed}

    def _description(self, name: str, default: Any) -> str:
        """The text that replaces a tool's description. Empty if none is given."""
        default_text = default if isinstance(default, str) else ""
        if name in self.overrides:
            return self.text(name, default_text, "tool")
        if text_problem(name, default_text) is None and len(self.declared) < MAX_TEXTS:
            self._declare(name, Declared(default_text, "tool"))
        return ""

    def _declare(self, name: str, declared: Declared) -> None:
        self.declared.setdefault(name, declared)
        self.on_declared(name, self.declared[name])

    @contextmanager
    def current(self) -> Iterator[None]:
        """While the block runs, this module's `text` and `examples` use these texts."""
        token = _current.set(self)
        try:
            yield
        finally:
            with suppress(ValueError):  # the block ended in another context
                _current.reset(token)


def text(name: str, default: str = "") -> str:
    """The text `name` of the current attempt: the recipe's or that of `agentevo optimize`, else
    `default`. Outside an attempt it is `default`. Raises BadRequestError for an invalid text."""
    now = _current.get()
    return (Texts() if now is None else now).text(name, default)


def examples(name: str = "examples") -> list[dict[str, Any]]:
    """The example messages `name` in OpenAI's format, to put before the task's messages. Empty by
    default. Raises BadRequestError for malformed examples."""
    now = _current.get()
    return [] if now is None else [as_openai(example) for example in now.examples(name)]


def examples_of(name: str, content: str) -> list[list[Message]]:
    """The conversations of a text of examples. Raises BadRequestError."""
    if not content:
        return []

    try:
        conversations = parse_json(content)
        if not isinstance(conversations, list) or not all(
            isinstance(conversation, list) and conversation for conversation in conversations
        ):
            raise ValueError("it is not a list of conversations")
        return [messages_of(conversation) for conversation in conversations]
    except (ParseError, ValueError, BadRequestError) as error:
        raise BadRequestError(
            f"the text {name}: examples are a list of conversations as JSON, such as "
            f'[[{{"role": "user", "content": "..."}}, ...]]: {error}'
        ) from error


def as_examples(conversations: Sequence[Sequence[Message]]) -> str:
    """The inverse of `examples_of`: messages in OpenAI's form."""
    return json.dumps(
        [[as_openai(message) for message in each] for each in conversations], indent=1
    )


class TextKeeper:
    """Stores each text once, in full, under its digest in a run's folder. Stores nothing if the
    folder does not exist (as in an evaluation that writes nothing), if a text could not be used in
    a recipe, or beyond MAX_TEXTS in a process."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._kept: set[str] = set()

    def __call__(self, content: str) -> None:
        """Raises OSError if the folder can't be written."""
        digest = digest_of_text(content)
        if digest in self._kept or len(self._kept) >= MAX_TEXTS or not self._run_dir.is_dir():
            return
        if text_problem(digest, content) is not None:
            return

        path = self._run_dir / FOLDER / f"{digest}.txt"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            create_atomic(path, content)

        self._kept.add(digest)
