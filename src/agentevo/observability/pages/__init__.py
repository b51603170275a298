"""HTML of runs: templates, style, JavaScript, and pure functions from plain data to HTML.

This package opens no file of a run, store or socket. The dashboard (`ui/`) serves these pages;
a report is one file with the same components inside (`static_page.py`).

Invariants. Everything from a run is text: templates escape everything, and the texts of models,
environments and users go through `shown` first. No page of the dashboard has inline style or
script, so a policy of `default-src 'self'` holds; a page makes requests only to the server that
sent it, and a page that is a file makes none.
"""

from agentevo.observability.pages.rendering import render
from agentevo.observability.pages.text import shown

__all__ = ["render", "shown"]
