"""What vLLM's workers do with new weights, without vLLM."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from agentevo.inference.vllm import weights as vllm_weights
from agentevo.inference.vllm.weights import WeightLoader
from agentevo.inference.weights.broadcast_files import IncomingWeights, PlaceAnswer


def are_gone(references):
    """The thread that received them may be a moment from its end."""
    ends = time.monotonic() + 300
    while any(reference() is not None for reference in references):
        if time.monotonic() > ends:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_worker_keeps_none_of_what_it_received_beside_its_model(is_loaded, tmp_path, monkeypatch):
    """Neither once it is loaded nor, where another worker has lost the round, into the next one."""
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    loaded = []
    came = []

    def reload_weights(weights_iterator):
        loaded.extend((name, tensor.tolist()) for name, tensor in weights_iterator)

    def received(incoming, place, device):
        assert are_gone(came), "two copies at once"
        tensor = torch.full((3,), float(len(came)))
        came.append(weakref.ref(tensor))
        return {"weight": tensor}

    monkeypatch.setattr(vllm_weights, "receive_place", received)
    worker = WeightLoader()
    worker.rank = 0
    worker.device = torch.device("cpu")
    worker.model_runner = SimpleNamespace(reload_weights=reload_weights)
    given = msgspec.json.encode(
        IncomingWeights("", PlaceAnswer("a" * 32, "", "gloo", 1, 2))
    ).decode()

    def receive():
        worker.begin_agentevo_weights(given, str(tmp_path))
        ends = time.monotonic() + 300
        while (found := worker.end_agentevo_weights()) is None:
            assert time.monotonic() < ends
            time.sleep(0.001)
        assert found == ["here"] == worker.end_agentevo_weights(), "others may still wait"

    receive()
    if is_loaded:
        worker.load_agentevo_weights()
        assert are_gone(came)

    receive()
    worker.load_agentevo_weights()
    assert are_gone(came)
    assert loaded[-1] == ("weight", [1.0] * 3) and len(loaded) == 1 + is_loaded
