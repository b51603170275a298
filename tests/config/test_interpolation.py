"""`${...}` in recipes and overrides: what it stands for, and how much may come out of it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from slow import slow

from agentevo.cli.main import main
from agentevo.config import build_config, sources, to_tree, to_yaml
from agentevo.config.interpolation import escape_tree, resolve_tree
from agentevo.errors import ConfigError
from agentevo.runtime.parsing import MAX_BYTES, ParseError, parse_yaml

STEPS = 40
"""Doublings: more than any memory holds."""
LIMIT_S = 20.0
"""CPU time of a refusal."""


def chain(link: Callable[[str], Any], last: Any) -> dict[str, Any]:
    """Values each of which stands for the next one twice."""
    return {f"a{step}": link(f"a{step + 1}") for step in range(STEPS)} | {f"a{STEPS}": last}


GROWING = {
    "text": chain(lambda key: f"${{{key}}}${{{key}}}", "x"),
    "nothing": chain(lambda key: f"<${{{key}}}, ${{{key}}}>", ""),
    "within sections": chain(lambda key: {"b": f"${{{key}.b}}${{{key}[b]}}"}, {"b": "xyz"}),
    "key of a key": chain(lambda key: f"${{${{n}}{key}}} ${{${{n}}{key}}}", "x") | {"n": ""},
    "list": chain(lambda key: [f"${{{key}}}", f"${{{key}}}"], []),
    "mapping": chain(lambda key: {"left": f"${{{key}}}", "right": f"${{{key}}}"}, 1),
    "decoded": chain(lambda key: f"${{oc.decode:'[${{{key}}}, ${{{key}}}]'}}", "[x]"),
}


QUICK = ("text", "key of a key")


@pytest.fixture(params=[*QUICK, *slow(*(kind for kind in GROWING if kind not in QUICK))])
def growing(request) -> dict[str, Any]:
    return GROWING[request.param]


def refused_at_once(words: list[str], capsys) -> str:
    started = time.process_time()
    assert main(words) == 2
    assert time.process_time() - started < LIMIT_S
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 400
    return line


def test_what_doubles_at_every_step_is_refused_in_a_recipe(growing, capsys):
    Path("r.yaml").write_text(yaml.safe_dump({"environment": {"type": "test_doors"}, **growing}))
    line = refused_at_once(["train", "r.yaml", "--dry-run"], capsys)
    assert "r.yaml" in line
    assert sorted(path.name for path in Path().iterdir()) == ["r.yaml"]


def test_what_doubles_at_every_step_is_refused_in_overrides(growing, capsys):
    words = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in growing.items()
    ]
    Path("r.yaml").write_text("environment: {type: test_doors}\n")
    assert "override" in refused_at_once(["train", "r.yaml", *words], capsys)


def test_a_section_that_doubles_is_refused_where_an_override_goes_into_it(growing, capsys):
    tree = {"environment": {"type": "test_doors"}, "trainer": "${a0}", **growing}
    Path("r.yaml").write_text(yaml.safe_dump(tree))
    refused_at_once(["train", "r.yaml", "trainer.steps=3"], capsys)


@pytest.mark.slow
def test_variables_of_the_environment_are_counted(monkeypatch, capsys):
    monkeypatch.setenv("LONG", "x" * 100_000)
    Path("r.yaml").write_text(
        f"environment: {{type: test_doors}}\nrun: {{name: '{'${oc.env:LONG}' * 2000}'}}\n"
    )
    refused_at_once(["train", "r.yaml", "--dry-run"], capsys)


def test_a_value_refers_to_itself(capsys):
    Path("r.yaml").write_text("environment: {type: test_doors}\nrun: {name: '${run.name}!'}\n")
    assert "run.name: refers to itself" in refused_at_once(["train", "r.yaml"], capsys)
    for tree in ({"a": "${b}", "b": ["${a}"]}, {"a": {"b": "${a}"}}, {"a": "${..}"}, {"a": "${.}"}):
        with pytest.raises(ValueError, match=r"refers to itself|names no key"):
            resolve_tree(tree)


def test_a_text_of_aliases_is_counted_with_what_they_stand_for():
    text = "x" * (MAX_BYTES // 10)
    assert len(parse_yaml(f"a: &a {text}\nb: [*a, *a, *a]")["b"]) == 3
    with pytest.raises(ParseError, match="characters of text, with those of aliases"):
        parse_yaml(f"a: &a {text}\nb: [{'*a, ' * 20}]")


def test_of_merged_mappings_the_first_one_counts():
    values = parse_yaml("<<: [{b: 1, a: 1}, {b: 2, c: 2}]\nd: 3\n<<: {c: 4, e: 4, d: 4}")
    assert values == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${a.b}", 3),
        ("${ a.b }", 3),
        ("${a[b]}", 3),
        ("${list[1]}", "two"),
        ("${list.1}", "two"),
        ("${list}", [1, "two", 3]),
        ("${a}", {"b": 3, "c": 3}),
        ("${.other}", "next"),
        ("${..a.b}", 3),
        ("x${a.b}y${none}", "x3yNone"),
        ("${a.${word}}", 3),
        ("${section.b}", 3),
        ("\\${a.b}", "${a.b}"),
        ("\\\\${a.b}", "\\3"),
        ("C:\\dir ${a.b}", "C:\\dir 3"),
        ("it's ${a.b}, isn't it}", "it's 3, isn't it}"),
        ("postgresql://me:${env:NAME}@x/${a.b}", "postgresql://me:${env:NAME}@x/3"),
        ("${oc.env:WORD}", "word, with a comma"),
        ("${oc.env:NO_SUCH, none}", "none"),
        ("${oc.env:NO_SUCH,null}", None),
        ("${oc.env:NO_SUCH,'a}b'}", "a}b"),
        ("${oc.env:NO_SUCH,${a.b}}", "3"),
        ("${oc.decode:${oc.env:NUMBER}}", 12),
        ("${oc.decode:{x: [1, 2]}}", {"x": [1, 2]}),
        ("no interpolation \\ at all", "no interpolation \\ at all"),
    ],
)
def test_what_it_stands_for(text, value, monkeypatch):
    monkeypatch.setenv("WORD", "word, with a comma")
    monkeypatch.setenv("NUMBER", "12")
    tree = {
        "a": {"b": 3, "c": "${.b}"},
        "list": [1, "two", "${a.b}"],
        "section": "${a}",
        "none": None,
        "word": "b",
        "here": {"it": text, "other": "next"},
    }
    assert resolve_tree(tree)["here"]["it"] == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${", "without the `}`"),
        ("${a", "without the `}`"),
        ("${}", "names no key"),
        ("${a.nothing}", "'a.nothing' not found"),
        ("${list[3]}", "'list[3]' not found"),
        ("x${list}", "a list or mapping can't be part of a text"),
        ("${...a}", "names no key"),
        ("${oc.env:NO_SUCH}", "'NO_SUCH' not found: set it"),
        ("${oc.env:\ud800}", "not found: set it"),
        ("${oc.decode:[1}", "not valid YAML"),
        ("${oc.select:a}", "`${oc.select:...}` is not known"),
        ("${oc.coerce:this.s,1}", "`${oc.coerce:...}` is not known"),
    ],
)
def test_what_it_can_not_stand_for(text, expected):
    with pytest.raises(ConfigError) as caught:
        sources.merge({"list": [1], "a": {"b": text}}, [], where="r", is_text=lambda key: False)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("r: a.b: ")
    assert expected in line


def test_what_two_keys_share_is_each_ones_own():
    tree = resolve_tree({"a": {"b": [1]}, "c": "${a}", "d": "${a.b}"})
    tree["a"]["b"].append(2)
    assert (tree["c"], tree["d"]) == ({"b": [1]}, [1])


@given(
    st.recursive(
        st.text(alphabet="\\${}a:.env'?", max_size=12),
        lambda part: (
            st.lists(part, max_size=3) | st.dictionaries(st.sampled_from("abc"), part, max_size=3)
        ),
    )
)
def test_an_escaped_tree_is_resolved_to_itself(value):
    if "???" not in str(value):
        tree = {"a": value}
        assert resolve_tree(escape_tree(tree)) == tree


def test_a_text_with_a_dollar_brace_survives_the_folder_of_a_run():
    config = build_config(
        {"environment": {"type": "test_doors"}}, ["agent.system_prompt=Write \\${name} in braces."]
    )
    assert config.agent.system_prompt == "Write ${name} in braces."
    assert build_config(yaml.safe_load(to_yaml(config))) == config
    assert build_config(to_tree(config)) == config
