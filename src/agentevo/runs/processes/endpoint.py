"""The endpoint at which a process serves clients of other APIs: its socket, its encryption and its
key. In the endpoint's folder, below the run's: `secret` is the key, `tls.pem` the key and
certificate of its encryption, `certificate.pem` the certificate that clients on other machines
trust, and for a served model, while it is served, its `url`."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agentevo.inference.serving.certificate import RunCertificate, check_installed
from agentevo.inference.serving.http_server import open_socket
from agentevo.inference.serving.secret import RunSecret
from agentevo.runtime.files import must_write, write_atomic
from agentevo.runtime.http_clients import is_this_machine

FOLDER = "gateway"
"""The folder of the endpoint through which clients train a run."""
SERVING = "serving"
"""The folder of the endpoint of the run's served model, which has a key of its own."""


URL = "url"
"""The file with the URL of the endpoint."""


def read_url(folder: Path) -> str | None:
    """The published URL of an open endpoint; None if there is none."""
    try:
        return (folder / URL).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(frozen=True)
class Endpoint:
    """See the module."""

    listener: socket.socket
    encrypts: bool
    _folder: Path
    _host: str

    @property
    def secret(self) -> RunSecret:
        """The key's file."""
        return RunSecret(self._folder)

    def server_context(self) -> ssl.SSLContext | None:
        """The file of its encryption, which is created if missing; None without encryption. Raises
        EngineError if the file can't be used."""
        if not self.encrypts:
            return None
        names = {self._host, socket.gethostname(), "localhost", "127.0.0.1"}
        certificate = RunCertificate(self._folder, sorted(names - {"", "0.0.0.0", "::"}))
        context, _ = certificate.server_context()
        certificate.publish()
        return context

    @contextmanager
    def announce(self, base: str) -> Iterator[None]:
        """Publishes the URL in a file until the end of the block. Raises DiskError."""
        file = self._folder / URL
        with must_write(file):
            write_atomic(file, f"{base}\n")

        try:
            yield
        finally:
            with suppress(OSError):
                if read_url(self._folder) == base:  # another process may have opened one since
                    file.unlink()

    def how_to(self, base: str) -> str:
        """Instructions for a client, whose URL is `base`. They never contain the key itself."""
        variables = f"  OPENAI_BASE_URL={base}/v1 ANTHROPIC_BASE_URL={base}"
        key = f"  export OPENAI_API_KEY=$(cat {self.secret.file})"
        return f"{variables}\n{key}\n{self.where_the_key_is()}"

    def where_the_key_is(self) -> str:
        lines = []
        if self.encrypts:
            public = RunCertificate(self._folder).public_file
            lines.append(f"  clients trust {public}: SSL_CERT_FILE={public}")
        return "\n".join([*lines, f"  the key is in {self.secret.file}"])


@contextmanager
def open_endpoint(
    run_dir: Path, host: str, port: int, tls: bool | None, folder: str = FOLDER
) -> Iterator[Endpoint]:
    """Binds the socket and creates nothing. `tls`: whether it encrypts; None encrypts if other
    machines can reach it. `folder`: the place of its key, below the run's folder. Raises
    ConfigError if it can't listen, MissingExtraError if it can't encrypt."""
    with open_socket(host, port) as listener:
        encrypts = tls if tls is not None else not is_this_machine(listener.getsockname()[0])
        if encrypts:
            check_installed()
        yield Endpoint(listener, encrypts, run_dir / folder, host)
