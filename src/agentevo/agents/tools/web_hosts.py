"""The hosts that a tool may read from, and requests that obey these rules.

A host is allowed if an entry of `allow` matches it and no entry of `deny` does: `en.wikipedia.org`,
`*.python.org` (any host below it), `*` (any). An entry with `:PORT` covers only that port. Without
a port, `allow` covers 80 and 443, and `deny` covers every port. A host's addresses must be public,
unless `allow_private` is set. A name is looked up once. The connection goes to the checked address,
and the certificate must match the name. Each redirect is checked like the first URL. No proxy is
used, since it would look up the name again.

The requests have a time limit and a size limit that hold for any server. An HTTP client's timeout
applies to one read, so a server that sometimes sends a byte never exceeds it. Here all connections
of a call are shut down at the call's deadline.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from agentevo.errors import ConfigError, ToolError
from agentevo.runtime.daemon_threads import call_in_thread
from agentevo.runtime.http_clients import trusted_context

ENCODING = "gzip"
"""The content encodings that a request accepts: zlib can unpack them step by step."""
_GZIP_ALONE = 16 + zlib.MAX_WBITS


class TimedRequests:
    """The requests of one call. `timed_requests` creates it."""

    def __init__(self, within_s: float) -> None:
        self._until = time.monotonic() + within_s
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []

    def left_s(self) -> float:
        """The remaining time. Raises TimeoutError if there is none."""
        remaining_s = self._until - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("no time is left")
        return remaining_s

    def stream(
        self, client: httpx.Client, method: str, url: httpx.URL | str, **options: Any
    ) -> AbstractContextManager[httpx.Response]:
        """The same as the client's `stream`. Raises TimeoutError if no time is left."""
        options["extensions"] = {**options.get("extensions", {}), "trace": self._keep_socket}
        return client.stream(method, url, timeout=self.left_s(), **options)

    def shut_down(self) -> None:
        """Shuts down the connections of these requests, so that a reader sees the end."""
        with self._lock:
            for connection in self._sockets:
                with suppress(OSError):  # the connection is closed
                    # Not SSLSocket.shutdown: it removes the TLS state that the reading thread uses.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _keep_socket(self, event: str, details: dict[str, Any]) -> None:
        """Records the socket. httpx calls it at each step of a request."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            with self._lock:
                self._sockets.append(details["return_value"].get_extra_info("socket"))
            if time.monotonic() >= self._until:
                self.shut_down()


@contextmanager
def timed_requests(within_s: float) -> Iterator[TimedRequests]:
    """Requests with one time limit for all of them together. Raises TimeoutError if the block
    exceeds it."""
    requests = TimedRequests(within_s)
    timer = threading.Timer(within_s, requests.shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield requests
        requests.left_s()  # a connection that was shut down looks like the end of an answer
    except httpx.HTTPError as error:
        requests.left_s()
        if isinstance(error, httpx.TimeoutException):
            raise TimeoutError(str(error)) from error
        raise
    finally:
        timer.cancel()


def read_content(answer: httpx.Response, name: str, max_bytes: int) -> bytes:
    """The unpacked content of an answer. `name` is the answer's name in messages. Raises ToolError
    for more than `max_bytes` and for content that can't be unpacked, and what httpx raises."""
    encoding = answer.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", ENCODING):
        raise ToolError(f"{name} answers in the encoding {encoding}, which was not asked for")

    unpacker = zlib.decompressobj(_GZIP_ALONE) if encoding == ENCODING else None
    content = bytearray()
    num_received = 0
    for piece in answer.iter_raw():
        num_received += len(piece)
        if unpacker is None:
            content += piece
        else:
            try:
                content += unpacker.decompress(piece, max_bytes + 1 - len(content))
            except zlib.error as error:
                raise ToolError(f"{name} can't be unpacked: {error}") from error

        if max(len(content), num_received) > max_bytes:
            raise ToolError(f"{name} has more than {max_bytes:,} bytes")
        if unpacker is not None and unpacker.eof:
            break

    return bytes(content)


MAX_REDIRECTS = 5
MAX_URL = 2000
"""The maximum number of characters of a URL."""
USUAL_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""The part of IPv6 that IANA has assigned to hosts of the internet."""
_DOCUMENTATION = ipaddress.IPv6Network("3fff::/20")
"""The network of RFC 9637, which Python 3.11 does not know."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class WebPage:
    """The answer of a URL."""

    url: str
    """The URL after redirects."""
    media_type: str
    """Such as text/html; empty if the server does not say."""
    charset: str | None
    content: bytes


class WebHosts:
    """See the module."""

    def __init__(
        self, allow: Sequence[str], deny: Sequence[str] = (), *, allow_private: bool = False
    ) -> None:
        """Raises ConfigError for an entry that is not a host."""
        self._allow = [_entry("allow", entry) for entry in allow]
        self._deny = [_entry("deny", entry) for entry in deny]
        self._allow_private = allow_private

    def allows(self, url: str) -> bool:
        """Whether the rules allow the URL's host. Its addresses are not looked up."""
        try:
            self._check_name(_parse_url(url))
        except ToolError:
            return False
        return True

    def read(self, url: str, *, max_bytes: int, within_s: float) -> WebPage:
        """The whole content of a URL. Raises ToolError if the URL is refused, too large, late or
        not reachable, or if the server returns an error: the policy chose the host."""
        try:
            with (
                httpx.Client(verify=trusted_context(), trust_env=False) as client,
                timed_requests(within_s) as requests,
            ):
                return self._follow(url, client, requests, max_bytes)
        except TimeoutError as error:
            raise ToolError(f"{url} was not read within {within_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ToolError(f"{url}: {error}") from error

    def _follow(
        self, url: str, client: httpx.Client, requests: TimedRequests, max_bytes: int
    ) -> WebPage:
        """The page of a URL, after its redirects."""
        for _ in range(MAX_REDIRECTS + 1):
            parsed = _parse_url(url)
            address = self._address_of(parsed, requests.left_s())
            with requests.stream(client, "GET", **_request_to(parsed, address)) as answer:
                if not answer.has_redirect_location:
                    return _page(answer, parsed, max_bytes)
                url = str(parsed.join(answer.headers["location"]))

        raise ToolError(f"{url}: more than {MAX_REDIRECTS} redirects")

    def _check_name(self, url: httpx.URL) -> None:
        host = url.host.rstrip(".").lower()
        port = url.port or USUAL_PORTS[url.scheme]
        usual = port == USUAL_PORTS[url.scheme]
        is_denied = any(
            pattern_port in (None, port) and _matches(pattern, host)
            for pattern, pattern_port in self._deny
        )
        if is_denied or not any(
            (usual if pattern_port is None else pattern_port == port) and _matches(pattern, host)
            for pattern, pattern_port in self._allow
        ):
            at = host if usual else f"{host}:{port}"
            raise ToolError(f"{at} is not a host that may be read")

    def _address_of(self, url: httpx.URL, within_s: float) -> _Address:
        """The address to connect to, checked."""
        self._check_name(url)
        port = url.port or USUAL_PORTS[url.scheme]
        try:
            infos = call_in_thread(
                lambda: socket.getaddrinfo(url.host, port, type=socket.SOCK_STREAM),
                "name lookup",
                within_s,
            )
        except (OSError, UnicodeError) as error:
            raise ToolError(f"{url.host} can't be found: {error}") from error

        addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]
        private = next((address for address in addresses if not is_public(address)), None)
        if private is not None and not self._allow_private:
            raise ToolError(f"{url.host} is not a public host: its address is {private}")
        return addresses[0]


def is_public(address: _Address) -> bool:
    """Whether an address is public; checks an embedded IPv4 address too."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if address.teredo is not None:
            return False
        if address in _NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(embedded)
        if address not in _GLOBAL_UNICAST or address in _DOCUMENTATION:
            return False
    return address.is_global and not address.is_multicast


def _entry(key: str, text: str) -> tuple[str, int | None]:
    """Parses an entry into host and port."""
    host, _, port = text.strip().lower().partition(":")
    name = host.removeprefix("*.")
    if not text.strip() or "/" in text or (host != "*" and "*" in name) or not name:
        raise ConfigError(
            f"{key}: {text!r} is not a host: give one such as en.wikipedia.org, *.python.org, * "
            "(any) or localhost:8000"
        )
    if port and not port.isdecimal():
        raise ConfigError(f"{key}: {text!r}: the port must be a number")
    return host.rstrip("."), int(port) if port else None


def _matches(pattern: str, host: str) -> bool:
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return pattern in ("*", host)


def _parse_url(text: str) -> httpx.URL:
    """Parses a URL. Raises ToolError if it is invalid."""
    if len(text) > MAX_URL:
        raise ToolError(f"the URL has more than {MAX_URL} characters")
    try:
        url = httpx.URL(text.strip())
    except (httpx.InvalidURL, UnicodeError, TypeError) as error:
        raise ToolError(f"{text!r} is no URL: {error}") from error

    if url.scheme not in USUAL_PORTS or not url.host:
        raise ToolError(f"{text!r} is no URL that begins with https:// or http:// and a host")
    if url.userinfo:
        raise ToolError("a URL with a user's name or password is not read")
    return url.copy_with(fragment=None)


def _request_to(url: httpx.URL, address: _Address) -> dict[str, Any]:
    """The arguments of a request to the address, with the host's name in its headers."""
    return {
        "url": url.copy_with(host=str(address)),
        "headers": {
            "Host": url.netloc.decode(),
            "User-Agent": "agentevo",
            "Accept": "text/html,text/plain,application/json,*/*;q=0.1",
            "Accept-Encoding": ENCODING,
        },
        "extensions": {"sni_hostname": url.raw_host.decode()},
    }


def _page(answer: httpx.Response, url: httpx.URL, max_bytes: int) -> WebPage:
    if answer.is_error:
        raise ToolError(f"{url} answers {answer.status_code} {answer.reason_phrase}".rstrip())

    content = read_content(answer, str(url), max_bytes)
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    return WebPage(str(url), media_type, answer.charset_encoding, content)
