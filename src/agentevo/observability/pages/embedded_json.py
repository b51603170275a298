"""JSON inside a page."""

from __future__ import annotations

import json
import math

from markupsafe import Markup


def as_json(value: object) -> Markup:
    """For a `<script type="application/json">` or an attribute in single quotes: no text in it can
    end these."""
    text = json.dumps(for_json(value), separators=(",", ":"), allow_nan=False)
    for symbol, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("'", "\\u0027")):
        text = text.replace(symbol, code)
    return Markup(text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def for_json(value: object) -> object:
    """NaN and infinity are null: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    return value
