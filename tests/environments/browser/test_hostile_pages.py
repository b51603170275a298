"""Pages that attack the browser or leave their site, and browsers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from browser_site import DEADLINE_S, Site, browser_processes, wait_for_no_process
from slow import soak

from agentevo.environments.browser import BrowserConfig, BrowserEnvironment, close_browsers
from agentevo.environments.browser.process import MAX_PLACE, PREFIX
from agentevo.errors import EnvironmentFailure

pytestmark = pytest.mark.slow

HANG = "for (;;);"
Open = Callable[..., BrowserEnvironment]
GOOD = "<button onclick=\"this.textContent = 'thanks'\">go</button>"


def play_well(open_page: Open) -> None:
    """Other pages work."""
    observation = str(open_page(GOOD).step("click button")[0])
    assert "thanks" in observation


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("for (;;) alert('again')", "dialogs"),
        (HANG, "deadline_s"),
        pytest.param("for (;;) open('about:blank')", "windows|deadline_s", marks=pytest.mark.soak),
        pytest.param(
            "const all = []; for (;;) all.push(new Array(1e6).fill(1.5))",
            "crash|deadline_s",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_page_that_floods_the_browser_fails_its_attempt(
    open_page: Open, script: str, reason: str
) -> None:
    other = open_page(GOOD)
    environment = open_page(f'<button onclick="{script}">x</button>')
    patient = environment.config
    environment.config = patient.model_copy(update={"deadline_s": 3.0 if script == HANG else 15.0})

    with pytest.raises(EnvironmentFailure, match=reason):
        environment.step("click button")

    environment.config = patient
    assert "thanks" in str(other.step("click button")[0])
    environment.reset(seed=1)  # the page opens again


def test_endless_navigation_goes_on_by_the_pages_clock(open_page: Open) -> None:
    script = "setInterval(() => { location.search = '?' + Math.random() }, 1)"
    environment = open_page(f"<h1>Busy</h1><script>{script}</script>")

    observation, _, _, _, info = environment.step("wait 100")

    assert info["valid"]
    assert "Busy" in str(observation)


def test_dialogs_popups_and_downloads_are_closed(open_page: Open, site: Any) -> None:
    site.pages["/other"] = "<h1>Other</h1>"
    html = """<button onclick="out.textContent = [confirm('sure?'), prompt('name?')]">ask</button>
    <a id="pop" target="_blank" href="/other">pop</a> <a id="get" href="/download">get</a>
    <p id="out"></p>"""
    environment = open_page(html)

    observation, _, _, _, info = environment.step("click button")
    assert "dialog (confirm): sure?" in str(observation)
    assert "paragraph [ref=" in str(observation)
    assert "false," in str(observation)
    assert info["num_dialogs"] == 2
    observation, _, _, _, info = environment.step("click #pop")
    assert info["num_popups"] == 1
    assert 'link "pop"' in str(observation)
    observation, _, _, _, info = environment.step("click #get")
    assert info["num_downloads"] == 1
    assert "refused" in str(observation)

    follows = open_page(html, popups="follow", dialogs="accept")
    assert "true," in str(follows.step("click button")[0])
    assert "Other" in str(follows.step("click #pop")[0])


def test_a_followed_window_that_closes_leads_back(open_page: Open, site: Any) -> None:
    site.pages["/login"] = '<button onclick="window.close()">done</button>'
    shop = open_page('<h1>Shop</h1><a target="_blank" href="/login">log in</a>', popups="follow")

    assert "done" in str(shop.step("click a")[0])
    observation, *_, info = shop.step("click button")
    assert info["valid"]
    assert 'heading "Shop"' in str(observation)


def test_other_hosts_and_files_are_closed(open_page: Open, site: Any) -> None:
    port = site.server_address[1]
    other = f"http://localhost:{port}"  # the same server by another name
    site.pages["/secret"] = "<h1>Secret</h1>"
    html = f"""<h1>Home</h1><img src="{other}/pixel"><iframe src="file:///etc/passwd"></iframe>
    <a id="file" href="file:///etc/passwd">file</a> <a id="other" href="{other}/secret">other</a>
    <a id="hop" href="/redirect?{other}/secret">hop</a>
    <a id="file_hop" href="/redirect?file:///etc/passwd">hop</a>
    <script>
      fetch("{other}/fetched").catch(() => 0);
      fetch("/redirect?{other}/hopped", {{mode: "no-cors"}}).catch(() => 0);
      new WebSocket("ws://localhost:{port}/socket");
      navigator.sendBeacon("{other}/beacon", "x");
    </script>"""
    environment = open_page(html, max_actions=20)
    for action in ("click #file", "click #other", "click #hop", "click #file_hop"):
        observation, _, _, _, info = environment.step(action)
        assert 'heading "Home"' in str(observation), action
        assert "root:" not in str(observation)
        assert info["url"].startswith(site.url)
    assert info["num_blocked_requests"] >= 4
    forbidden = {"/pixel", "/secret", "/fetched", "/hopped", "/socket", "/beacon"}
    assert not forbidden & set(site.asked)

    allowed = open_page(html, allowed_hosts=("localhost",))
    assert "Secret" in str(allowed.step("click #hop")[0])


@pytest.fixture
def neighbour() -> Iterator[Site]:
    """Another service on the host of the pages."""
    server = Site()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_other_ports_of_the_host_are_closed(open_page: Open, site: Site, neighbour: Site) -> None:
    other, port = neighbour.url, neighbour.server_address[1]
    neighbour.pages["/secret"] = "<h1>Secret</h1>"
    html = f"""<h1>Home</h1><img src="/redirect?{other}/image"><img src="{other}/image">
    <iframe src="/redirect?{other}/frame"></iframe><link rel="preconnect" href="{other}">
    <link rel="stylesheet" href="/redirect?{other}/style">
    <a id="go" href="{other}/secret">go</a> <a id="hop" href="/redirect?{other}/secret">hop</a>
    <a id="pop" target="_blank" href="/redirect?{other}/window">pop</a>
    <script>
      fetch("/redirect?{other}/fetch", {{mode: "no-cors"}}).catch(() => 0);
      fetch("/redirect?/redirect?{other}/fetch", {{mode: "no-cors"}}).catch(() => 0);
      new WebSocket("ws://127.0.0.1:{port}/socket");
      const hop = location.origin + "/redirect?{other}/worker";
      const work = new Blob([`fetch("${{hop}}", {{mode: "no-cors"}}).catch(() => 0)`]);
      new Worker(URL.createObjectURL(work)); new SharedWorker(URL.createObjectURL(work));
      new EventSource("/redirect?{other}/events");
      navigator.sendBeacon("/redirect?{other}/beacon", "x");
    </script>"""
    environment = open_page(html, max_actions=20)
    for action in ("click #go", "click #hop", "click #pop", "wait 500"):
        observation, _, _, _, info = environment.step(action)
        assert 'heading "Home"' in str(observation), action
        assert info["url"].startswith(site.url)
    assert f"127.0.0.1:{port}" in info["blocked"]
    assert neighbour.asked == []

    follows = open_page(html, popups="follow")
    assert "Secret" not in str(follows.step("click #pop")[0])
    assert neighbour.asked == []

    allowed = open_page(html, allowed_hosts=(f"127.0.0.1:{port}",))
    assert "Secret" in str(allowed.step("click #hop")[0])
    assert {"/image", "/frame", "/style", "/fetch", "/worker", "/socket"} <= set(neighbour.asked)


def test_a_page_may_read_its_own_folder(chromium: str, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (tmp_path / "key.js").write_text("document.title = 'stolen'")
    (folder / "own.js").write_text("out.textContent = 'own'")
    page = folder / "page.html"
    page.write_text("<p id=out></p><script src=own.js></script><script src=../key.js></script>")
    environment = BrowserEnvironment(BrowserConfig(url=page.as_uri(), observation="text"))
    try:
        observation, info = environment.reset(seed=1)
        assert "own" in str(observation)
        assert environment.evaluate("document.title") == ""
        assert info["num_blocked_requests"] == 1
        assert not environment.step(f"navigate {(tmp_path / 'key.js').as_uri()}")[4]["valid"]
    finally:
        environment.close()


@pytest.mark.soak
def test_a_page_of_100_mb(open_page: Open, site: Any) -> None:
    environment = open_page(GOOD, observation="text", deadline_s=60)
    try:
        observation, *_ = environment.step("navigate /huge")
    except EnvironmentFailure:
        pass  # too much for this machine's browser
    else:
        assert len(str(observation)) < 10_000

    play_well(open_page)


def test_a_page_that_is_not_there(open_page: Open, site: Any) -> None:
    environment = BrowserEnvironment(BrowserConfig(url="http://127.0.0.1:1/"))
    with pytest.raises(EnvironmentFailure, match="can't be opened"):
        environment.reset(seed=1)
    environment.close()


def kill_first(name: str) -> None:
    for process in psutil.Process().children(recursive=True):
        parent = process.parent()
        if name in process.name() and parent is not None and name not in parent.name():
            process.kill()
            return
    raise AssertionError(f"there is no process {name}")


@pytest.mark.parametrize("name", ["chrom", *soak("node")])
def test_a_killed_browser_fails_its_episodes_and_starts_again(open_page: Open, name: str) -> None:
    first, second = open_page(GOOD), open_page(GOOD)

    kill_first(name)
    for environment in (first, second):
        with pytest.raises(EnvironmentFailure):
            environment.step("click button")
        environment.reset(seed=1)
        assert "thanks" in str(environment.step("click button")[0])
        environment.close()

    close_browsers()
    wait_for_no_process()


def test_many_episodes_share_one_browser(open_page: Open) -> None:
    close_browsers()
    environments = [open_page(GOOD, reset=False) for _ in range(3)]

    def play(environment: BrowserEnvironment) -> str:
        environment.reset(seed=1)
        observation = str(environment.step("click button")[0])
        environment.close()
        return observation

    with ThreadPoolExecutor(3) as pool:
        assert all("thanks" in text for text in pool.map(play, environments))
    mains = [item for item in browser_processes() if "--agentevo-browser" in str(item.cmdline())]
    assert len(mains) == 1


PROGRAM = """
import sys
from agentevo.environments.browser import BrowserConfig, BrowserEnvironment
environment = BrowserEnvironment(BrowserConfig(url=sys.argv[1]))
environment.reset(seed=1)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exit", "kill", "kill the group"])
def test_chromium_ends_with_its_program(open_page: Open, site: Any, end: str) -> None:
    """Its files go with it; after a kill, when the next one starts."""
    site.pages["/good"] = GOOD
    process, children = start_program(site)
    (folder,) = folders_of(process.pid)
    flags = [part for child in children for part in command_of(child)]
    profiles = {flag for flag in flags if flag.startswith("--user-data-dir")}
    assert profiles == {f"--user-data-dir={folder}/profile"}
    if len(os.fsencode(folder)) <= MAX_PLACE:
        assert list(folder.glob("*.[cC]hrom*/SingletonSocket"))

    assert process.stdin is not None
    if end == "kill the group":
        os.killpg(process.pid, signal.SIGKILL)
    elif end == "kill":
        process.kill()
    process.stdin.close()
    process.wait(DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if is_alive(child)]

    if "kill" in end:
        close_browsers()
        play_well(open_page)
    assert not folders_of(process.pid)


def start_program(site: Site) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A program in its own process group, with a page, and the processes below it."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, f"{site.url}/good"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process, psutil.Process(process.pid).children(recursive=True)


def command_of(process: psutil.Process) -> list[str]:
    """Empty for a process that has ended: Chromium starts some for a moment."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def folders_of(pid: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*-{pid}-*"))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
