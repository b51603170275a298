"""vLLM's worker extension, whose next load can be made to fail after half of the tensors."""

from __future__ import annotations

from itertools import islice

from agentevo.inference.vllm.weights import WeightLoader


class _Half(dict):
    def items(self):
        yield from islice(super().items(), len(self) // 2)
        raise OSError("the device is gone, on purpose")


class FailingLoader(WeightLoader):
    fails = False

    def fail_in_the_next_load(self) -> None:
        FailingLoader.fails = True

    def load_agentevo_weights(self) -> None:
        if FailingLoader.fails:
            WeightLoader.agentevo_weights = _Half(WeightLoader.agentevo_weights)
        super().load_agentevo_weights()
