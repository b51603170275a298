"""What a version of the weights costs on its way to engines: bytes and seconds, in full and as what
changed.

    agentevo models smollm2-135m-instruct
    .venv/bin/python benchmarks/weights.py [--steps 4] [--lr 1e-6] [--url file:///FOLDER]

SmolLM2-135M in bfloat16 with float32 masters; each step is AdamW on the gradient of the language
model's loss over 96 tokens of a page of docs/, clipped to norm 1. After each, one folder is given
the version in full and one as a delta; a reader that follows each reads it, and all bits are
compared with the model's. `--url` puts both there by fsspec in place of a temporary folder. Beside
it: what other forms of the same delta would take. Figures go to stdout as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import zlib
from pathlib import Path

import torch

from agentevo.config import ModelSection
from agentevo.inference.weights.object_store import ObjectStoreWeights
from agentevo.inference.weights.weight_delta import find_change
from agentevo.inference.weights.weight_versions import VersionManifest, WeightVersions
from agentevo.inference.weights.weights_folder import WeightsFolder
from agentevo.models.compute.parameters import trained_weights
from agentevo.models.files.load import load_model
from agentevo.training.optimization import MasterWeights

TOKENS = 96
FULL_EVERY = 100


def other_forms(
    old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]
) -> tuple[int, int, float]:
    """Changed elements; bytes of xor under zlib level 1; the seconds that takes."""
    count = sum(len(find_change(old[name], new[name]).indices) for name in new)
    began = time.perf_counter()
    size = 0
    for name, tensor in new.items():
        both = old[name].view(torch.int16) ^ tensor.view(torch.int16)
        size += len(zlib.compress(both.numpy().tobytes(), 1))
    return count, size, time.perf_counter() - began


def measure(
    writer: WeightVersions, reader: WeightVersions, version: int, model: torch.nn.Module
) -> dict[str, float]:
    """Publishes and loads once; refuses to give figures for other bits than the model's."""
    began = time.perf_counter()
    sha256 = writer.write(version, model, keep=2)
    published = time.perf_counter()
    found = reader.read(version, sha256=sha256)
    loaded = time.perf_counter()

    for name, tensor in trained_weights(model).items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name

    manifest: VersionManifest = writer._manifest(version, sha256)
    return {
        "bytes": manifest.bytes,
        "is_delta": bool(manifest.chain),
        "publish_s": round(published - began, 3),
        "load_s": round(loaded - published, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--url")
    asked = parser.parse_args()
    loaded = load_model(ModelSection(name="smollm2-135m-instruct", dtype="bfloat16"))
    model = loaded.model
    text = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    ids = torch.tensor(loaded.tokenizer(text)["input_ids"])

    parameters = [one for one in model.parameters() if one.requires_grad]
    for one in parameters:
        one.grad_dtype = torch.float32

    masters = MasterWeights(parameters, on_cpu=False)
    optimizer = torch.optim.AdamW(masters.masters, lr=asked.lr)
    with tempfile.TemporaryDirectory() as folder:

        def place(kind: str, full_every: int) -> WeightVersions:
            if asked.url is None:
                return WeightsFolder(Path(folder) / kind, full_every=full_every)
            id_file = Path(folder) / kind
            return ObjectStoreWeights(f"{asked.url}/{kind}", full_every=full_every, id_file=id_file)

        ways = {"full": 1, "delta": FULL_EVERY}
        pairs = {kind: (place(kind, every), place(kind, every)) for kind, every in ways.items()}
        old: dict[str, torch.Tensor] = {}
        for step in range(asked.steps + 1):
            if step:
                piece = ids[step * TOKENS : (step + 1) * TOKENS][None].to(model.device)
                model(input_ids=piece, labels=piece).loss.backward()
                masters.take_gradients()
                torch.nn.utils.clip_grad_norm_(masters.masters, 1.0)
                optimizer.step()
                masters.give_weights()

            row = {kind: measure(*pair, step, model) for kind, pair in pairs.items()}
            new = trained_weights(model)
            if step:
                count, xor, xor_s = other_forms(old, new)
                total = sum(one.numel() for one in new.values())
                full = row["full"]["bytes"]
                shares = {
                    "changed": count / total,
                    "delta": row["delta"]["bytes"] / full,
                    "int32_and_values": 6 * count / full,
                    "xor_zlib1": xor / full,
                }
                row["shares"] = {name: round(share, 5) for name, share in shares.items()}
                row["xor_zlib1_s"] = {"seconds": round(xor_s, 2)}

            print(json.dumps({"step": step, "lr": asked.lr} | row), flush=True)
            old = {name: tensor.clone() for name, tensor in new.items()}


if __name__ == "__main__":
    main()
