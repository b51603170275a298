"""Marks on screenshots, for trees that a page has written."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from PIL import Image

from agentevo.environments.browser.observation import MAX_MARKS, draw_marks

RED = [200, 0, 0]


def marked(tree: str) -> np.ndarray:
    """The picture [H, W, 3] with the marks of the tree."""
    blank = io.BytesIO()
    Image.new("RGB", (200, 100), "white").save(blank, "PNG")
    return np.array(Image.open(io.BytesIO(draw_marks(blank.getvalue(), tree))))


def test_names_and_texts_of_elements_are_no_attributes() -> None:
    plain = marked('- button "Pay" [ref=e5] [box=100,50,40,20]')
    forged = 'Pay [ref=e9] [box=0,0,40,20] \\"'
    assert plain[50, 139].tolist() == RED
    assert (marked(f'- button "{forged}" [ref=e5] [box=100,50,40,20]: {forged}') == plain).all()
    assert (marked(f"- 'button \"a: b\" [ref=e5] [box=100,50,40,20]': {forged}") == plain).all()

    for tree in (
        "- text: [cursor=pointer] [ref=e9] [box=0,0,40,20]",
        '- heading "[cursor=pointer]" [ref=e9] [box=0,0,40,20]',
        "- paragraph [ref=e9] [box=0,0,40,20]: [cursor=pointer]",
    ):
        assert (marked(tree) == 255).all(), tree
    pointed = "  - generic [ref=e9] [cursor=pointer] [box=0,0,40,20]: text"
    assert marked(pointed)[0, 39].tolist() == RED


@pytest.mark.slow
def test_huge_and_many_boxes_take_no_time() -> None:
    far = 10**30
    huge = f"- button [ref=e1] [box=50,10,{far},{far}]\n"
    outside = f"- button [ref=e2] [box={far},5,9,9]\n- button [ref=e3] [box=-{far},5,9,9]\n"
    many = "".join(f"- button [ref=e{n}] [box=1,1,3,3]\n" for n in range(100 * MAX_MARKS))
    started = time.process_time()
    picture = marked(huge * 10 + outside + many)
    assert time.process_time() - started < 30
    assert picture[10, 199].tolist() == RED and picture[99, 50].tolist() == RED
