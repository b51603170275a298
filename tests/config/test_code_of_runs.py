"""Code that came with the folder of a run is not run by whoever looks at it."""

from __future__ import annotations

from contextlib import suppress

import pytest

import agentevo
from agentevo.cli.main import main
from agentevo.errors import ConfigError


@pytest.fixture
def foreign_run(tmp_path, monkeypatch):
    """(the folder of a run from elsewhere, its config.yaml with other code, the file that its code
    would make)."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    made = tmp_path / "made"
    (folder / "evil.py").write_text(f"open({str(made)!r}, 'w')\n")
    (folder / "metrics.jsonl").write_text("")
    monkeypatch.chdir(folder)

    def with_code(entry):
        text = f"# agentevo train\nenvironment: coins\nimport: [{entry}]\n"
        (folder / "config.yaml").write_text(text)
        return folder

    return folder, with_code, made


@pytest.mark.parametrize("entry", ["./evil.py", "evil", "HERE/evil.py", "../foreign/evil.py"])
def test_code_that_came_with_a_run_is_not_run(entry, foreign_run, capsys, monkeypatch):
    folder, with_code, made = foreign_run
    with_code(entry.replace("HERE", str(folder)))
    config = folder / "config.yaml"
    for words in (
        ["config", "show", config],
        ["list", "environments", "--recipe", config],
        ["config", "explain", "--recipe", config],
        ["train", config, "--dry-run"],
        ["doctor", folder],
        ["eval", folder],
        ["replay", folder, "--all", "1"],
        ["merge", folder, "merged"],
        ["serve", config],
    ):
        assert main([str(word) for word in words]) == 2, words
        problem = capsys.readouterr().err
        assert "is code that lies in the run's folder" in problem, (words, problem)
        assert "AGENTEVO_TRUST_RUNS=1" in problem and not made.exists()

    with pytest.raises(ConfigError, match="is not run unasked"):
        agentevo.load_run(folder)

    monkeypatch.setenv("AGENTEVO_TRUST_RUNS", "1")
    with suppress(ConfigError):  # it registers nothing
        agentevo.load_run(folder)
    assert made.exists()


def test_code_of_this_machine_is_run_and_so_is_what_is_named(foreign_run, tmp_path):
    folder, with_code, made = foreign_run
    with_code("./evil.py")
    mine = tmp_path / "mine_of_trust.py"
    mine.write_text(f"open({str(tmp_path / 'fine')!r}, 'w')\n")
    agentevo.load_run(folder, overrides=[f"import=[{mine}]"])
    assert (tmp_path / "fine").exists() and not made.exists()

    (tmp_path / "fine").unlink()
    other = tmp_path / "other_of_trust.py"
    other.write_text(mine.read_text())
    agentevo.load_run(with_code(other))
    assert (tmp_path / "fine").exists()
