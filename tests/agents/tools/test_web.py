"""Pages of the web and a search in it, as tools: which hosts are read, and what is made of them."""

from __future__ import annotations

import gzip
import ipaddress
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentevo.agents.tools import web_hosts, web_search
from agentevo.agents.tools.fetch import Fetch, page_text
from agentevo.agents.tools.web_hosts import WebHosts, is_public
from agentevo.agents.tools.web_search import WebSearch
from agentevo.errors import ConfigError, ToolError, ToolUnavailableError

PAGE = """<!doctype html><html><head><title> Perth &amp; more </title><style>p{}</style></head>
<body><script>var a = "<p>no</p>";</script><h1>Perth</h1><p>A <b>city</b> in
Australia.<br>Capital of <a href="/wa">Western <i>Australia</i></a>.</p>
<ul><li>sun</li><li>sea</li></ul><table><tr><td>1</td><td>2</td></tr></table></body></html>"""


class _Site:
    def __init__(self, port: int) -> None:
        self.port = port
        self.base = f"http://127.0.0.1:{port}"
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        """Path, headers and body of each request."""
        self.answers: dict[str, Callable[[], tuple[int, dict[str, str], bytes]]] = {}

    def gives(self, path: str, body: bytes | str, kind: str = "text/html", **headers: str) -> str:
        content = body.encode() if isinstance(body, str) else body
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        told = {"Content-Type": kind, **more}
        self.answers[path] = lambda: (200, told, content)
        return self.base + path

    def fails(self, path: str, status: int, **headers: str) -> str:
        self.answers[path] = lambda: (status, headers, b"")
        return self.base + path


@pytest.fixture
def site() -> Iterator[_Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            here.asked.append((self.path, dict(self.headers), self.rfile.read(length)))
            answer = here.answers.get(self.path.partition("?")[0])
            status, headers, body = (404, {}, b"") if answer is None else answer()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        here = _Site(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield here
        server.shutdown()
        thread.join()


def reader(site: _Site, **options: Any) -> Fetch:
    return Fetch(allow=[f"127.0.0.1:{site.port}"], allow_private=True, **options)


def test_a_page_is_read_as_its_title_and_text(site):
    url = site.gives("/perth", PAGE)
    assert reader(site).fetch(url) == (
        "Perth & more\n\nPerth\nA city in Australia.\nCapital of Western Australia.\nsun\nsea\n1 2"
    )
    linked = reader(site, links=True).fetch(url)
    assert f"Capital of [Western Australia]({site.base}/wa)." in linked


def test_a_long_page_is_read_in_parts_and_asked_for_once(site):
    url = site.gives("/long", "abcdef" * 3, "text/plain")
    fetch = reader(site, part_chars=10)
    assert fetch.fetch(url) == "abcdefabcd\n[part 1 of 2]"
    assert fetch.fetch(url, part=2) == "efabcdef\n[part 2 of 2]"
    assert len(site.asked) == 1
    for part in (0, 3):
        with pytest.raises(ToolError, match="has the parts 1 to 2, and no part"):
            fetch.fetch(url, part=part)


def test_other_texts_are_read_as_they_are(site):
    fetch = reader(site)
    latin = site.gives("/latin", "Zürich".encode("latin-1"), "text/plain; charset=latin-1")
    assert fetch.fetch(latin) == "Zürich"
    wide = site.gives("/wide", "Zürich".encode("utf-16"), "text/plain; charset=UTF-16")
    assert fetch.fetch(wide) == "Zürich"
    for charset in ("klingon", "undefined", "idna", "punycode", "hex", "unicode_escape"):
        odd = site.gives(f"/{charset}", "ü-\\u00e4", f"text/plain; charset={charset}")
        assert fetch.fetch(odd) == "ü-\\u00e4"
    assert fetch.fetch(site.gives("/json", '{"a":1}', "application/json")) == '{\n "a": 1\n}'
    assert fetch.fetch(site.gives("/none", " ", "text/plain")) == "The page has no text."
    packed = site.gives("/gz", gzip.compress(b"hi"), "text/plain", Content_Encoding="gzip")
    assert fetch.fetch(packed) == "hi"


def test_what_is_no_text_too_large_or_an_error_is_refused(site):
    fetch = reader(site, max_bytes=1000)
    bomb = gzip.compress(b"a" * 100_000)
    for url, words in (
        (site.gives("/pdf", b"%PDF", "application/pdf"), "is application/pdf, and texts alone"),
        (site.gives("/big", "a" * 1001), "has more than 1,000 bytes"),
        (site.gives("/bomb", bomb, "text/plain", Content_Encoding="gzip"), "more than 1,000"),
        (site.gives("/br", b"x", Content_Encoding="br"), "the encoding br, which was not asked"),
        (site.gives("/bad", b"no gzip" * 9, Content_Encoding="gzip"), "/bad can't be un"),
        (site.fails("/500", 500), "answers 500 Internal Server Error"),
        (site.base + "/404", "answers 404"),
    ):
        with pytest.raises(ToolError, match=words):
            fetch.fetch(url)


@pytest.mark.slow
def test_what_unpacks_to_too_much_is_unpacked_no_further(site):
    url = site.gives("/bomb", gzip.compress(bytes(30_000_000)), Content_Encoding="gzip")
    tracemalloc.start()
    try:
        with pytest.raises(ToolError, match="has more than 1,000 bytes"):
            reader(site, max_bytes=1000).fetch(url)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10_000_000


def test_redirects_are_checked_as_the_first_url_is(site):
    fetch = reader(site)
    site.gives("/end", "there", "text/plain")
    assert fetch.fetch(site.fails("/here", 302, Location="/end")) == "there"
    for target, words in (
        ("http://localhost:1/", "localhost:1 is not a host that may be read"),
        (f"http://localhost:{site.port}/end", "is not a host that may be read"),
        ("file:///etc/passwd", "is no URL that begins with https"),
        ("/loop", "more than 5 redirects"),
    ):
        url = site.fails("/loop" if target == "/loop" else "/to", 307, Location=target)
        with pytest.raises(ToolError, match=words):
            fetch.fetch(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://evil.example/", "evil.example is not a host"),
        ("https://python.org.evil.example/", "is not a host"),
        ("https://notpython.org/", "is not a host"),
        ("https://secret.docs.python.org/", "is not a host"),
        ("https://docs.python.org:8443/", "docs.python.org:8443 is not a host"),
        ("http://docs.python.org:443/", "is not a host"),
        ("ftp://docs.python.org/", "is no URL that begins with https"),
        ("docs.python.org", "is no URL that begins with https"),
        ("https:///x", "is no URL that begins with https"),
        ("https://a:b@docs.python.org/", "a user's name or password"),
        ("https://docs.python.org@evil.example/", "a user's name or password"),
        ("https://docs.python.org/" + "a" * 2000, "more than 2000 characters"),
        ("http://[::1", "is no URL"),
        ("", "is no URL"),
    ],
)
def test_hosts_that_no_rule_names_are_not_asked(url, words, monkeypatch):
    monkeypatch.setattr(web_hosts.socket, "getaddrinfo", lambda *given, **more: pytest.fail(url))
    fetch = Fetch(allow=["*.python.org"], deny=["secret.docs.python.org"])
    with pytest.raises(ToolError, match=words):
        fetch.fetch(url)


def resolves(monkeypatch, *addresses: str) -> list[str]:
    """Every name has these addresses; the list holds the names that were looked up."""
    names: list[str] = []
    real = socket.getaddrinfo

    def look_up(host, port, *given, **options):
        if host in addresses:  # whoever connects
            return real(host, port, *given, **options)
        names.append(host)
        kinds = {4: socket.AF_INET, 6: socket.AF_INET6}
        return [
            (
                kinds[ipaddress.ip_address(address).version],
                socket.SOCK_STREAM,
                6,
                "",
                (address, port),
            )
            for address in addresses
        ]

    monkeypatch.setattr(web_hosts.socket, "getaddrinfo", look_up)
    return names


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"], ["10.0.0.7"], ["192.168.1.1"], ["169.254.169.254"], ["100.64.0.1"],
        ["0.0.0.0"], ["::1"], ["fd00::1"], ["fe80::1"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"], ["224.0.0.1"], ["fec0::1"], ["64:ff9b:1::a00:1"], ["::127.0.0.1"],
        ["::ffff:0:127.0.0.1"], ["3fff::1"], ["5f00::1"], ["2001:db8::1"],
        ["93.184.216.34", "127.0.0.1"],
    ],
    ids=str,
)  # fmt: skip
def test_a_name_with_an_address_that_is_not_public_is_refused(addresses, monkeypatch):
    resolves(monkeypatch, *addresses)
    with pytest.raises(ToolError, match="is not a public host: its address is"):
        Fetch(allow=["*"]).fetch("https://pages.example/")


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address):
    assert is_public(ipaddress.ip_address(address))


def test_numbers_that_are_addresses_are_looked_up_and_refused():
    for host in ("127.0.0.1", "2130706433", "0x7f.1", "[::1]", "localhost"):
        with pytest.raises(ToolError, match=r"is not a public host|can't be found"):
            Fetch(allow=["*"]).fetch(f"http://{host}/")


def test_the_connection_goes_to_the_address_that_was_checked(site, monkeypatch):
    site.gives("/a", "hello", "text/plain")
    names = resolves(monkeypatch, "127.0.0.1")
    fetch = Fetch(allow=[f"pages.example:{site.port}"], allow_private=True)
    assert fetch.fetch(f"http://Pages.example:{site.port}/a#part") == "hello"
    assert names == ["pages.example"], "looked up once"
    ((path, headers, _),) = site.asked
    assert (path, headers["Host"]) == ("/a", f"pages.example:{site.port}")


@pytest.mark.parametrize("entry", ["", "https://a.b", "a.b/c", "a*.b", "*.", "a.b:x"])
def test_what_names_no_host_is_refused(entry):
    with pytest.raises(ConfigError, match=r"allow: .* is not a host|the port must be a number"):
        WebHosts([entry])


def test_a_host_is_denied_at_every_port_unless_the_entry_has_one():
    hosts = WebHosts(["*", "*:8080"], deny=["secret.example", "*.corp.example", "other.example:80"])
    for url in ("http://secret.example", "http://a.corp.example", "https://A.corp.example."):
        assert not hosts.allows(url)
        assert not hosts.allows(f"{url}:8080")
    assert not hosts.allows("http://other.example/")
    assert hosts.allows("http://other.example:8080/")


def test_a_reader_without_hosts_is_refused():
    with pytest.raises(ConfigError, match="allow is empty"):
        Fetch(allow=[])


def test_html_that_is_cut_or_odd_is_read_as_far_as_it_goes():
    assert page_text("<p>a<p>b<div>c")[1] == "a\nb\nc"
    assert page_text("a<script>if (1 < 2) {</script>b<svg><svg></svg>x</svg>c")[1] == "abc"
    assert page_text("<title>a</title><title>b</title>c") == ("a", "bc")
    assert page_text('<a href="javascript:x()">x</a>', links=True)[1] == "x"
    assert page_text('<a href="//[">x</a>', links=True)[1] == "x"
    assert page_text("x <style>y")[1] == "x"
    assert page_text("1 < 2 <!-- <p> --> <!doctype x></> &lt;b&gt; &#39;<br/>y")[1] == (
        "1 < 2 <b> '\ny"
    )
    assert page_text("&#" + "9" * 5000 + ";")[1].startswith("&#999")
    assert page_text("<p class=a\"b title='>'>x<script/>y")[1] == "xy"


@pytest.mark.parametrize(
    "href", ["href=/x", "HREF = '/x'", 'title="href=no" href="&#47;x" href=no', "href=http://h/x"]
)
def test_the_address_of_a_link_is_that_of_its_first_href(href):
    assert page_text(f"<a {href}>a</a>", url="http://h/", links=True)[1] == "[a](http://h/x)"


@pytest.mark.parametrize(
    "unit", ["<a ", "<x =", "<a x=", "<a b='", "</a ", "<!--", "<script>", "<a href=x>", "<", "&#"]
)
def test_a_page_is_read_once_whatever_is_in_it(unit):
    page_text((unit * 200_000)[:200_000], url="http://h/", links=True)  # or a minute goes by


def test_the_text_of_a_page_is_not_much_longer_than_the_page(site):
    deep = "[" * 900 + "1," * 9_000 + "1" + "]" * 900
    fetch = reader(site, max_bytes=20_000, part_chars=100_000)
    assert fetch.fetch(site.gives("/deep", deep, "application/json")) == deep

    links = "<a href=x>" * 2000
    target = "/" + "y" * 1000 + "/"
    with pytest.raises(ToolError, match="has links of more than 20,000 characters"):
        reader(site, max_bytes=20_000, links=True).fetch(site.gives(target, links))


def test_pages_are_kept_by_what_they_take(site, monkeypatch):
    monkeypatch.setattr("agentevo.agents.tools.fetch.KEPT_BYTES", 3000)
    fetch = reader(site)
    urls = [site.gives(f"/{number}", "a" * 1200, "text/plain") for number in range(3)]
    for url in (*urls, urls[2], urls[1], urls[0]):
        fetch.fetch(url)
    assert [path for path, _, _ in site.asked] == ["/0", "/1", "/2", "/0"]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
SLOW: dict[str, tuple[bytes, bytes, bytes]] = {
    "headers": (b"HTTP/1.1 200 OK\r\nX: ", b"a", b"\r\nContent-Length: 2\r\n\r\n{}"),
    "body": (HEAD + b"\r\n", b" ", b"{}"),
    "name in gzip": (
        HEAD + b"Content-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x08\0\0\0\0\0\xff",
        b"A" * 10,
        b"\0" + gzip.compress(b"{}")[10:],
    ),
}
"""What a server says at first, now and then, and after all."""


@pytest.fixture
def slow_server() -> Iterator[Callable[[tuple[bytes, bytes, bytes]], int]]:
    """Starts a server that takes three seconds, a piece each 50 ms; gives its port."""
    with ExitStack() as stack:

        def start(said: tuple[bytes, bytes, bytes]) -> int:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def answer() -> None:
                with suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(said[0])
                        for _ in range(60):
                            connection.sendall(said[1])
                            time.sleep(0.05)
                        connection.sendall(said[2])

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            stack.callback(thread.join)
            return int(listener.getsockname()[1])

        yield start


@pytest.mark.parametrize("said", SLOW.values(), ids=SLOW)
def test_a_server_that_drips_is_late(said, slow_server, monkeypatch):
    port = slow_server(said)
    fetch = Fetch(allow=[f"127.0.0.1:{port}"], allow_private=True, timeout_s=0.4)
    with pytest.raises(ToolError, match=r"was not read within 0\.4 s"):
        fetch.fetch(f"http://127.0.0.1:{port}/")

    monkeypatch.setattr(web_search, "TIMEOUT_S", 0.4)
    url = f"http://127.0.0.1:{slow_server(said)}/"
    with pytest.raises(ToolUnavailableError, match=r"has not answered within 0\.4 s") as refusal:
        WebSearch("searxng", url=url).web_search("x")
    assert refusal.value.was_sent


def test_redirects_and_names_count_against_the_time(site, monkeypatch):
    def answer() -> tuple[int, dict[str, str], bytes]:
        time.sleep(0.3)
        return 302, {"Location": "/again"}, b""

    site.answers["/again"] = answer
    with pytest.raises(ToolError, match=r"/again was not read within 0\.8 s"):
        reader(site, timeout_s=0.8).fetch(site.base + "/again")

    has_ended = threading.Event()
    monkeypatch.setattr(web_hosts.socket, "getaddrinfo", lambda *given, **more: has_ended.wait())
    with pytest.raises(ToolError, match="localhost can't be found: it did not return within"):
        Fetch(allow=["*"], timeout_s=2.0).fetch("http://localhost/")
    has_ended.set()


RESULTS = [
    {"title": "One  two", "url": "https://a.example/1", "content": "said\nthere"},
    {"title": "Hidden", "url": "https://benchmark.example/2", "content": "the answer"},
    {"title": None, "url": "https://b.example/3"},
]


def test_results_are_shown_but_those_of_hosts_that_are_denied(site):
    url = site.gives("/search", json.dumps({"results": RESULTS}), "application/json")
    tool = WebSearch("searxng", url=url, deny=["benchmark.example"])
    assert tool.web_search("perth") == (
        "[1] One two\nhttps://a.example/1\nsaid there\n\n[2] \nhttps://b.example/3"
    )
    assert site.asked[0][0] == "/search?format=json&q=perth"


@pytest.mark.parametrize(
    ("api", "answer", "header", "asked"),
    [
        ("serper", {"organic": [{"title": "T", "link": "https://a.b", "snippet": "s"}]},
         ("X-API-KEY", "k"), {"q": "x", "num": 2}),
        ("tavily", {"results": [{"title": "T", "url": "https://a.b", "content": "s"}]},
         ("Authorization", "Bearer k"), {"query": "x", "max_results": 2}),
        ("brave", {"web": {"results": [{"title": "T", "url": "https://a.b", "description": "s"}]}},
         ("X-Subscription-Token", "k"), None),
        ({"url": "", "method": "POST", "query": "text", "results": "data.hits", "link": "href",
          "text": "body", "key_header": "X-Mine", "parameters": {"lang": "en"}},
         {"data": {"hits": [{"title": "T", "href": "https://a.b", "body": "s"}]}},
         ("X-Mine", "k"), {"lang": "en", "text": "x"}),
    ],
    ids=["serper", "tavily", "brave", "mine"],
)  # fmt: skip
def test_each_api_is_asked_and_read_in_its_own_way(api, answer, header, asked, site, monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "k")
    url = site.gives("/api", json.dumps(answer), "application/json")
    tool = WebSearch(api, url=url, api_key="${env:SEARCH_KEY}", top_k=2)
    assert tool.web_search("x") == "[1] T\nhttps://a.b\ns"
    ((path, headers, body),) = site.asked
    assert {name.lower(): one for name, one in headers.items()}[header[0].lower()] == header[1]
    if asked is None:
        assert path == "/api?q=x&count=2"
    else:
        assert json.loads(body) == asked


def test_a_search_that_gives_nothing_or_nonsense(site):
    for body, words in (("[1]", "Nothing"), ("{}", "Nothing"), ('{"results": []}', "Nothing")):
        tool = WebSearch("searxng", url=site.gives("/s", body, "application/json"))
        assert tool.web_search("x") == "Nothing was found." and words
    for body, words in (
        ('{"results": {}}', "no list at 'results'"),
        ("<html>", "nonsense"),
        ("[" * 100_000, "nonsense"),
        ('{"results":' + "[" * 100_000 + "]" * 100_000 + "}", "nonsense"),
    ):
        with pytest.raises(ToolError, match=words):
            WebSearch("searxng", url=site.gives("/s", body)).web_search("x")
    with pytest.raises(ToolUnavailableError, match="answers 403: see api_key"):
        WebSearch("searxng", url=site.fails("/s", 403)).web_search("x")
    with pytest.raises(ToolError, match="answers 500"):
        WebSearch("searxng", url=site.fails("/s", 500)).web_search("x")
    with pytest.raises(ToolUnavailableError, match="the search API"):
        WebSearch("searxng", url="http://127.0.0.1:9/").web_search("x")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api": "altavista"}, "'altavista' is not known: choose one of searxng, brave"),
        ({"api": "searxng"}, "url is missing"),
        ({"api": "brave"}, "needs a key: set api_key"),
        ({"api": "brave", "api_key": "secret"}, "write .{env:NAME}"),
        ({"api": "searxng", "url": "http://a.b", "api_key": "${env:PATH}"}, "has no header"),
        ({"api": {"url": "http://a.b", "metod": "GET"}}, "api.metod"),
        ({"api": "searxng", "url": "ftp://a.b"}, "api.url"),
    ],
)
def test_an_api_that_can_not_be_asked_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        WebSearch(**options)
