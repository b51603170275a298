"""Makes the JSON schema of a Python function from its type hints and docstring, and checks
arguments against it.

    def add(a: int, b: int = 1) -> int:
        '''Adds two numbers.

        Args:
            a: The first one.
        '''

A type hint can be any type that pydantic supports. A parameter without a type hint accepts any
JSON. Docstrings are parsed in the styles of Google, numpy and Sphinx.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import docstring_parser
import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo

from agentevo.agents.tools.tool import ToolSpec, ordered_schema
from agentevo.config.field_words import wrong_value
from agentevo.errors import ConfigError, ToolArgumentsError

MAX_PROBLEMS = 5
"""The most wrong arguments that are reported to the policy."""


class Signature:
    """The parameters of a function. `skip_first` leaves out the `self` of a method."""

    def __init__(
        self, name: str, function: Callable[..., Any], *, skip_first: bool = False
    ) -> None:
        """Raises ConfigError for a function that can't be called with keyword arguments, or whose
        type hints have no JSON schema."""
        self.name = name
        self._model = _model(name, function, skip_first)
        text = docstring_parser.parse(inspect.getdoc(function) or "")
        paragraphs = [part for part in (text.short_description, text.long_description) if part]

        try:
            parameters = self._model.model_json_schema()
        except pydantic.PydanticInvalidForJsonSchema as error:
            raise ConfigError(f"the tool {name!r}: a type has no JSON schema: {error}") from error

        described = {
            param.arg_name: param.description for param in text.params if param.description
        }
        self.spec = ToolSpec(
            name=name, description="\n\n".join(paragraphs), parameters=_plain(parameters, described)
        )

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, converted to the function's types. Raises ToolArgumentsError."""
        try:
            checked = self._model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            problems = [_problem(wrong, self._model) for wrong in error.errors()[:MAX_PROBLEMS]]
            raise ToolArgumentsError(
                f"wrong arguments for {self.name}: {'; '.join(problems)}"
            ) from None

        return {
            field.alias or name: getattr(checked, name)
            for name, field in type(checked).model_fields.items()
            if name in checked.model_fields_set
        }


def checked_options(name: str, item: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a tool class, converted to the type hints of its constructor, like the
    arguments of calls. An option whose hint pydantic does not support is not changed. Raises
    ConfigError."""
    constructor = inspect.unwrap(item.__init__)  # type: ignore[misc]
    hints = getattr(constructor, "__annotations__", {})
    checked = dict(options)
    for key in options.keys() & hints.keys():
        holder = SimpleNamespace(__annotations__={key: hints[key]})
        try:
            hint = typing.get_type_hints(holder, constructor.__globals__, include_extras=True)[key]
            adapter = pydantic.TypeAdapter[Any](hint)
        except (AttributeError, TypeError, NameError, pydantic.errors.PydanticUserError):
            continue  # a type imported only for type checkers, or one that pydantic does not know

        try:
            checked[key] = adapter.validate_python(options[key])
        except pydantic.ValidationError as error:
            wrong = error.errors()[0]
            info = FieldInfo.from_annotation(hint)
            raise ConfigError(
                f"the tool {name!r}: {item.__name__}: the option {key}"
                f"{wrong_value(info, wrong['loc'], wrong['input'])}"
            ) from None

    return checked


def _model(name: str, function: Callable[..., Any], skip_first: bool) -> type[pydantic.BaseModel]:
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip_first:]
        hints = typing.get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"the tool {name!r}: its parameters can't be read: {error}") from error

    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if (
            parameter.kind is parameter.POSITIONAL_ONLY
            or parameter.kind is parameter.VAR_POSITIONAL
        ):
            raise ConfigError(
                f"the tool {name!r} takes {parameter}: arguments are passed by name, so name each"
            )

        if parameter.kind is parameter.VAR_KEYWORD:
            raise ConfigError(f"the tool {name!r} takes {parameter}: name each parameter")

        default = ... if parameter.default is parameter.empty else parameter.default
        # Under another name: pydantic reserves some (model_*, schema, names with underscores).
        fields[f"p{number}"] = (
            hints.get(parameter.name, Any),
            Field(default, alias=parameter.name),
        )

    try:
        return pydantic.create_model(
            name, __config__=pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False),
            **fields,
        )  # fmt: skip
    except pydantic.errors.PydanticUserError as error:
        raise ConfigError(f"the tool {name!r}: {str(error).splitlines()[0]}") from error


def _plain(schema: dict[str, Any], described: Mapping[str, str]) -> dict[str, Any]:
    """The schema without pydantic's titles, and with the docstring's parameter descriptions."""
    schema = {key: value for key, value in schema.items() if key != "title"}
    properties = {}
    for name, property_schema in schema.get("properties", {}).items():
        properties[name] = {key: value for key, value in property_schema.items() if key != "title"}
        if name in described:
            properties[name].setdefault("description", described[name])
    return ordered_schema({**schema, "properties": properties})


def _problem(wrong: Any, model: type[pydantic.BaseModel]) -> str:
    place = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "missing":
        return f"{place} is missing"
    if wrong["type"] == "extra_forbidden":
        argument_names = (
            ", ".join(str(field.alias) for field in model.model_fields.values()) or "none"
        )
        return f"there is no {place} (arguments: {argument_names})"
    return f"{place}: {wrong['msg'][:1].lower()}{wrong['msg'][1:]}"
