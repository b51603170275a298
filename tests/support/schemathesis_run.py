"""schemathesis against an OpenAPI page, in an environment of its own: its plugin would cost every
run of pytest seconds."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,unsupported_method"


def installed(folder):
    """The program; the test is skipped where it can't be had."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
    pip = [folder / "venv/bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
    done = subprocess.run(
        [*pip, "--quiet", "schemathesis==4.32.5"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"schemathesis can't be installed: {done.stderr[-500:]}")

    return folder / "venv/bin/schemathesis"


async def found(program, url, *options, checks=CHECKS, cwd):
    """What it finds on the page at `url`: its exit status and what it says."""
    process = await asyncio.create_subprocess_exec(
        program,
        "run",
        url,
        "--continue-on-failure",
        "--checks",
        checks,
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=cwd,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 600)
    return process.returncode, said.decode()
