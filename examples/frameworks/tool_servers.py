"""A tool that ships, as an MCP server over HTTP: a tiny policy reads demonstrations that give up at
half of their steps, and then learns from what each attempt leaves behind.

    python tool_servers.py booking      # calculator, database, files or search as well
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentevo.tool_servers.lessons import LESSONS
from agentevo.tool_servers.lessons.writing import HELD_OUT, SHOWN, TRAIN, write_lesson
from cold_start import fine_tuned
from learn import options, reinforced

QUITS, EPOCHS = 0.5, 2
STEPS = 8


@contextmanager
def served(tool: str, *words: str) -> Iterator[str]:
    """The URL of a server of the tool, which ends with the block."""
    command = [sys.executable, "-m", "agentevo", "mcp", "serve", tool, *words, "--http"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            found = re.search(r"at (http\S+)", said)
            if found is None:
                raise RuntimeError(said + process.stderr.read())
            yield found[1]
        finally:
            process.terminate()


def main() -> None:
    parser = options(Path("runs/tool_servers"), steps=STEPS, conversations=2048)
    parser.add_argument("tool", choices=sorted(LESSONS))
    given = parser.parse_args()
    lesson = LESSONS[given.tool]
    given.out = given.out / given.tool
    settings = write_lesson(
        given.tool,
        given.out,
        count=600,
        held_out=given.held_out,
        shown=given.conversations,
        seed=0,
        quits=QUITS,
    )
    rows = [json.loads(line) for line in (given.out / SHOWN).read_text().splitlines()]
    policy = fine_tuned(given.out, rows, epochs=EPOCHS)
    with served(given.tool, *(f"{key}={value}" for key, value in settings.items())) as url:
        entry = {"type": "mcp", "name": given.tool, "url": url, "send_task": True}
        judged = {"rewards": list(lesson.rewards)} if lesson.rewards else {}
        reinforced(
            given,
            model=str(policy),
            tools=[entry if judged else {**entry, "outcome": "outcome"}],
            agent={"system_prompt": lesson.instructions, "max_turns": 4},
            tasks={"train": str(given.out / TRAIN), "eval": str(given.out / HELD_OUT)},
            **judged,
        )


if __name__ == "__main__":
    main()
