"""Reads by a tracker's own API what write_a_run.py has logged; prints it as JSON.

python read_a_run.py NAME PLACE: the folder of the run, or MLflow's server.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCORE = "critic/score/mean"


def wandb(place: str) -> dict[str, Any]:
    """The files that `wandb sync` would send, by W&B's own messages."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"runs": [], "steps": [], "config": "", "pictures": 0, "tables": 0}
    for path in sorted(Path(place).glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                found["runs"].append(record.run.run_id)
                found["config"] += str(record.run.config)

            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                if SCORE in items:
                    found["steps"].append([record.history.step.num, items[SCORE]])

                found["pictures"] += "plots/curve" in str(items)
                found["tables"] += "table-file" in str(items)

    return found | {"runs": len(set(found["runs"]))}


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, in which a .wandb file is written behind its head of 7
    bytes: blocks of 32 KiB, of pieces with a checksum, a length and a kind (1 whole, 2 first,
    3 middle, 4 last)."""
    block = 32768
    place = 7
    record = b""
    data = b"\0" * 7 + data
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue

        length, kind = struct.unpack_from("<HB", data, place + 4)
        record = (b"" if kind in (1, 2) else record) + data[place + 7 : place + 7 + length]
        place += 7 + length

        if kind in (1, 4):
            yield record


def mlflow(place: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=place)
    experiment = client.get_experiment_by_name("agentevo-test")
    assert experiment is not None

    runs = client.search_runs([experiment.experiment_id])
    known = runs[0].info.run_id
    history = client.get_metric_history(known, SCORE)
    names = [artifact.path for artifact in client.artifacts(known)]

    return {
        "runs": len(runs),
        "steps": [[one.step, one.value] for one in history],
        "config": str(runs[0].data.params),
        "pictures": len(client.artifacts(known, "plots")),
        "tables": len(client.artifacts(known, "attempts")),
        "state": runs[0].info.status,
        "artifacts": names,
    }


def swanlab(place: str) -> dict[str, Any]:
    """The files of the local runs, which SwanLab's board draws."""
    found: dict[str, Any] = {"runs": 1, "steps": [], "config": "", "pictures": 0, "tables": 0}
    for run in sorted(Path(place).glob("swanlog/run-*")):
        for path in sorted(run.glob("logs/*/*.log")):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            points = [[one["index"], one["data"]] for one in lines]
            if all(value == step / 2 for step, value in points):
                found["steps"] += points

        found["config"] += (run / "files" / "config.yaml").read_text()
        found["pictures"] += len(list(run.glob("media/image/*")))
        found["tables"] += len(list(run.glob("media/text/*")))

    return found


def trackio(place: str) -> dict[str, Any]:
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(Api().runs("agentevo-test"))
    logs = SQLiteStorage.get_logs("agentevo-test", runs[0].name)
    return {
        "runs": len(runs),
        "steps": [[int(log["step"]), log[SCORE]] for log in logs if SCORE in log],
        "config": str(runs[0].config),
        "pictures": sum("plots/curve" in log for log in logs),
        "tables": sum("attempts" in log for log in logs),
    }


READERS = {"wandb": wandb, "mlflow": mlflow, "swanlab": swanlab, "trackio": trackio}

if __name__ == "__main__":
    read = READERS[sys.argv[1]](sys.argv[2])
    assert not re.search("hush", json.dumps(read)), "a secret has arrived"
    print(json.dumps(read))
