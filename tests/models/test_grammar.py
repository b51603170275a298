"""Masks of a grammar: what they allow, and that whoever makes them again gets the same."""

from __future__ import annotations

import contextlib
import json
import time

import numpy as np
import pytest
from constrained import CALL, END, FACT, tiny_policy

from agentevo.errors import GrammarError
from agentevo.models.grammar import Grammars, unpack_mask
from agentevo.types import Constraint


def grammars(tokenizer: str = "byte") -> Grammars:
    loaded = tiny_policy(tokenizer)
    return Grammars.of(loaded.model, loaded.tokenizer)


def texts_of(mask, tokenizer) -> set[str]:
    ids = np.flatnonzero(unpack_mask(mask, len(tokenizer))).tolist()
    return {str(tokenizer.decode([token])) for token in ids}


@pytest.mark.parametrize("kind", ["byte", "word"])
def test_a_mask_has_the_tokens_that_a_text_can_go_on_with(kind):
    tokenizer = tiny_policy(kind).tokenizer
    state = grammars(kind).begin(CALL, (END,))
    seen = []
    for token in [*tokenizer.encode("<left,right>", add_special_tokens=False), END]:
        seen.append(texts_of(state.mask(), tokenizer))
        state.take(token)
    assert seen[0] == {"<"}

    words = {"left", "l", "right", "r"} & set(tokenizer.get_vocab())
    assert seen[1] == words
    assert seen[-1] == {"<|end|>"}
    assert {",", ">"} in seen


@pytest.mark.parametrize("vocabulary", [266, 288, 320, 330])
def test_a_model_may_have_more_logits_than_its_tokenizer_has_tokens(vocabulary):
    """Of any number, a multiple of 32 as well: those of no token are never allowed."""
    state = Grammars(tiny_policy().tokenizer, vocabulary).begin(CALL, (END,))
    mask = state.mask()
    assert len(mask) == -(-vocabulary // 32)
    assert np.flatnonzero(unpack_mask(mask, vocabulary)).tolist() == tiny_policy().tokenizer.encode(
        "<"
    )


def test_the_same_masks_again_or_none_at_all():
    tokenizer = tiny_policy().tokenizer
    ids = [*tokenizer.encode('{"n":7,"s":"hot"}', add_special_tokens=False), END]
    one = grammars().begin(FACT, (END,))
    masks = []
    for token in ids:
        masks.append(one.mask())
        one.take(token)

    constraint = Constraint(grammar=FACT, end_ids=(END,), masks=one.digest())
    again = grammars().masks_of(constraint, ids)
    assert len(again.table) < len(ids)
    assert all(
        (again.table[row] == mask).all() for row, mask in zip(again.rows, masks, strict=True)
    )

    other = Constraint(grammar=FACT, end_ids=(END,), masks="0" * 32)
    with pytest.raises(GrammarError, match="same version of llguidance"):
        grammars().masks_of(other, ids)
    with pytest.raises(GrammarError, match="allows no continuation"):
        grammars().masks_of(constraint, [*ids[:3], 200])


HOSTILE = {
    "no schema": {"type": 3},
    "another file": {"$ref": "file:///etc/passwd"},
    "another host": {"$ref": "http://127.0.0.1:9/x.json"},
    "thousands of optional keys": {"properties": {f"p{n}": {} for n in range(2500)}},
    "alternatives": {"anyOf": [{"properties": {f"p{n}": {}}} for n in range(1500)]},
    "a product of patterns": {
        "allOf": [{"type": "string", "pattern": f"^(a|b){{0,{n}}}x"} for n in range(50, 90)]
    },
    "a large number": {"type": "integer", "multipleOf": 7919, "minimum": -(10**15)},
    "long texts": {"type": "string", "minLength": 99_999, "maxLength": 999_999},
    "itself": {"$ref": "#"},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_schema_costs_a_second_at_most(what):
    started = time.process_time()
    with contextlib.suppress(GrammarError):
        state = grammars().begin("start: %json " + json.dumps(HOSTILE[what]), (END,))
        for _ in range(20):
            tokens = np.flatnonzero(unpack_mask(state.mask(), 266))
            state.take(int(tokens[-1]))
    assert time.process_time() - started < 30
