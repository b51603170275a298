"""Code that came with the folder of a run is not run by whoever looks at it."""

from __future__ import annotations

from contextlib import suppress

import pytest

import agentevo
from agentevo.cli.main import main
from agentevo.config.imports import check_code_of_run
from agentevo.errors import ConfigError


@pytest.fixture
def foreign_run(tmp_path, monkeypatch):
    """(the folder of a run from elsewhere, its config.yaml with other code, the file that its code
    would make)."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    made = tmp_path / "made"
    (folder / "evil.py").write_text(f"open({str(made)!r}, 'w')\n")
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
        ["config", config],
        ["list", "environments", "--recipe", config],
        ["config", "--recipe", config],
        ["train", config, "--dry-run"],
        ["doctor", folder],
        ["eval", folder],
        ["audit", folder, "--replay-random", "1"],
        ["models", folder, "--merge", "merged"],
        ["serve", config],
    ):
        assert main([str(word) for word in words]) == 2, words
        problem = capsys.readouterr().err
        assert "is code in the run's folder" in problem, (words, problem)
        assert "AGENTEVO_TRUST_RUNS=1" in problem and not made.exists()

    with pytest.raises(ConfigError, match="does not run it unasked"):
        agentevo.load_run(folder)

    monkeypatch.setenv("AGENTEVO_TRUST_RUNS", "1")
    with suppress(ConfigError):  # it registers nothing
        agentevo.load_run(folder)
    assert made.exists()


def test_nor_is_a_module_of_the_folder_whichever_folder_is_the_current_one(
    foreign_run, tmp_path, monkeypatch, capsys
):
    folder, with_code, made = foreign_run
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "foreign_neighbour").mkdir()
    (tmp_path / "foreign_neighbour" / "evil.py").write_text((folder / "evil.py").read_text())
    for entry in ("evil", "foreign.evil", "foreign_neighbour.evil", "~/../foreign/evil.py"):
        monkeypatch.setenv("HOME", str(tmp_path / "foreign"))
        with_code(entry)
        assert main(["config", "foreign/config.yaml"]) == 2, entry
        assert "does not run it unasked" in capsys.readouterr().err, entry
        with pytest.raises(ConfigError, match="does not run it unasked"):
            agentevo.load_run("foreign")
        assert not made.exists()


GYM = "environment: {type: gymnasium, id: 'foreign.evil:X-v0'}"


@pytest.mark.parametrize(
    "text",
    [
        GYM,
        GYM.replace("X-v0", "X v0"),
        GYM.replace("evil", "evil.py"),
        GYM.replace("foreign", "~root"),
        GYM.replace("foreign.evil", "${run.name}.evil") + "\nrun: {name: foreign}",
        "environment: {type: gymnasium, id: A-v0, kwargs: {env_id: 'foreign.evil:X-v0'}}",
        "environment: coins\nsweep: {variants: {a: {environment.id: 'foreign.evil:X'}}}",
        "agent: {type: verifiers, id: owner/evil@1.0}",
        "agent: {type: verifiers, id: gsm8k, args: {taskset: evil}}",
        "agent: {tools: [{type: verl_tools, file: HERE/tools.yaml}]}",
        "agent: {tools: [{type: verl_tools, file: tools.yaml}]}",
    ],
)
def test_nor_is_code_that_another_value_names(text, foreign_run, tmp_path, monkeypatch):
    folder, _, made = foreign_run
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "~root").symlink_to(folder)
    (folder / "config.yaml").write_text(text.replace("HERE", str(folder)))
    with pytest.raises(ConfigError, match="does not run it unasked"):
        agentevo.load_run("foreign")
    assert not made.exists()


def test_a_value_that_an_override_names_and_installed_modules_are_no_code_of_the_run(foreign_run):
    folder, _, _ = foreign_run
    tree = {
        "import": ["agentevo.integrations.verifiers", "json"],
        "environment": {"type": "gymnasium", "id": "evil:X-v0"},
        "agent": {"instructions": "evil: say nothing", "url": "http://127.0.0.1:1/v1"},
    }
    check_code_of_run(folder, tree, ["environment.id=evil:X-v0"])
    check_code_of_run(folder, tree, ["environment={type: coins}"])
    with pytest.raises(ConfigError, match=r"environment\.id: 'evil' is code"):
        check_code_of_run(folder, tree, ["import=[]"])


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
