"""Any OpenEnv server as a text environment, by its URL: reset and step over its WebSocket, with one
connection per episode.

The server's schema decides how the player's text becomes an action. If an action has a single
field, the text is that field. Otherwise the text is the action as a JSON object. A text that does
not fit the schema is an invalid action. The player sees the only field of an observation, or `name:
value` lines, and images (openenv_observations.py). The server gives the reward. If an episode ends
without any reward, the attempt fails.

No package of OpenEnv is needed. Every wait has a deadline, and messages have a size limit. The
attempt fails if the server hangs, dies, or sends another kind of message.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pydantic
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment, choose
from agentevo.environments.observation import Shown
from agentevo.environments.openenv_observations import Blocks, shown_observation
from agentevo.errors import ConfigError, EnvironmentFailure, storable
from agentevo.runtime.http_clients import is_loopback, trusted_context
from agentevo.runtime.parsing import ParseError, parse_json
from agentevo.runtime.trace_header import trace_headers

NO_SESSION_LEFT = "CAPACITY_REACHED"
BAD_ACTION = "VALIDATION_ERROR"
RETRY_S = 0.2
"""The pause in seconds before the next request to a server without a free session."""
CLOSE_S = 1.0
MAX_SEED = 2**31
"""Seeds are taken modulo this number, because numpy's generators accept no larger ones."""


class OpenEnvConfig(EnvironmentConfig):
    """The server, and the text form of its actions and observations."""

    type: Literal["openenv"] = "openenv"
    url: str = pydantic.Field(pattern=r"^(https?|wss?)://[^/\s]+")
    """The server's URL, such as http://127.0.0.1:8000."""
    reset: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    """The options of every reset, in addition to the seed."""
    action: dict[str, pydantic.JsonValue] = pydantic.Field(default_factory=dict)
    """Constant fields of every action, in addition to the player's fields."""
    action_field: str | None = None
    """The field of an action that receives the player's text. Default: the only field, or the only
    required field. If there are several, the player writes a JSON object."""
    observation_fields: tuple[str, ...] = ()
    """The fields of an observation that are written as text, in this order: one alone, several as
    lines `field: value`. Empty: all but `image_fields`."""
    image_fields: tuple[str, ...] = ()
    """The fields of an observation that are images, which the player sees before the text: a file
    in base64, a data URL, or rows of pixels. Lists of content blocks need no entry here."""
    instructions: str = ""
    """The rules for the player. Empty: the server's description and the form of an action."""
    success_on: Literal["reward", "termination"] = "reward"
    """An ended episode is a success if its last reward was positive (`reward`), or in any case
    (`termination`). The observation's own `success` overrides it."""
    call_timeout_s: float = pydantic.Field(default=60.0, gt=0)
    """The time limit of an answer, in seconds."""
    session_timeout_s: float = pydantic.Field(default=120.0, gt=0)
    """The longest wait for a free session in seconds, if the server limits their number."""
    max_message_mb: float = pydantic.Field(default=4.0, gt=0)
    """The maximum size of a message from the server, in megabytes."""

    @property
    def shows_images(self) -> bool:
        return bool(self.image_fields)


@dataclass(frozen=True)
class OpenEnvForm:
    """A server's description of itself."""

    description: str
    fields: Mapping[str, Any]
    """Maps the name of each field of an action to its JSON schema."""
    required: frozenset[str]

    def only_field(self, fixed: Mapping[str, Any]) -> str | None:
        """The field that receives the text, if only one field is possible."""
        names = [name for name in self.fields if name not in fixed]
        needed = [name for name in names if name in self.required]
        chosen = needed if len(needed) == 1 else names
        return chosen[0] if len(chosen) == 1 else None


_forms: dict[str, OpenEnvForm] = {}
"""The forms by URL. A process queries each server once."""
_forms_lock = threading.Lock()


@environments.register("openenv")
class OpenEnvEnvironment(EpisodicEnvironment):
    """An episode at an OpenEnv server."""

    Config: ClassVar[type[EnvironmentConfig]] = OpenEnvConfig
    config: OpenEnvConfig

    def __init__(self, config: OpenEnvConfig) -> None:
        """Raises ConfigError if no OpenEnv server answers, or if an option does not fit the
        server."""
        super().__init__(config)
        self._form = read_server_form(config)
        self._field = config.action_field or self._form.only_field(config.action)

        unknown = {*config.action, *filter(None, [config.action_field])} - {*self._form.fields}
        if unknown and self._form.fields:
            raise ConfigError(
                f"openenv: the actions of {config.url} have no field {sorted(unknown)[0]!r}, only "
                f"{', '.join(self._form.fields)}"
            )

        self._open = ExitStack()
        self._connection: ClientConnection | None = None
        self._shown: str | Blocks = ""
        self._has_reward = False

    @property
    def instructions(self) -> str:
        if self.config.instructions:
            return self.config.instructions
        if self._field is not None:
            hint = self._form.fields.get(self._field, {}).get("description") or self._field
            return f"{self._form.description}\nAnswer with: {hint}".strip()
        fields = json.dumps(dict(self._form.fields))
        return f"{self._form.description}\nAnswer with a JSON object of {fields}".strip()

    def start(self, seed: int) -> None:
        self._has_reward = False
        message = {"seed": seed % MAX_SEED, **self.config.reset}
        deadline = time.monotonic() + self.config.session_timeout_s
        while True:
            self.close()
            self._connection = self._connect()

            answer = self._request("reset", message)
            if answer.get("code") != NO_SESSION_LEFT:
                break

            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"openenv: {self.config.url} has no free session "
                    f"({storable(str(answer.get('message')), 200)}): raise its limit "
                    "(max_concurrent_envs), or run fewer attempts at once"
                )

            time.sleep(RETRY_S)

        _raise_server_error(answer, "reset", self.config.url)
        if self._apply_answer(answer)[1]:
            raise EnvironmentFailure(
                f"openenv: the episode of {self.config.url} is over after its reset"
            )

    def observe(self) -> Shown:
        return self._shown

    def act(self, action: str) -> ActionResult:
        fields = self._parse_action(action)
        if fields is None:
            return INVALID

        answer = self._request("step", fields)
        if answer.get("code") == BAD_ACTION:
            return INVALID

        _raise_server_error(answer, "step", self.config.url)
        before = self._shown

        reward, done = self._apply_answer(answer)
        if done and not self._has_reward:
            raise EnvironmentFailure(
                f"openenv: the episode of {self.config.url} ended, and no step of it had a reward"
            )

        success = answer["observation"].get("success")
        is_success = self.config.success_on == "termination" or reward > 0
        return ActionResult(
            reward=reward,
            effective=self._shown != before or done,
            terminated=done,
            success=success if isinstance(success, bool) else done and is_success,
        )

    def close(self) -> None:
        self._connection = None
        self._open.close()

    def _parse_action(self, text: str) -> dict[str, Any] | None:
        """Parses a text as an action. None for a text that is not an action."""
        if self._field is not None:
            schema = self._form.fields.get(self._field, {})
            value = _parse_value(text, schema)
            return None if value is None else {**self.config.action, self._field: value}

        try:
            fields = parse_json(text)
        except ParseError:
            return None

        return {**fields, **self.config.action} if isinstance(fields, dict) else None

    def _apply_answer(self, answer: Mapping[str, Any]) -> tuple[float, bool]:
        """Reads an answer, and makes its observation the current one. Returns the reward, and
        whether the episode has ended. Raises EnvironmentFailure for an answer of another form."""
        observation = answer.get("observation")
        reward = answer.get("reward")
        done = answer.get("done", False)
        if not isinstance(observation, dict) or not isinstance(done, bool):
            raise EnvironmentFailure(
                f"openenv: {self.config.url} answered {storable(str(answer), 200)}: an answer "
                "needs the keys `observation` and `done`"
            )

        if reward is not None:
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise EnvironmentFailure(
                    f"openenv: the reward of {self.config.url} is {storable(repr(reward), 200)}, "
                    "which is not a number"
                )
            self._has_reward = True

        self._shown = shown_observation(
            observation, self.config.observation_fields, self.config.image_fields, is_last=done
        )
        return float(reward or 0.0), done

    def _connect(self) -> ClientConnection:
        scheme, rest = self.config.url.rstrip("/").split("://", 1)
        url = f"{'wss' if scheme in ('https', 'wss') else 'ws'}://{rest}/ws"
        options: dict[str, Any] = {"proxy": None} if is_loopback(url) else {}
        try:
            return self._open.enter_context(
                connect(
                    url,
                    open_timeout=self.config.call_timeout_s,
                    close_timeout=CLOSE_S,
                    max_size=int(self.config.max_message_mb * 2**20),
                    additional_headers=trace_headers(),
                    **options,
                )
            )
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailure(
                f"openenv: {self.config.url} can't be reached: {type(error).__name__}: {error}"
            ) from error

    def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the data of the answer. Only the data of an error has the key
        `code`. Raises EnvironmentFailure if no answer arrives."""
        assert self._connection is not None

        problem = f"openenv: {self.config.url} did not answer a {kind}"
        try:
            # A server that closes may have sent a refusal before, which recv still reads.
            with suppress(ConnectionClosed):
                self._connection.send(json.dumps({"type": kind, "data": data}))
            text = self._connection.recv(timeout=self.config.call_timeout_s)
        except TimeoutError:
            raise EnvironmentFailure(
                f"{problem} in environment.call_timeout_s={self.config.call_timeout_s:g} s"
            ) from None
        except ConnectionClosed as error:
            if error.sent is not None and error.sent.code == 1009:
                raise EnvironmentFailure(
                    f"{problem} with less than environment.max_message_mb="
                    f"{self.config.max_message_mb:g} MB"
                ) from error
            raise EnvironmentFailure(f"{problem}: the connection broke ({error})") from error

        try:
            answer = parse_json(text if isinstance(text, str) else text.decode())
        except (ParseError, UnicodeDecodeError) as error:
            raise EnvironmentFailure(f"{problem} in JSON: {error}") from error

        data_of_answer = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data_of_answer, dict):
            raise EnvironmentFailure(
                f"{problem} as OpenEnv does, but with {storable(str(answer), 200)}"
            )

        if answer.get("type") == "error":
            return {"code": "UNKNOWN", **data_of_answer}

        return {key: value for key, value in data_of_answer.items() if key != "code"}


def read_server_form(config: OpenEnvConfig) -> OpenEnvForm:
    """The server's description of its actions. Raises ConfigError if no OpenEnv server answers."""
    url = config.url.rstrip("/")
    with _forms_lock:
        if url not in _forms:
            scheme, rest = url.split("://", 1)
            base = f"{'https' if scheme in ('https', 'wss') else 'http'}://{rest}"
            _forms[url] = _read_form(base, config)
        return _forms[url]


def _read_form(base: str, config: OpenEnvConfig) -> OpenEnvForm:
    import httpx  # httpx imports rich, and every recipe imports this module

    try:
        with httpx.Client(
            timeout=config.call_timeout_s, trust_env=not is_loopback(base), verify=trusted_context()
        ) as client:
            schema = client.get(f"{base}/schema").raise_for_status().json()["action"]
            metadata = client.get(f"{base}/metadata")
            description = metadata.json().get("description", "") if metadata.is_success else ""

        fields = {
            name: field
            for name, field in schema.get("properties", {}).items()
            if name != "metadata"
        }
        return OpenEnvForm(str(description or ""), fields, frozenset(schema.get("required", ())))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"environment.url: no OpenEnv server answers at {config.url} "
            f"({type(error).__name__}: {error}): start it, or give another URL"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"environment.url: the server at {config.url} is not an OpenEnv server: its /schema "
            "has no schema of an action"
        ) from error


def _parse_value(text: str, schema: Mapping[str, Any]) -> Any:
    """Parses a text as the value that a schema requires. None if the text does not fit."""
    schema = next((option for option in schema.get("anyOf", ()) if "type" in option), schema)
    if "enum" in schema:
        names = [str(value) for value in schema["enum"]]
        index = choose(text, names)
        return None if index is None else schema["enum"][index]

    kind = schema.get("type", "string")
    if kind == "string":
        return text

    try:
        value = parse_json(text)
    except ParseError:
        return None

    kinds: dict[str, Any] = {
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    fits = isinstance(value, kinds.get(kind, object))
    return value if fits and (kind == "boolean") == isinstance(value, bool) else None


def _raise_server_error(answer: Mapping[str, Any], kind: str, url: str) -> None:
    """Raises EnvironmentFailure with the server's message if the answer is an error."""
    if "code" in answer:
        raise EnvironmentFailure(
            f"openenv: the {kind} of {url} failed ({answer['code']}): "
            f"{storable(str(answer.get('message', '')), 1000)}"
        )
