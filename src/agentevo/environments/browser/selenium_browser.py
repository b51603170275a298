"""Chromium that Selenium starts: by chromedriver on this machine, on a Selenium Grid, or as
`make_driver` of a user's class does. Playwright joins it by the DevTools protocol, so pages are
those of a Chromium without Selenium: each in a context of its own, behind its own gate.

A browser without that protocol, such as Firefox, is refused, and so is one without the flags that
keep names and WebRTC behind the gate. After a kill of this process, chromedriver and its Chromium
stay, and a grid keeps the session until its own time limit.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.environments.browser.process import (
    CLOSE_S,
    LAUNCH_S,
    BrowserProcess,
    Environ,
    find_program,
    first_line,
    load_playwright,
    root_flags,
)
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.extras import load_extra

if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.remote.webdriver import WebDriver

CHROMEDRIVER = "chromedriver"
FLAGS = (
    "--headless=new",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-hang-monitor",
    "--disable-back-forward-cache",  # Playwright waits for a page's load after going back
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
)
"""Of the flags that Playwright gives the Chromium that it starts, those that pages depend on."""
FEATURES_FLAG = "--disable-features=" + ",".join(
    (
        "AvoidCorsURLLoaderRestartOnRedirect",
        "AvoidUnnecessaryBeforeUnloadCheckSync",
        "HttpsFirstBalancedModeAutoEnable",
        "HttpsUpgrades",
        "PaintHolding",
        "ThirdPartyStoragePartitioning",
    )
)
"""Likewise. chromedriver joins it with features of its own."""

MakeDriver = Callable[["Options", "Service | None"], "WebDriver"]


def load_selenium(module: str) -> Any:
    return load_extra(f"selenium.{module}", "selenium", "environment.driver=selenium")


def check_selenium(executable: str, grid: str) -> None:
    """Raises MissingExtraError without Selenium or Playwright, and ConfigError if this machine is
    to start a browser and lacks Chromium or chromedriver."""
    load_selenium("webdriver")
    load_playwright()
    if grid:
        return

    has = {"Chromium": find_program(executable), CHROMEDRIVER: shutil.which(CHROMEDRIVER)}
    for name, path in has.items():
        if not path:
            raise ConfigError(
                f"environment.driver=selenium needs {name} in PATH: `apt-get install chromium "
                "chromium-driver`, or environment.grid=URL"
            )


def start_driver(grid: str, options: Options, service: Service | None) -> WebDriver:
    """Chromium on a grid, or if `grid` is empty on this machine."""
    webdriver = load_selenium("webdriver")
    driver: WebDriver = (
        webdriver.Remote(grid, options=options)
        if grid
        else webdriver.Chrome(options=options, service=service)
    )
    return driver


class SeleniumBrowser(BrowserProcess):
    """See the module."""

    def __init__(self, executable: str, grid: str, gate_host: str, make_driver: MakeDriver) -> None:
        super().__init__(executable)
        self._grid = grid
        self._gate_host = gate_host
        self._make_driver = make_driver
        self.driver: WebDriver | None = None
        """Selenium's driver, while Chromium runs."""

    async def _open_browser(
        self, playwright: Playwright, folder: Path, environment: Environ | None
    ) -> Browser:
        options, service = self._options(), self._service(environment)

        def make() -> None:  # kept also if nobody waits for it any more: `_shut_down` ends it
            self.driver = self._make_driver(options, service)

        try:
            await in_thread(make)
        except _driver_errors() as error:
            raise EnvironmentFailure(
                f"Selenium can't start Chromium: {first_line(error)}"
            ) from error

        assert self.driver is not None
        browser = await playwright.chromium.connect_over_cdp(
            devtools_address(self.driver), timeout=LAUNCH_S * 1000
        )
        await self._check_flags(browser)
        return browser

    def _options(self) -> Options:
        options: Options = load_selenium("webdriver.chrome.options").Options()
        for flag in (*self._all_flags(), FEATURES_FLAG):
            options.add_argument(flag)
        if not self._grid:
            options.binary_location = find_program(self._executable)
            for flag in root_flags():
                options.add_argument(flag)
        # At most one window for each action of the player, so that no loop floods us.
        options.add_experimental_option("excludeSwitches", ["disable-popup-blocking"])
        return options

    def _all_flags(self) -> list[str]:
        return [*self._flags(self._gate_host), *FLAGS]

    def _service(self, environment: Environ | None) -> Service | None:
        if self._grid:
            return None
        service: Service = load_selenium("webdriver.chrome.service").Service(
            shutil.which(CHROMEDRIVER), env=environment or os.environ
        )
        return service

    async def _check_flags(self, browser: Browser) -> None:
        client = await browser.new_browser_cdp_session()
        answer = await client.send("Browser.getBrowserCommandLine")
        await client.detach()
        for flag in self._all_flags():
            if flag not in answer["arguments"]:
                raise EnvironmentFailure(
                    f"Selenium's Chromium was started without the flag {flag}, and without the "
                    "flags other hosts would not be closed, nor would pages be equal for equal "
                    "seeds: start it with the options that make_driver gets"
                )

    def close(self) -> None:
        """See BrowserProcess.close. The driver ends on this thread."""
        driver, self.driver = self.driver, None
        super().close()
        if driver is not None:
            with suppress(*_driver_errors()):
                driver.quit()

    async def _shut_down(self) -> None:
        await super()._shut_down()
        driver, self.driver = self.driver, None
        if driver is not None:
            # A driver whose process has ended, or whose grid has gone, has nothing to end.
            with suppress(TimeoutError, *_driver_errors()):
                async with asyncio.timeout(CLOSE_S):
                    await in_thread(driver.quit)


def _driver_errors() -> tuple[type[Exception], ...]:
    """What a call of Selenium's driver raises."""
    from selenium.common.exceptions import WebDriverException
    from urllib3.exceptions import HTTPError  # nobody listens

    return WebDriverException, HTTPError


def devtools_address(driver: WebDriver) -> str:
    """Where Playwright joins the driver's browser: through the grid, or at this machine."""
    capabilities = driver.capabilities
    if address := capabilities.get("se:cdp"):
        return str(address)
    for key in ("goog:chromeOptions", "ms:edgeOptions"):
        if address := capabilities.get(key, {}).get("debuggerAddress"):
            return f"http://{address}"

    name = capabilities.get("browserName")
    raise EnvironmentFailure(
        f"Selenium's browser {name!r} has no DevTools protocol, by which hosts are closed and "
        "pages are equal for equal seeds: use Chromium, Chrome or Edge"
    )
