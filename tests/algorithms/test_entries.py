"""Every entry fits its function, whatever its kind."""

from __future__ import annotations

import inspect

import pytest

from agentevo.algorithms.entries import FUNCTION, AlgorithmEntry, EntryTable, Hyperparameter
from agentevo.algorithms.presets import TABLES

ENTRIES = [
    pytest.param(table, entry, id=f"{key}={entry.name}")
    for key, table in TABLES.items()
    for entry in table.values()
]


@pytest.mark.parametrize(("table", "entry"), ENTRIES)
def test_a_function_takes_its_inputs_and_the_hyper_parameters_of_its_entry(table, entry):
    parameters = inspect.signature(entry.function).parameters.values()
    keywords = [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    inputs = {*entry.needs, *entry.optional} if table is TABLES["preference_loss"] else set()
    users = {"function"} if entry.name == FUNCTION else set()
    assert {one.name for one in keywords} == inputs | users | entry.hyper_names
    assert {one.name for one in keywords if one.default is not one.empty} <= {
        *getattr(entry, "optional", ())
    }, "only entries hold defaults"


@pytest.mark.parametrize(("table", "entry"), ENTRIES)
def test_an_entry_says_what_it_is_and_its_defaults_are_in_their_ranges(table, entry):
    assert entry.meaning and entry.formula and entry.source
    required = {
        hyper.name: max(hyper.low, 0.0) + 1.0 for hyper in entry.hyper if hyper.default is None
    }
    assert set(table.resolve(entry.name, required)) == entry.hyper_names
    table.resolve(entry.name, table.resolve(entry.name, required))


def test_a_name_is_that_of_one_entry():
    table = EntryTable("kl", AlgorithmEntry)

    @table.entry(
        meaning="twice the log-ratio",
        formula="f d",
        source="none",
        hyper=(Hyperparameter("factor", 2.0, "f", low=0.0),),
    )
    def twice(d, *, factor):
        return factor * d

    assert table["twice"].function(1.0, **table.resolve("twice", {})) == 2.0
    with pytest.raises(ValueError, match="two entries of the kind kl have the name 'twice'"):
        table.entry(meaning="", formula="", source="")(twice)
    with pytest.raises(ValueError, match="kl twice has no hyper-parameter 'facto': did you mean"):
        table.resolve("twice", {"facto": 1.0})
