"""Real trackers, each in an environment of its own: what a run and its resumed run have logged is
read back. `make test-trackers` makes the environments and runs this; CI has none of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "src"
ENVIRONMENTS = os.environ.get("AGENTEVO_TRACKERS", "")
PATIENCE_S = 300
STEPS = [[step, step / 2] for step in range(5)]

pytestmark = pytest.mark.skipif(
    not ENVIRONMENTS, reason="needs the environments that `make test-trackers` makes"
)


def python(name: str) -> str:
    return str(Path(ENVIRONMENTS).resolve() / name / "bin" / "python")


def call(name: str, folder: Path, program: str, *words: str) -> str:
    plain = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    environment = plain | {
        "PYTHONPATH": str(SOURCES),
        "HOME": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "SOME_API_KEY": "hush-hush-hush",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "120",  # seconds: the machine may be slow
    }
    done = subprocess.run(
        [python(name), str(HERE / program), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr

    if program == "write_a_run.py":
        assert not done.stdout, "a tracker has written to the command's stdout"
        assert "tracker " not in done.stderr, done.stderr

    return done.stdout


def write_and_read(name: str, folder: Path, options: dict[str, str], place: str = "") -> dict:
    """A run of steps 0 to 2, the resumed one to 4, and what is found then."""
    run = folder / "run"
    written = ["write_a_run.py", name, json.dumps(options), str(run)]
    for first, last in ((0, 2), (3, 4)):
        call(name, folder, *written, str(first), str(last))

    read = call(name, folder, "read_a_run.py", name, place or str(run))
    found = json.loads(read.splitlines()[-1])
    assert sorted(found["steps"]) == STEPS, "no step is lost, and none is there twice"
    assert found["runs"] == 1
    assert "learning_rate" in found["config"]
    assert found["tables"] == 2
    assert found["pictures"] >= 1
    return found


def test_wandb_offline(tmp_path: Path) -> None:
    write_and_read("wandb", tmp_path, {"mode": "offline"})


def test_swanlab_local(tmp_path: Path) -> None:
    write_and_read("swanlab", tmp_path, {"mode": "local"})


def test_trackio_local(tmp_path: Path) -> None:
    write_and_read("trackio", tmp_path, {})


def test_mlflow_server(tmp_path: Path) -> None:
    with mlflow_server(tmp_path) as url:
        found = write_and_read("mlflow", tmp_path, {"tracking_uri": url}, url)
    assert found["state"] == "FINISHED"
    assert "summary.json" in found["artifacts"]


@pytest.mark.parametrize("place", ["database", "server", "one key"])
def test_a_run_of_a_second_loses_no_span_in_mlflow(tmp_path: Path, place: str) -> None:
    """Its package is imported and a new database gets its tables, which takes longer."""
    with mlflow_server(tmp_path) if place == "server" else nullcontext("") as url:
        uri = url or f"sqlite:///{tmp_path}/traces.db"
        uri = str(tmp_path / "run") if place == "one key" else uri
        said = call("mlflow", tmp_path, "trace_a_run.py", uri, "150").splitlines()[-1]
    found = json.loads(said)
    assert found["told"] == ["tracing: 600 spans were exported"]
    assert found["traces"] == [4] * 150


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    words = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    stored = ["--backend-store-uri", f"sqlite:///{folder}/mlruns.db", "--workers", "1"]
    server = subprocess.Popen(
        [python("mlflow"), *words, *stored],
        cwd=folder,
        stdout=(folder / "server.log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + PATIENCE_S
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < until, (folder / "server.log").read_text()
            time.sleep(0.5)

        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, 15)
        server.wait(300)
