"""Chromium that Selenium starts: pages are those of Playwright, and other hosts are closed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from browser_site import DEADLINE_S, Site, browser_processes, kill_browser, wait_for_no_process

from agentevo.config import build_config
from agentevo.environments.browser import BrowserConfig, BrowserEnvironment, close_browsers
from agentevo.environments.browser.process import PREFIX
from agentevo.environments.browser.selenium_browser import SeleniumBrowser, devtools_address
from agentevo.errors import ConfigError, EnvironmentFailure

Open = Callable[..., BrowserEnvironment]
GOOD = "<button onclick=\"this.textContent = 'thanks'\">go</button>"
RANDOM_PAGE = """<canvas id="c" width="300" height="200"></canvas><p id="t"></p><script>
  const pen = c.getContext("2d");
  const draw = (time) => {
    pen.fillStyle = `hsl(${Math.random() * 360}, 80%, 50%)`;
    pen.fillRect(Math.random() * 300, Math.random() * 200, 20, 20);
    t.textContent = `${time} ${new Date()} ${crypto.randomUUID()}`;
    requestAnimationFrame(draw);
  };
  requestAnimationFrame(draw);
</script>"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": "http://grid:4444"}, "grid needs driver: selenium"),
        ({"driver": "selenium", "grid": "http://g", "downloads": True}, "leave downloads or grid"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    environment = {"type": "browser", "url": "http://127.0.0.1/", **options}
    with pytest.raises(ConfigError, match=message):
        build_config({"environment": environment, "agent": {"step_timeout_s": 120}}, ())


def test_a_grid_has_no_files_of_this_machine(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(GOOD)
    config = BrowserConfig(url=page.as_uri(), driver="selenium", grid="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="is a file, which nodes of a grid can't read"):
        BrowserEnvironment(config)


@pytest.mark.parametrize(
    ("capabilities", "address"),
    [
        ({"goog:chromeOptions": {"debuggerAddress": "localhost:9"}}, "http://localhost:9"),
        ({"ms:edgeOptions": {"debuggerAddress": "localhost:9"}}, "http://localhost:9"),
        (
            {"se:cdp": "ws://g/cdp", "goog:chromeOptions": {"debuggerAddress": "localhost:9"}},
            "ws://g/cdp",
        ),
    ],
)
def test_where_playwright_joins(capabilities: dict[str, Any], address: str) -> None:
    driver: Any = SimpleNamespace(capabilities=capabilities)
    assert devtools_address(driver) == address


def test_firefox_is_refused() -> None:
    driver: Any = SimpleNamespace(capabilities={"browserName": "firefox"})
    with pytest.raises(EnvironmentFailure, match="'firefox' has no DevTools protocol"):
        devtools_address(driver)


@pytest.fixture
def open_selenium(open_page: Open) -> Open:
    """As `open_page`, with Selenium."""
    pytest.importorskip("selenium", reason="pip install 'agentevo[selenium]'")
    if shutil.which("chromedriver") is None:
        pytest.skip("there is no chromedriver: apt-get install chromium-driver")

    def open_one(html: str, **options: Any) -> BrowserEnvironment:
        return open_page(html, driver="selenium", **options)

    return open_one


@pytest.mark.slow
def test_pages_are_those_of_playwright(open_page: Open, open_selenium: Open) -> None:
    def pictures(open_one: Open) -> list[Any]:
        environment = open_one(RANDOM_PAGE, observation="both", reset=False)
        seen = [environment.reset(seed=1)[0]]
        seen += [environment.step(action)[0] for action in ("click 500 900", "wait 1000")]
        environment.close()
        return seen

    assert pictures(open_selenium) == pictures(open_selenium) == pictures(open_page)


@pytest.mark.slow
def test_other_hosts_and_what_a_page_opens_are_closed(open_selenium: Open, site: Site) -> None:
    other = f"http://localhost:{site.server_address[1]}"  # the same server by another name
    site.pages["/secret"] = "<h1>Secret</h1>"
    site.pages["/other"] = "<h1>Other</h1>"
    html = f"""<h1>Home</h1><img src="{other}/pixel">
    <a id="hop" href="/redirect?{other}/secret">hop</a>
    <a id="pop" target="_blank" href="/other">pop</a> <a id="get" href="/download">get</a>
    <button onclick="out.textContent = confirm('sure?')">ask</button><p id="out"></p>
    <script>
      const hop = location.origin + "/redirect?{other}/worker";
      const work = new Blob([`fetch("${{hop}}", {{mode: "no-cors"}}).catch(() => 0)`]);
      new SharedWorker(URL.createObjectURL(work));
    </script>"""
    environment = open_selenium(html, max_actions=20)
    assert "Other" in str(environment.step("navigate /other")[0])
    for action in ("back", "click #hop", "click #pop", "click #get", "wait 500", "click button"):
        observation, *_, info = environment.step(action)
        assert 'heading "Home"' in str(observation), action
    assert "false" in str(observation)
    assert (info["num_popups"], info["num_downloads"], info["num_dialogs"]) == (1, 1, 1)
    assert not {"/pixel", "/secret", "/worker"} & set(site.asked)

    allowed = open_selenium(html, allowed_hosts=("localhost",))
    assert "Secret" in str(allowed.step("click #hop")[0])


class Bare(BrowserEnvironment):
    """A user's driver without the options."""

    @classmethod
    def make_driver(cls, config: Any, options: Any, service: Any) -> Any:
        from selenium import webdriver

        bare = webdriver.ChromeOptions()
        bare.binary_location = options.binary_location
        for argument in ("--headless", "--no-sandbox"):
            bare.add_argument(argument)
        return webdriver.Chrome(options=bare, service=service)


class Recorded(BrowserEnvironment):
    """A user's driver with the options and one of its own."""

    drivers: list[Any]

    @classmethod
    def make_driver(cls, config: Any, options: Any, service: Any) -> Any:
        options.add_argument("--user-agent=Ours")
        driver = super().make_driver(config, options, service)
        cls.drivers.append(driver)
        return driver


@pytest.mark.slow
def test_a_driver_without_the_options_is_refused(open_selenium: Open) -> None:
    config = open_selenium(GOOD, reset=False).config
    assert isinstance(config, BrowserConfig)
    environment = Bare(config)
    with pytest.raises(EnvironmentFailure, match="without the flag --disable-quic"):
        environment.reset(seed=1)
    close_browsers()
    wait_for_no_process()


@pytest.mark.slow
def test_a_users_driver_starts_once_and_sees_the_page(open_selenium: Open) -> None:
    Recorded.drivers = []
    config = open_selenium(GOOD, reset=False).config
    assert isinstance(config, BrowserConfig)
    environment = Recorded(config)
    for seed in (1, 2):
        environment.reset(seed=seed)
        assert environment.evaluate("navigator.userAgent") == "Ours"
    assert "thanks" in str(environment.step("click button")[0])

    (driver,) = Recorded.drivers
    seen = set()
    for window in driver.window_handles:
        driver.switch_to.window(window)
        seen.add(driver.find_element("css selector", "body").text)
    assert "thanks" in seen
    environment.close()


@pytest.mark.slow
def test_a_killed_browser_fails_its_episode_and_nothing_is_left(open_selenium: Open) -> None:
    environment = open_selenium(GOOD)
    kill_browser()
    with pytest.raises(EnvironmentFailure):
        environment.step("click button")

    environment.reset(seed=1)
    assert "thanks" in str(environment.step("click button")[0])
    environment.close()
    close_browsers()
    wait_for_no_process()
    assert not list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*-{psutil.Process().pid}-*"))


@pytest.mark.slow
def test_a_browser_of_a_grid(open_selenium: Open) -> None:
    """A driver that runs by itself speaks as a grid does."""
    unreachable = open_selenium(GOOD, grid="http://127.0.0.1:1", reset=False)
    with pytest.raises(EnvironmentFailure, match="Selenium can't start Chromium"):
        unreachable.reset(seed=1)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL) as grid:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not _listens(port) and time.monotonic() < deadline:
                time.sleep(0.1)

            config = open_selenium(GOOD, grid=f"http://127.0.0.1:{port}", reset=False).config
            assert isinstance(config, BrowserConfig)
            environment = AsRoot(config)
            environment.reset(seed=1)
            assert "thanks" in str(environment.step("click button")[0])
            environment.close()
            close_browsers()
            assert not browser_processes() or grid.poll() is None
        finally:
            grid.kill()


class AsRoot(BrowserEnvironment):
    """For a grid of one node, which runs as root."""

    @classmethod
    def make_driver(cls, config: Any, options: Any, service: Any) -> Any:
        assert service is None
        options.add_argument("--no-sandbox")
        return super().make_driver(config, options, service)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_gate_at_another_address_of_this_machine(open_selenium: Open) -> None:
    environment = open_selenium(GOOD, gate_host="127.0.0.2")
    assert "thanks" in str(environment.step("click button")[0])

    elsewhere = open_selenium(GOOD, gate_host="192.0.2.1", reset=False)
    with pytest.raises(EnvironmentFailure, match=r"gate_host: 192\.0\.2\.1 is no address of this"):
        elsewhere.reset(seed=1)
    assert isinstance(elsewhere._browser, SeleniumBrowser)
