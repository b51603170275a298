"""Pages in a real Chromium: actions, observations, rewards, and equal pages for equal seeds."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from agentevo.environments.browser import (
    BrowserConfig,
    BrowserEnvironment,
    Grade,
    page_session,
)
from agentevo.errors import EnvironmentFailure

pytestmark = pytest.mark.slow

FORM = """<!doctype html><title>Form</title><body style="margin: 0; font: 14px sans-serif">
<style>body > * { position: absolute; left: 0 }</style>
<input id="name" placeholder="name" style="top: 0; width: 200px; height: 30px">
<button id="ok" style="left: 200px; top: 150px; width: 100px; height: 30px"
  onclick="setTimeout(() => log('sent ' + nameField.value), 100)">Send</button>
<a id="next" href="NEXT" style="top: 100px">next</a>
<span id="twice" ondblclick="log('twice')" style="top: 150px">twice</span>
<button id="hidden" style="display: none">no</button>
<div id="drag" style="top: 200px; width: 40px; height: 40px; background: red"
  onmousedown="this.held = true"></div>
<p id="log" style="top: 250px">empty</p>
<div style="top: 300px; width: 1px; height: 2000px"></div>
<script>
  const nameField = document.querySelector('#name');
  const log = (text) => { document.querySelector('#log').textContent = text; };
  addEventListener('mouseup', (e) => {
    if (drag.held) log('dropped at ' + e.clientX + ' ' + e.clientY);
  });
  addEventListener('keydown', (e) => { if (e.key === 'F2') log('pressed'); });
  addEventListener('scroll', () => { log('scrolled ' + scrollY); });
</script>"""

Open = Callable[..., BrowserEnvironment]


def log_of(environment: BrowserEnvironment) -> str:
    return str(environment.evaluate("document.querySelector('#log').textContent"))


def place_of(observation: str, name: str) -> str:
    """The id of the element with this name in an accessibility tree."""
    line = next(line for line in observation.splitlines() if f'"{name}"' in line)
    return line.partition("[ref=")[2].partition("]")[0]


def test_every_action(open_page: Open, site: Any) -> None:
    site.pages["/next"] = "<title>Next</title><h1>Another page</h1>"
    environment = open_page(FORM.replace("NEXT", "/next"), max_actions=100)
    observation, info = environment.reset(seed=1)
    assert info["valid"]
    assert 'button "Send"' in observation
    assert "box=" not in observation

    def play(action: str) -> str:
        seen, reward, terminated, truncated, info = environment.step(action)
        assert info["valid"], info["problem"]
        assert reward == 0
        assert not (terminated or truncated)
        return str(seen)

    assert "Ann" in play('type #name "Ann"')
    play(f"click {place_of(observation, 'Send')}")
    assert log_of(environment) == "sent Ann"
    play('{"action": "type", "selector": "#name", "text": "Bob", "clear": true}')
    play("click 625 550")  # a point of the button
    assert log_of(environment) == "sent Bob"
    play("double_click #twice")
    assert log_of(environment) == "twice"
    play("drag 50 733 500 500")
    assert log_of(environment) == "dropped at 200 150"
    play("press F2")
    assert log_of(environment) == "pressed"
    assert "Another page" in play("click #next")
    assert 'button "Send"' in play("back")
    assert "Another page" in play("navigate /next")
    play("back")
    play("scroll 0 1000")
    assert log_of(environment) == "scrolled 300"
    before = environment.evaluate("Date.now()", "page")
    play("wait 5000")
    assert environment.evaluate("Date.now()", "page") - before == 5000 + 200

    _, reward, terminated, _, info = environment.step("done")
    assert (reward, terminated, info["success"]) == (0, True, False)
    assert info["num_actions"] == 14


def test_impossible_actions_are_invalid(open_page: Open) -> None:
    environment = open_page(FORM, max_actions=100)
    for action, reason in [
        ("jump", "is not one of"),
        ("click e99", "e99"),
        ("click #nothing", "there is no element #nothing"),
        ("click #hidden", "is not visible"),
        ("click ]]", "]]"),
        ("press NoSuchKey", "NoSuchKey"),
        ("navigate file:///etc/passwd", "not allowed"),
        ("navigate http://example.com/", "not allowed"),
        ("navigate chrome://version", "not allowed"),
        ("navigate javascript:alert(1)", "not allowed"),
        ("navigate data:text/html,<p>Bought</p>", "not allowed"),
        ("navigate http://[", "not allowed"),
        ("back", "no earlier page"),
    ]:
        observation, reward, terminated, truncated, info = environment.step(action)
        assert not info["valid"], action
        assert reason in info["problem"], action
        assert reason in observation, action
        assert not info["effective"], action
        assert (reward, terminated, truncated) == (0, False, False)
        assert 'button "Send"' in observation


RANDOM_PAGE = """<body><canvas id="c" width="300" height="200"></canvas><p id="t"></p>
<input autofocus><style>
  @keyframes go { to { margin-left: 99px } }
  p { animation: go 1s infinite }
</style>
<script>
  const pen = c.getContext("2d");
  const draw = (time) => {
    pen.fillStyle = `hsl(${Math.random() * 360}, 80%, 50%)`;
    pen.fillRect(Math.random() * 300, Math.random() * 200, 20, 20);
    t.textContent = `${time} ${new Date()} ${performance.now()} ${crypto.randomUUID()}`;
    requestAnimationFrame(draw);
  };
  requestAnimationFrame(draw);
</script>"""


def test_equal_seeds_give_equal_bytes(open_page: Open) -> None:
    def pictures(seed: int) -> list[bytes]:
        environment = open_page(RANDOM_PAGE, observation="screenshot", reset=False)
        observations = [environment.reset(seed=seed)[0]]
        for action in ("click 500 900", "wait 1000", "press Tab", 'type "x"'):
            observations.append(environment.step(action)[0])
        for observation in observations:
            assert observation["obs_str"].count("<image>") == 1
        return [seen["multi_modal_data"]["<image>"][0] for seen in observations]

    first = pictures(1)
    same = pictures(1)
    different = pictures(2)

    assert first == same
    assert first[0] != different[0]
    assert len(set(first)) == len(first)
    assert Image.open(io.BytesIO(first[0])).size == (400, 300)


def test_observations(open_page: Open) -> None:
    html = "<title>T</title><button>Go &lt;image&gt;</button>" + "<p>word</p>" * 500
    options = {"task_instruction": "Do it.", "max_text": 300}

    text = open_page(html, observation="text", reset=False, **options).reset(seed=1)[0]
    assert text.startswith("Task: Do it.\nURL: http://127.0.0.1:")
    assert "Go (image)" in text
    assert text.endswith("... (the rest of the page is not shown)")
    assert len(text) < 500

    both = open_page(html, observation="both", reset=False, **options).reset(seed=1)[0]
    assert "button" in both["obs_str"]
    assert both["obs_str"].count("<image>") == 1

    plain = open_page(html, observation="screenshot", reset=False).reset(seed=1)[0]
    marked = open_page(html, observation="screenshot", marks=True, reset=False).reset(seed=1)[0]
    assert "button" not in marked["obs_str"]
    assert plain["multi_modal_data"] != marked["multi_modal_data"]


STEPS = """<button onclick="count()">more</button><p id="out"></p><script>
  let n = 0;
  const count = () => {
    n++;
    out.textContent = 'clicks: ' + n;
    history.pushState({}, '', '?n=' + n);
  };
</script>"""


def test_rules_about_the_page(open_page: Open) -> None:
    rules = [
        {"type": "text", "contains": "clicks: 2"},
        {"type": "element", "selector": "#out", "text": "CLICKS", "weight": 2},
        {"type": "element", "selector": ".wrong", "absent": True},
        {"type": "url", "matches": r"n=2$"},
        {"type": "javascript", "expression": "n === 2", "world": "page"},
        {"type": "javascript", "expression": "typeof n === 'undefined'"},
        {"type": "point_in_box", "selector": "button"},
    ]
    environment = open_page(STEPS, reward=rules)
    _, reward, terminated, _, info = environment.step("click button")
    assert (reward, terminated, info["success"]) == (0, False, False)
    _, reward, terminated, _, info = environment.step("click button")
    assert (reward, terminated, info["success"]) == (1, True, True)

    environment.reset(seed=1)
    environment.step("click button")
    _, reward, terminated, _, info = environment.step("done")
    assert reward == pytest.approx(5 / 8)
    assert (terminated, info["success"]) == (True, False)


def test_rewards_at_done_only(open_page: Open) -> None:
    rule = {"type": "point_in_box", "box": [400, 400, 600, 600]}
    environment = open_page(STEPS, reward=rule, reward_at="done", max_actions=2)

    assert environment.step("click 500 500")[1:4] == (0, False, False)
    _, reward, terminated, _, info = environment.step("done")
    assert (reward, terminated, info["success"]) == (1, True, True)

    environment.reset(seed=1)
    environment.step("click 500 500")
    assert environment.step("click 700 500")[1:4] == (0, False, True)


TALL = """<div style="height: 2000px"></div>
<button id="low" style="position: absolute; left: 0; top: 1900px">Low</button>
<button id="red" style="position: absolute; left: 0; top: 0" onclick="this.remove()">Red</button>
<button id="late" style="position: absolute; left: 0; top: 250px">Late</button>
<script>setTimeout(() => document.querySelector("#late").style.top = 0, 1000)</script>"""


def test_a_box_is_that_of_the_click(open_page: Open) -> None:
    """It is neither the one before the page scrolled to the element, nor that of a later action."""
    low = open_page(TALL, reward={"type": "point_in_box", "selector": "#low"})
    assert low.step("click #low")[1:3] == (1, True)

    red = open_page(
        TALL, reward={"type": "point_in_box", "selector": "#red"}, reward_at="done", max_actions=2
    )
    red.step("click #red")
    assert red.step("done")[1:3] == (1, True)  # the click has removed the button

    late = open_page(TALL, reward={"type": "point_in_box", "selector": "#late"}, max_actions=3)
    late.step("click #red")
    assert late.step("wait 2000")[1:3] == (0, False)  # it moves under the click
    assert late.step("click #late")[1:3] == (1, True)


def test_a_box_is_found_however_slow_the_machine(open_page: Open, monkeypatch: Any) -> None:
    monkeypatch.setattr(page_session, "ELEMENT_MS", 1)
    page = open_page(TALL, reward={"type": "point_in_box", "selector": "#red"})
    assert page.step("click 10 10")[1:3] == (1, True)


def test_a_broken_selector_of_a_rule_fails_the_attempt(open_page: Open) -> None:
    page = open_page(TALL, reward={"type": "point_in_box", "selector": "#red["})
    with pytest.raises(EnvironmentFailure, match="the box of an element can't be found"):
        page.step("click 500 500")


class Counting(BrowserEnvironment):
    """A user's own rewards."""

    async def grade(self, is_done: bool) -> Grade:
        clicks = await self.session.evaluate("n", "page")
        return Grade(reward=0.5, success=clicks == 2, is_over=clicks == 2)

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


def test_a_subclass_has_its_own_rewards(open_page: Open) -> None:
    config = open_page(STEPS, reset=False).config
    assert isinstance(config, BrowserConfig)
    environment = Counting(config)
    environment.reset(seed=1)

    assert environment.step("click button")[1:3] == (0.5, False)
    assert environment.step("click button")[1:3] == (0.5, True)
    assert environment.evaluate("n", "page") == 2  # the page is open until the next reset
    environment.close()
