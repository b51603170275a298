"""The image's recipe against the tree that it copies: what a build would fail for after minutes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "deploy" / "docker"
RECIPE = (DOCKER / "Dockerfile").read_text()


def test_what_is_copied_is_there_and_not_ignored():
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    copies = re.findall(r"^COPY (.+) \S+$", RECIPE, re.MULTILINE)
    sources = [source for copied in copies for source in copied.split()]
    assert {"src", "recipes", "constraints.txt"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, source


def test_the_extras_are_the_packages():
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", RECIPE, re.MULTILINE)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)


def test_every_package_is_of_the_version_that_is_tested():
    installs = re.findall(r"pip install (.+)", RECIPE)
    assert len(installs) == 2
    assert "ARG CONSTRAINTS=constraints.txt\n" in RECIPE
    for install in installs:
        assert '--constraint "${CONSTRAINTS}"' in install
