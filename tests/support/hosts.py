"""Several hosts on one machine: network namespaces, each with an address of its own, whose wires
(wires.py) can be slow, lossy, or cut without a word to anybody. Needs root, iproute2 and
/dev/net/tun."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import wires
from servers import PostgreSQL

NETWORK = "10.213.77"


def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run this test as root"
    if missing := [name for name in ("ip", "nsenter") if shutil.which(name) is None]:
        return f"no {missing[0]} on this machine (Debian: apt-get install iproute2 util-linux)"

    try:
        with Hosts("one", "two"):
            return None
    except (RuntimeError, OSError) as error:
        return f"this machine permits no network namespaces with TAP devices: {error}"


class Hosts:
    """A context: the namespaces of `names` and the wires between them, gone at its end with every
    process that was started there."""

    def __init__(self, *names: str) -> None:
        self._prefix = f"ae{secrets.token_hex(3)}"
        self._names = names
        self._processes: list[subprocess.Popen[bytes]] = []
        self._wires: subprocess.Popen[str] | None = None
        self.addresses = {name: f"{NETWORK}.{n}" for n, name in enumerate(names, start=1)}

    def __enter__(self) -> Self:
        try:
            for name in self._names:
                _call("ip", "netns", "add", self.namespace(name))

            places = [f"{self.namespace(name)}={self.addresses[name]}" for name in self._names]
            self._wires = subprocess.Popen(
                [sys.executable, str(wires.__file__), *places],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert self._wires.stdout is not None

            if self._wires.stdout.readline() != "ready\n":
                raise RuntimeError(self._wires.communicate(timeout=300)[1].strip()[-300:])
        except BaseException:
            self.__exit__()
            raise

        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        if self._wires is not None:
            self._wires.kill()
            self._wires.communicate()

        for name in self._names:
            with suppress(RuntimeError):
                _call("ip", "netns", "del", self.namespace(name))

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def inside(self, name: str) -> list[str]:
        """The words before a command that runs on that host."""
        return ["nsenter", f"--net=/run/netns/{self.namespace(name)}"]

    def start(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*self.inside(name), *command],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,
            )

        self._processes.append(process)
        return process

    def cut(self, name: str) -> None:
        """From now on nothing reaches the host and nothing leaves it, and nobody is told."""
        self._change(name, cut=True)

    def slow(self, name: str) -> None:
        """60 to 90 ms each way, and one frame in 50 lost."""
        self._change(name, delay_s=0.06, jitter_s=0.03, loss=0.02)

    def heal(self, name: str) -> None:
        self._change(name, cut=False, delay_s=0.0, jitter_s=0.0, loss=0.0)

    def _change(self, name: str, **conditions: float) -> None:
        assert self._wires is not None and self._wires.stdin is not None
        change = {"host": self.namespace(name), **conditions}
        self._wires.stdin.write(json.dumps(change) + "\n")
        self._wires.stdin.flush()


class PostgreSQLOnHost(PostgreSQL):
    """Listens on the host's address too, for connections that are encrypted and know the
    password."""

    def __init__(self, hosts: Hosts, name: str, certificate: str, password: str) -> None:
        """`certificate`: key and certificate in PEM."""
        super().__init__()
        self._address = hosts.addresses[name]
        self._as = [*hosts.inside(name), *self._as]

        key, _, rest = certificate.partition("-----BEGIN CERTIFICATE-----")
        for file, content in (
            ("server.key", key),
            ("server.crt", f"-----BEGIN CERTIFICATE-----{rest}"),
        ):
            path = self.data / file
            path.write_text(content)
            path.chmod(0o600)
            shutil.chown(path, "postgres")

        with (self.data / "pg_hba.conf").open("a") as rules:
            rules.write(f"hostssl all all {NETWORK}.0/24 scram-sha-256\n")
        with (self.data / "postgresql.conf").open("a") as settings:
            settings.write(f"ssl = on\nlisten_addresses = '{self._address}'\n")

        self._password = password

    def begin(self) -> None:
        self.start(addresses=None)
        self.ask(f"ALTER USER agentevo PASSWORD '{self._password}'")

    def ask(self, statement: str) -> str:
        """The answer, as text alone."""
        url = f"postgresql://agentevo@/postgres?host={self.folder}"
        return _call("psql", "--tuples-only", "--no-align", url, "-c", statement).strip()

    def address(self, schema: str, password: str) -> str:
        """The URL by which other hosts reach it; `password` as it is to stand there."""
        return (
            f"postgresql://agentevo:{password}@{self._address}/postgres?schema={schema}"
            "&sslmode=verify-full"
        )


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
