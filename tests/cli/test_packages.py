"""`agentevo` without the packages that build on it."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
sys.modules["agentevo_ui"] = sys.modules["agentevo_evolve"] = None
from agentevo.cli.main import main
codes = [main(words.split()) for words in sys.argv[1:]]
print(codes)
"""


def run_without_packages(*commands: str) -> tuple[str, str]:
    """Standard output and errors of commands in a process in which neither package is found."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *commands],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.cold_start
def test_commands_of_a_missing_package_are_missing_and_all_others_work() -> None:
    output, errors = run_without_packages("--help", "list", "ui", "list pipelines", "config coins")
    assert output.endswith("[0, 0, 2, 2, 0]\n"), output + errors
    assert "  train " in output
    assert "  pipeline " not in output
    assert "  ui " not in output
    assert "No such command 'ui'" in errors
    assert "nothing is listed under 'pipelines'" in errors


def test_their_commands_are_listed_with_the_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentevo", "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    for name in ("ui", "pipeline", "evolve", "optimize"):
        assert f"\n  {name} " in done.stdout
