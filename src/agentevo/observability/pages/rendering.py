"""Renders templates: everything is escaped, and a name that a page does not give is an error."""

from __future__ import annotations

from functools import cache
from typing import Any
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup, escape

from agentevo.observability.pages import assets, intervals, navigation, words
from agentevo.observability.pages.embedded_json import as_json
from agentevo.observability.pages.text import LIMIT, one_line, shown, without_folders


def mark_code(value: object, limit: int = LIMIT) -> Markup:
    """`shown` as escaped HTML, in which the text between two backticks is code. A backtick without
    its pair is unchanged."""
    pieces = shown(value, limit).split("`")
    if len(pieces) % 2 == 0:
        pieces[-2:] = ["`".join(pieces[-2:])]
    return Markup().join(
        Markup("<code>{}</code>").format(piece) if number % 2 else escape(piece)
        for number, piece in enumerate(pieces)
    )


FILTERS = {
    "shown": shown,
    "marked": mark_code,
    "one_line": one_line,
    "without_folders": without_folders,
    "number": words.number,
    "chance": words.chance,
    "percent": words.percent,
    "count": words.count,
    "duration": words.duration,
    "ago": words.ago,
    "moment": words.moment,
    "share_interval": intervals.share_interval,
    "number_interval": intervals.number_interval,
    "points": intervals.points,
    "sparkline": words.sparkline,
    "token_words": words.token_words,
}
"""The filters of templates; all but `marked` give plain text."""


@cache
def environment() -> jinja2.Environment:
    """The one environment of all templates."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("agentevo.observability.pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    templates.filters.update(FILTERS)
    templates.globals.update(
        asset=assets.url,
        query=urlencode,
        run_url=navigation.run_url,
        scale=intervals.scale,
        interval_scale=intervals.interval_scale,
        json=as_json,
    )

    return templates


def compile_templates() -> None:
    """Compiles all templates. Otherwise the first page with a template compiles it."""
    templates = environment()
    for name in templates.list_templates(extensions=["html"]):
        templates.get_template(name)


def render(template: str, **data: Any) -> str:
    """The HTML of `templates/TEMPLATE` with these values."""
    return environment().get_template(template).render(**data)
