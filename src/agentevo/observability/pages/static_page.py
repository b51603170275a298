"""A page that is one file: style, scripts and pictures are inside, and it makes no request.

Its content security policy names the digests of these scripts and this style, so texts in the page
can't add a script or a style.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from agentevo.observability.pages import assets
from agentevo.observability.pages.rendering import render

STYLES = ("agentevo.css", "attempts.css", "still.css")
CHARTS = (assets.UPLOT, "charts.js")
"""The scripts that charts need."""
SCRIPTS = ("still.js", "agentevo.js", "tokens.js")
"""Those of every page."""


def render_still(template: str, *, scripts: Sequence[str] = (), **data: Any) -> str:
    """The HTML of `templates/TEMPLATE`, which extends still_layout.html."""
    style = assets.inline_style(*STYLES)
    script = assets.inline_script(*SCRIPTS, *scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script)}'; form-action 'none'; base-uri 'none'"
    )
    page = render(
        template, policy=policy, style=Markup(style), script=Markup(script), is_still=True, **data
    )
    return page.encode("utf-8", "replace").decode()  # half a character in a name becomes `?`


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
