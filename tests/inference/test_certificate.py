"""A run's certificate: made once, kept from others, known by its fingerprint and by nothing else.
Who shows another one is told nothing."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_door import SOON_S, a_door

from agentevo.errors import ConfigError, EngineError, EngineUnavailableError, MissingExtraError
from agentevo.inference.serving import certificate as module
from agentevo.inference.serving.address import EngineAddress
from agentevo.inference.serving.certificate import NAME, RunCertificate, fingerprint_of
from agentevo.inference.serving.client_connection import ClientConnection, LostError, RefusedError
from agentevo.inference.serving.directory import Announcement, EngineDirectory
from agentevo.inference.serving.remote import RemoteEngine
from agentevo.inference.serving.secret import RunSecret
from agentevo.types import SamplingParams

FINGERPRINT = "ab" * 32


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> RunCertificate:
    """A certificate of a run, made once: a copy of its file is any test's own."""
    pytest.importorskip("cryptography")
    run = RunCertificate(tmp_path_factory.mktemp("run") / "engines")
    run.server_context()
    return run


def give(folder: Path, made: RunCertificate) -> RunCertificate:
    (folder / NAME).write_bytes(made.file.read_bytes())
    return RunCertificate(folder)


def test_it_is_made_once_and_for_its_owner_alone(made):
    assert made.file.stat().st_mode & 0o777 == 0o600
    before = made.file.read_bytes()
    context, fingerprint = made.server_context()
    assert made.file.read_bytes() == before and fingerprint == made.fingerprint()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    block = before.decode().partition("-----BEGIN CERTIFICATE")
    assert fingerprint == fingerprint_of(ssl.PEM_cert_to_DER_cert("".join(block[1:])))


def test_engines_that_start_together_share_one(tmp_path):
    pytest.importorskip("cryptography")
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: RunCertificate(tmp_path).server_context()[1], "x" * 8))
    assert len(set(results)) == 1 and [one.name for one in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\nYWJj\n-----END CERTIFICATE-----\n",
    ],
    ids=repr,
)
def test_a_damaged_file_is_refused_with_what_to_do(content, tmp_path):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(EngineError, match=rf"{tmp_path}/tls.pem holds no key .*: delete it"):
        RunCertificate(tmp_path).server_context()


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    def missing(name: str):
        raise ModuleNotFoundError("No module named 'cryptography'", name="cryptography")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(MissingExtraError, match=r"'cryptography': pip install 'agentevo\[serve\]'"):
        module.check_installed()


def test_requests_go_encrypted_to_the_engine_that_is_announced(made, tmp_path):
    give(tmp_path, made)

    async def work():
        async with a_door(tmp_path, encrypted=True) as door:
            directory = EngineDirectory(tmp_path)
            announcement = Announcement(
                url=door.address.url, name="e", pid=1, started_at=1.0,
                certificate=door.address.certificate,
            )  # fmt: skip
            directory.announce(announcement)
            os.utime(tmp_path / NAME, (1.0, 1.0))
            directory.forget_dead(announcement)
            assert (tmp_path / NAME).is_file(), "it is not an announcement of the dead"

            client = RemoteEngine(directory, poll_s=0.02)
            answer = await client.generate([7], SamplingParams(), deadline_s=SOON_S)
            assert answer.ids == [7]

            await client.close()
            pinned = RemoteEngine(
                [announcement.address.pinned_url], secret=RunSecret(tmp_path), poll_s=0.02
            )
            assert (await pinned.generate([8], SamplingParams(), deadline_s=SOON_S)).ids == [8]

            await pinned.close()
            _, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(b"GET /state HTTP/1.1\r\n" + door.header() + b"\r\n")

            with pytest.raises(LostError):  # in the clear
                await ClientConnection.open(
                    EngineAddress(announcement.url.replace("https", "http")),
                    secret=door.secret,
                    every_s=1.0,
                    on_report=lambda state: None,
                )

            writer.transport.abort()

    asyncio.run(work())


class Listener:
    """A server with a certificate of its own, that keeps what it is told."""

    def __init__(self, folder: Path) -> None:
        self.heard = b""
        self.context, self.certificate = RunCertificate(folder).server_context()

    async def __aenter__(self) -> Listener:
        async def listen(reader, writer):
            with suppress(ConnectionError):
                while part := await reader.read(4096):
                    self.heard += part
            writer.close()

        self.server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=self.context)
        self.url = f"https://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_) -> None:
        self.server.close()


@pytest.mark.slow
def test_who_shows_another_certificate_is_told_nothing(made, tmp_path, caplog):
    caplog.set_level(logging.INFO)

    async def work():
        async with Listener(tmp_path / "other") as other:
            address = EngineAddress(other.url, made.fingerprint())
            with pytest.raises(RefusedError, match="nothing was sent to it"):
                await ClientConnection.open(
                    address, secret=RunSecret(tmp_path), every_s=1.0, on_report=lambda state: None
                )

            client = RemoteEngine([address.pinned_url], secret=RunSecret(tmp_path), poll_s=0.02)
            with pytest.raises(
                EngineUnavailableError, match=r"shows the certificate .* instead of"
            ):
                await client.generate([1], SamplingParams(), deadline_s=2.0)

            await client.close()
            assert other.heard == b""
            assert other.certificate in caplog.text and made.fingerprint() in caplog.text

    asyncio.run(work())
    assert (
        len([record for record in caplog.records if "shows the certificate" in record.message]) == 1
    )


def test_an_engine_that_comes_back_with_another_certificate_is_known_by_its_announcement(
    made, tmp_path
):
    """The file was deleted: the engine that starts next at the same port has a new one."""
    give(tmp_path, made)

    async def work():
        directory = EngineDirectory(tmp_path)
        async with a_door(tmp_path, encrypted=True) as door:

            def announce(certificate: str) -> None:
                directory.announce(
                    Announcement(
                        url=door.address.url,
                        name="e",
                        pid=1,
                        started_at=1.0,
                        certificate=certificate,
                    )
                )

            announce(FINGERPRINT)
            client = RemoteEngine(directory, poll_s=0.02)
            waiting = asyncio.ensure_future(client.generate([7], SamplingParams(), deadline_s=300))
            await asyncio.sleep(0.2)
            assert not waiting.done()

            announce(door.address.certificate)
            assert (await waiting).ids == [7]

            await client.close()

    asyncio.run(work())


@pytest.mark.parametrize("years", [(-9, -5), (5, 9)], ids=["expired", "not valid yet"])
def test_no_clock_has_to_be_right(years, tmp_path, monkeypatch):
    """A pin does not expire: the fingerprint is right, whatever the dates are."""
    pytest.importorskip("cryptography")

    def date(year: int, *_: int) -> datetime.datetime:
        return datetime.datetime.now() + datetime.timedelta(days=365 * years[year == 9999])

    monkeypatch.setattr(module, "datetime", SimpleNamespace(datetime=date))
    RunCertificate(tmp_path)._make()
    monkeypatch.undo()

    async def work():
        async with a_door(tmp_path, encrypted=True) as door:
            assert await door.is_served()

    asyncio.run(work())


def test_the_printed_curl_line_works(made, tmp_path):
    """docs/engines.md, for people and scripts."""
    give(tmp_path, made)
    with suppress(FileNotFoundError):
        subprocess.run(["curl", "--version"], check=True, capture_output=True)

        async def work():
            async with a_door(tmp_path, encrypted=True) as door:
                curl = await asyncio.create_subprocess_exec(
                    "curl", "-s", "--cacert", str(tmp_path / NAME), "--connect-to",
                    f"agentevo::127.0.0.1:{door.port}", "-H",
                    f"Authorization: {door.secret.header()['Authorization']}",
                    "https://agentevo/state", stdout=subprocess.PIPE,
                )  # fmt: skip
                return (await curl.communicate())[0]

        assert b'"version":3' in asyncio.run(work())
        return

    pytest.skip("no curl here")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:8000", ("http://127.0.0.1:8000", "")),
        ("http://localhost:8000/", ("http://localhost:8000", "")),
        ("http://[::1]:8000", ("http://[::1]:8000", "")),
        (f"https://gpu7:8000#sha256={FINGERPRINT.upper()}", ("https://gpu7:8000", FINGERPRINT)),
    ],
)
def test_an_address_is_read(text, address):
    read = EngineAddress.read(text)
    assert read == address
    assert EngineAddress.read(read.pinned_url) == address


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not a url", "is not the URL of an engine"),
        ("", "is not the URL of an engine"),
        ("http://127.0.0.1", "is not the URL of an engine"),
        ("http://127.0.0.1:99999", "is not the URL of an engine"),
        ("http://[::1:8000", "is not the URL of an engine"),
        ("ftp://127.0.0.1:8000", "is not the URL of an engine"),
        ("http://127.0.0.1:8000/requests", "is not the URL of an engine"),
        ("http://me:pw@127.0.0.1:8000", "is not the URL of an engine"),
        ("http://gpu7:8000", "secret would travel unencrypted"),
        ("http://10.0.0.7:8000", "secret would travel unencrypted"),
        ("http://127.0.0.1.evil.org:8000", "secret would travel unencrypted"),
        ("https://gpu7:8000", "fingerprint of its certificate is missing"),
        ("https://gpu7:8000#sha256=abc", "fingerprint of its certificate is missing"),
        (f"http://127.0.0.1:8000#sha256={FINGERPRINT}", "is not encrypted"),
    ],
)
def test_what_is_no_address_or_would_give_the_secret_away_is_refused(text, problem):
    with pytest.raises(ConfigError, match=problem) as refused:
        EngineAddress.read(text)
    assert "pw" not in str(refused.value)


def test_a_sampler_refuses_such_an_engine_before_anything_is_created(tmp_path, monkeypatch, capsys):
    from agentevo.cli.main import main

    monkeypatch.chdir(tmp_path)
    for url in ("not a url", "http://gpu7:8000"):
        assert main(["sample", "coins", "run.dir=run", "model.name=tiny", "--engine", url]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
