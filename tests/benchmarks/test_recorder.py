"""What the benchmarks write down: what decides a ratio, and nothing that names the machine or its
owner."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ZEN_4 = {
    "vendor_id": "AuthenticAMD",
    "cpu family": "25",
    "model": "17",
    "model name": "AMD EPYC 9000",
    "flags": "sse2 avx avx2 avx512f avx512_vnni avx512_bf16",
}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_the_processor_is_told_by_what_decides_a_ratio(module):
    machine = module("machine")
    told = machine.processor(ZEN_4)
    assert (told["architecture"], told["family"], told["model"]) == ("Zen 4", 25, 17)
    assert told["instruction_sets"] == ["AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16"]

    older = machine.processor(ZEN_4 | {"model": "1", "flags": "avx avx2"})
    assert (older["architecture"], older["instruction_sets"]) == ("Zen 3", ["AVX2"])

    intel = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "143", "flags": "amx_tile"}
    assert machine.processor(intel)["instruction_sets"] == ["AMX"]
    assert machine.processor({})["instruction_sets"] == []


def test_shares_are_of_the_measured_limits(module):
    machine = module("machine")
    limits = machine.Limits(flops_per_s=200e9, bytes_per_s=20e9)
    assert machine.Rate(50e9, 0.0).shares(limits) == {"of_peak_flops": 0.25}
    assert machine.Rate(0.0, 18e9).shares(limits) == {"of_peak_bytes": pytest.approx(0.9)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python run.py --model /data/me/smollm2 --save", "python run.py --model smollm2 --save"),
        ("cache=/home/me/cache, 3 GB/s", "cache=cache, 3 GB/s"),
        ("'/a b'", "'a b'"),
        ("~/models/x/", "x"),
        (r"C:\Users\me\x.json", "x.json"),
        ("sqlite:////var/run/x.sqlite", "sqlite://x.sqlite"),
        ("https://example.org/a/b and tokens/s, 1/2", "https://example.org/a/b and tokens/s, 1/2"),
        ("/usr/bin:/opt/me/bin", "bin:bin"),
        ("cc -I/home/me/include -isystem/opt/x -L/usr/lib -lm", "cc -Iinclude -isystemx -Llib -lm"),
        ("run 2>/home/me/log @/home/me/args", "run 2>log @args"),
        ("<file:///home/me/a.json> {/home/me/b} `/home/me/c`", "<file://a.json> {b} `c`"),
        (r"//server/me/x \\server\me\y ~other/z", "x y z"),
        ("a-I/b, (a + b)/c, */x, ~3/4 and <1/s", "a-I/b, (a + b)/c, */x, ~3/4 and <1/s"),
    ],
)
def test_absolute_paths_are_cut_down_to_names(text, expected, module):
    assert module("figures").without_paths(text) == expected


def test_nothing_of_the_machines_folders_and_variables_is_written(module, tmp_path, monkeypatch):
    figures = module("figures")
    machine = module("machine")
    peers = module("peers")
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "run.py"), "--model", str(tmp_path / "m")])
    monkeypatch.setenv("PATH", f"/opt/secret-tools{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("AGENTEVO_TEST_TOKEN", "do-not-tell")
    monkeypatch.setattr(machine, "measured_limits", lambda: machine.Limits(1e11, 1e10))
    monkeypatch.setattr(figures, "measured_limits", machine.measured_limits)

    peer = peers.Peer(
        "p", None, "peer.py", [str(tmp_path / "rows.json"), "2"], {"LD_PRELOAD": "/opt/lib/x.so"}
    )
    peer.description = {"settings": f"cache in {tmp_path}"}
    figure = figures.Figure(
        "a_vs_b", 2.0, "a", {"unit": "s", "medians": [1.0]}, machine.Rate(flops_per_s=5e10)
    )
    path = figures.write_results(
        [figure], {"q": f"see {tmp_path}/log"}, {"p": peer.record()}, machine.describe_machine()
    )
    text = path.read_text()
    for private in (str(tmp_path), str(BENCHMARKS), "/opt", "secret-tools", "do-not-tell"):
        assert private not in text

    content = json.loads(text)
    assert content["peers"]["p"]["command"] == ["python", "peer.py", "rows.json", "2"]
    assert content["peers"]["p"]["variables"] == {"LD_PRELOAD": "x.so"}
    assert content["figures"][0]["share_of_limits"] == {"of_peak_flops": 0.5}

    told = content["machine"]
    assert {"cpu", "instruction_sets", "cores", "threads", "peak_gflops", "peak_gb_per_s"} <= set(
        told
    )
    assert (told["peak_gflops"], told["peak_gb_per_s"]) == (100.0, 10.0)
    assert "host" not in told


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").iterdir()), ids=lambda p: p.name)
def test_recorded_results_name_no_folder_and_no_machine(path, module):
    text = path.read_text()
    assert not re.search(r"/(root|home|tmp|work|Users|usr)/|\"PATH\"|\"host\"", text)
    if path.suffix == ".json":
        content = json.loads(text)
        assert module("figures").without_paths(content) == content


SCRIPTS = [
    "asynchronous",
    "engine_transport",
    "linear",
    "passes",
    "prefix_merging",
    "run",
    "store",
    "training_memory",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_command_starts(name):
    words = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize("name", ["algorithms", "logprobs", "turns", "sft", "train_step"])
def test_what_the_command_imports_can_be_imported(name, module):
    assert module(name)
