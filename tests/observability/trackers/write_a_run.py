"""Writes steps of a run to one tracker, in an environment that has that tracker and not torch.

python write_a_run.py NAME OPTIONS_JSON FOLDER FIRST LAST: rows FIRST to LAST, as a run would that
is killed before LAST + 1; a second call with the same folder is the resumed run, which offers the
rows before FIRST again.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from pathlib import Path

from agentevo.observability.trackers import TrackedRow, TrackedRun, TrackedTable, Tracking, trackers
from agentevo.observability.trackers.secrets import without_secrets

CONFIG = {
    "trainer": {"steps": 5, "learning_rate": 1e-4},
    "agent": {"tools": [{"headers": {"Authorization": "Bearer hush-hush-hush"}}]},
    "store": {"url": "postgresql://user:hush-hush-hush@host/db"},
}


def picture(path: Path) -> Path:
    """A PNG of one red pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixel = zlib.compress(b"\0\xff\0\0")
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")
    )
    return path


def main(name: str, options: str, folder: Path, first: int, last: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kind = trackers.get(name)
    config = kind.Config.model_validate({"name": name, **json.loads(options)})
    kind.check(config)
    run = TrackedRun(
        folder=folder,
        project="agentevo-test",
        name="first",
        tags=("a",),
        notes="words",
        config=without_secrets(CONFIG),
    )
    tracking = Tracking([(config, kind)], run, note=say, warn=say, flush_s=120)
    for step in range(last + 1):
        table = TrackedTable("attempts", ("task", "reward", "said"), ((f"t{step}", 0.5, "a | b"),))
        tracking.put(
            TrackedRow(
                step=step,
                time=1_770_000_000.0 + step,
                metrics={
                    "critic/score/mean": step / 2,
                    "actor/grad_norm": math.nan if step == 1 else 1.0,
                },
                tables=(table,) if step == last else (),
            )
        )

    artifact = folder / "summary.json"
    artifact.write_text("{}")
    tracking.close(
        "finished",
        {"steps": last},
        figures={"plots/curve": picture(folder / "curve.png")},
        artifacts={"summary": artifact},
    )


def say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
