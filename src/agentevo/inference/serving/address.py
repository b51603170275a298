"""The address of an engine, as its clients know it: `http://HOST:PORT` on one machine,
`https://HOST:PORT#sha256=FINGERPRINT` beyond it."""

from __future__ import annotations

import re
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from agentevo.errors import ConfigError
from agentevo.runtime.credentials import without_password
from agentevo.runtime.http_clients import is_this_machine

PIN = "#sha256="


class EngineAddress(NamedTuple):
    """The address of one engine. See the module's docstring."""

    url: str
    certificate: str = ""
    """SHA-256 of the certificate that the engine must show, in hexadecimal; empty if the connection
    is not encrypted."""

    @property
    def pinned_url(self) -> str:
        """The URLs that `EngineAddress.read` accepts."""
        return f"{self.url}{PIN}{self.certificate}" if self.certificate else self.url

    @classmethod
    def read(cls, text: str, *, what: str = "an engine", printed_by: str = "serve") -> Self:
        """Parses the address that `agentevo serve` prints, or the command in `printed_by`. Raises
        ConfigError for text that is not such a URL, and for a URL to which the key would travel
        unencrypted."""
        url, pin, certificate = text.partition(PIN)
        try:
            parts = urlsplit(url)
            host = parts.hostname
            port = parts.port
        except ValueError:
            host = port = None

        if (
            not host
            or port is None
            or parts.scheme not in ("http", "https")
            or parts.username is not None
            or parts.path.strip("/")
            or parts.query
            or parts.fragment
        ):
            raise ConfigError(
                f"{without_password(text)!r} is not the URL of {what}: give what "
                f"`agentevo {printed_by}` printed, such as http://127.0.0.1:8000"
            )

        certificate = certificate.lower()
        if parts.scheme == "https" and not re.fullmatch("[0-9a-f]{64}", certificate):
            raise ConfigError(
                f"{url}: the fingerprint of its certificate is missing or incomplete: give the "
                f"whole URL that `agentevo {printed_by}` printed, {url}{PIN}..."
            )

        if parts.scheme == "http" and pin:
            raise ConfigError(f"{url} has a fingerprint but is not encrypted: write https://")

        if parts.scheme == "http" and not is_this_machine(host):
            raise ConfigError(
                f"{url}: its secret would travel unencrypted: give the https:// URL that "
                f"`agentevo {printed_by}` printed, or use a tunnel (ssh -L)"
            )

        return cls(url.rstrip("/"), certificate)
