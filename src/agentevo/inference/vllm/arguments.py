"""Checks options of `engine.options` against vLLM's own argument list.

vLLM's command-line parser decides which names and values exist in the installed release and
converts the values. Only the package is imported; no engine is started.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import pydantic

from agentevo.config import EngineSection
from agentevo.errors import ConfigError, MissingExtraError
from agentevo.inference.vllm.options import REFUSED, VllmOptions, read_options


def check_options(section: EngineSection) -> None:
    """Raises the errors of `read_options`, MissingExtraError if vLLM is not installed, and
    ConfigError for options that the installed vLLM does not accept. If there are options that only
    vLLM knows, it is imported, which takes seconds; nothing is started."""
    options = read_options(section)
    if find_spec("vllm") is None:
        unchecked = ", ".join(map(_unchecked_option, options.passed_on))
        checks = f" (without it, {unchecked} can't be checked)" if unchecked else ""
        raise MissingExtraError(
            f"engine.type=vllm needs the package 'vllm'{checks}: pip install 'agentevo[vllm]', or "
            "set engine.type=torch"
        )

    vllm_arguments(options)


def _unchecked_option(name: str) -> str:
    """The key of an option, and the known option whose name it resembles."""
    # Names of vLLM's own must not be taken for a wrong spelling.
    known = difflib.get_close_matches(name, VllmOptions.model_fields, n=1, cutoff=0.9)
    return f"engine.options.{name}" + "".join(f" (did you mean {field}?)" for field in known)


def vllm_arguments(options: VllmOptions) -> dict[str, Any]:
    """The arguments of vLLM's `AsyncEngineArgs` for the options that only vLLM knows. Raises
    ConfigError for a name or a value that vLLM does not have, and the errors of `load_vllm`."""
    if not options.passed_on:
        return {}

    from agentevo.inference.vllm.terms import load_vllm  # needs torch

    load_vllm(options.start_timeout_s)
    parser = _vllm_parser()
    actions = {action.dest: action for action in parser._actions}
    arguments = {
        name: _parse(parser, _action_of(name, actions, options), value)
        for name, value in options.passed_on.items()
        if value is not None
    }
    _check_quantization(arguments.get("quantization"))
    _check_drafting(arguments.get("speculative_config"))
    return arguments


def _vllm_parser() -> argparse.ArgumentParser:
    """vLLM's parser. It raises ValueError where a program would end."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser: argparse.ArgumentParser = AsyncEngineArgs.add_cli_args(Parser(add_help=False))
    return parser


def _action_of(
    name: str, actions: dict[str, argparse.Action], options: VllmOptions
) -> argparse.Action:
    if name in actions:
        return actions[name]

    known = {*actions, *type(options).model_fields} - REFUSED.keys()
    raise ConfigError(f"engine.options.{name}: vLLM has no such argument: {_closest(name, known)}")


def _closest(name: str, known: Iterable[str]) -> str:
    """A remedy that names the closest of the known names, or all of a few."""
    names = sorted(known)
    text = name.lower().replace("-", "_")
    close = difflib.get_close_matches(text, names, n=3, cutoff=0.5)
    close += [other for other in names if text in other and other not in close]
    if close:
        return f"did you mean {' or '.join(close[:3])}?"
    if len(names) <= 40:
        return f"give one of {', '.join(names)}"
    return "`vllm serve --help=all` lists them (with _ for -)"


def _parse(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    """The value of vLLM's argument, with the type that vLLM gives it."""
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"engine.options.{action.dest}: got {value!r}: give true or false")
        words = [flag if value else action.option_strings[-1]]
    elif isinstance(value, list) and action.nargs in ("+", "*"):
        words = [flag, *map(_word, value)]
        option = next((word for word in words[1:] if word.startswith("--")), None)
        if option is not None:  # the parser would end the list before it
            raise ConfigError(
                f"engine.options.{action.dest}: {option!r} in the list begins with -- as an "
                "argument of its own does: give values only"
            )
    else:
        words = [f"{flag}={_word(value)}"]

    try:
        return getattr(parser.parse_args(words), action.dest)
    except (ValueError, TypeError, argparse.ArgumentError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"engine.options.{action.dest}: vLLM refuses {value!r} ({problem})"
        ) from error


def _word(value: Any) -> str:
    """A value as a word of a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _check_quantization(name: str | None) -> None:
    """vLLM gets the trained weights in their own dtype, so it has to quantize them itself."""
    if name is None:
        return

    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        get_quantization_config,
    )

    if name not in QUANTIZATION_METHODS:
        remedy = _closest(name, QUANTIZATION_METHODS)
        raise ConfigError(f"engine.options.quantization: vLLM has no {name!r}: {remedy}")

    if get_quantization_config(name).get_config_filenames():
        raise ConfigError(
            f"engine.options.quantization={name} is for weights that are stored so, and vLLM gets "
            "the trained weights in their own dtype: choose a method that quantizes while it "
            "loads, such as fp8"
        )


def _check_drafting(config: Any) -> None:
    """Checks the names and values of speculative decoding one by one. vLLM adds others itself."""
    if config is None:
        return

    key = "engine.options.speculative_config"
    if not isinstance(config, dict):
        raise ConfigError(f"{key}: got {config!r}: give a mapping such as {{method: ngram, ...}}")

    from vllm.config import SpeculativeConfig

    fields = SpeculativeConfig.__pydantic_fields__
    for name, value in config.items():
        field = fields.get(name.replace("-", "_"))
        if field is None:
            remedy = _closest(name, fields)
            raise ConfigError(f"{key}.{name}: vLLM has no such setting: {remedy}")

        kind: Any = Annotated[(field.annotation, name, *field.metadata)]
        try:
            pydantic.TypeAdapter(kind).validate_python(value)
        except pydantic.ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ConfigError(f"{key}.{name}: vLLM refuses {value!r} ({problem})") from error
