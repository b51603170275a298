"""The pages for people who write their own agents, environments and rewards: their files and
commands, typed as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FILE = re.compile(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONGEST_EXAMPLE = 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "agents",
        "credit",
        "environments",
        "loop",
        "multi_agent",
        "rewards",
        "python",
        "records",
        "tools",
    ],
)
def test_what_the_page_prints_works(page, tmp_path):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    files = dict(FILE.findall(text))
    assert files

    for name, content in files.items():
        assert content.count("\n") <= LONGEST_EXAMPLE
        (tmp_path / name).write_text(content, encoding="utf-8")

    commands = [
        line
        for block in COMMANDS.findall(text)
        for line in block.splitlines()
        if line.startswith(("agentevo ", "python "))
    ]
    assert commands

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for command in commands:
        program, *words = shlex.split(command)
        module = ["-m", "agentevo"] if program == "agentevo" else []
        done = subprocess.run(
            [sys.executable, *module, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
