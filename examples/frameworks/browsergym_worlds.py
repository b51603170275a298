"""What an agent reads of a page of BrowserGym, for the recipe browsergym.yaml.

An observation of BrowserGym has the page as objects. `Readable` writes the accessibility tree as
text, marks an action that failed as invalid, and gives the random player the elements that it can
click. BrowserGym has one Playwright, which works on one thread only; AgentEvo plays each attempt on
a thread of its own, so each thread gets its own Playwright.
"""

import os
import re
import shutil
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import browsergym.miniwob  # noqa: F401 (registers browsergym/miniwob.TASK)
import gymnasium
from browsergym.core import chat, env
from browsergym.utils.obs import IGNORED_AXTREE_ROLES, flatten_axtree_to_str
from gymnasium import spaces
from playwright.sync_api import sync_playwright

os.environ.setdefault(
    "MINIWOB_URL", f"{(Path(find_spec('miniwob').origin).parent / 'html/miniwob').as_uri()}/"
)
CLICKABLE = re.compile(r"\[(\w+)\] (?:button|checkbox|link|option|radio|tab|textbox)\b")
IGNORED = (*IGNORED_AXTREE_ROLES, "InlineTextBox")  # newer Chromiums repeat each text by it
threads = threading.local()


def own_playwright():
    """The Playwright of this thread."""
    if not hasattr(threads, "playwright"):
        threads.playwright = sync_playwright().start()
        chromium = threads.playwright.chromium
        if path := shutil.which("chromium"):  # in place of Playwright's download
            chromium.launch = partial(chromium.launch, executable_path=path)
    return threads.playwright


env._get_global_playwright = chat._get_global_playwright = own_playwright


class Calls(spaces.Text):
    """Any call of BrowserGym's, such as click('12')."""

    def __init__(self):
        super().__init__(10_000)
        self.elements = ["0"]

    def contains(self, x):
        return isinstance(x, str)

    def sample(self, mask=None, probability=None):
        return f"click('{self.np_random.choice(self.elements)}')"


class Readable(gymnasium.Wrapper):
    def __init__(self, world):
        super().__init__(world)
        self.observation_space = spaces.Dict(
            {**world.observation_space.spaces, "tree": world.observation_space["goal"]}
        )
        self.action_space = Calls()

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=None if seed is None else seed % 2**32)
        return self.read(observation), info

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        info["valid"] = not observation["last_action_error"]
        return self.read(observation), reward, terminated, truncated, info

    def read(self, observation):
        tree = flatten_axtree_to_str(
            observation["axtree_object"],
            observation["extra_element_properties"],
            ignored_roles=IGNORED,
        )
        self.action_space.elements = CLICKABLE.findall(tree) or ["0"]
        return {**observation, "tree": tree}

    def close(self):
        super().close()
        if playwright := threads.__dict__.pop("playwright", None):
            playwright.stop()


def make_readable(make, **options):
    return Readable(make(**options))


for spec in gymnasium.registry.values():
    if spec.namespace == "browsergym":
        spec.entry_point = partial(make_readable, spec.entry_point)
