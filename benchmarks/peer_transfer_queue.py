"""TransferQueue's end of benchmarks/store.py: groups of attempts put into its storage units in
memory, handed out, and read back.

A group is one batch: a row for each attempt, as tensors that are made before the clock starts. Its
lease is `get_meta`, which marks rows as consumed by a task. One storage unit for each core, as its
configuration recommends for one node.
"""

from __future__ import annotations

import time
from importlib.metadata import version

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from peer_worker import Line

FIELDS = ["prompt_ids", "completion_ids", "logprobs", "versions", "lengths"]


def make_group(group: int, turns: int, tokens: int) -> TensorDict:
    half = (group, tokens // 2)
    ids = (50_000 ** torch.rand(2, *half)).to(torch.int32)
    fields = {
        "prompt_ids": ids[0],
        "completion_ids": ids[1],
        "logprobs": -torch.rand(half),
        "versions": torch.full(half, 7, dtype=torch.int32),
    }
    return TensorDict(
        fields | {"lengths": torch.full((group, turns), tokens // turns)}, batch_size=group
    )


def main() -> None:
    line = Line()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)

    transfer_queue.init()
    client = transfer_queue.get_client()
    names = ("TransferQueue", "ray", "tensordict", "torch")
    count = 0
    for request in line.requests(
        {"versions": {name: version(name) for name in names}, "modes": ["transferqueue"]}
    ):
        size = request["group"]
        groups = [
            make_group(size, request["turns"], request["tokens"]) for _ in range(request["groups"])
        ]
        seconds = dict.fromkeys(("lease", "write", "read"), 0.0)
        partition = f"round{count}"
        for fields in groups:
            keys = [f"{count}_{i}" for i in range(size)]
            count += 1
            start = time.perf_counter()
            transfer_queue.kv_batch_put(
                keys=keys, partition_id=partition, fields=fields, tags=[{"status": "ready"}] * size
            )

            written = time.perf_counter()
            meta = client.get_meta(
                data_fields=FIELDS, batch_size=size, partition_id=partition, task_name="trainer"
            )

            leased = time.perf_counter()
            data = client.get_data(meta)
            seconds["write"] += written - start
            seconds["lease"] += leased - written
            seconds["read"] += time.perf_counter() - leased
            assert (
                len(data["completion_ids"]) == size
                and len(data["completion_ids"][0]) == request["tokens"] // 2
            )

        line.reply({name: size * len(groups) / spent for name, spent in seconds.items()})


if __name__ == "__main__":
    main()
