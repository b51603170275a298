"""Ids in an answer of the gateway: no two answers have the same."""

from __future__ import annotations

import re


def ids_in(answer: str) -> list[str]:
    """In order, each once."""
    ids = re.findall(r'"((?:chatcmpl|resp|fc|msg|rs|call|toolu)[-_][0-9a-f]{12,}\w*)"', answer)
    return list(dict.fromkeys(ids))
