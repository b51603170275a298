from __future__ import annotations

import pytest
import torch

from agentevo.models.compute import device_peak as module
from agentevo.models.compute.device_peak import device_peak, known_peak


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_gpus_by_name(name: str, tera: float):
    found = known_peak(name, torch.bfloat16, tf32=False)
    assert found is not None
    assert found.flops_per_s == tera * 1e12
    assert name in found.source


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G", "NVIDIA GeForce GTX 1080"]
)
def test_other_gpus_are_not_taken_for_those_of_the_table(name: str):
    assert known_peak(name, torch.bfloat16, tf32=False) is None


def test_float32_is_by_what_pytorch_may_use():
    peaks = [
        known_peak("NVIDIA H100 80GB HBM3", torch.float32, tf32=tf32) for tf32 in (False, True)
    ]
    assert [peak.flops_per_s for peak in peaks if peak is not None] == [67e12, 494.5e12]


@pytest.mark.slow
def test_a_cpu_is_measured_once_and_no_program_is_faster(monkeypatch):
    module._measure.cache_clear()
    found = device_peak(torch.device("cpu"), torch.float32)
    assert found.source.endswith("float32, measured")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_seconds", None)
        assert device_peak(torch.device("cpu"), torch.float32) is found

    left = torch.ones(64, 2048)
    product = lambda: left @ left.t()  # noqa: E731
    for _ in range(20):  # another process may take the CPU during the first measurements
        if 2 * 64 * 64 * 2048 / module._seconds(product, "cpu") < 3 * found.flops_per_s:
            return
        module._measure.cache_clear()
        found = device_peak(torch.device("cpu"), torch.float32)
    pytest.fail("a product of smaller matrices is always faster than the measured peak")
