"""One server of a remote model: requests over HTTP, and the meaning of their failures."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from agentevo.errors import AgentEvoError, storable
from agentevo.inference.remote_models.wire import BadAnswerError, Listen, RemoteReply, Wire
from agentevo.runtime.http_clients import is_loopback, trusted_context

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
"""The time limit for opening a connection."""
MAX_ANSWER = 64 * 2**20
"""The most bytes of an answer."""
SHOWN = 300
"""The number of a server's answer's characters that a message shows."""
DONE = b"[DONE]"
"""OpenAI's last event."""
_AGAIN = {408, 409, 425, 429}
_NO_CREDIT = "insufficient_quota"
"""OpenAI's code for an account without credit. Its status is 429, but waiting does not help."""


class Unanswered(AgentEvoError):
    """A request got no usable answer. `is_retryable`: whether a retry may help, after
    `retry_after_s` if the server sent it. `may_cost`: whether the server may charge for the
    request."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        is_retryable: bool,
        may_cost: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.is_retryable = is_retryable
        self.may_cost = may_cost
        self.retry_after_s = retry_after_s


class EventReader:
    """Reads server-sent events: takes bytes in pieces of any size, and yields the data of whole
    events. Their names and ids are ignored.
    https://html.spec.whatwg.org/multipage/server-sent-events.html"""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The data of the events that this part completes; without DONE."""
        *ended_lines, rest = part.split(b"\n")
        for line in ended_lines:
            self._line += line
            complete_line = bytes(self._line)
            self._line = bytearray()
            yield from self._taken(complete_line.removesuffix(b"\r"))
        self._line += rest

    def _taken(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data = b"\n".join(self._data)
            self._data = []
            if data.strip() != DONE:
                yield data


@dataclass
class _Pause:
    """Until when a server wants no requests, by the monotonic clock."""

    until: float = 0.0


class ModelServer:
    """See the module. Any thread may use it."""

    def __init__(
        self,
        name: str,
        url: str,
        wire: Wire,
        key: str | None,
        key_reference: str | None,
    ) -> None:
        """`url` is the base URL; `key_reference` describes where the key comes from."""
        # Import before any attempt: otherwise a thread could find httpx only half imported by
        # another one.
        import httpx

        headers = {**wire.headers(key), "Content-Type": "application/json"}
        self._wire = wire
        self.url = wire.path(url)
        self._client = httpx.Client(
            headers=headers, verify=trusted_context(), trust_env=not is_loopback(self.url)
        )

        self._name = name
        self._key = key
        self._key_reference = key_reference
        self._pause = _Pause()

    def speaking(self, wire: Wire, url: str) -> ModelServer:
        """The same server, asked and read by another API at the base URL `url`. Both share their
        connections and pauses, and close together."""
        other = copy.copy(self)
        other._wire = wire
        other.url = wire.path(url)
        return other

    def pause_requests(self, seconds: float) -> None:
        """Pauses the requests of all callers for this time, because the server asked for it."""
        self._pause.until = max(self._pause.until, time.monotonic() + seconds)

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def post(
        self,
        body: bytes,
        within_s: float,
        listen: Listen | None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[RemoteReply, int]:
        """Posts a body, and returns the answer and its status. `listen` receives each event
        immediately. `headers` are sent in addition to those of every request. Raises Unanswered."""
        import httpx

        until = time.monotonic() + within_s
        if self._pause.until >= until:
            raise self._failure(
                "its server asked for a longer pause than is left", is_retryable=False
            )

        time.sleep(max(0.0, self._pause.until - time.monotonic()))
        time_left = max(until - time.monotonic(), 0.01)
        timeout = httpx.Timeout(time_left, connect=min(CONNECT_S, time_left))
        try:
            with self._client.stream(
                "POST", self.url, content=body, timeout=timeout, headers=dict(headers)
            ) as response:
                kind = response.headers.get("content-type", "")
                if response.status_code == 200 and kind.startswith("text/event-stream"):
                    return self._reply(self._events(response, until, listen), b""), 200
                content = b"".join(self._parts(response, until))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise self._failure(f"can't be reached: {_words(error)}", is_retryable=True) from error
        except httpx.TimeoutException as error:
            raise self._late(within_s) from error
        except httpx.TransportError as error:
            raise self._failure(
                f"broke off: {_words(error)}", is_retryable=True, may_cost=True
            ) from error
        except httpx.HTTPError as error:
            raise self._failure(_words(error), is_retryable=False) from error

        if response.status_code != 200:
            raise self._refusal(response, content)

        try:
            answer = msgspec.json.decode(content)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self._invalid_answer(error, content) from error

        return self._reply(answer, content), 200

    def _reply(self, answer: Any, content: bytes) -> RemoteReply:
        try:
            if not isinstance(answer, Mapping):
                raise BadAnswerError(f"a {type(answer).__name__}")
            reply = self._wire.reply(answer)
            msgspec.convert(msgspec.to_builtins(reply), RemoteReply)  # checks types
            return reply
        except (BadAnswerError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self._invalid_answer(error, content) from error

    def _events(self, response: httpx.Response, until: float, listen: Listen | None) -> Any:
        """Collects the events, and returns the complete body."""
        reader = EventReader()
        streamed = self._wire.streamed()
        data = b""
        try:
            for part in self._parts(response, until):
                for data in reader.feed(part):
                    for delta in streamed.add(msgspec.json.decode(data)):
                        if listen is not None:
                            listen(delta)
            return streamed.answer()
        except (BadAnswerError, msgspec.MsgspecError, RecursionError) as error:
            raise self._invalid_answer(error, data) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._invalid_answer(
                BadAnswerError(f"no event ({_words(error)})"), data
            ) from error

    def _parts(self, response: httpx.Response, until: float) -> Iterator[bytes]:
        num_bytes = 0
        for part in response.iter_bytes():
            yield part
            num_bytes += len(part)
            if time.monotonic() > until:
                raise self._late(None)

            if num_bytes > MAX_ANSWER:
                raise self._failure(
                    f"answers with more than {MAX_ANSWER} bytes", is_retryable=False, may_cost=True
                )

    def _invalid_answer(self, error: Exception, content: bytes) -> Unanswered:
        return self._failure(
            f"sent an unreadable answer ({_words(error)}): {self._shown(content)}",
            status=200,
            is_retryable=True,
            may_cost=True,
        )

    def _refusal(self, response: httpx.Response, content: bytes) -> Unanswered:
        status = response.status_code
        server_text = self._shown(content)
        if status in (401, 403):
            key = self._key_reference or "no key was sent: give api_key"
            return self._failure(
                f"refuses the key ({status}; {key}): {server_text}",
                status=status,
                is_retryable=False,
            )

        is_retryable = (status in _AGAIN or status >= 500) and _NO_CREDIT not in server_text
        return self._failure(
            f"answered {status}: {server_text}",
            status=status,
            is_retryable=is_retryable,
            retry_after_s=retry_after(response.headers, time.time()) if is_retryable else None,
        )

    def _late(self, within_s: float | None) -> Unanswered:
        within = "" if within_s is None else f" within {within_s:g} s"
        return self._failure(
            f"has not answered{within} (timeout_s)", is_retryable=True, may_cost=True
        )

    def _failure(self, what: str, **facts: Any) -> Unanswered:
        text = f"remote model {self._name} at {self.url} {what}"
        return Unanswered(storable(self._without_key(text)), **facts)

    def _shown(self, content: bytes) -> str:
        """The beginning of an answer, on one line: the error's message if it has one."""
        try:
            answer = msgspec.json.decode(content)
            error = answer["error"]
            text = str(error["message"] if isinstance(error, dict) else error)
            code = error.get("code") if isinstance(error, dict) else None
            text = f"{text} ({code})" if code else text
        except (msgspec.MsgspecError, LookupError, TypeError, RecursionError, UnicodeError):
            text = content.decode("utf-8", "replace")

        text = " ".join(self._without_key(text).split())
        return text[:SHOWN] + ("..." if len(text) > SHOWN else "") or "an empty answer"

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that a server asks to wait: `retry-after-ms`, or `Retry-After` as seconds or as a
    date. None if it sends no readable value."""
    try:
        if (milliseconds := headers.get("retry-after-ms")) is not None:
            return _seconds(float(milliseconds) / 1000)
    except ValueError:
        pass

    text = headers.get("retry-after", "").strip()
    if not text:
        return None

    try:
        return _seconds(float(text))
    except ValueError:
        pass

    try:
        return _seconds(parsedate_to_datetime(text).timestamp() - now)
    except (TypeError, ValueError, OverflowError):
        return None


def _seconds(value: float) -> float | None:
    return max(0.0, value) if math.isfinite(value) else None


def _words(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
