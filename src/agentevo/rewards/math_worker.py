"""The process that compares mathematical answers with the package math-verify, for math_answer.py.

A policy's text can keep sympy busy forever or fill the memory, in code that a thread can't
interrupt. So the comparison runs in this process (json_worker.py). A request is {"right": [...],
"stated": TEXT}, and the answer is {"equal": true} or {"problem": ...}.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from importlib import import_module
from typing import Any

from agentevo.rewards.numerals import (
    CODE,
    EUROPEAN_MILLIONS,
    SCALE,
    power_of_ten,
    write_european,
    write_plainly,
)
from agentevo.runtime.json_worker import serve_requests

MAX_MEMORY = 4 * 2**30
"""The limit of the process's address space, in bytes."""
_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed|\\fbox|\\begin")
_TEX_WORDS = re.compile(r"\\(?:text|mathrm|mathbf|operatorname)\s{0,3}\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_MIXED = re.compile(r"(?<![\w.,}])(\d{1,9})[ \t]{1,3}(\d{1,9}/\d{1,9})(?![\w.])")
_CURRENCY = re.compile(r"(?<!\\)\\\$|[\u20ac\u00a3\u00a5]")
_POWER_OF_TEN = re.compile(r"(?<![\w.,}])(\d{1,400}(?:\.\d{0,400})?)[eE]([-+]?\d{1,3})(?!\w)")
_EUROPEAN_MILLIONS = re.compile(rf"(?<![\w.,]){EUROPEAN_MILLIONS}(?![.,]?\d)")
_CODE = re.compile(rf"(?<![\w.]){CODE}")
_SCALED = re.compile(
    rf"(?<![\w.,/])(?P<number>\d{{1,400}}(?:\.\d{{1,400}})?)(?P<close>\$?)(?P<scale>{SCALE})"
    rf"(?![ \t]{{0,3}}\d)|(?<=[\d)}}]){SCALE}"
)


def main() -> None:
    """Answers requests until there are no more."""
    logging.disable(logging.WARNING)
    serve_requests(answer_to, prepare=lambda: import_module("math_verify"), max_memory=MAX_MEMORY)


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Compares a stated answer with the right answers, which must all be mathematics."""
    from math_verify import verify

    try:
        stated = _parse(request["stated"])
        for right in request["right"]:
            parsed = _parse(right)
            if not parsed:
                return {"problem": f"the right answer is not mathematics: {right[:200]!r}"}
            if stated and verify(parsed, stated, timeout_seconds=None, raise_on_error=True):
                return {"equal": True}
    except Exception as error:  # noqa: BLE001 (sympy can raise anything)
        return {"problem": f"{type(error).__name__}: {str(error)[:300]}"}

    return {"equal": False}


def _parse(text: str) -> list[Any]:
    """The expressions in a text, without signs of currencies. Empty if it has no mathematics. LaTeX
    needs no dollar signs if the text contains nothing else."""
    from math_verify import parse

    text = _MIXED.sub(r"(\1+\2)", write_plainly(_CURRENCY.sub("", text)))
    text = _POWER_OF_TEN.sub(r"\1 \\cdot 10^{\2}", text)
    text = _CODE.sub(lambda code: str(int(code[0], 0)), text)
    text = _EUROPEAN_MILLIONS.sub(lambda digits: write_european(digits[0]), text)
    text = _SCALED.sub(_write_scaled, text)
    if not _DELIMITED.search(text) and not _WORD.search(_TEX_WORDS.sub(" ", text)):
        as_formula: list[Any] = parse(f"${text}$", parsing_timeout=None)
        if as_formula:
            return as_formula

    within: list[Any] = parse(text, parsing_timeout=None)
    return within


def _write_scaled(scaled: re.Match[str]) -> str:
    """A number and the words of its scale as a number; the words after an expression as a power of
    ten."""
    if scaled["number"] is None:
        return rf" \cdot 10^{{{power_of_ten(scaled[0])}}}"
    return f"{Decimal(scaled['number']).scaleb(power_of_ten(scaled['scale'])):f}{scaled['close']}"


if __name__ == "__main__":
    main()
