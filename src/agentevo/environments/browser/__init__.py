"""Pages in a browser as environments (`agentevo[browser]`): any URL, and MiniWoB++.

Importing this package imports neither Playwright nor Pillow.
"""

from __future__ import annotations

from agentevo.environments.browser.environment import (
    BrowserConfig,
    BrowserEnvironment,
    Grade,
    PageConfig,
    PageEnvironment,
)
from agentevo.environments.browser.miniwob import MiniWobConfig, MiniWobEnvironment
from agentevo.environments.browser.process import close_browsers

__all__ = [
    "BrowserConfig",
    "BrowserEnvironment",
    "Grade",
    "MiniWobConfig",
    "MiniWobEnvironment",
    "PageConfig",
    "PageEnvironment",
    "close_browsers",
]
