"""Fields that the APIs have in common, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.policy import overrides_of
from agentevo.errors import BadRequestError, shown
from agentevo.models.chat.answer_form import ANY_OBJECT, AnswerForm, Schema
from agentevo.types import MAX_TOP_LOGPROBS, SamplingOverrides
from agentevo.types.penalties import Penalties

_PENALTIES = {
    "frequency_penalty": "frequency",
    "presence_penalty": "presence",
    "repetition_penalty": "repetition",
}
"""Names of penalties -> those in types.Penalties."""


def keys_of(names: str) -> frozenset[str]:
    """The names of fields in a text, with blanks between them."""
    return frozenset(names.split())


SAMPLING_KEYS = keys_of(
    "model stream temperature top_p top_k min_p seed stop logit_bias"
) | frozenset(_PENALTIES)
"""The keys with which every request of OpenAI's APIs may choose and sample a model."""
ANY_SEED = -1
"""vLLM's and llama.cpp's word for no seed."""
_LARGEST = 1e6
"""Numbers beyond are out of any range."""


def check_known(body: Mapping[str, Any], known: Set[str], request: str) -> None:
    """Raises Refusal for a field that is not among the `known` ones; `request` names the request
    in the message."""
    unknown = sorted(k for k, value in body.items() if k not in known and value is not None)
    if unknown:
        raise Refusal(f"this gateway does not know the field {unknown[0]!r} of a {request}")


def tools_in(body: Mapping[str, Any]) -> Sequence[Any]:
    """The body's list of tools; absent and null mean no tools. Raises BadRequestError for any other
    value."""
    tools = body.get("tools")
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise BadRequestError(f"tools is {shown(tools)}: give a list")
    return tools


def object_in(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Absent and null are an empty object."""
    value = body.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise BadRequestError(f"{key} is {shown(value)}: give an object")
    return value or {}


def of_completions(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ModelRequest that both of OpenAI's completions have."""
    return {
        "model": str(body.get("model") or "policy"),
        "stream": boolean(body, "stream"),
        "include_usage": bool(object_in(body, "stream_options").get("include_usage")),
        "n": whole_number(body, "n", 1),
        "token_ids": boolean(body, "return_token_ids"),
    }


def template_of(body: Mapping[str, Any], effort: Any) -> dict[str, Any]:
    """The fields of a ModelRequest for the chat template's variables. `effort`: the value of the
    API's own field for the reasoning effort."""
    if effort is not None and not isinstance(effort, str):
        raise BadRequestError(f"the reasoning effort is {shown(effort)}: give a text")
    return {"template": object_in(body, "chat_template_kwargs"), "effort": effort}


def boolean(body: Mapping[str, Any], key: str) -> bool:
    """Absent and null are false."""
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRequestError(f"{key} is {shown(value)}: give true or false")
    return bool(value)


def whole_number(body: Mapping[str, Any], key: str, default: int) -> int:
    """Absent and null are the default."""
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequestError(f"{key} is {shown(value)}: give a whole number")
    return value


def top_logprobs_of(body: Mapping[str, Any], key: str, default: int = 0) -> int:
    """How many of the likeliest tokens are asked for. Raises Refusal for too many."""
    count = whole_number(body, key, default)
    if not default <= count <= MAX_TOP_LOGPROBS:
        raise Refusal(f"{key} is {shown(count)}: ask for 0 to {MAX_TOP_LOGPROBS}", param=key)
    return count


def sampling_of(
    body: Mapping[str, Any], *, max_tokens: Sequence[str], stop: str
) -> SamplingOverrides | None:
    """The sampling settings that the body changes. `max_tokens`: the keys that may hold the
    limit."""
    values: dict[str, Any] = {
        key: body[key]
        for key in ("temperature", "top_p", "top_k", "min_p", "seed")
        if body.get(key) is not None
    }
    if values.get("top_k") == -1:  # vLLM's word for all tokens
        values["top_k"] = 0
    seed = values.get("seed")
    if seed == ANY_SEED and not isinstance(seed, bool):
        del values["seed"]
    elif isinstance(seed, int) and -(2**63) <= seed < 0:
        values["seed"] = seed + 2**63

    limit = next((body[key] for key in max_tokens if body.get(key) is not None), None)
    if limit is not None:
        values["max_new_tokens"] = limit

    penalties = penalties_of(body)
    if penalties is not None:
        values["penalties"] = penalties

    texts = body.get(stop)
    return overrides_of(values, texts if texts else None)


def penalties_of(body: Mapping[str, Any]) -> Penalties | None:
    """The body's changes to the logits; None if there are none. Raises BadRequestError and
    Refusal."""
    values: dict[str, Any] = {}
    for key, name in _PENALTIES.items():
        if body.get(key) is not None:
            values[name] = _number(body[key], key)
            _refuse(Penalties(**{name: values[name]}).problem, key)

    biases = body.get("logit_bias") or {}
    if not isinstance(biases, Mapping):
        raise BadRequestError(f"logit_bias is {shown(biases)}: give an object of ids and numbers")

    pairs = []
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise BadRequestError(f"logit_bias has the key {shown(token)}: give ids of tokens")
        pairs.append((int(token), _number(bias, f"logit_bias of {token}")))

    values["logit_bias"] = tuple(sorted(pairs))
    _refuse(Penalties(logit_bias=values["logit_bias"]).problem, "logit_bias")
    return Penalties(**values).or_none


def _number(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _LARGEST:
        raise BadRequestError(f"{where} is {shown(value)}: give a number")
    return float(value)


def _refuse(problem: str | None, key: str) -> None:
    if problem is not None:
        raise Refusal(f"{key}: {problem}", param=key)


def no_other_service(body: Mapping[str, Any]) -> None:
    """Raises Refusal for fields that would change the prompt or the answer, and that the gateway
    handles in another way."""
    for key in ("functions", "function_call"):
        if body.get(key):
            raise Refusal(f"{key!r} is not supported: use tools", param=key)

    if body.get("modalities") not in (None, [], ["text"]):
        raise Refusal(
            f"modalities {shown(body['modalities'])} is not supported: the policy writes texts "
            'alone; leave it out, or give ["text"]',
            param="modalities",
        )
    if boolean(body, "return_tokens_as_token_ids"):
        raise Refusal(
            "return_tokens_as_token_ids is not supported: ask for return_token_ids",
            param="return_tokens_as_token_ids",
        )


def schema_of(form: Any, key: str) -> Schema | None:
    """The JSON schema that an answer must follow, None for a text; `form` is the value of the field
    `key`."""
    kind = form.get("type") if isinstance(form, Mapping) else form
    if kind in (None, "text"):
        return None
    if isinstance(form, Mapping) and kind == "json_object":
        return ANY_OBJECT

    if isinstance(form, Mapping) and kind == "json_schema":
        inner = form.get("json_schema")  # of chat completions alone
        schema = inner.get("schema") if isinstance(inner, Mapping) else form.get("schema")
        if not isinstance(schema, Mapping | bool):
            raise BadRequestError(f"{key}: the schema is {shown(schema)}: give a JSON schema")
        return schema

    raise Refusal(
        f"{key} {shown(kind)} is not supported: use text, json_object or json_schema", param=key
    )


def is_strict(form: Any) -> bool:
    """Whether the field that `schema_of` reads asks for OpenAI's strict mode."""
    inner = form.get("json_schema", form) if isinstance(form, Mapping) else None
    return isinstance(inner, Mapping) and inner.get("strict") is True


def choice_of(body: Mapping[str, Any]) -> FieldChoice:
    """The ToolChoice of OpenAI's tool_choice and parallel_tool_calls."""
    parallel = body.get("parallel_tool_calls") is None or boolean(body, "parallel_tool_calls")
    choice: Any = body.get("tool_choice") or "auto"
    if choice in ("auto", "none", "required"):
        return FieldChoice(kind=choice, parallel=parallel)

    if isinstance(choice, Mapping) and choice.get("type") == "function":
        inner = choice.get("function")  # of chat completions alone
        name = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
        if isinstance(name, str) and name:
            return FieldChoice(kind="required", tool=name, parallel=False)

    raise Refusal(
        f'tool_choice {shown(choice)} is not supported: use "auto", "none", "required" or a '
        "function by its name",
        param="tool_choice",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChoice:
    """Whether tools may or must be called."""

    kind: Literal["auto", "none", "required"]
    tool: str | None = None
    """The only function that may be called."""
    parallel: bool = True

    def form(self, schema: Schema | None, *, strict: bool = False) -> AnswerForm | None:
        """The required form of the answer; `schema`: its JSON schema if it is not a call. None if
        any text is allowed."""
        if self.kind == "none":
            return AnswerForm(schema=schema, calls="none", strict=strict)
        if self.kind == "required":
            return AnswerForm(calls="required", tool=self.tool, parallel=self.parallel)
        if schema is None and self.parallel:
            return None
        return AnswerForm(schema=schema, parallel=self.parallel, strict=strict)
