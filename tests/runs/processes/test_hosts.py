"""A run over five hosts that share no folder: store and object store, trainer, engine, two
samplers, encrypted, while links are slow, cut and come back.

    make hosts      as root: installs the S3 server, and runs these tests
"""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import Hosts, PostgreSQLOnHost, why_not
from servers import PostgreSQL

from agentevo.inference.serving.certificate import new_certificate

pytestmark = pytest.mark.slow
STEPS = 14
RECIPE = [
    "coins", "model.name=tiny", "rollout.staleness=2", "rollout.policy=mask",
    f"trainer.steps={STEPS}", "evaluation.tasks=4", "evaluation.every=0", "cold_start.episodes=0",
    "trainer.groups_per_step=4", "rollout.lease_s=6", "engine.timeout_s=20",
    "rollout.engine_secret=${env:ENGINE_SECRET}",
]  # fmt: skip
CUT_S = 20.0
"""Longer than an engine may be silent (15 s) and than a lease lasts."""


class Machines:
    """The hosts with their servers, and what is started there."""

    def __init__(self, hosts, folder):
        self.hosts = hosts
        self.folder = folder
        self.password = secrets.token_hex(8)
        self.certificate = new_certificate([hosts.addresses["store"]])
        self.database = PostgreSQLOnHost(hosts, "store", self.certificate, self.password)
        authority = folder / "authority.pem"
        authority.write_text(self.certificate[self.certificate.index("-----BEGIN CERT") :])
        self.environment = {
            "DATABASE_PASSWORD": self.password,
            "ENGINE_SECRET": secrets.token_hex(32),
            "PGSSLROOTCERT": str(authority),
            "OMP_NUM_THREADS": "1",
        }
        self.weights = self._bucket(authority)
        self.overrides = [
            f"store.url={self.database.address('run', '${env:DATABASE_PASSWORD}')}",
            f"rollout.weights.url={self.weights}",
        ]

    def _bucket(self, authority):
        """An S3 server over HTTPS."""
        key = self.folder / "key.pem"
        key.write_text(self.certificate)
        address = self.hosts.addresses["store"]
        self.environment |= {
            "AWS_ENDPOINT_URL": f"https://{address}:9000",
            "AWS_CA_BUNDLE": str(authority),
            "AWS_ACCESS_KEY_ID": "the-key",
            "AWS_SECRET_ACCESS_KEY": "the-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        server = Path(sys.executable).parent / "moto_server"
        self.hosts.start(
            "store",
            [sys.executable, *f"{server} -H {address} -p 9000 -c {authority} -k {key}".split()],
            log=self.folder / "s3.log",
            environment={},
        )

        make = "import s3fs; s3fs.S3FileSystem().mkdir('weights')"
        deadline = time.monotonic() + 300
        while subprocess.run(
            [*self.hosts.inside("store"), sys.executable, "-c", make],
            env={**os.environ, **self.environment},
            capture_output=True,
            check=False,
        ).returncode:
            assert time.monotonic() < deadline, (self.folder / "s3.log").read_text()
            time.sleep(1)

        return "s3://weights/run"

    def command(self, *words):
        return [sys.executable, "-m", "agentevo", *words]

    def start(self, host, *words):
        place = f"run.dir={self.run(host)}"
        return self.hosts.start(
            host,
            self.command(words[0], *RECIPE, *self.overrides, place, *words[1:]),
            log=self.folder / f"{host}.log",
            environment=self.environment,
        )

    def serve(self, host):
        return self.start(host, "serve", "--host", self.hosts.addresses[host], "--port", "8000")

    def run(self, host):
        """Each host has a folder of its own."""
        return self.folder / host / "run"

    def step(self):
        try:
            rows = (self.run("trainer") / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return max((int(json.loads(row).get("step", 0)) for row in rows), default=0)

    def wait_for_step(self, step, *living, within_s=300):
        deadline = time.monotonic() + within_s
        while self.step() < step:
            assert time.monotonic() < deadline, f"step {step}: {self.logs()}"
            for process in living:
                assert process.poll() is None, self.logs()
            time.sleep(0.1)

    def listening(self, host):
        """Addresses beyond loopback at which something on that host listens."""
        done = subprocess.run(
            [*self.hosts.inside(host), "ss", "--no-header", "--listening", "--tcp", "--numeric"],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        found = {line.split()[3] for line in done.stdout.splitlines()}
        return {one for one in found if not one.startswith(("127.", "[::1]"))}

    def wait_until_forgotten(self, host, within_s=300):
        """The database has ended the sessions of a host that is gone, and their locks with them."""
        clients = f"SELECT count(*) FROM pg_stat_activity WHERE client_addr = '{host}'"
        deadline = time.monotonic() + within_s
        while self.database.ask(clients.replace(host, self.hosts.addresses[host])) != "0":
            assert time.monotonic() < deadline, self.logs()
            time.sleep(1)

    def logs(self):
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log")
        )

    def audit(self):
        done = subprocess.run(
            [*self.hosts.inside("trainer"), *self.command("audit", str(self.run("trainer")))],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def machines(tmp_path):
    if reason := why_not() or PostgreSQL.why_not():
        pytest.skip(reason)

    pytest.importorskip("moto.server", reason="make hosts installs moto and s3fs")
    pytest.importorskip("s3fs", reason="make hosts installs moto and s3fs")
    with Hosts("store", "trainer", "engine", "sampler", "other") as hosts:
        machines = Machines(hosts, tmp_path)
        machines.database.begin()
        try:
            yield machines
        finally:
            machines.database.delete()


def test_hosts_that_are_slow_cut_off_and_come_back(machines):
    """The sampler is slow throughout; the other one is cut off for good, until the run is over; the
    engine, and then the trainer, are cut off and come back."""
    hosts = machines.hosts
    hosts.slow("sampler")

    trainer = machines.start("trainer", "learn")
    engine = machines.serve("engine")
    sampler = machines.start("sampler", "sample")
    other = machines.start("other", "sample")
    everybody = (trainer, engine, sampler, other)
    machines.wait_for_step(2, *everybody)
    assert machines.listening("engine") == {f"{hosts.addresses['engine']}:8000"}

    for quiet in ("trainer", "sampler", "other"):
        assert machines.listening(quiet) == set()

    hosts.cut("other")
    machines.wait_for_step(4, *everybody)
    hosts.cut("engine")
    time.sleep(CUT_S)
    assert machines.step() < STEPS

    hosts.heal("engine")
    machines.wait_for_step(machines.step() + 3, *everybody)
    machines.wait_until_forgotten("other")
    hosts.cut("trainer")
    time.sleep(CUT_S)
    assert machines.step() < STEPS

    hosts.heal("trainer")
    assert trainer.wait(timeout=300) == 0, machines.logs()
    assert sampler.wait(timeout=300) == 0, machines.logs()
    assert engine.poll() is None and other.poll() is None, machines.logs()

    hosts.heal("other")
    assert other.wait(timeout=300) == 0, machines.logs()

    engine.terminate()
    assert engine.wait(timeout=300) == 0

    code, said = machines.audit()
    assert code == 0, said
    assert json.loads((machines.run("trainer") / "summary.json").read_text())["steps"] == STEPS
    assert not (machines.run("trainer") / "engines").exists()
