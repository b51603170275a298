"""A tool that ships, as an MCP server over HTTP: a tiny policy reads tasks that are solved, without
the tool's schema, and demonstrations that give up at most of their steps. Then it learns from what
each attempt leaves behind.

    python tool_servers.py booking      # calculator, database, files or search as well
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentevo.agents.tool_servers.lessons import LESSONS
from agentevo.agents.tool_servers.lessons.lesson import demonstrations, lesson_tasks
from agentevo.agents.tool_servers.lessons.writing import HELD_OUT, SHOWN, TRAIN, write_lesson
from agentevo.runs.evaluation.evaluate import EvaluationRun, evaluate
from cold_start import fine_tuned
from learn import options, reinforced

QUITS = 0.6
EPOCHS = 2
STEPS = 8
SAMPLES = 1
OWN: dict[str, dict[str, Any]] = {
    "booking": {"conversations": 1024, "learning_rate": 5e-4},
    "files": {"solved": 8192, "steps": 10},
    "search": {"solved": 8192, "solved_tasks": 600},
}
"""What a tool has in place of the defaults: names of many words are learnt later."""


@contextmanager
def served(tool: str, *words: str) -> Iterator[str]:
    """The URL of a server of the tool, which ends with the block."""
    command = [sys.executable, "-m", "agentevo", "tools", "serve", tool, *words, "--http"]
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


def solved(
    tool: str, count: int, num_tasks: int, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """So many conversations that solve tasks to their end, some of them more than once, without the
    tool's schema: its length is most of a conversation's."""
    tasks = lesson_tasks(LESSONS[tool], min(count, num_tasks), seed=1)
    shown = list(demonstrations(LESSONS[tool], tasks, seed=0, options=settings))
    draw = random.Random(0)
    return [{"messages": draw.choice(shown)["messages"]} for _ in range(count)]


def earlier(folder: Path) -> dict[str, float]:
    """Greedy success on the held-out tasks of the policy with random weights, and after reading
    alone, before any demonstration gave up."""
    stages = {"untrained": folder / "base", "read": folder / "reading"}
    asked = EvaluationRun(target=str(folder / "run"), against=[str(one) for one in stages.values()])
    models = {one["model"]: one for one in evaluate(asked, print)["models"]}
    return {stage: models[str(policy)]["pass_at"]["1"]["value"] for stage, policy in stages.items()}


def main() -> None:
    parser = options(Path("runs/tool_servers"), steps=STEPS, conversations=512)
    parser.add_argument("tool", choices=sorted(LESSONS))

    help_text = "conversations that solve tasks to their end, which are read first"
    parser.add_argument("--solved", type=int, default=4096, help=help_text)
    help_text = "different tasks that they are of, at most"
    parser.add_argument("--solved-tasks", type=int, default=1500, help=help_text)
    parser.set_defaults(**OWN.get(parser.parse_args().tool, {}))
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
    read = solved(given.tool, given.solved, given.solved_tasks, settings)
    policy = fine_tuned(given.out, rows, reading=read, epochs=EPOCHS, min_lr_ratio=0.1)
    with served(given.tool, *(f"{key}={value}" for key, value in settings.items())) as url:
        entry = {"type": "mcp", "name": given.tool, "url": url, "send_task": True}
        judged = {"rewards": list(lesson.rewards)} if lesson.rewards else {}
        result = reinforced(
            given,
            model=str(policy),
            tools=[entry if judged else {**entry, "outcome": "outcome"}],
            agent={"system_prompt": lesson.instructions, "max_turns": 4},
            tasks={"train": str(given.out / TRAIN), "eval": str(given.out / HELD_OUT)},
            evaluation={"tasks": given.held_out, "samples": SAMPLES, "every": 0},
            sampling={"max_new_tokens": 128},
            **judged,
        )
        (given.out / "result.json").write_text(json.dumps(result | earlier(given.out)))


if __name__ == "__main__":
    main()
