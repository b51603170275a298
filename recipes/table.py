"""Prints the Markdown table of several finished runs: python recipes/table.py runs/frozen_lake-0 runs/frozen_lake-1 ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def main(folders: list[str]) -> None:
    print(
        "| seed | before RL | after | gain, points | sampled, after | random player | optimal player | held-out tasks | steps | minutes |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for folder in folders:
        summary = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
        result = summary["eval"]
        cells = [
            str(summary["seed"]),
            percent(result["before"]),
            percent(result["after"]),
            f"{100 * (result['after'] - result['before']):+.1f}",
            percent(result["sampled"]["after"]),
            percent(result["random"]),
            percent(result["optimal"]),
            str(result["n"]),
            str(summary["steps"]),
            f"{summary['wall_s'] / 60:.1f}",
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
