"""Checkpoints of a trainer that lies in parts. As a program, one process of several: WHAT KEY SIZE
PROCESS WORLD MEETING_FILE FOLDER OUT_FILE, where WHAT is `save` (train, save, go on) or `load` (go
on from the checkpoints in the folder) and KEY is one of trainer.parallel; or `kill FOLDER ROUNDS
OUT_FILE`."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import data_parallel_runs
import torch
from data_parallel_runs import model_of
from fsdp_runs import with_reference
from tensor_memory import TensorMemory
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from agentevo.config import AlgorithmSection, ParallelSection
from agentevo.errors import CheckpointError
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.compute.attention import prepare
from agentevo.models.compute.parts import WeightPart, give
from agentevo.models.compute.sharded import make_plain, skeleton_of
from agentevo.models.files.split_models import InParts, register_in_parts
from agentevo.training import state_parts
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.checkpoint_parts import Contribution
from agentevo.training.distribute import spread
from agentevo.training.mesh import Meshes, make_meshes
from agentevo.training.sharding.layouts import layouts_of, whole_of, whole_tensors
from agentevo.training.sharding.saving import saved_parts, weight_parts
from agentevo.training.state_parts import split_state
from agentevo.training.trainer import Trainer

ALGORITHM = AlgorithmSection(kl_coef=0.2, kl_in="loss", reference="ema", reference_decay=0.5)
SECTION = data_parallel_runs.SECTION.model_copy(update={"epochs": 1})
STEPS = 2
LAYERS = {"shard": 2, "pipeline": 4}
"""By key of trainer.parallel: a stage has one."""


class Silent:
    """A tokenizer without files, or without room for them."""

    def __init__(self, full: bool = False) -> None:
        self._full = full

    def save_pretrained(self, folder: Path) -> None:
        if self._full:
            raise OSError(28, "No space left on device")


def started(meshes: Meshes | None, model: LlamaForCausalLM) -> Trainer:
    make_plain(model)
    if meshes is not None:
        spread(model, meshes)
        register_in_parts(
            model, InParts(skeleton_of(model), lambda only: weight_parts(model, only))
        )

    return Trainer(model, SECTION, ALGORITHM)


def taught(meshes: Meshes | None, key: str) -> Trainer:
    trainer = started(meshes, model_of(1, LAYERS[key]))
    trainer.begin()
    for _ in range(STEPS):
        trainer.step(with_reference(trainer))
    return trainer


def resumed(meshes: Meshes | None, path: Path) -> Trainer:
    trainer = started(meshes, prepare(LlamaForCausalLM.from_pretrained(path).eval()))
    state, _ = Checkpoints(path.parent, 9, is_only_caller=True).load(
        path, mapped=meshes is not None
    )
    trainer.load_state_dict(state)
    return trainer


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Moments, reference and weights as plain tensors."""
    optimizer = trainer.optimization.optimizer
    layouts = layouts_of(trainer.model)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    found = {
        f"{index}.{name}": whole_of(value, p, layouts.get(p)) if value.dim() else value
        for index, p in enumerate(stepped)
        for name, value in optimizer.state[p].items()
    }
    for role, model in (("reference", trainer.roles.reference.model), ("policy", trainer.model)):
        whole = whole_tensors(model, dict(model.named_parameters()))
        found |= {f"{role}.{n}": tensor for n, tensor in whole.items()}

    return {name: tensor.detach().clone() for name, tensor in found.items()}


def contribution(trainer: Trainer) -> Contribution:
    _, state = split_state(trainer.state_dict())
    return Contribution(saved_parts(trainer.model), state)


def save(trainer: Trainer, folder: Path, step: int, *, full: bool = False) -> str:
    """Calls `save` on the first process; the others give. What came of it."""
    given = contribution(trainer)
    if distributed.is_initialized() and distributed.get_rank():
        given.give()
        return "gave"

    checkpoints = Checkpoints(folder, 9, is_only_caller=True)
    state = trainer.state_dict()
    try:
        checkpoints.save(
            step, trainer.model, Silent(full), state, {"s": step}, None, contribution=given
        )
    except CheckpointError as error:
        return str(error)

    return "saved"


def larger(meshes: Meshes) -> LlamaForCausalLM:
    """Of many layers, each far smaller than the whole."""
    return spread(prepare(whole_larger()), meshes)


def whole_larger() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=12,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def memory_of_reading(meshes: Meshes, folder: Path) -> dict[str, int]:
    """Bytes of tensors that this process makes of a saved model in bfloat16 until it has its part,
    those of all weights in float32, and those of a layer."""
    saved = folder / "to-read"
    if distributed.get_rank() == 0:
        whole_larger().bfloat16().save_pretrained(saved)
    distributed.barrier()

    model = prepare(LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).eval())
    sizes = {name: 4 * p.numel() for name, p in model.named_parameters()}
    with TensorMemory() as memory:
        spread(model, meshes)

    of_layer = sum(size for name, size in sizes.items() if ".layers.3." in name)
    return {"reading": memory.peak, "whole": sum(sizes.values()), "layer": of_layer}


def memory_of_writing(meshes: Meshes, folder: Path) -> dict[str, Any]:
    """Bytes of tensors that this process makes while a model is saved and published, beside those
    of the whole model and of a layer."""
    model = larger(meshes)
    parts = weight_parts(model)
    sizes = {name: part.spec.num_bytes for name, part in parts.items()}
    found: dict[str, Any] = {
        "whole": sum(sizes.values()),
        "layer": sum(size for name, size in sizes.items() if ".layers.3." in name),
    }
    expected = whole_tensors(model, dict(model.named_parameters()))
    register_in_parts(model, InParts(skeleton_of(model), lambda only: weight_parts(model, only)))

    first = distributed.get_rank() == 0
    versions = WeightsFolder(folder / "weights")

    with TensorMemory() as memory:
        given = Contribution(parts, {"some": next(iter(parts.values()))})
        if first:
            checkpoints = Checkpoints(folder / "larger", 9, is_only_caller=True)
            checkpoints.save(1, model, Silent(), {}, {}, None, contribution=given)
        else:
            given.give()

    found["saving"] = memory.peak
    with TensorMemory() as memory:
        if first:
            versions.write(1, model, keep=2)
        else:
            give(weight_parts(model, True))

    found["publishing"] = memory.peak
    if first:
        again = LlamaForCausalLM.from_pretrained(folder / "larger/step-000001")
        found["saved"] = _equal(dict(again.named_parameters()), expected)
        found["published"] = _equal(versions.read(1), expected)

    return found


def _equal(found: Any, expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def killed(folder: Path, rounds: int) -> list[str]:
    """What is wrong after each of so many times that one of two processes was killed while they
    saved one checkpoint after the other; the other one has to end by itself."""
    rng = random.Random(5)
    wrong = []
    for number in range(rounds):
        place = folder / f"killed-{number}"
        place.mkdir()
        children = []
        for process in range(2):
            child = os.fork()
            if child == 0:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                os._exit(_save_for_ever(process, place))
            children.append(child)

        deadline = time.monotonic() + 300
        while not any(place.glob("checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.01)

        time.sleep(rng.uniform(0, 0.4))
        os.kill(children[number % 2], signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)

        checkpoints = Checkpoints(place / "checkpoints", 3, is_only_caller=True)
        if not checkpoints.folders():
            wrong.append("nothing was saved")

        for step in checkpoints.folders():
            try:
                checkpoints.verify(checkpoints.path(step))
            except CheckpointError as error:
                wrong.append(str(error))

        checkpoints.forget_after(10**6)
        left = [p.name for p in checkpoints.folder.iterdir() if p.name.startswith(".")]
        wrong += [f"left behind: {left}"] if left else []

    return wrong


def _save_for_ever(process: int, place: Path) -> int:
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=process, world_size=2,
        timeout=timedelta(seconds=300),
    )  # fmt: skip
    torch.set_num_threads(1)
    model = model_of(1)

    def own(only_trained: bool = False) -> dict[str, WeightPart]:
        found = {}
        for name, parameter in model.named_parameters():
            half = (len(parameter) + 1) // 2
            mine = parameter.detach()[half:] if process else parameter.detach()[:half]
            offset = (half * process, *(0,) * (parameter.dim() - 1))
            found[name] = WeightPart(mine, tuple(parameter.shape), offset)
        return found

    register_in_parts(model, InParts(model, own))
    checkpoints = Checkpoints(place / "checkpoints", 2, is_only_caller=True)
    try:
        for step in range(1, 10**6):
            given = Contribution(own(), {f"moment.{n}": part for n, part in own().items()})
            if process:
                given.give()
            else:
                checkpoints.save(step, model, Silent(), {}, {}, None, contribution=given)
    except Exception:  # noqa: BLE001 (the other one was killed)
        return 1

    return 0


def main(what: str, key: str, size: int, folder: Path) -> dict[str, Any]:
    meshes = make_meshes(ParallelSection(**{key: size}), "cpu")
    if what == "load":
        found: dict[str, Any] = {}
        for name in ("of-2", "of-1"):
            trainer = resumed(meshes, folder / name / f"step-{STEPS:06d}")
            found[name] = {"state": whole_state(trainer)}
            found[name]["metrics"] = trainer.step(with_reference(trainer))
        return found

    trainer = taught(meshes, key)
    found = {"state": whole_state(trainer), "said": save(trainer, folder / "of-2", STEPS)}
    found["full"] = save(trainer, folder / "of-2", 9, full=True)
    writer = state_parts.dcp.FileSystemWriter
    whole_writer = writer.write_data

    if distributed.get_rank() == 1:
        writer.write_data = _no_room  # type: ignore[method-assign]

    found["part"] = save(trainer, folder / "of-2", 9)
    writer.write_data = whole_writer  # type: ignore[method-assign]
    found["left"] = sorted(path.name for path in (folder / "of-2").iterdir())
    late = contribution(trainer).copy()
    found["metrics"] = trainer.step(with_reference(trainer))

    if distributed.get_rank():
        late.give()
    else:
        Checkpoints(folder / "late", 9, is_only_caller=True).save(
            STEPS, trainer.model, Silent(), {}, {}, None, contribution=late
        )

    return found | {
        "memory": memory_of_writing(meshes, folder),
        "read": memory_of_reading(meshes, folder),
    }


def _no_room(*args: Any) -> None:
    raise OSError(28, "No space left on device")


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        torch.save(killed(Path(sys.argv[2]), int(sys.argv[3])), sys.argv[4])
        sys.exit()
    what, key, size, process, world, meeting, folder, out = sys.argv[1:]
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(process),
        world_size=int(world),
        timeout=timedelta(seconds=300),
    )
    torch.save(main(what, key, int(size), Path(folder)), out)
    distributed.destroy_process_group()
