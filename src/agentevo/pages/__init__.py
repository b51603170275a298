"""HTML of runs: templates, style, our own JavaScript, and pure functions from plain data to HTML.

Nothing here opens a file of a run, a store or a socket. The dashboard (`ui/`) serves these pages;
a report is one file with the same components inside (`still.py`).

Invariants. Whatever comes from a run is text: templates escape everything, and what a model, an
environment or a user wrote goes through `shown` first. No page of the dashboard has inline style or
script, so a policy of `default-src 'self'` holds; a page asks for nothing beyond the server that
sent it, and one that is a file for nothing at all.
"""

from agentevo.pages.rendering import render
from agentevo.pages.text import shown

__all__ = ["render", "shown"]
