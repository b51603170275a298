"""Versions of weights that lie in parts, published as what changed. As a program, one process of
several: CASES PROCESS MEETING_FILE FOLDER OUT_FILE."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from mesh_runs import made, num_processes, of_groups
from saved_runs import larger
from tensor_memory import TensorMemory
from torch import distributed
from transformers import PreTrainedModel

from agentevo.config import ParallelSection, SFTSection
from agentevo.inference.weights.part_deltas import PublishedParts
from agentevo.inference.weights.weight_delta import num_bytes
from agentevo.inference.weights.weight_versions import VersionManifest
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.compute.sharded import note_change, skeleton_of
from agentevo.models.files.split_models import InParts, PartsCommand, register_in_parts
from agentevo.models.files.tensor_file import TensorFile
from agentevo.training.distribute import spread
from agentevo.training.mesh import make_meshes
from agentevo.training.sharding.layouts import layouts_by_name, local, whole_tensors
from agentevo.training.sharding.saving import weight_parts
from agentevo.training.supervised import SupervisedTrainer

FULL_EVERY = 9
KEEP = 2
SECTION = SFTSection(learning_rate=3e-6, micro_batch_tokens=64)
Case = tuple[str, dict[str, int], int]
"""Model, sizes, number of steps. Rows are 97 of the vocabulary and 48 or 5 others: shards are
unequal."""
CASES: dict[str, list[Case]] = {
    "2 processes": [
        ("llama", {"shard": 2}, 11),
        ("qwen3 tied", {"tensor": 2}, 6),
        ("llama+lora", {"shard": 2}, 6),
        ("moe+deep", {"pipeline": 2}, 6),
    ],
    "4 processes": [
        ("llama", {"shard": 2, "tensor": 2}, 12),
    ],
    "4 processes, more": [
        ("moe", {"tensor": 2, "expert": 2}, 12),
        ("gemma2", {"shard": 4}, 40),
        ("qwen3 tied", {"shard": 2}, 12),
        ("llama+deep", {"pipeline": 4}, 12),
    ],
}
CASES_OF_SOAK = ["4 processes", "4 processes, more"]
CASES_OF_CI = [name for name in CASES if name not in CASES_OF_SOAK]


class Published:
    """A model in parts, and what its processes do together when it is published."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.first = distributed.get_rank() == 0
        own = lambda only_trained: weight_parts(model, only_trained)  # noqa: E731
        self._parts = PublishedParts(own)
        if self.first:
            register_in_parts(model, InParts(skeleton_of(model), own, self._tell))

    def _tell(self, command: PartsCommand) -> None:
        distributed.broadcast_object_list([command], 0)

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Whether this process writes, while the others do what it tells them."""
        while not self.first:
            told: list[Any] = [None]
            distributed.broadcast_object_list(told, 0)
            if told[0] is None:
                break
            self._parts.carry_out(told[0])

        try:
            yield self.first
        finally:
            if self.first:
                distributed.broadcast_object_list([None], 0)

    def kept_bytes(self) -> int:
        """Of the copy that this process keeps, unless it is the first."""
        return num_bytes({name: kept for name, (_, kept) in self._parts._kept.items()})


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same(found: Any, model: torch.nn.Module) -> bool:
    own = trained_weights(model)
    return found.keys() == own.keys() and all(
        torch.equal(bits(found[name]), bits(own[name])) for name in own
    )


def manifest(folder: WeightsFolder, version: int) -> VersionManifest:
    return msgspec.json.decode(
        (folder.path(version) / "manifest.json").read_bytes(), type=VersionManifest
    )


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """The disk is full after so many tensors."""
    add = TensorFile.add
    count = 0

    def adding(self: TensorFile, name: str, tensor: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(28, "No space left on device")
        add(self, name, tensor)

    TensorFile.add = adding  # type: ignore[method-assign]
    try:
        yield
    finally:
        TensorFile.add = add  # type: ignore[method-assign]


def in_bfloat16(name: str) -> PreTrainedModel:
    """All of it, adapters too."""
    return made(name).to(torch.bfloat16)


def history(case: Case, folder: Path) -> dict[str, Any]:
    """Trains, and publishes each step in parts and, beside it, whole; what a reader that follows
    each finds, and every fifth time one that is new."""
    name, sizes, steps = case
    plain = in_bfloat16(name)
    model = spread(in_bfloat16(name), make_meshes(ParallelSection(**sizes), "cpu"))
    published = Published(model)
    trainer = SupervisedTrainer(model, SECTION, steps)
    parts, whole = (WeightsFolder(folder / kind, full_every=FULL_EVERY) for kind in ("in", "of"))
    follower = WeightsFolder(parts.folder, full_every=FULL_EVERY)

    wrong = []
    kinds = []
    sizes_found = []
    states = []
    for version in range(steps + 1):
        if version:
            trainer.step(of_groups((2,)))

        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for n, tensor in whole_tensors(model, trained).items():
            dict(plain.named_parameters())[n].data.copy_(tensor)

        note_change(model)
        if version == 4:
            with published.writing() as writes:
                if writes:
                    wrong += _without_room(parts, version, model)

        with published.writing() as writes:
            if not writes:
                continue

            sha256 = parts.write(version, model, keep=KEEP)
            whole.write(version, plain, keep=KEEP)

            readers = [follower] if version % 5 else [follower, WeightsFolder(parts.folder)]
            for number, reader in enumerate(readers):
                if not same(reader.read(version, sha256=sha256), plain):
                    wrong.append(f"version {version}, reader {number}")

            of_parts = manifest(parts, version)
            of_whole = manifest(whole, version)
            kinds.append((len(of_parts.chain), len(of_whole.chain)))
            sizes_found.append((of_parts.bytes, of_whole.bytes))
            states += [
                (n, n in of_parts.grids, of_parts.state[n] == of_whole.state[n])
                for n in of_parts.state
                if of_parts.chain and of_whole.chain
            ]

    layouts = layouts_by_name(model)
    alone = [n for n in trained if n not in layouts or layouts[n].dim is None]
    return {
        "wrong": wrong,
        "kinds": kinds,
        "sizes": sizes_found,
        "states": states,
        "latest": parts.latest_version(),
        "kept": published.kept_bytes(),
        "own": sum(2 * local(p).numel() for p in trained.values()),
        "whole": num_bytes(trained_weights(plain)),
        "replicated": sum(2 * local(trained[n]).numel() for n in alone),
    }


def _without_room(folder: WeightsFolder, version: int, model: torch.nn.Module) -> list[str]:
    """What is wrong after a delta that found the disk full in its middle."""
    before = folder.latest_version()
    with full_disk(after=3):
        try:
            folder.write(version, model, keep=KEEP)
        except OSError:
            left = [path.name for path in folder.folder.iterdir()]
            whole = folder.latest_version() == before and folder.path(version).name not in left
            return [] if whole else [f"a half-written version: {left}"]

    return ["a version was written to a full disk"]


def memory(folder: Path) -> dict[str, int]:
    """The most that this process makes of tensors while a delta is published, and sizes."""
    model = larger(make_meshes(ParallelSection(shard=distributed.get_world_size()), "cpu"))
    published = Published(model)
    versions = WeightsFolder(folder / "memory", full_every=FULL_EVERY)
    with published.writing() as writes:
        if writes:
            versions.write(0, model, keep=KEEP)

    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        one = local(parameter.detach())
        one.mul_(1 + (torch.rand(one.shape, generator=generator) < 0.02).to(one.dtype))

    with TensorMemory() as used, published.writing() as writes:
        if writes:
            versions.write(1, model, keep=KEEP)

    specs = {name: part.spec for name, part in weight_parts(model).items()}
    found = {
        "peak": used.peak,
        "whole": sum(spec.num_bytes for spec in specs.values()),
        "layer": sum(spec.num_bytes for name, spec in specs.items() if ".layers.3." in name),
    }
    if published.first:
        found |= {"delta": manifest(versions, 1).bytes, "chain": len(manifest(versions, 1).chain)}

    return found


def dies(folder: Path) -> str:
    """The last process ends without a word when it is to give what it has found changed; what the
    first one says then."""
    model = spread(in_bfloat16("llama"), make_meshes(ParallelSection(shard=2), "cpu"))
    published = Published(model)
    if distributed.get_rank() == distributed.get_world_size() - 1:
        published._parts.give = lambda: os._exit(0)

    versions = WeightsFolder(folder / "dies", full_every=FULL_EVERY)
    for version in (1, 2):
        for parameter in model.parameters():
            local(parameter.detach())[:1].mul_(1 if version == 1 else 2)

        with published.writing() as writes:
            if writes:
                try:
                    versions.write(version, model, keep=KEEP)
                except RuntimeError as error:
                    torch.save({"said": str(error)}, folder / "died.pt")
                    os._exit(0)

    return "nobody died"


if __name__ == "__main__":
    name, process, meeting, folder, out = sys.argv[1:]
    count = num_processes(name)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(process),
        world_size=count,
        timeout=timedelta(seconds=300),
    )
    place = Path(folder)
    results = [history(case, place / str(n)) for n, case in enumerate(CASES[name])]
    torch.save((results, memory(place)), out)
    if count == 2:
        raise SystemExit(dies(place))
    distributed.destroy_process_group()
