"""`agentevo ui`: listens, prints the URL with the token, and serves until it is stopped."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from agentevo.inference.serving.admission import AdmissionLimits
from agentevo.inference.serving.http_server import serving, url_of
from agentevo.observability.pages.rendering import compile_templates
from agentevo.runs.folder.sources import Sources
from agentevo.runs.processes.endpoint import Endpoint, open_endpoint
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import in_thread, run_coroutine
from agentevo.runtime.signals import POLL_INTERVAL_S, catch_stop_signals
from agentevo_ui.access import Access, names_of_this_machine
from agentevo_ui.app import make_app

MAX_CONNECTIONS = 512
IDLE_S = 60.0
NICE = 10
"""How much the dashboard lowers its priority by default."""


def serve_dashboard(
    words: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: bool | None = None,
    control: bool = False,
    nice: int = NICE,
    notify: Callable[[str], None] = print,
    note: Callable[[str], None] = to_stderr,
) -> None:
    """Shows runs and stores until it is stopped, and blocks. `words`: folders and URLs of stores.
    `tls`: whether the server encrypts. None: it encrypts if other machines can reach it. `control`:
    whether a second URL allows trying checkpoints and sending requests to runs. `nice`: how much
    the process lowers its priority. `notify` receives the URLs with their tokens, which appear
    nowhere else. Raises ConfigError before it listens."""
    sources = Sources(words)
    sources.check(later=True)
    for folder_to_come in sources.missing:
        note(f"{folder_to_come}: the folder does not exist yet: its runs appear once it does")

    with (
        catch_stop_signals() as stop,
        tempfile.TemporaryDirectory(prefix="agentevo-ui-") as folder,
        open_endpoint(Path(folder), host, port, tls) as endpoint,
    ):
        _prepare_pages()
        if nice:
            os.nice(nice)  # threads and processes that start later inherit the priority

        run_coroutine(_serve(sources, endpoint, host, control, stop, notify, note))


def _prepare_pages() -> None:
    """Loads what the first pages of a run need, which takes a second of CPU time. On a busy machine
    a process with a low priority would take longer for it than a page may."""
    import_module("agentevo.store.sqlite")
    compile_templates()


async def _serve(
    sources: Sources,
    endpoint: Endpoint,
    host: str,
    control: bool,
    stop: Callable[[], bool],
    notify: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    context = endpoint.server_context()
    base = url_of(endpoint.listener, encrypted=context is not None)
    hosts = {host, *names_of_this_machine()}
    access = Access(hosts=hosts, secure=context is not None, control=control)
    app, shared = make_app(sources, access)

    async def close() -> None:
        await shared.players.close()
        await shared.watcher.close()
        await shared.stores.close()
        await in_thread(shared.indexes.close)

    limits = AdmissionLimits(strangers=128, clients=MAX_CONNECTIONS, idle_s=IDLE_S)
    async with serving(app, endpoint.listener, close=close, tls=context, limits=limits):
        notify(f"AgentEvo shows {sources.shown} at\n  {access.url(base)}")
        if control:
            notify("and anyone who opens this can try checkpoints and ask runs to stop:")
            notify(f"  {access.control_url(base)}")
        if context is not None:
            note(
                "the certificate is self-signed by this process: a browser asks once whether "
                "to trust it"
            )
        while not stop():
            await asyncio.sleep(POLL_INTERVAL_S)

    note("stopped")
