"""What git tracks: no link, and no path of the machine on which somebody worked."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
A_DEVELOPERS_FOLDER = re.compile(
    rb"(?<![\w.~-])/(?:work|home/(?!me/)[a-z][a-z0-9_-]*|root|Users/[A-Za-z]+)/[A-Za-z0-9._-]+"
)


@pytest.fixture(scope="module")
def tracked() -> dict[str, str]:
    """The mode of each tracked path. Skipped in a source archive, which has no git folder."""
    listing = subprocess.run(
        ["git", "ls-files", "--stage", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if listing.returncode != 0:
        pytest.skip("this tree is no git checkout")

    entries = (entry.split("\t", 1) for entry in listing.stdout.split("\0") if entry)
    return {path: facts.split()[0] for facts, path in entries}


def test_no_symbolic_link_is_tracked(tracked: dict[str, str]) -> None:
    """A tracked link named .venv is what a clone finds where `make` wants to build its own."""
    assert [path for path, mode in tracked.items() if mode == "120000"] == []


@pytest.mark.slow
def test_no_file_names_a_developers_folder(tracked: dict[str, str]) -> None:
    contents = {path: (ROOT / path).read_bytes() for path in tracked if (ROOT / path).is_file()}
    assert contents
    found = {path: A_DEVELOPERS_FOLDER.findall(content) for path, content in contents.items()}
    assert {path: folders for path, folders in found.items() if folders} == {}
