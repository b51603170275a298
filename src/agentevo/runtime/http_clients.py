"""The common parts of all HTTP clients: the trusted authorities, and the servers that are reached
without a proxy. The authorities are read only once, because that takes 50 ms in which no attempt
plays."""

from __future__ import annotations

import ipaddress
import os
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl


def trusted_context() -> ssl.SSLContext:
    """The context that httpx creates for a client, including SSL_CERT_FILE and SSL_CERT_DIR. Any
    number of clients and threads can share it. Raises OSError for a file that can't be read."""
    return _context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


def is_loopback(url: str) -> bool:
    """Whether a URL is on this machine. Then no proxy is used, so no proxy sees its keys."""
    return is_this_machine(urlsplit(url).hostname or "")


def is_this_machine(host: str) -> bool:
    """Whether the name or address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


@lru_cache(maxsize=4)
def _context(file: str | None, folder: str | None) -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()
