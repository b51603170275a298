"""Devices: found or refused with what to install; no other module names a kind; and what is called
of a kind's part of torch, with stand-ins for accelerators that no machine here has."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import agentevo
from agentevo.config import ModelSection
from agentevo.errors import ModelError
from agentevo.models.compute.thread_settings import own_torch_state
from agentevo.runtime import devices
from agentevo.runtime.device_names import DeviceName

SOURCES = Path(agentevo.__file__).parents[1]
KINDS = ("cuda", "npu", "xpu", "mps")
NAMED = {"agentevo/runtime/devices.py", "agentevo/runtime/device_names.py"}


def uses_of_kinds(tree: ast.AST) -> list[int]:
    """Lines with a kind as a string, as a part of torch, or in an import; texts for people are
    none."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if text.partition(":")[0] in KINDS:
                found.append(node.lineno)
            case ast.Attribute(attr=name) if name in KINDS:
                found.append(node.lineno)
            case ast.ImportFrom(module=str(module)) if set(module.split(".")) & {*KINDS}:
                found.append(node.lineno)
            case ast.Import(names=names):
                parts = {part for one in names for part in one.name.split(".")}
                found += [node.lineno] * bool(parts & {*KINDS, "torch_npu"})

    return found


@pytest.mark.slow
def test_no_other_module_names_a_kind_of_accelerator() -> None:
    texts = {
        str(path.relative_to(SOURCES)): path.read_text(encoding="utf-8")
        for path in SOURCES.glob("agentevo*/**/*.py")
    }
    found = [
        f"{path}:{line}"
        for path, text in texts.items()
        if path not in NAMED and any(kind in text for kind in KINDS)
        for line in uses_of_kinds(ast.parse(text))
    ]
    assert not found, "ask agentevo.runtime.devices"


@pytest.mark.parametrize(
    "code",
    ['x = "cuda"', 'x = f("cuda:0")', "torch.cuda.synchronize()", "y.cuda()", "import torch.cuda",
     "from torch.cuda import nvtx", "torch.backends.mps.is_available()", "import torch_npu"],
)  # fmt: skip
def test_what_counts_as_naming_one(code: str) -> None:
    assert uses_of_kinds(ast.parse(code)) and not uses_of_kinds(ast.parse(f"'''{code}'''"))


def test_recipes_know_the_names_that_are_found() -> None:
    assert set(get_args(DeviceName)) == {"auto", "cpu", *KINDS}
    assert ModelSection.model_fields["device"].annotation == DeviceName


def only(monkeypatch: pytest.MonkeyPatch, *there: str) -> None:
    monkeypatch.setattr(devices, "is_available", lambda kind: kind in there)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_is_not_there_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    only(monkeypatch)
    with pytest.raises(ModelError, match=f"model.device={kind}, but PyTorch sees no .*: set "):
        devices.find(kind)
    if kind != "npu":  # torch itself knows no such device without torch_npu
        only(monkeypatch, kind)
        assert devices.find(kind).type == kind


def test_auto_takes_the_first_that_is_there_and_mps_only_when_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for there, expected in (
        ((), "cpu"),
        (("mps",), "cpu"),
        (("xpu", "mps"), "xpu"),
        (KINDS, "cuda"),
    ):
        only(monkeypatch, *there)
        assert devices.find("auto").type == expected

    assert devices.AUTOMATIC == ("cuda", "npu", "xpu")


def test_ascend_is_there_only_with_a_package_that_can_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not devices.is_available("npu")

    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "torch_npu.py"
    package.write_text("raise ImportError('libhccl.so: cannot open shared object file')")

    with pytest.raises(ModelError, match=r"can't be loaded \(libhccl.so.*CANN"):
        devices.is_available("npu")

    package.write_text(
        "import torch, types\ntorch.npu = types.SimpleNamespace(is_available=lambda: True)"
    )
    try:
        assert devices.is_available("npu")
    finally:
        sys.modules.pop("torch_npu", None)
        del torch.npu


class Accelerator:
    """A kind's part of torch, with its own seeds."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state = 7

    def __getattr__(self, name: str) -> Any:
        answers = {"mem_get_info": (3, 10), "get_device_name": "Maker's chip"}

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return answers.get(name)

        return call

    def get_rng_state(self) -> int:
        return self.state

    def set_rng_state(self, state: int) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> None:
        self.state = seed


@pytest.mark.parametrize("kind", ["npu", "xpu", "cuda"])
def test_all_kinds_take_the_same_calls(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    part = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: part)
    device: Any = SimpleNamespace(type=kind, index=None)
    devices.synchronize(device)
    devices.empty_cache(device)

    assert devices.memory(device) == (3.0, 10.0)
    assert devices.name_of(device) == "Maker's chip"
    assert part.calls == ["synchronize", "empty_cache", "mem_get_info", "get_device_name"]
    assert devices.can_pin(device) and devices.is_accelerator(device)

    def fail() -> None:
        assert part.state == 5
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), devices.seeded_by(device, 5):
        fail()

    assert part.state == 7


def test_draws_of_a_block_are_its_seeds_and_later_ones_are_undisturbed() -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(1)
    expected = torch.rand(3)

    torch.manual_seed(1)
    drawn = []
    for _ in range(2):
        with devices.seeded_by(cpu, 9):
            drawn.append(torch.rand(3))

    assert torch.equal(*drawn)
    assert torch.equal(torch.rand(3), expected)


def test_the_cpu_has_memory_a_name_and_nothing_to_wait_for() -> None:
    cpu = torch.device("cpu")
    free, whole = devices.memory(cpu)
    assert 0 < free <= whole
    assert (devices.name_of(cpu), devices.is_accelerator(cpu)) == ("cpu", False)
    assert not devices.can_pin(cpu) and devices.profiled_activity(cpu) is None

    devices.synchronize(cpu)
    devices.synchronize_started()
    devices.empty_cache(cpu)


def test_own_code_sees_no_autocast_of_whoever_called() -> None:
    assert devices.autocasting() == []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert devices.autocasting() == ["cpu"]
        with own_torch_state():
            assert devices.autocasting() == []
