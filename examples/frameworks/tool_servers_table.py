"""Trains a policy with each tool that ships, through MCP, and writes the table of docs/tools.md.

python tool_servers_table.py                  # all: some minutes each
python tool_servers_table.py --only booking   # a line without a result stays as it is
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from agentevo.agents.tool_servers.lessons import LESSONS
from table import FOLDER, ROOT, cpu_s, rewrite

PAGE = ROOT / "docs" / "tools.md"


def train(tool: str, out: Path) -> None:
    """One of them, with the CPU minutes of all its processes."""
    words = [sys.executable, str(FOLDER / "tool_servers.py"), tool, "--out", str(out)]
    began = cpu_s()

    done = subprocess.run(words, capture_output=True, text=True, cwd=FOLDER)
    if done.returncode:
        raise RuntimeError(f"{tool} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")

    path = out / tool / "result.json"
    result = json.loads(path.read_text()) | {"minutes": (cpu_s() - began) / 60}
    path.write_text(json.dumps(result))
    print(f"{tool}: {result['before']:.0%} -> {result['after']:.0%}", flush=True)


def table(out: Path, page: str) -> str:
    """Of all results that there are; a tool without one keeps its line of the page."""
    stand = {line.split("|")[1].strip(): line for line in page.splitlines() if line[:1] == "|"}
    lines = [
        "| in `examples/frameworks` | untrained | reading | cold start | RL | gain, points "
        "| sampled: cold start | RL | gain, points | steps | CPU minutes |",
        f"|{' --- |' * 11}",
    ]
    for tool in sorted(LESSONS):
        path = out / tool / "result.json"
        name = f"`python tool_servers.py {tool}`"
        if not path.exists():
            lines += [stand[name]] if name in stand else []
            continue

        result = json.loads(path.read_text())
        stages = [f"{result[stage]:.0%}" for stage in ("untrained", "read")]
        shown = [*stages, _gain(result), _gain(result["sampled"])]
        lines.append(
            f"| {name} | {' | '.join(shown)} | {result['steps']} | {result['minutes']:.1f} |"
        )

    return "\n".join(lines)


def _gain(shares: dict[str, float]) -> str:
    before = 100 * shares["before"]
    after = 100 * shares["after"]
    return f"{before:.0f}% | {after:.0f}% | {after - before:+.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted(LESSONS), default=sorted(LESSONS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "tool_servers")
    given = parser.parse_args()
    for tool in given.only:
        train(tool, given.out)
    rewrite(PAGE, lambda stands: table(given.out, stands))


if __name__ == "__main__":
    main()
