"""`import`: a user's files and modules are executed before names are resolved, found again from the
run's configuration, and their errors are shown."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from agentevo.config import build_config, load_config, to_yaml
from agentevo.config.agents import agents
from agentevo.environments import environments
from agentevo.errors import ConfigError

AGENT = """
import agentevo
from {stem}_words import WORD

class Options(agentevo.AgentSection):
    tries: int = 3

@agentevo.agent("{stem}")
class Mine:
    Config = Options
    def __init__(self, config): self.config = config
    async def run(self, task, policy): return {{"word": len(WORD) * self.config.tries}}
"""


@pytest.fixture
def user_files(tmp_path, monkeypatch):
    """Forgets, when the test is over, what was imported and registered."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(agents, "_items", dict(agents._items))
    monkeypatch.setattr(environments, "_items", dict(environments._items))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    before = set(sys.modules)

    def write(name: str, text: str, folder: str = "code") -> Path:
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def recipe(write, name="recipe.yaml", **keys):
    tree = {"environment": {"type": "coins"}, **keys}
    return write(name, yaml.safe_dump(tree))


@pytest.mark.slow
def test_an_agent_of_a_file_is_named_by_the_recipe_and_found_again_from_anywhere(
    user_files, tmp_path, monkeypatch
):
    user_files("mine_words.py", "WORD = 'four'\n")
    user_files("mine.py", AGENT.format(stem="mine"))
    path = recipe(user_files, **{"import": ["./mine.py"], "agent": {"type": "mine", "tries": 5}})
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    assert (config.agent.type, config.agent.tries) == ("mine", 5)
    assert config.imports == (str(tmp_path / "code" / "mine.py"),)

    again = yaml.safe_load(to_yaml(config))
    assert again["import"] == [str(tmp_path / "code" / "mine.py")]

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert to_yaml(build_config(again)) == to_yaml(config)


@pytest.mark.parametrize("entry", ["mine", "./mine.py", "mine.py", "mine/"])
def test_ways_to_name_it(user_files, tmp_path, entry):
    name = "mine/__init__.py" if entry == "mine/" else "mine.py"
    path = user_files(
        name, "import agentevo\n@agentevo.agent('way')\nasync def f(t, p): return 1\n"
    )
    config = load_config(recipe(user_files, **{"import": entry, "agent": {"type": "way"}}))
    assert config.imports == (str(path.parent if entry == "mine/" else path),)


def test_an_override_starts_at_the_current_folder(user_files, tmp_path, monkeypatch):
    user_files(
        "mine.py", "import agentevo\n@agentevo.agent('here')\nasync def f(t, p): return 1\n", "cwd"
    )
    monkeypatch.chdir(tmp_path / "cwd")
    config = load_config(recipe(user_files), ["import=[./mine.py]", "agent.type=here"])
    assert config.imports == (str(tmp_path / "cwd" / "mine.py"),)


@pytest.mark.slow
def test_nothing_is_executed_twice(user_files, tmp_path):
    user_files("mine.py", f"open({str(tmp_path / 'log')!r}, 'a').write('x')\n")
    user_files("mine.py", f"open({str(tmp_path / 'log')!r}, 'a').write('y')\n", "other")
    path = recipe(user_files, **{"import": ["./mine.py", "../other/mine.py", "mine"]})
    for _ in range(2):
        load_config(path)
    assert (tmp_path / "log").read_text() == "xy"


def test_modules_that_python_knows_are_imported_by_name(user_files):
    assert load_config(recipe(user_files, **{"import": ["email.mime.text"]})).imports == (
        "email.mime.text",
    )


@pytest.mark.slow
def test_an_environment_of_a_file_without_options(user_files):
    user_files(
        "environment.py",
        """
import agentevo
from agentevo.environments.coins import CoinsEnvironment

@agentevo.environment("my_coins")
class Mine(CoinsEnvironment):
    pass
""",
    )
    path = recipe(user_files, **{"import": ["environment"], "environment": {"type": "my_coins"}})
    assert load_config(path).environment.model_dump() == {"type": "my_coins", "max_actions": 10}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\ny = nothing\n", ["mine.py", "line 2", "y = nothing", "NameError: name 'nothing'"]),
        ("def f(:\n", ["mine.py", "line 1", "SyntaxError"]),
        ("import sys\nsys.exit(3)\n", ["line 2", "SystemExit: 3"]),
        (
            "class Far(BaseException): pass\nraise Far('it is over')\n",
            ["line 2", "Far: it is over"],
        ),
        (
            "import asyncio\nraise asyncio.CancelledError\n",
            ["line 2", "CancelledError"],
        ),
        (
            "import json\n\ndef read():\n    json.loads('{')\n\nread()\n",
            ["line 6, in <module>", "line 4, in read", "JSONDecodeError: "],
        ),
        ("import not_there_at_all\n", ["line 1", "No module named 'not_there_at_all'"]),
        (
            "import agentevo\n@agentevo.agent('x')\ndef run(): return 1\n",
            ["line 2", "the agent 'x' takes no parameters: make it `run(task)` or"],
        ),
        (
            "import agentevo\n@agentevo.agent('x')\nclass A: pass\n",
            ["the agent 'x' needs a method `async def run(self, task, policy)` in A"],
        ),
        (
            "import agentevo\n"
            "@agentevo.agent('environment')\n"
            "async def run(task, policy): return 1\n",
            ["the name 'environment' is built in"],
        ),
    ],
)
def test_what_a_users_code_raises_is_shown_with_its_place(user_files, text, expected):
    user_files("mine.py", text)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe(user_files, **{"import": ["./mine.py"]}))

    message = str(caught.value)
    assert "recipe.yaml: import: " in message.splitlines()[0]
    assert "importlib" not in message and "/agentevo/config/" not in message

    for part in expected:
        assert part in message, message

    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["./gone.py"], "./gone.py is neither a Python file"),
        (["gone_module"], "no module is called 'gone_module', and there is no gone_module.py in "),
        (["not-a-name"], "'not-a-name' is not a module's name"),
        ([3], "got [3]; needs a list of modules or files"),
        ({"a": 1}, "needs a list of modules or files"),
    ],
)
def test_what_can_not_be_imported_is_refused(user_files, given, expected):
    with pytest.raises(ConfigError, match="import: ") as caught:
        load_config(recipe(user_files, **{"import": given}))
    assert expected in str(caught.value)


@pytest.mark.slow
def test_agents_have_the_checks_of_other_sections(user_files):
    user_files("mine_words.py", "WORD = 'four'\n")
    user_files("mine.py", AGENT.format(stem="mine"))

    keys = {"import": ["./mine.py"]}
    for agent, expected in (
        ({"type": "mime"}, "agent.type: got 'mime'; did you mean mine?"),
        ({"type": "mine", "tires": 2}, "agent.tires: unknown key; did you mean agent.tries?"),
        (
            {"type": "mine", "format": "plain"},
            "unknown key for agent.type=mine; it is an option of environment",
        ),
        ({"type": "mine", "tries": "many"}, "agent.tries: got 'many'; needs a whole number"),
        ({"type": "mine", "tries": True}, "agent.tries: got true; needs a whole number"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(recipe(user_files, **keys, agent=agent))
        assert expected in str(caught.value)


def test_the_current_folder_is_left_as_it_was(user_files):
    before = os.getcwd()
    user_files("mine.py", "")
    load_config(recipe(user_files, **{"import": ["./mine.py"]}))
    assert os.getcwd() == before


@pytest.mark.slow
def test_a_file_is_looked_for_beside_the_recipe_then_in_the_current_folder(
    user_files, tmp_path, monkeypatch
):
    beside = user_files("mine.py", "PLACE = 'beside'\n")
    here = user_files("other.py", "PLACE = 'here'\n", folder="here")
    user_files("mine.py", "PLACE = 'here'\n", folder="here")
    monkeypatch.chdir(tmp_path / "here")
    path = recipe(user_files)
    for entry, expected in (("./mine.py", beside), ("mine", beside), ("./other.py", here)):
        for config in (
            load_config(str(path), [f"import=[{entry}]"]),
            load_config(str(recipe(user_files, **{"import": [entry]}))),
        ):
            assert config.imports == (str(expected),)

    with pytest.raises(ConfigError, match=r"did you mean .*code/mine\.py"):
        load_config(str(path), ["import=[./mnie.py]"])


def test_what_an_override_names_is_never_looked_for_in_the_folder_of_a_run(
    user_files, tmp_path, monkeypatch
):
    user_files("mine.py", "raise SystemExit('code of a stranger')\n", folder="run")
    here = user_files("mine.py", "PLACE = 'here'\n", folder="here")
    monkeypatch.chdir(tmp_path / "here")
    path = user_files("config.yaml", "environment: {type: coins}\n", folder="run")
    assert load_config(str(path), ["import=[./mine.py]"]).imports == (str(here),)
    here.unlink()
    with pytest.raises(ConfigError, match="is neither a Python file"):
        load_config(str(path), ["import=[./mine.py]"])
