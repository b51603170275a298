"""Temporary database servers for the store's tests: started in a folder of their own, reachable
from this machine only, and deleted at the end."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MONGODB_PROGRAM = """
import sys, time
from secantus import SecantusDBServer
# A transaction whose client was killed is in everybody's way until it is given up: after 4 seconds,
# and not 60, that tests need not wait. A transaction that takes longer never succeeds.
options = {"replica_set_name": sys.argv[2] or None, "transaction_lifetime_seconds": 4.0}
server = SecantusDBServer(port=0, storage_path=sys.argv[1], **options)
server.start()
print(server.uri, flush=True)
sys.stdin.read()
server.stop()
"""


class PostgreSQL:
    """A cluster on a unix socket. Its programs refuse to run as root, so as root they run as the
    user `postgres`."""

    def __init__(self) -> None:
        self.programs = Path(sorted(glob.glob("/usr/lib/postgresql/*/bin"))[-1])
        # Not a folder of pytest's: only its owner may enter that.
        self.folder = Path(tempfile.mkdtemp(prefix="agentevo-pg-"))
        self.folder.chmod(0o755)
        self.data = self.folder / "data"
        self._as = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        self.data.mkdir()

        if self._as:
            shutil.chown(self.folder, "postgres")
            shutil.chown(self.data, "postgres")

        self._call(
            "initdb",
            "--auth=trust",
            "--username=agentevo",
            "--no-sync",
            "--encoding=UTF8",
            "--locale=C",
        )

    @staticmethod
    def why_not() -> str | None:
        """Why it can't be started here; None if it can."""
        if not glob.glob("/usr/lib/postgresql/*/bin/initdb"):
            return "no PostgreSQL server on this machine (Debian: apt-get install postgresql)"
        return None

    def start(
        self, *, durable: bool = False, connections: int = 100, addresses: str | None = ""
    ) -> None:
        """`durable`: commits wait for the disk, as a server's do by default. `connections`: at most
        so many at once. `addresses`: where it listens beside its socket; None: as it is
        configured."""
        options = (
            f"-k {self.folder} -c max_connections={connections} -c autovacuum=off"
            + ("" if addresses is None else f" -c listen_addresses='{addresses}'")
            + ("" if durable else " -c fsync=off")
        )
        self._call(
            "pg_ctl",
            "start",
            "--wait",
            "--silent",
            f"--options={options}",
            f"--log={self.folder / 'log'}",
        )

    def kill(self) -> None:
        """Sends SIGKILL to the first process; the others notice that it is gone, and end."""
        first = int((self.data / "postmaster.pid").read_text().split()[0])
        others = [child.pid for child in psutil.Process(first).children()]
        os.kill(first, signal.SIGKILL)
        psutil.wait_procs(
            [psutil.Process(pid) for pid in [first, *others] if psutil.pid_exists(pid)], timeout=300
        )

    def delete(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def stop(self, mode: str = "immediate") -> None:
        self._call("pg_ctl", "stop", "--wait", "--silent", f"--mode={mode}")

    def url(self, schema: str) -> str:
        return f"postgresql://agentevo@/postgres?host={self.folder}&schema={schema}"

    def _call(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self.programs / program), f"--pgdata={self.data}", *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            cwd="/",
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")


class MongoDB:
    """The server that AGENTEVO_TEST_MONGODB names (a replica set), else SecantusDB: a Python
    package that speaks MongoDB's protocol, transactions included, on WiredTiger, MongoDB's storage
    engine."""

    def __init__(self, folder: Path, *, replica_set: str = "rs0") -> None:
        self.given = os.environ.get("AGENTEVO_TEST_MONGODB") if replica_set else None
        self._process: subprocess.Popen[str] | None = None
        if self.given is None:
            command = [sys.executable, "-c", MONGODB_PROGRAM, str(folder), replica_set]
            log = (folder.parent / "mongodb.log").open("w")
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
            assert self._process.stdout is not None
            self.given = self._process.stdout.readline().strip()

        if not self.given:
            raise RuntimeError(f"SecantusDB did not start: see {folder.parent / 'mongodb.log'}")

    @staticmethod
    def why_not() -> str | None:
        if os.environ.get("AGENTEVO_TEST_MONGODB"):
            return None

        try:
            import secantus  # noqa: F401
        except ImportError:
            return (
                "no MongoDB server: give one by AGENTEVO_TEST_MONGODB=mongodb://..., or pip "
                "install secantusdb"
            )

        return None

    def url(self, database: str) -> str:
        address, _, options = str(self.given).partition("?")
        return f"{address.rstrip('/')}/{database}" + (f"?{options}" if options else "")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def unused_name() -> str:
    return f"t{time.time_ns():x}{os.getpid():x}"
