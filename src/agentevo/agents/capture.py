"""Attributes the policy calls of an agent's own client to attempts, by the context of the call.

    with captured(gateway_url, key):            around one attempt
        ... OpenAI().chat.completions.create(...)

The attempt's key is in a context variable. A request to the gateway's URL in that context is sent
as a copy with the key in the header HEADER, so many attempts can send the same request object.
Requests to other URLs are not changed. Covered clients: httpx, httpx2, requests, aiohttp and
urllib.request. They are patched while an attempt runs, also if they are imported in that time.
Environment variables point clients to the gateway, and are restored after the last attempt. Their
API key is a placeholder that identifies no attempt.

asyncio's tasks and to_thread, calls submitted to a ThreadPoolExecutor, and new threads inherit the
context. This has limits. A thread that several attempts share belongs to the attempt that started
it, so start it outside of attempts or let it use `policy.api_key`. Child processes, also forked
ones, have only the placeholder, since a process pool may serve many attempts.

Environment variables that point clients of OpenAI's and Anthropic's APIs to the gateway.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from copy import copy
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from agentevo.errors import AgentEvoError
from agentevo.runtime.trace_header import trace_headers

PLACEHOLDER_KEY = "agentevo"
"""The API key of clients that require one although the attempt is identified in another way. It
gives no access."""
_PROXIES = ("HTTP_PROXY", "ALL_PROXY")


def client_variables(
    gateway_url: str, api_key: str, environment: Mapping[str, str] = os.environ
) -> dict[str, str | None]:
    """Variables to set, or to remove if the value is None, in addition to those of `environment`.
    If `environment` has a proxy, the gateway is reached without it."""
    base_url = f"{gateway_url}/v1"
    variables: dict[str, str | None] = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": gateway_url,
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": None,
    }
    if any(environment.get(name) or environment.get(name.lower()) for name in _PROXIES):
        proxy_exceptions = environment.get("no_proxy") or environment.get("NO_PROXY")
        hosts = ",".join(filter(None, [proxy_exceptions, urlsplit(gateway_url).hostname]))
        variables |= {"NO_PROXY": hosts, "no_proxy": hosts}

    return variables


HEADER = "X-AgentEvo-Session"


class _CapturedAttempt(NamedTuple):
    """The attempt of a context."""

    gateway_url: str
    key: str
    process: int
    """The process that made the context: a forked child inherits the context, but belongs to no
    attempt."""


_session: ContextVar[_CapturedAttempt | None] = ContextVar("agentevo session", default=None)


@contextlib.contextmanager
def capture_calls(gateway_url: str, key: str) -> Iterator[None]:
    """See the module. Raises AgentEvoError while attempts of another gateway run in this
    process."""
    _capture.enter(gateway_url)
    token = _session.set(_CapturedAttempt(gateway_url, key, os.getpid()))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the block ended in another context
            _session.reset(token)
        _capture.leave()


@contextlib.contextmanager
def untracked() -> Iterator[dict[str, str]]:
    """Excludes the API calls in this block from the attempt, for example calls to a judge. Yields
    the values of the `client_variables` outside an attempt."""
    token = _session.set(None)
    try:
        yield _capture.variables_before()
    finally:
        with contextlib.suppress(ValueError):
            _session.reset(token)


def _key_for(url: str) -> str | None:
    """The key for a request to `url` in the current context."""
    session = _session.get()
    if session is None or not url.startswith(session.gateway_url):
        return None
    rest = url[len(session.gateway_url) :]
    is_there = rest[:1] in ("", "/", "?", "#")
    return session.key if is_there and session.process == os.getpid() else None


def _mark_request(request: Any) -> Any:
    """The request to send in the current context: a copy with the key, if it gets one."""
    key = _key_for(str(request.url))
    if key is None:
        return request

    marked = object.__new__(type(request))  # copy.copy of an httpx request drops its body
    vars(marked).update(vars(request))

    marked.headers = request.headers.copy()
    marked.headers[HEADER] = key
    for name, value in trace_headers().items():
        marked.headers.setdefault(name, value)

    return marked


def _answering(answer: Any, marked: Any, request: Any) -> Any:
    """Sets the original request as the answer's request."""
    with contextlib.suppress(AttributeError, RuntimeError):  # httpx: none has been set
        if answer.request is marked:
            answer.request = request
    return answer


def _sending(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Client.send` of httpx and httpx2, `Session.send` of requests."""

    @wraps(original)
    def send(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        marked = _mark_request(request)
        return _answering(original(self, marked, *args, **options), marked, request)

    return send


def _sending_async(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AsyncClient.send` of httpx and httpx2."""

    @wraps(original)
    async def send(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        marked = _mark_request(request)
        return _answering(await original(self, marked, *args, **options), marked, request)

    return send


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ClientRequest.__init__` of aiohttp, which is called for every redirect."""

    @wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if (key := _key_for(str(self.url))) is not None:
            self.headers[HEADER] = key
            for name, value in trace_headers().items():
                self.headers.setdefault(name, value)

    return init


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    """`OpenerDirector.open` of urllib.request."""

    @wraps(original)
    def open_url(self: Any, fullurl: Any, data: Any = None, *args: Any, **options: Any) -> Any:
        url = fullurl if isinstance(fullurl, str) else fullurl.full_url
        if (key := _key_for(url)) is None:
            return original(self, fullurl, data, *args, **options)

        from urllib.request import Request

        request = Request(fullurl) if isinstance(fullurl, str) else copy(fullurl)
        request.headers = dict(request.headers)
        request.unredirected_hdrs = dict(request.unredirected_hdrs)
        request.add_unredirected_header(HEADER, key)
        for name, value in trace_headers().items():
            if not request.has_header(name.capitalize()):
                request.add_unredirected_header(name, value)

        return original(self, request, data, *args, **options)

    return open_url


def _starting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Thread.start`: the new thread gets the attempt of the thread that starts it."""

    @wraps(original)
    def start(self: threading.Thread) -> None:
        if (session := _session.get()) is not None:
            run = self.run

            def run_in_session() -> None:
                del self.run
                _session.set(session)
                run()

            self.run = run_in_session  # type: ignore[method-assign]

        original(self)

    return start


def _submitting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`ThreadPoolExecutor.submit`: the call gets the attempt of the code that submits it. The
    pool's threads, which may serve other attempts, have none."""

    @wraps(original)
    def submit(self: Any, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        call = partial(_call_in_session, _session.get(), function)
        token = _session.set(None)
        try:
            return original(self, call, *args, **options)
        finally:
            _session.reset(token)

    return submit


def _call_in_session(
    session: _CapturedAttempt | None, function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    token = _session.set(session)
    try:
        return function(*args, **options)
    finally:
        _session.reset(token)


_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
_HTTPX: tuple[tuple[str, str, _Wrap], ...] = (
    ("Client", "send", _sending),
    ("AsyncClient", "send", _sending_async),
)
_MODULES: dict[str, tuple[tuple[str, str, _Wrap], ...]] = {
    "httpx": _HTTPX,
    "httpx2": _HTTPX,
    "requests": (("Session", "send", _sending),),
    "aiohttp": (("ClientRequest", "__init__", _making),),
    "urllib.request": (("OpenerDirector", "open", _opening),),
}
"""Module -> (class, method, wrapper of the method)."""


class _Capture(importlib.abc.MetaPathFinder):
    """The changes in this process while attempts run: environment variables, patched methods, and
    an entry in `sys.meta_path` that notices imports."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_attempts = 0
        self._gateway_url = ""
        self._before: dict[str, str | None] = {}
        self._set: dict[str, str | None] = {}
        self._patches: dict[tuple[type, str], tuple[Any, Any]] = {}
        """(class, method) -> (original, ours)."""

    def enter(self, gateway_url: str) -> None:
        with self._lock:
            if self._num_attempts and gateway_url != self._gateway_url:
                raise AgentEvoError(
                    f"attempts at the gateway {self._gateway_url} run in this process and use "
                    "its environment variables: train in another process, or let the agent "
                    "take the policy, and give its client base_url=policy.base_url and "
                    "api_key=policy.api_key"
                )

            if not self._num_attempts:
                self._gateway_url = gateway_url
                self._set = client_variables(gateway_url, PLACEHOLDER_KEY)
                self._before = {name: os.environ.get(name) for name in self._set}
                _set_variables(self._set)
                sys.meta_path.insert(0, self)

            self._num_attempts += 1
            self._patch(threading.Thread, "start", _starting)
            self._patch(ThreadPoolExecutor, "submit", _submitting)

            for name in _MODULES:
                self._patch_module(sys.modules.get(name))

    def leave(self) -> None:
        with self._lock:
            self._num_attempts -= 1
            if self._num_attempts:
                return

            sys.meta_path.remove(self)
            _set_variables(
                {
                    name: value
                    for name, value in self._before.items()
                    if os.environ.get(name) == self._set[name]  # otherwise the agent has set it
                }
            )
            for (owner, name), (original, wrapped) in list(self._patches.items()):
                if vars(owner).get(name) is wrapped:  # otherwise other code has patched it later
                    setattr(owner, name, original)
                    del self._patches[owner, name]

    def variables_before(self) -> dict[str, str]:
        with self._lock:
            names = self._before if self._num_attempts else client_variables("", "")
            values = self._before if self._num_attempts else os.environ
            return {name: value for name in names if (value := values.get(name)) is not None}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds the module through the other finders, and patches it after its execution."""
        if fullname not in _MODULES:
            return None

        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None and not isinstance(spec.loader, type):
            loader = spec.loader

            def exec_module(module: ModuleType) -> None:
                with contextlib.suppress(AttributeError):
                    del loader.exec_module
                loader.exec_module(module)
                with self._lock:
                    if self._num_attempts:
                        self._patch_module(module)

            with contextlib.suppress(AttributeError):  # otherwise the next attempt patches it
                loader.exec_module = exec_module  # type: ignore[method-assign]

        return spec

    def _patch_module(self, module: ModuleType | None) -> None:
        for owner, name, wrap in _MODULES[module.__name__] if module is not None else ():
            patched_class = getattr(module, owner, None)
            if isinstance(patched_class, type):  # otherwise it is being imported
                self._patch(patched_class, name, wrap)

    def _patch(self, owner: type, name: str, wrap: _Wrap) -> None:
        """Patches a method once, even if other code has patched it later."""
        now = getattr(owner, name)
        if (owner, name) not in self._patches or now is self._patches[owner, name][0]:
            wrapped = wrap(now)
            self._patches[owner, name] = (now, wrapped)
            setattr(owner, name, wrapped)


_capture = _Capture()


def _set_variables(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
