"""The image of deploy/docker, as far as it can be read without a builder."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
LINES = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def test_everything_is_installed_in_the_versions_that_ci_tests():
    installs = [line for line in LINES if "pip install" in line and not line.startswith("#")]
    assert len(installs) == 2
    assert all('--constraint "${CONSTRAINTS}"' in line for line in installs)
    assert "ARG CONSTRAINTS=constraints.txt" in LINES


def test_what_is_copied_is_there_and_reaches_the_builder():
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [name for line in LINES if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert {"constraints.txt", "pyproject.toml", "src", "recipes"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
