"""Every fenced block of README and docs does what it says.

A block of YAML is read as what it is: a recipe, a pipeline, or a part of a recipe, which is laid
over a fitting one. The blocks of Python of a page are executed in order, up to where they would
train. A command is parsed by the command line's own parser, and its recipe is read with its
overrides; `agentevo launch` is run. The pages for people who write their own agents, environments
and rewards are typed as printed, training included (slow; some only in the soak).

A comment before a block says what it is: `part of FILE`, whose lines it repeats; `each line alone`;
or `not run: WHY`. How many are not run is fixed here, so that no page adds one without thought.
"""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from slow import soak

import agentevo
from agentevo.cli import main as cli
from agentevo.config import build_config, check_sft, config_keys, load_config
from agentevo.config.sft import check_rm
from agentevo.config.sources import OVERRIDE, overlay, packaged_recipes, read_yaml
from agentevo.config.sweep import load_sweep
from agentevo.runtime.parsing import parse_yaml
from agentevo_evolve.evolution.evolve import read_evolution
from agentevo_evolve.pipeline import build_pipeline, load_pipeline, packaged_pipelines

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/README.md")])
NAMES = [
    str(page.relative_to(ROOT))
    for page in PAGES
    if not page.name.endswith(("_zh.md", ".zh.md"))  # their blocks are those of the English pages
]
BLOCK = re.compile(
    r"^(?:<!-- (?P<remark>[^\n]+) -->\n\n?)?(?:`(?P<file>[\w./]+)`\n\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SHELLS = ("bash", "sh", "text", "")
NOT_RUN = {"python": 5, "yaml": 2}
"""How many blocks of each language are not run."""

NOT_PRINTED = {
    "clerk.yaml": "import: [./clerk.py]\nagent: clerk\nmodel: tiny\n",
    "judgements.jsonl": '{"messages": [{"role": "user", "content": "2?"},'
    ' {"role": "assistant", "content": "right"}]}\n',
    "runs/clerk-prompts/texts.yaml": "system: You count.\n",
}
"""Files that must be there for what a page prints, and that it describes only."""

TYPED = ["tasks", "tools"]
TYPED_IN_SOAK = ["agents", "algorithms", "environments", "loop", "multi_agent", "rewards"]
"""Pages whose files and commands are typed as printed."""
LONGEST_FILE = 60


class Block(NamedTuple):
    remark: str
    file: str
    """The name of the file that it is the whole of, or empty."""
    language: str
    text: str
    place: str
    """PAGE:LINE"""

    @property
    def is_run(self) -> bool:
        return not self.remark.startswith(("not run: ", "part of "))


def read_blocks(name: str, *languages: str) -> list[Block]:
    """The blocks of a page in order; of all languages where none is named."""
    page = (ROOT / name).read_text(encoding="utf-8")
    blocks = []
    for match in BLOCK.finditer(page):
        line = page.count("\n", 0, match.start("language")) + 1
        fields = {key: value or "" for key, value in match.groupdict().items()}
        blocks.append(Block(**fields, place=f"{name}:{line}"))
    return [block for block in blocks if not languages or block.language in languages]


def pages_with(*languages: str) -> list[str]:
    return [name for name in NAMES if read_blocks(name, *languages)]


def write_files(name: str, folder: Path) -> dict[str, str]:
    """Writes the files that a page prints whole, and returns them."""
    files = {block.file: block.text for block in read_blocks(name) if block.file}
    for file, text in {**NOT_PRINTED, **files}.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    return files


def test_few_blocks_are_not_run():
    blocks = [block for name in NAMES for block in read_blocks(name)]
    unread = [block.language for block in blocks if block.remark.startswith("not run: ")]
    assert Counter(unread) == NOT_RUN


def test_a_block_that_is_part_of_a_file_repeats_its_lines():
    parts = [
        block
        for name in NAMES
        for block in read_blocks(name)
        if block.remark.startswith("part of ")
    ]
    assert parts
    for block in parts:
        file = ROOT / block.remark.removeprefix("part of ")
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        remaining = iter(lines)
        for line in block.text.splitlines():
            assert line.strip() in remaining, f"{block.place}: {file.name} has no line {line!r}"


@pytest.mark.parametrize("name", pages_with("yaml"))
def test_yaml_is_read(name, folder):
    write_files(name, folder)
    for block in read_blocks(name, "yaml"):
        texts = block.text.splitlines() if block.remark == "each line alone" else [block.text]
        for text in texts if block.is_run else []:
            read_as_what_it_is(text, block.place, folder)


def read_as_what_it_is(text: str, place: str, folder: Path) -> None:
    tree = parse_yaml(text)
    if "stages" in tree:
        build_pipeline({"recipe": "coins", **tree}, folder=folder, name="page")
        return

    if "evolve" in tree:
        (folder / "evolve.yaml").write_text(text, encoding="utf-8")
        assert read_evolution(str(folder / "evolve.yaml"), [])
        return

    is_sft = "sft" in tree or "train" in tree.get("data", {})
    config = build_config(
        overlay(make_fitting_recipe(tree), tree),
        where=place,
        folder=folder,
        needs_environment=not is_sft and "rm" not in tree,
    )
    if is_sft:
        check_sft(config)
    if "rm" in tree:
        check_rm(config)


def make_fitting_recipe(tree: dict[str, Any]) -> dict[str, Any]:
    """The recipe that a part of one is laid over."""
    if {"environment", "tasks", "sft", "rm"} & tree.keys():
        return {}
    if tree.get("agent", {}).get("type") == "verifiers":  # brings its tasks
        return {}
    if {"agent", "rewards"} & tree.keys():
        return {"tasks": "tasks.jsonl"}
    return read_yaml(packaged_recipes()["coins"])


class ComesToTraining(BaseException):
    """A block has come to where it trains, with settings that were read and checked."""


@pytest.mark.parametrize("name", pages_with("python"))
def test_python_is_executed_up_to_where_it_trains(name, folder, monkeypatch):
    def stop(*arguments, **options):
        raise ComesToTraining

    monkeypatch.setattr("agentevo.api.run.train", stop)
    monkeypatch.setattr(agentevo, "open_model", stop)
    monkeypatch.setattr("agentevo_evolve.pipeline.run_pipeline", stop)
    write_files(name, folder)
    names = {"__name__": "__main__"}
    for block in read_blocks(name, "python"):
        code = compile(block.text, block.place, "exec")
        check_names_of_ours(block)
        if block.is_run:
            with suppress(ComesToTraining):
                exec(code, names)


def check_names_of_ours(block: Block) -> None:
    """What the block imports from the package, and what it names `agentevo.NAME`, is there."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentevo"):
            module = importlib.import_module(node.module)
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "agentevo":
            module = agentevo
            names = [node.attr]
        else:
            continue

        for name in names:
            assert hasattr(module, name), f"{block.place}: {module.__name__} has no {name}"


def read_commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each `agentevo` command of a block: the line, and the words after `agentevo`."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if "agentevo " not in line:
            continue
        words = shlex.split(line, comments=True)
        for place, word in enumerate(words[:-1]):
            before = words[place - 1] if place else ""
            if re.fullmatch(r"(\S*/)?agentevo", word) and before not in ("install", "--output"):
                after = words[place + 1 :]
                ends = [n for n, text in enumerate(after) if text in ("|", "&&", "&", ">")]
                yield line, after[: ends[0]] if ends else after


@pytest.mark.slow
@pytest.mark.parametrize("name", pages_with(*SHELLS))
def test_commands_are_parsed_and_their_recipes_read(name, folder):
    write_files(name, folder)
    for block in read_blocks(name, *SHELLS):
        for line, words in read_commands(block) if block.is_run else []:
            place = f"{block.place}: {line}"
            try:
                parse(words)
            except Exception as error:
                raise AssertionError(f"{place}\n{error}") from error
            check_recipe(words, place, folder)


def parse(words: list[str]) -> None:
    """As `agentevo WORDS` is parsed, through its groups. Raises for what would be refused."""
    command = cli._command(words[0])
    context = command.make_context("agentevo", list(words))
    while hasattr(command, "resolve_command"):
        remaining = [*context._protected_args, *context.args]
        name, command, remaining = command.resolve_command(context, remaining)
        context = command.make_context(name, remaining, parent=context)


READ_A_RECIPE = ("train", "sft", "learn", "sample", "serve", "doctor", "optimize")
WITH_OPTIONS_OF_THEIR_OWN = ("tools serve", "sandbox")


def check_recipe(words: list[str], place: str, folder: Path) -> None:
    """Reads the recipe of a command with its overrides, where there is one; elsewhere the keys of
    the overrides exist."""
    if "--copy" in words:
        assert cli.main(words) == 0, place
        return

    if words[0] == "launch":
        assert cli.main([*words, "--out", str(folder / "launch")]) == 0, place
        return

    if "agentevo" in words:  # the command of a server, which is read by itself
        words = words[: words.index("agentevo")]
    overrides = [word for word in words if OVERRIDE.fullmatch(word)]
    recipe = next((word for word in words[1:] if not word.startswith("-")), "")
    if words[0] == "pipeline" and recipe in packaged_pipelines():
        assert load_pipeline(recipe, overrides), place
    elif words[0] in READ_A_RECIPE and (recipe in packaged_recipes() or os.path.isfile(recipe)):
        if recipe.endswith(".py"):
            recipe = "coins"
        if words[0] == "sft":
            check_sft(load_config(recipe, overrides, needs_environment=False))
        else:
            assert load_sweep(recipe, overrides) or load_config(recipe, overrides), place
    elif not " ".join(words).startswith(WITH_OPTIONS_OF_THEIR_OWN):
        if words[0] in ("train", "sft", "learn") and recipe != "RECIPE":
            assert recipe.endswith(".yaml"), f"{place}: no recipe {recipe!r}"
        for key in (override.partition("=")[0] for override in overrides):
            if not key.startswith(("evolve.", "remote_models.")):
                config_keys().explain(key)  # raises for a key that does not exist


@pytest.mark.slow
@pytest.mark.parametrize("page", [*TYPED, *soak(*TYPED_IN_SOAK)])
def test_what_the_page_prints_works(page, tmp_path):
    name = f"docs/{page}.md"
    files = write_files(name, tmp_path)
    assert files
    for file, text in files.items():
        assert text.count("\n") <= LONGEST_FILE, file

    lines = [line for block in read_blocks(name, "bash") for line in block.text.splitlines()]
    starts = ("agentevo ", *(f"python {file}" for file in files))
    commands = [line for line in lines if line.startswith(starts)]
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
            timeout=800,  # pytest allows 900 for the page
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
