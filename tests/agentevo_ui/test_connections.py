"""The dashboard's own socket: encrypted where it is asked to be, and pages come while many others
listen or say only half of what they want."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from dashboard_visitor import dashboard

pytestmark = pytest.mark.slow

ANSWERED_S = 300.0
"""How long an answer may take on a slow machine."""


def test_pages_come_while_many_listen_and_others_say_half_a_request(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("trainer: {steps: 2}\n")
    with dashboard(tmp_path) as url, contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=ANSWERED_S, trust_env=False))
        assert client.get(url).status_code == 303

        root = url.partition("/?")[0]
        place = urlsplit(url)
        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        sockets = []
        for number in range(120):
            one = socket.create_connection((place.hostname, place.port), timeout=ANSWERED_S)
            stack.enter_context(one)
            sockets.append(one)
            head = f"GET /live?run=a HTTP/1.1\r\nHost: {place.netloc}\r\nCookie: {cookie}\r\n"
            one.sendall((head + ("\r\n" if number % 2 else "X-Half: ")).encode())

        for one in sockets[1::2]:
            assert one.recv(200).startswith(b"HTTP/1.1 200")
        for path in ("/", "/runs/a", "/runs/a/metrics"):
            assert client.get(root + path).status_code == 200, path


def test_an_encrypted_dashboard_gives_a_cookie_that_only_encrypted_connections_carry(
    tmp_path: Path,
) -> None:
    with dashboard(tmp_path, "--tls") as url:
        assert url.startswith("https://")
        with httpx.Client(verify=False, timeout=ANSWERED_S, trust_env=False) as client:
            answer = client.get(url)
            assert answer.status_code == 303
            assert "; Secure" in answer.headers["set-cookie"]
            assert client.get(url.partition("?")[0]).status_code == 200

        plain = url.replace("https://", "http://")
        with pytest.raises(httpx.HTTPError):
            httpx.get(plain, timeout=ANSWERED_S, trust_env=False)
