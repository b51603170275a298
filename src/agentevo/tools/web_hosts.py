"""Which hosts a tool may read from, and a read that keeps to it.

A host is allowed where an entry of `allow` names it and none of `deny`: `en.wikipedia.org`,
`*.python.org` (any host below it), `*` (any), each with `:PORT` where it is not 80 or 443. Its
addresses must be public, unless `allow_private`. They are looked up once: the connection goes to
the address that was checked, and the certificate is that of the name. Each redirect is checked as
the first URL is. No proxy is used, since that would look the name up again.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from agentevo.errors import ConfigError, ToolError
from agentevo.http_clients import trusted_context

MAX_REDIRECTS = 5
MAX_URL = 2000
"""Characters of a URL."""
USUAL_PORTS = {"http": 80, "https": 443}
ENCODINGS = ("", "identity", "gzip", "deflate")
"""Of an answer, whose pieces unpack to a bounded size."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class WebPage:
    """What a URL gave."""

    url: str
    """After redirects."""
    media_type: str
    """Such as text/html; empty where the server does not say."""
    charset: str | None
    content: bytes


class WebHosts:
    """See the module."""

    def __init__(
        self, allow: Sequence[str], deny: Sequence[str] = (), *, allow_private: bool = False
    ) -> None:
        """Raises ConfigError for what names no host."""
        self._allow = [_entry("allow", one) for one in allow]
        self._deny = [_entry("deny", one) for one in deny]
        self._allow_private = allow_private

    def allows(self, url: str) -> bool:
        """Whether the rules name the URL's host; its addresses are not looked up."""
        try:
            self._check_name(_parse_url(url))
        except ToolError:
            return False
        return True

    def read(self, url: str, *, max_bytes: int, within_s: float) -> WebPage:
        """The content behind a URL, cut off nowhere. Raises ToolError for what is refused, too
        large, late, an error of the server, or not reached: whoever calls has chosen the host."""
        deadline = time.monotonic() + within_s
        with httpx.Client(verify=trusted_context(), trust_env=False, timeout=within_s) as client:
            for _ in range(MAX_REDIRECTS + 1):
                parsed = _parse_url(url)
                address = self._address_of(parsed)
                try:
                    with client.stream("GET", **_request_to(parsed, address)) as answer:
                        if answer.has_redirect_location:
                            url = str(parsed.join(answer.headers["location"]))
                            continue
                        return _page(answer, parsed, max_bytes, deadline, within_s)
                except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                    raise ToolError(f"{parsed}: {error}") from error

        raise ToolError(f"{url}: more than {MAX_REDIRECTS} redirects")

    def _check_name(self, url: httpx.URL) -> None:
        host = url.host.rstrip(".").lower()
        port = url.port or USUAL_PORTS[url.scheme]
        usual = port == USUAL_PORTS[url.scheme]
        if any(_matches(entry, host, port, usual) for entry in self._deny) or not any(
            _matches(entry, host, port, usual) for entry in self._allow
        ):
            at = host if usual else f"{host}:{port}"
            raise ToolError(f"{at} is no host that may be read")

    def _address_of(self, url: httpx.URL) -> _Address:
        """The address to connect to, checked."""
        self._check_name(url)
        port = url.port or USUAL_PORTS[url.scheme]
        try:
            infos = socket.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ToolError(f"{url.host} can't be found: {error}") from error

        addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]
        private = next((one for one in addresses if not is_public(one)), None)
        if private is not None and not self._allow_private:
            raise ToolError(f"{url.host} is no public host: its address is {private}")
        return addresses[0]


def is_public(address: _Address) -> bool:
    """Whether an address is of the internet, also where it holds another one."""
    if isinstance(address, ipaddress.IPv6Address):
        held = address.ipv4_mapped or address.sixtofour
        if address.teredo is not None:
            return False
        if address in _NAT64:
            held = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if held is not None:
            return is_public(held)
    return address.is_global and not address.is_multicast


def _entry(key: str, text: str) -> tuple[str, int | None]:
    """Host and port of an entry."""
    host, _, port = text.strip().lower().partition(":")
    name = host.removeprefix("*.")
    if not text.strip() or "/" in text or (host != "*" and "*" in name) or not name:
        raise ConfigError(
            f"{key}: {text!r} is no host: give one such as en.wikipedia.org, *.python.org, * (any) "
            "or localhost:8000"
        )
    if port and not port.isdecimal():
        raise ConfigError(f"{key}: {text!r}: a port is a number")
    return host.rstrip("."), int(port) if port else None


def _matches(entry: tuple[str, int | None], host: str, port: int, usual: bool) -> bool:
    pattern, wanted = entry
    if not (usual if wanted is None else port == wanted):
        return False
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return pattern in ("*", host)


def _parse_url(text: str) -> httpx.URL:
    """Raises ToolError."""
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
    """A request to the address, for the name."""
    return {
        "url": url.copy_with(host=str(address)),
        "headers": {
            "Host": url.netloc.decode(),
            "User-Agent": "agentevo",
            "Accept": "text/html,text/plain,application/json,*/*;q=0.1",
            "Accept-Encoding": "gzip, deflate",
        },
        "extensions": {"sni_hostname": url.raw_host.decode()},
    }


def _page(
    answer: httpx.Response, url: httpx.URL, max_bytes: int, deadline: float, within_s: float
) -> WebPage:
    if answer.is_error:
        raise ToolError(f"{url} answers {answer.status_code} {answer.reason_phrase}".rstrip())

    encoding = answer.headers.get("content-encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise ToolError(f"{url} answers in the encoding {encoding}, which was not asked for")

    content = bytearray()
    for piece in answer.iter_bytes():
        content += piece
        if len(content) > max_bytes:
            raise ToolError(f"{url} has more than {max_bytes:,} bytes")
        if time.monotonic() > deadline:
            raise ToolError(f"{url} was not read within {within_s:g} s")

    media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    return WebPage(str(url), media_type, answer.charset_encoding, bytes(content))
