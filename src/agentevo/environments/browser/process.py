"""One Chromium of this process for all of its browser environments, driven by Playwright on a
thread with an event loop.

Environments are synchronous: each of their calls waits for a coroutine on that loop, with a
deadline. If Chromium or Playwright's driver dies, the calls of all open pages raise
EnvironmentFailure, and the next episode starts a new one. Chromium ends with this process: at a
normal exit by `close_browsers`, and after a kill because the driver's input closes.

A Chromium's files (profile, downloads, sockets) are in one folder of this process, which is deleted
with it. If its path is longer than MAX_PLACE, the sockets and other temporary files are beside it,
and stay after a kill of Chromium. After a kill of this process the folder stays until a process of
this user in the same container (process namespace) starts a Chromium; if the machine boots before
that, the folder stays until the system clears its temporary folder.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil

from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.extras import load_extra
from agentevo.runtime.process_folders import new_folder, remove_folder

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright

T = TypeVar("T")

FLAGS = (
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-smooth-scrolling",
    "--disable-lcd-text",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)
RESOLVER_FLAG = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {}"
"""Names are resolved by the gate of each context (gate.py), which is at this address."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAUNCH_S = 120.0
"""The longest start of Chromium, in seconds."""
CLOSE_S = 10.0
"""The longest orderly end of a page or of Chromium, in seconds. After that it is killed."""
STOP_S = 5 * CLOSE_S
"""The longest end of Chromium: it closes, Playwright's driver and idle pages close, what is left
is killed, and the files are deleted."""
POLL_S = 0.05
PREFIX = "agentevo-browser-"
MAX_PLACE = 61
"""The longest path of a temporary folder in which Chromium starts, in bytes: it makes a socket
there, whose path must be shorter than 108 bytes. Its longest name below the folder is
`.org.chromium.Chromium.XXXXXX/SingletonSocket`."""
GRACE_S = 15.0
"""How long a call may outlast its deadline before the whole loop counts as blocked, in seconds."""


def find_chromium(executable: str) -> str:
    """The path of Chromium. `executable` is a recipe's choice, or empty: the program in PATH, then
    Playwright's own download (an empty path). Raises ConfigError, and MissingExtraError without
    Playwright."""
    load_playwright()
    if path := find_program(executable):
        return path

    downloads = Path(
        os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright"
    )
    if any(downloads.glob("chromium*")):
        return ""
    raise ConfigError(
        "the environment `browser` needs Chromium: `apt-get install chromium`, `playwright "
        "install chromium`, or environment.executable=PATH"
    )


def find_program(executable: str) -> str:
    """The path of Chromium's program in PATH. Empty if there is none. Raises ConfigError without
    `executable`, a recipe's choice."""
    if executable:
        path = shutil.which(executable)
        if path is None:
            raise ConfigError(f"environment.executable: there is no program {executable!r}")
        return path
    return next(filter(None, map(shutil.which, PROGRAMS)), "")


def load_playwright() -> Any:
    """Playwright's module. Raises MissingExtraError."""
    return load_extra("playwright.async_api", "browser", "the environment `browser`")


def driver_error() -> type[Exception]:
    """The base class of Playwright's exceptions."""
    error: type[Exception] = load_playwright().Error
    return error


Environ = dict[str, str | float | bool]
"""Variables of a process's environment."""


class IdlePage(Protocol):
    """An open page that waits for its next episode."""

    async def close(self) -> None: ...


class BrowserProcess:
    """Chromium, which starts at the first page and starts again after a crash. Use
    `shared_browser`."""

    def __init__(self, executable: str) -> None:
        self._executable = executable
        self._tag = ""
        self._folders: list[Path] = []
        """Those that are not deleted yet."""
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._starting = asyncio.Lock()
        self._idle: dict[object, list[IdlePage]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]], within_s: float) -> T:
        """Runs a coroutine on the loop, from another thread. Raises EnvironmentFailure after
        `within_s`, and for all that Playwright raises."""
        future = asyncio.run_coroutine_threadsafe(self._guard(work, within_s), self._loop)
        try:
            return future.result(within_s + GRACE_S)
        except TimeoutError as error:
            future.cancel()
            raise EnvironmentFailure(
                f"the thread of the browser did not answer within {within_s + GRACE_S:g} s"
            ) from error

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, T]], within_s: float) -> T:
        try:
            async with asyncio.timeout(within_s):
                return await work()
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"the page did not answer within {within_s:g} s (environment.deadline_s)"
            ) from error
        except Exception as error:
            # Some versions raise a plain Exception from calls during which the driver dies.
            if type(error) is not Exception and not isinstance(error, driver_error()):
                raise
            raise EnvironmentFailure(f"the browser failed: {first_line(error)}") from error

    def start(self) -> None:
        """Starts Chromium if it does not run. Raises EnvironmentFailure if it does not start within
        LAUNCH_S, whatever the deadline of a page is: a start that is broken off is lost, and the
        next one begins again."""
        self.call(self._start, LAUNCH_S + 2 * STOP_S)

    async def _start(self) -> None:
        async with self._starting:
            if self._browser is None or not self._browser.is_connected():
                await self._restart()

    async def open_context(self, **options: Any) -> BrowserContext:
        """A new context. Starts Chromium if it does not run. Call it on the loop."""
        async with self._starting:
            if self._browser is not None and self._browser.is_connected():
                with suppress(driver_error()):  # the driver has died without a word
                    return await self._browser.new_context(**options)

            return await (await self._restart()).new_context(**options)

    async def end_context(self, context: BrowserContext) -> None:
        """Closes a context. If that takes too long, the whole Chromium is replaced."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await context.close()
        except driver_error():
            return  # its Chromium has ended
        except TimeoutError:
            await in_thread(self._kill)

    def keep_page(self, kind: object, page: IdlePage) -> None:
        """Keeps an open page for a later episode of this kind. Call it on the loop."""
        self._idle.setdefault(kind, []).append(page)

    def take_page(self, kind: object) -> IdlePage | None:
        """A page that was kept, if there is one. Call it on the loop."""
        pages = self._idle.get(kind)
        return pages.pop() if pages else None

    async def _restart(self) -> Browser:
        await self._stop()
        try:
            async with asyncio.timeout(LAUNCH_S):
                return await self._launch()
        except BaseException as error:
            await self._stop()
            if isinstance(error, TimeoutError):
                raise EnvironmentFailure(f"Chromium did not start within {LAUNCH_S:g} s") from error
            raise

    async def _launch(self) -> Browser:
        self._tag = f"--agentevo-browser={uuid.uuid4().hex}"
        folder = await in_thread(self._new_folder)
        is_short = len(os.fsencode(folder)) <= MAX_PLACE
        self._playwright = await load_playwright().async_playwright().start()
        environment: Environ | None = None
        if is_short:
            environment = {**os.environ, "TMPDIR": str(folder)}
        self._browser = await self._open_browser(self._playwright, folder, environment)
        return self._browser

    async def _open_browser(
        self, playwright: Playwright, folder: Path, environment: Environ | None
    ) -> Browser:
        """A new Chromium, with its files in the folder and, if `environment` is not None, with
        these environment variables."""
        # `launch` has no option for the profile's folder. The context of this call
        # has one empty page, and no episode uses it.
        context = await playwright.chromium.launch_persistent_context(
            folder / "profile",
            artifacts_dir=folder / "artifacts",
            env=environment,
            executable_path=self._executable or None,
            args=[*self._flags("127.0.0.1"), *root_flags()],
            # At most one window for each action of the player, so that no loop floods us.
            ignore_default_args=["--disable-popup-blocking"],
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
            timeout=LAUNCH_S * 1000,
        )
        assert context.browser is not None
        return context.browser

    def _flags(self, gate_host: str) -> list[str]:
        return [*FLAGS, RESOLVER_FLAG.format(gate_host), self._tag]

    def _new_folder(self) -> Path:
        try:
            folder = new_folder(PREFIX)
        except OSError as error:
            raise EnvironmentFailure(
                f"a folder for Chromium's files can't be made: {error}: free space in the "
                "temporary folder, or set TMPDIR to a folder that this user can write to"
            ) from error

        self._folders.append(folder)
        return folder

    async def _stop(self) -> None:
        """Takes at most STOP_S."""
        processes = await in_thread(self._processes)
        await self._shut_down()
        await in_thread(self._remove, processes, tuple(self._folders))

    async def _shut_down(self) -> None:
        """The orderly end of Chromium, of Playwright's driver, and of what idle pages have here."""
        browser, playwright = self._browser, self._playwright
        self._browser = self._playwright = None
        for item, end in ((browser, "close"), (playwright, "stop")):
            if item is not None:
                with suppress(TimeoutError, driver_error()):  # a dead one has nothing to end
                    async with asyncio.timeout(CLOSE_S):
                        await getattr(item, end)()

        pages = [page for kept in self._idle.values() for page in kept]
        self._idle.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(page.close() for page in pages), return_exceptions=True)

    def _remove(self, processes: list[psutil.Process], folders: tuple[Path, ...]) -> None:
        """Kills processes and deletes their files, into which they may write until they have
        ended. A folder that can't be deleted in time is deleted at the next end."""
        _kill_all(processes)

        deadline = time.monotonic() + CLOSE_S
        for folder in folders:
            remove_folder(folder)
            while folder.exists() and time.monotonic() < deadline:
                time.sleep(POLL_S)
                remove_folder(folder)

            if not folder.exists():
                with suppress(ValueError):  # an end that was broken off has deleted it as well
                    self._folders.remove(folder)

    def _kill(self) -> None:
        _kill_all(self._processes())

    def _processes(self) -> list[psutil.Process]:
        """Chromium's main process, also if its parent has died, all processes below it, and
        Playwright's driver. Not those whose main process has died: they end by themselves."""
        if not self._tag:
            return []

        ours = set(psutil.Process().children(recursive=True))
        processes: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self._tag in process.cmdline():
                    processes += [process, *process.children(recursive=True)]
                    parent = process.parent()
                    if parent in ours:
                        processes.append(parent)
        return processes

    def close(self) -> None:
        """Ends Chromium and the thread. At the exit of the program no call can go to another
        thread, so this one kills and deletes."""
        processes = self._processes()
        future = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
        with suppress(TimeoutError):
            future.result(3 * CLOSE_S + GRACE_S)
        self._remove(processes, tuple(self._folders))

        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


def root_flags() -> list[str]:
    """The flags without which Chromium as root does not start."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


def first_line(error: Exception) -> str:
    """The first line of an exception's message, at most 300 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _kill_all(processes: list[psutil.Process]) -> None:
    """Kills the processes and waits for their end, at most CLOSE_S."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()

    deadline = time.monotonic() + CLOSE_S
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. A zombie does not: it stays where its new parent does not reap, such
    as in a container whose first program is `sleep`."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


_shared: dict[tuple[int, Hashable], BrowserProcess] = {}
_lock = threading.Lock()


def shared_browser(key: Hashable, make: Callable[[], BrowserProcess]) -> BrowserProcess:
    """The Chromium of this process with this key."""
    with _lock:
        if (os.getpid(), key) not in _shared:
            _shared[os.getpid(), key] = make()
        return _shared[os.getpid(), key]


def close_browsers() -> None:
    """Ends all Chromiums of this process. Later episodes start new ones."""
    with _lock:
        browsers = [_shared.pop(key) for key in list(_shared) if key[0] == os.getpid()]
    for browser in browsers:
        browser.close()


atexit.register(close_browsers)
