"""What the pages name exists: links, files, configuration keys, calls."""

import re
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml

import agentevo
from agentevo.algorithms.presets import PRESETS
from agentevo.config import config_keys, load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("recipes/*/README.md"),
        *ROOT.glob("src/agentevo/config/*.md"),
    ]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|json|txt|css))(?:::?\w+)?`")
BASH_COMMENT = re.compile(r"(?:^|\s+)#.*")
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(=[^`]*)?`")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(page):
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    kept = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in kept}


def blocks(name):
    """The fenced blocks of a page, as [language, line, line, ...], without what a translation may
    change: comments in bash."""
    return [
        [language, *(as_compared(line, language) for line in text.splitlines())]
        for language, text in FENCE.findall(read(name))
    ]


def as_compared(line, language):
    return (BASH_COMMENT.sub("", line) if language == "bash" else line).rstrip()


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("_zh.md", ".zh.md"))])
def test_a_translation_has_the_blocks_of_its_page(name):
    pairs = zip_longest(blocks(re.sub(r"[._]zh\.md$", ".md", name)), blocks(name))
    for number, (block, translated) in enumerate(pairs, start=1):
        assert translated == block, f"{name}: block {number} differs from the English page's"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for target, anchor in LINK.findall(FENCE.sub("", read(name))):
        file = (page.parent / target) if target else page
        assert file.exists(), f"{name}: {target} does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name}: {target} has no heading #{anchor}"


@pytest.mark.parametrize("name", [name for name in NAMES if "lab-notebook" not in name])
def test_named_files_exist(name):
    """A file may be named from the root, from the package, or from beside the page."""
    for path in FILE.findall(read(name)):
        if re.search(r"NAME|RUN|STEP", path) or path.startswith(
            ("runs/", "checkpoints/", "profile/")
        ):
            continue
        places = (ROOT, ROOT / "src", ROOT / "src" / "agentevo", (ROOT / name).parent)
        assert any((place / path).is_file() for place in places), f"{name}: {path} does not exist"


def keys_here(text):
    """Our keys in a text of a page, as (key, `=value` or nothing)."""
    for key, value in KEY.findall(text):
        if not key.startswith(("agentevo.", "policy.")) and not key.endswith((".jsonl", ".html")):
            yield key, value


@pytest.mark.slow
def test_the_keys_that_peers_settings_become_exist():
    page = "src/agentevo/config/peer_keys.md"
    rows = [line.rstrip("| ").rpartition("|")[2] for line in table_rows("docs/coming_from.md")]
    rows += [line.split("|")[2] for line in table_rows(page)]
    known = config_keys()
    num_keys = 0
    for row in rows:
        keys = list(keys_here(row))
        num_keys += len(keys)
        for key, _ in keys:
            known.explain(key)  # raises for a key that does not exist

        values = [(key, value) for key, value in keys if value]
        is_ambiguous = len({key for key, _ in values}) < len(values)
        for order in (values, values[::-1])[: 1 + is_ambiguous]:  # of two values the last counts
            if order:
                load_config("coins", [key + value for key, value in order])

    assert num_keys > 300


def table_rows(name):
    return [line for line in read(name).splitlines() if line.startswith("| ")]


def test_the_calls_from_the_command_to_the_loss_are_there():
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([^`]+)` \|", read("docs/design.md"), re.MULTILINE)
    assert len(rows) == 6
    for file, call in rows:
        code = (ROOT / "src" / "agentevo" / file).read_text(encoding="utf-8")
        assert call in code, f"docs/design.md: {file} has no {call}"


def test_a_token_has_at_most_ten_forms_from_the_engine_to_the_loss():
    """The table lists them; what makes each of them is where it says."""
    forms = re.findall(r"^\| \d+ \|.*\| `(\w+)` \| `([\w/]+\.py)` \|", read("docs/design.md"), re.M)
    assert 8 <= len(forms) <= 10
    for maker, file in forms:
        code = (ROOT / "src" / "agentevo" / file).read_text(encoding="utf-8")
        assert re.search(rf"(class|def) {maker}\b", code), f"docs/design.md: {file} has no {maker}"


def test_citation_and_changelog_are_of_this_version():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == agentevo.__version__
    assert f"\n## {agentevo.__version__}" in read("CHANGELOG.md")
    assert f"agentevo-{agentevo.__version__}-py3-none-any.whl" in read("README.md")


@pytest.mark.parametrize("name", ["README.md", "README_zh.md", "docs/index.md", "docs/index.zh.md"])
def test_the_number_of_algorithms_is_that_of_the_presets(name):
    counts = re.findall(r"(\d+) (?:algorithms|种)", read(name))
    assert counts and set(counts) == {str(len(PRESETS))}
