"""Which addresses a page may ask for."""

from pathlib import Path

import pytest

from agentevo.environments.browser.permissions import absolute_url, permissions_for
from agentevo.errors import ConfigError


def test_hosts() -> None:
    permissions = permissions_for(
        "http://127.0.0.1:80/a", ("*.example.com", "cdn.org:8443", "plain.net", "[::1]:81")
    )

    for url in (
        "http://127.0.0.1/b",
        "ws://127.0.0.1/socket",
        "https://a.b.example.com:99/",
        "https://CDN.org:8443/",
        "http://plain.net:1/",
        "http://[::1]:81/",
        "data:text/html,hi",
        "about:blank",
    ):
        assert permissions.allow(url), url
    for url in (
        "http://127.0.0.1:5432/",
        "http://127.0.0.1@evil.org/",
        "https://example.com/",
        "https://notexample.com/",
        "https://cdn.org/",
        "http://[::1]/",
        "file:///etc/passwd",
        "chrome://version",
        "view-source:http://127.0.0.1/b",
        "javascript:alert(1)",
        "http://127.0.0.1:99999/",
        "ftp://plain.net/",
        "",
    ):
        assert not permissions.allow(url), url


def test_an_ipv6_address_is_one_host_in_every_spelling() -> None:
    for start, pattern in (("[0:0::0:1]", "::2"), ("[::1]", "[0::2]"), ("[::0001]", "[::2]")):
        permissions = permissions_for(f"http://{start}:81/", (pattern,))
        assert permissions.allow("http://[::1]:81/") and permissions.allow("http://[::2]/")
        assert permissions.allow_connection("::1", 81) and permissions.allow_connection("::2", 5)
        assert not permissions.allow("http://[::1]/") and not permissions.allow("http://[::3]/")


def test_only_the_folder_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    page = folder / "a b.html"
    page.write_text("hi")
    (tmp_path / "secret").write_text("key")
    (folder / "link").symlink_to(tmp_path / "secret")

    permissions = permissions_for(page.as_uri(), ())

    assert permissions.allow(page.as_uri())
    assert permissions.allow(f"file://localhost{folder}/other.css")
    assert not permissions.allow(f"file://{folder}/../secret")
    assert not permissions.allow(f"file://{folder}/%2e%2e/secret")
    assert not permissions.allow((folder / "link").as_uri())
    assert not permissions.allow(f"file://server{page}")
    assert not permissions.allow("http://127.0.0.1/")

    (folder / "circle").symlink_to(folder / "circle")
    for name in ("circle/x", "a%00b", "x" * 5000):  # an answer, not an exception
        assert permissions.allow(f"file://{folder}/{name}") in (True, False)
    assert not permissions.allow(f"file://{folder}/a%00b")


def test_a_player_opens_addresses_and_writes_no_pages() -> None:
    permissions = permissions_for("http://shop.org/", ())
    page = "http://shop.org/a/b?c"

    assert permissions.allow_navigation(absolute_url("../basket", page))
    for url in ("data:text/html,<p>Thanks", "about:blank", "blob:http://shop.org/1", "http://["):
        assert not permissions.allow_navigation(absolute_url(url, page)), url


@pytest.mark.parametrize(
    ("url", "hosts", "reason"),
    [
        ("example.com", (), "is not an address of a page"),
        ("chrome://version", (), "is not an address of a page"),
        ("http://", (), "is not an address of a page"),
        ("http://host:99999/", (), "is not an address"),
        ("file:///no/such/file.html", (), "there is no file"),
        ("http://host/", ("https://other/",), "is not a host"),
        ("http://host/", ("*",), "is not a host"),
        ("http://host/", ("a, EXCLUDE *",), "is not a host"),
    ],
)
def test_bad_addresses_are_refused(url: str, hosts: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        permissions_for(url, hosts)
