"""Which addresses a page may ask for: the host of the start URL, the hosts that a recipe allows,
and, if the start URL is a file, the files of its folder."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from agentevo.errors import ConfigError

PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
"""The schemes that reach a host, with their usual ports."""


@dataclass(frozen=True)
class Permissions:
    """The addresses that are open to a page. `hosts` has the forms `host` (all ports), `host:port`
    and `*.host` (all subdomains). `folder` contains the files that a page may read."""

    hosts: tuple[str, ...]
    folder: Path | None = None

    def allow(self, url: str) -> bool:
        """Whether a page may ask for `url`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            return False

        if parts.scheme in ("data", "blob"):
            return True
        if parts.scheme == "about":
            return parts.path in ("blank", "srcdoc")
        if parts.scheme == "file":
            return self._allow_file(parts.netloc, parts.path)
        if parts.scheme not in PORTS or not parts.hostname:
            return False
        return self.allow_connection(parts.hostname, port or PORTS[parts.scheme])

    def allow_connection(self, host: str, port: int) -> bool:
        """Whether a page may connect to the port of `host`, a name or an IP address."""
        return any(_matches(pattern, host, port) for pattern in self.hosts)

    def allow_navigation(self, url: str) -> bool:
        """Whether a player may open `url`. An address that holds the document itself is not open: a
        player could write the page that its reward asks for."""
        return self.allow(url) and urlsplit(url).scheme not in ("data", "blob", "about")

    def _allow_file(self, host: str, path: str) -> bool:
        if self.folder is None or host not in ("", "localhost"):
            return False
        try:
            return Path(unquote(path)).resolve().is_relative_to(self.folder)
        except (OSError, RuntimeError, ValueError):  # no path, or links in a circle
            return False


def absolute_url(url: str, page_url: str) -> str:
    """An address as the page at `page_url` means it. A malformed one, which is never allowed, stays
    as it is."""
    try:
        return urljoin(page_url, url)
    except ValueError:
        return url


def permissions_for(
    url: str, allowed_hosts: tuple[str, ...], folder: Path | None = None
) -> Permissions:
    """The permissions of an environment that starts at `url`. `folder` defaults to the folder of a
    file. Raises ConfigError for an address that can't be opened."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"environment.url: {url!r} is not an address: {error}") from error

    for pattern in allowed_hosts:
        if not _is_pattern(pattern):
            raise ConfigError(
                f"environment.allowed_hosts: {pattern!r} is not a host: write example.com, "
                "example.com:8080 or *.example.com"
            )

    if parts.scheme == "file":
        path = Path(unquote(parts.path)).resolve()
        if not path.is_file():
            raise ConfigError(f"environment.url: there is no file {path}")
        return Permissions(allowed_hosts, (folder or path.parent).resolve())

    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"environment.url: {url!r} is not an address of a page: write http://HOST/..., "
            "https://HOST/... or file:///FOLDER/PAGE.html"
        )

    return Permissions((f"{_host(parts.hostname)}:{port or PORTS[parts.scheme]}", *allowed_hosts))


def _is_pattern(pattern: str) -> bool:
    name, _ = _split_port(pattern)
    bare = name.removeprefix("*.")
    return bool(bare) and not any(letter in bare for letter in "/*, @?#") and "://" not in bare


def _split_port(pattern: str) -> tuple[str, int | None]:
    name, colon, port = pattern.rpartition(":")
    if colon and port.isdecimal() and (":" not in name or name.endswith("]")):
        return _host(name), int(port)
    return _host(pattern), None


def _matches(pattern: str, host: str, port: int) -> bool:
    name, only_port = _split_port(pattern)
    if only_port is not None and port != only_port:
        return False
    host = _host(host)
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _host(name: str) -> str:
    """A name or an IP address, with or without brackets, as Chromium writes it in an address."""
    try:
        return f"[{IPv6Address(name.strip('[]'))}]"
    except ValueError:
        return name.lower()
