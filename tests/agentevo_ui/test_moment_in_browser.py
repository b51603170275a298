"""What a run does now, on a page that is open: it changes by itself, without the page being asked
for again."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dashboard_visitor import dashboard
from filelock import FileLock

from agentevo.runs.folder.lock import LOCK

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_the_line_of_what_it_does_and_the_badge_change_by_themselves(
    visit: Callable[..., Any], tmp_path: Path
) -> None:
    run = tmp_path / "half"
    run.mkdir()
    (run / "config.yaml").write_text("# agentevo train\nrun: {name: half}\ntrainer: {steps: 4}\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 5.0, "timing_s/step": 1.0}\n')

    def tell(**told: Any) -> None:
        now = time.time()
        base = {"host": socket.gethostname(), "since": now - 70, "heartbeat_at": now + 3600}
        path = run / "now.json"
        path.with_suffix(".new").write_text(json.dumps(base | told))
        path.with_suffix(".new").rename(path)

    tell(phase="sampling", detail="step 2", done=3, total=8, unit="attempts")
    with FileLock(run / LOCK), dashboard(tmp_path) as url:
        one = visit(url)
        page = one.go("/runs/half")
        line = 'document.querySelector(".now [data-moment]").textContent'
        assert page.locator(".now [data-moment]").inner_text() == (
            "sampling, step 2: 3 of 8 attempts"
        )

        page.evaluate("window.isTheSamePage = true")
        tell(phase="sampling", detail="step 2", done=6, total=8, unit="attempts")
        one.until(f'{line} === "sampling, step 2: 6 of 8 attempts"')
        one.until('document.querySelector(".now progress").value === 0.75')
        one.until('/^for 1 m /.test(document.querySelector(".now [data-since]").textContent)')
        tell(phase="paused", detail="after step 2")
        one.until('document.querySelector("#state .state").textContent === "paused"')
        assert page.evaluate("window.isTheSamePage")

        page.close()  # before the dashboard ends
