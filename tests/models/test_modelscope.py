"""Models of ModelScope: names, the line that installs its package, and, where it is installed, its
own client against a server on loopback."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from agentevo.errors import MissingExtraError, ModelError
from agentevo.models.files import modelscope
from agentevo.models.files.resolve import fetch, missing_model, resolve

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights of v1",
    "model.gguf": b"another format",
}
NAME = "modelscope:own/name@v1"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("modelscope") is None, reason="needs the package modelscope"
)


class Hub:
    """ModelScope's API for the files of one repository at the revision `v1`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = urlsplit(self.path)
                query = parse_qs(urlsplit(self.path).query)
                hub.asked.append(self.path)

                body = b""
                if query.get("Revision") == ["v1"] and "/own/name/" in address.path:
                    body = hub.listing if address.path.endswith("/files") else b""
                    body = body or FILES.get(query.get("FilePath", [""])[0], b"")

                self.send_response(200 if body else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def listing(self) -> bytes:
        files = [
            {
                "Path": name,
                "Name": name,
                "Type": "blob",
                "Size": len(content),
                "Sha256": hashlib.sha256(content).hexdigest(),
                "Revision": "v1",
            }
            for name, content in FILES.items()
        ]
        return json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    opened = Hub()
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", opened.url)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield opened
    opened.server.shutdown()
    opened.server.server_close()


@pytest.mark.parametrize("name", ["own", "own/name/more", "own/name@", "../name", "own/na me", ""])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"is written modelscope:OWNER/NAME"):
        resolve(f"modelscope:{name}")


def test_without_its_package_the_line_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentevo\[modelscope\]'"):
        resolve(NAME)
    assert "agentevo models modelscope:own/name@v1" in missing_model(NAME)


@pytest.mark.slow
@needs_package
def test_a_pinned_model_is_fetched_and_found_again_without_the_hub(hub: Hub) -> None:
    assert missing_model(NAME)

    folder = fetch(NAME)
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in FILES}
    assert found == {name: text for name, text in FILES.items() if name != "model.gguf"}

    of_files = [path for path in hub.asked if "FilePath=" in path]
    assert len(of_files) >= 3 and all("Revision=v1" in path for path in of_files)

    (folder / "model.safetensors").unlink()  # as a fetch that was broken off leaves it
    assert (fetch(NAME) / "model.safetensors").read_bytes() == FILES["model.safetensors"]

    hub.server.shutdown()
    hub.server.server_close()
    assert fetch(NAME) == folder and missing_model(NAME) == ""

    with pytest.raises(ModelError, match="ModelScope did not provide it"):
        fetch("modelscope:own/name")


@pytest.mark.slow
@needs_package
def test_what_the_hub_does_not_give_is_told(hub: Hub) -> None:
    for name in ("own/name@v2", "own/other"):
        with pytest.raises(ModelError, match="ModelScope did not provide it"):
            fetch(modelscope.MODELSCOPE + name)
