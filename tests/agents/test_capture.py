"""Requests of an agent's own client carry the attempt's key to the gateway, and nothing else
changes."""

import asyncio
import importlib
import multiprocessing
import os
import sys
import threading
import urllib.request
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import httpx
import pytest
from fake_gateway import FakeGateway

from agentevo.agents import capture
from agentevo.agents.capture import PLACEHOLDER_KEY, capture_calls, client_variables, untracked
from agentevo.errors import AgentEvoError

BODY = {"messages": []}


def by_urllib(url):
    request = urllib.request.Request(url, b'{"messages": []}', {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()
    assert not request.has_header(capture.HEADER.capitalize())


def by_urllib_text(url):
    with urllib.request.urlopen(url, timeout=300) as answer:
        answer.read()


def by_httpx(url, package="httpx"):
    with importlib.import_module(package).Client(trust_env=False, timeout=300) as client:
        client.post(url, json=BODY)


def by_async_httpx(url, package="httpx"):
    async def work():
        async with importlib.import_module(package).AsyncClient(trust_env=False) as client:
            await client.post(url, json=BODY, timeout=300)

    asyncio.run(work())


def by_streaming_httpx(url):
    with httpx.Client(trust_env=False) as client, client.stream("POST", url, json=BODY) as answer:
        answer.read()


def by_httpx2(url):
    by_httpx(url, "httpx2")


def by_async_httpx2(url):
    by_async_httpx(url, "httpx2")


def by_requests(url):
    importlib.import_module("requests").post(url, json=BODY, timeout=300)


def by_aiohttp(url):
    aiohttp = importlib.import_module("aiohttp")

    async def work():
        async with aiohttp.ClientSession() as session, session.post(url, json=BODY) as answer:
            await answer.read()

    asyncio.run(work())


CLIENTS = [
    by_urllib,
    by_urllib_text,
    by_httpx,
    by_async_httpx,
    by_streaming_httpx,
    by_httpx2,
    by_async_httpx2,
    by_requests,
    by_aiohttp,
]


@pytest.fixture(scope="module")
def gateway():
    with FakeGateway() as gateway:
        yield gateway


@pytest.fixture(scope="module")
def elsewhere():
    with FakeGateway() as server:
        yield server


@pytest.fixture(autouse=True)
def _begin_anew(gateway, elsewhere):
    gateway.received.clear()
    elsewhere.received.clear()


def sessions(server):
    return [received.session for received in server.received]


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_requests_to_the_gateway_carry_the_key_and_others_are_as_they_were(
    client, gateway, elsewhere
):
    for package in ("httpx2", "requests", "aiohttp"):
        if client.__name__.endswith(package):
            pytest.importorskip(package)

    client(f"{gateway.url}/v1/chat")
    client(f"{elsewhere.url}/v1/chat")
    with capture_calls(gateway.url, "key-a"):
        client(f"{gateway.url}/v1/chat")
        client(f"{elsewhere.url}/v1/chat")
        with untracked():
            client(f"{gateway.url}/v1/chat")

    client(f"{gateway.url}/v1/chat")
    assert sessions(gateway) == [None, "key-a", None, None]

    before, during = elsewhere.received
    assert before == during

    marked = gateway.received[1]
    plain = gateway.received[0]
    assert marked.body == plain.body
    assert marked.headers.keys() - plain.headers.keys() == {capture.HEADER.lower()}


def test_only_the_gateways_own_url_counts(gateway):
    with capture_calls("http://127.0.0.1:80", "key-a"):
        assert capture._key_for("http://127.0.0.1:80/v1") == "key-a"
        assert capture._key_for("http://127.0.0.1:80") == "key-a"
        for other in ("http://127.0.0.1:8080/v1", "http://127.0.0.1:80.evil.com/", "https://a/"):
            assert capture._key_for(other) is None


@pytest.mark.slow
def test_attempts_at_once_are_told_apart(gateway):
    url = f"{gateway.url}/v1/chat"

    async def attempt(key):
        with capture_calls(gateway.url, key):
            async with httpx.AsyncClient(trust_env=False, timeout=300) as client:
                for _ in range(3):
                    await client.post(url, json={"key": key})
                await asyncio.to_thread(by_urllib, url + "/thread")
                await asyncio.gather(*(client.post(url, json={"key": key}) for _ in range(3)))

    async def work():
        await asyncio.gather(*(attempt(f"key-{n}") for n in range(8)))

    asyncio.run(work())
    assert len(gateway.received) == 8 * 7
    assert all(r.session == r.body["key"] for r in gateway.received if "key" in r.body)

    threads = [r.session for r in gateway.received if r.path.endswith("/thread")]
    assert sorted(threads) == [f"key-{n}" for n in range(8)]


def test_threads_belong_to_the_attempt_that_started_them(gateway):
    class Worker(threading.Thread):
        def run(self):
            by_urllib_text(f"{gateway.url}/own-class")

    with capture_calls(gateway.url, "key-a"):
        threads = [
            threading.Thread(target=by_urllib_text, args=(f"{gateway.url}/target",)),
            Worker(),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)

    assert sessions(gateway) == ["key-a", "key-a"]
    assert "run" not in vars(threads[0])


def test_a_pool_serves_whoever_submits(gateway):
    """Also one whose thread an attempt has started."""
    with ThreadPoolExecutor(1) as pool:
        for key in ("key-a", "key-b"):
            with capture_calls(gateway.url, key):
                pool.submit(by_urllib_text, gateway.url).result(300)

        with capture_calls(gateway.url, "key-c"), untracked():
            pool.submit(by_urllib_text, gateway.url).result(300)

        pool.submit(by_urllib_text, gateway.url).result(300)
        with capture_calls(gateway.url, "key-d"):
            asyncio.run(in_executor(pool, gateway.url))

    assert sessions(gateway) == ["key-a", "key-b", None, None, "key-d"]


@pytest.mark.slow
def test_forked_processes_are_nobodys(gateway):
    """A pool of them that one attempt has started serves others."""
    with capture_calls(gateway.url, "key-a"):
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
        pool.submit(by_urllib_text, gateway.url).result(300)
    with capture_calls(gateway.url, "key-b"), pool:
        pool.submit(by_httpx, gateway.url).result(300)
    assert sessions(gateway) == [None, None]


def reusable(name, url):
    """A request, and what sends it and gives the request that its answer names."""
    if name == "urllib":
        request = urllib.request.Request(url, b"{}", {"content-type": "application/json"})

        def send():
            with urllib.request.urlopen(request, timeout=300) as answer:
                answer.read()
            return request

        return request, send

    if name == "requests":
        requests = pytest.importorskip("requests")
        request = requests.Request("POST", url, json=BODY).prepare()
        return request, lambda: requests.Session().send(request, timeout=300).request

    client = httpx.Client(trust_env=False, timeout=300)
    request = client.build_request("POST", url, json=BODY)
    if name == "httpx":
        return request, lambda: client.send(request).request

    async def sent():
        async with httpx.AsyncClient(trust_env=False, timeout=300) as client:
            return (await client.send(request)).request

    return request, lambda: asyncio.run(sent())


@pytest.mark.parametrize("name", ["httpx", "async httpx", "requests", "urllib"])
def test_a_request_that_is_made_once_belongs_to_each_attempt_that_sends_it(gateway, name):
    request, send = reusable(name, f"{gateway.url}/v1/chat")
    before = dict(request.headers)
    for key in ("key-a", "key-b"):
        with capture_calls(gateway.url, key):
            assert send() is request

    send()
    assert sessions(gateway) == ["key-a", "key-b", None]
    assert dict(request.headers) == before
    assert len({str(received.body) for received in gateway.received}) == 1


async def in_executor(pool, url):
    await asyncio.get_running_loop().run_in_executor(pool, by_urllib_text, url)


def test_a_client_that_is_imported_in_the_attempt_is_patched_then(gateway, tmp_path, monkeypatch):
    (tmp_path / "late_client.py").write_text(
        "import urllib.request\n"
        "class Request:\n    def __init__(self, url): self.url, self.headers = url, {}\n"
        "class Session:\n    def send(self, request): return request.headers\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(capture._MODULES, "late_client", capture._MODULES["requests"])

    with capture_calls(gateway.url, "key-a"):
        late = importlib.import_module("late_client")
        request = late.Request(f"{gateway.url}/v1")
        assert late.Session().send(request) == {capture.HEADER: "key-a"}
        assert late.__spec__.loader.get_source("late_client").startswith("import")

    assert late.Session().send(late.Request(gateway.url)) == {}
    assert "send" not in repr(capture._capture._patches)

    sys.modules.pop("late_client")
    with capture_calls(gateway.url, "key-b"), capture_calls(gateway.url, "key-c"):
        late = importlib.import_module("late_client")
        assert late.Session().send(late.Request(gateway.url)) == {capture.HEADER: "key-c"}

    sys.modules.pop("late_client")


def test_nothing_stays_behind(gateway, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "secret")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    before = dict(os.environ)
    methods = [httpx.Client.send, threading.Thread.start, ThreadPoolExecutor.submit]
    finders = list(sys.meta_path)

    with capture_calls(gateway.url, "key-a"):
        with capture_calls(gateway.url, "key-b"):
            assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"] == "agentevo"

        assert os.environ["OPENAI_BASE_URL"] == f"{gateway.url}/v1"
        assert os.environ["ANTHROPIC_BASE_URL"] == gateway.url
        assert "ANTHROPIC_AUTH_TOKEN" not in os.environ
        assert httpx.Client.send is not methods[0]

        with untracked() as outside:
            assert outside["OPENAI_API_KEY"] == "secret" and "OPENAI_BASE_URL" not in outside

    with pytest.raises(ValueError, match="bad"), capture_calls(gateway.url, "key-a"):
        raise ValueError("bad")

    assert dict(os.environ) == before
    assert [httpx.Client.send, threading.Thread.start, ThreadPoolExecutor.submit] == methods
    assert sys.meta_path == finders

    with untracked() as outside:
        assert outside["OPENAI_API_KEY"] == "secret"


def test_what_an_agent_sets_itself_stays(gateway, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with capture_calls(gateway.url, "key-a"):
        os.environ["OPENAI_API_KEY"] = "other"
    assert os.environ["OPENAI_API_KEY"] == "other"


@pytest.mark.slow
def test_methods_that_others_patch_meanwhile_are_patched_once(gateway, monkeypatch):
    """An observer that is installed in an attempt keeps ours inside of its own."""
    calls = []
    monkeypatch.setattr(httpx.Client, "send", httpx.Client.send)  # put back at the end
    with capture_calls(gateway.url, "key-a"):
        ours = httpx.Client.send

        def observed(self, request, **options):
            calls.append(request.headers.get(capture.HEADER))
            return ours(self, request, **options)

        httpx.Client.send = observed

    for key in ("key-b", "key-c"):
        with capture_calls(gateway.url, key):
            assert httpx.Client.send is observed
            by_httpx(gateway.url)

    httpx.Client.send = ours  # the observer is taken away
    by_httpx(gateway.url)
    assert sessions(gateway) == ["key-b", "key-c", None] and calls == [None, None]

    capture._capture._patches.clear()


def test_two_gateways_at_once_are_refused(gateway, elsewhere):
    with (
        capture_calls(gateway.url, "key-a"),
        pytest.raises(AgentEvoError, match=r"run in this process and use its"),
        capture_calls(elsewhere.url, "key-b"),
    ):
        pass

    with capture_calls(elsewhere.url, "key-b"):
        by_httpx(elsewhere.url)

    assert sessions(elsewhere) == ["key-b"]


def test_the_gateway_is_reached_without_a_proxy():
    url = "http://127.0.0.1:1"
    assert "NO_PROXY" not in client_variables(url, PLACEHOLDER_KEY, {"NO_PROXY": "a"})
    variables = client_variables(url, "key", {"https_proxy": "x", "http_proxy": "x"})
    assert (variables["NO_PROXY"], variables["no_proxy"]) == ("127.0.0.1", "127.0.0.1")
    variables = client_variables(url, "key", {"HTTP_PROXY": "x", "NO_PROXY": "a,b"})
    assert (variables["NO_PROXY"], variables["no_proxy"]) == ("a,b,127.0.0.1", "a,b,127.0.0.1")
