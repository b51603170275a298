"""Passwords in URLs. `${env:NAME}` replaces the password, and the code that opens the URL inserts
the value of that environment variable.

A configuration keeps the URL as it is written, and so does everything that is derived from the
configuration: config.yaml, reports, messages, the arguments of child processes. A URL with the
password itself is refused if it could be stored. So is the key of a server (`api_key`) in any form
other than `${env:NAME}`. URLs are printed only through `without_password`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from agentevo.errors import ConfigError

REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
EXAMPLE = "${env:STORE_PASSWORD}"
API_KEYS = ("api_key", "admin_api_key", "engine_secret")
"""The names of a server's key in a configuration, in every section."""
_WITH_KEYS = ("tools", "engine", "remote_models", "sandbox", "mcp")
"""Sections of servers whose keys are `api_key`. No code inserts a value into their URLs."""
_HIDDEN = "***"
_URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]++:/{1,2}\S+")
"""Matches from the start of a name without backtracking, so a name of a megabyte is read only
once."""
_ONE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*")
_SECRET_OPTION = re.compile(
    r"(?i)(?<=[?&;,:=])"
    r"(?=[\w.-]*?(?:password|passwd|passphrase|secret|token|credential)"
    r"|(?:[\w.-]*?(?:api|access|auth|private|subscription|[?&;._-]))?key=|(?:sig|signature|auth)=)"
    r"([\w.-]++[=:])([^&;,]*)"
)
"""`sslkey` and `tlsCertificateKeyFile` name files."""


def with_environment(url: str) -> str:
    """The URL to connect to. Each `${env:NAME}` is replaced by the variable's value, which is
    escaped if it is a user's name or password. Raises ConfigError for a variable that is not
    set."""

    def value(reference: re.Match[str]) -> str:
        variable = os.environ.get(reference[1])
        if not variable:
            raise ConfigError(
                f"{without_password(url)}: the environment variable {reference[1]} is not set: "
                "set it for every process that opens this URL"
            )

        before = url[: reference.start()]
        after = url[reference.end() :]
        return quote(variable, safe="") if "://" in before and "@" in after else variable

    return REFERENCE.sub(value, url)


def key_of(name: str, reference: str | None) -> str | None:
    """The value of the environment variable that the configuration's key `name` refers to as
    `${env:NAME}`. None if the key is not set. Raises ConfigError."""
    if reference is None:
        return None

    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(f"{name}: write ${{env:NAME}}, the environment variable with the key")

    key = os.environ.get(match[1], "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{name}: the environment variable {match[1]} holds no key: set it, in one line of "
            "ASCII, for every process of the run"
        )

    return key


def without_password(url: str) -> str:
    """The URL for messages, without the password. A `${env:NAME}` in its place is kept."""
    return _with_password_as(url, _HIDDEN)


def without_passwords(text: str) -> str:
    """The text with every URL in its `without_password` form."""
    return _URL.sub(lambda url: without_password(url[0]), text)


def is_same_place(first_url: str, second_url: str) -> bool:
    """Whether two URLs are the same except for the password."""
    return all_but_password(first_url) == all_but_password(second_url)


def all_but_password(url: str) -> str:
    """The URL as if it had no password, in whatever form it contains one."""
    return _with_password_as(url, "", references=True).replace(":@", "@")


def credential_problems(tree: Mapping[str, object]) -> list[str]:
    """The values of a configuration that would store a password, or that have `${env:NAME}` in a
    place that no code fills in. Each is given as 'key: problem: remedy'."""
    problems = []
    for key, text in _texts(tree):
        if key.rpartition(".")[2] in API_KEYS:
            if not REFERENCE.fullmatch(text):
                problems.append(
                    f"{key}: a key would be written into the run's folder and seen in the list of "
                    "processes: put it into an environment variable and write, in single quotes "
                    "on a command line, '${env:NAME}'"
                )
            continue

        is_url = key in ("store", "store.url") or _ONE_URL.fullmatch(text) is not None
        if is_url and without_password(text) != text:
            problems.append(
                f"{key}: the password would be written into the run's folder and seen in the list "
                f"of processes: {_remedy(key, text)}"
            )
        elif not is_url and REFERENCE.search(text):
            problems.append(
                f"{key}: ${{env:NAME}} is put into URLs alone, when they are opened: write "
                "${oc.env:NAME} for what may be read in the run's config.yaml"
            )

    return problems


def _remedy(key: str, url: str) -> str:
    """The correct way to give the password of this URL."""
    name = key.rpartition(".")[2]
    if name == "base_url" or (name == "url" and key.startswith(_WITH_KEYS)):
        return (
            "leave it out of the URL, put it into an environment variable and write api_key: "
            "'${env:NAME}' (a server of tools whose URL must have it: list it in a file, type: "
            "mcp_file)"
        )
    return (
        "put it into an environment variable and write, in single quotes on a command line, "
        f"'{_with_password_as(url, EXAMPLE)}'"
    )


def refuse_password(url: str) -> str:
    """Returns the URL, which is from a command line. Raises ConfigError if it contains a
    password."""
    problems = credential_problems({"store": {"url": url}})
    if problems:
        raise ConfigError(problems[0].removeprefix("store.url: "))
    return url


def _with_password_as(url: str, shown: str, *, references: bool = False) -> str:
    """The URL with `shown` in place of a password. With `references`, also in place of a reference
    to a password."""

    def stays(password: str) -> bool:
        return not password or (not references and REFERENCE.fullmatch(password) is not None)

    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme = ""
        rest = url

    userinfo, at, place = rest.rpartition("@")  # an unescaped password may contain any character
    user, colon, password = userinfo.partition(":")
    if at and colon and "/" not in user and not stays(password):
        rest = f"{user}:{shown}@{place}"

    hidden = _SECRET_OPTION.sub(
        lambda option: option[0] if stays(option[2]) else option[1] + shown, rest
    )
    return f"{scheme}{separator}{hidden}"


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{key}[{number}]")
