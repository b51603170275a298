"""The options of an SGLang server in `engine.options` (`engine.type: sglang`), read before anything
is started."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from agentevo.config import EngineSection
from agentevo.errors import ConfigError, MissingExtraError
from agentevo.inference.engine_options import read_engine_options
from agentevo.runtime.credentials import key_of, without_password
from agentevo.runtime.http_clients import is_this_machine
from agentevo.runtime.section import Section

ROUNDING = ("--quantization", "--kv-cache-dtype")
"""Arguments under which SGLang computes with rounded weights, or over rounded keys and values."""
EXACT = ("auto", "bf16", "bfloat16")
"""Their values that round as a model's own dtype does."""


class SglangOptions(Section):
    """The options of a server that this run starts, or of a running server at `url`."""

    url: str | None = None
    """The address of a running server, such as https://gpu-1:30000. Default: the run starts a
    server on this machine, which ends with this process."""
    api_key: str | None = None
    """${env:NAME}: the variable with the key that the server at `url` requires."""
    admin_api_key: str | None = None
    """${env:NAME}: the variable with the server's admin key, if it has one."""
    ca_file: Path | None = None
    """The file of certificates (PEM) that verify the server's certificate. Default: the system's
    certificates."""
    weights_folder: Path | None = None
    """The folder for weight versions that the server reads, under the same path on its machine.
    Required for a URL of another machine. Default: a temporary folder."""
    command: list[str] = Field(default_factory=list)
    """The program that starts a server, with its first arguments. Default: `python -m
    sglang.launch_server` of this environment."""
    args: list[str] = Field(default_factory=list)
    """Further arguments of the program, such as [--tp-size, '2']."""
    log_file: Path | None = None
    """The file for the server's output. Default: a file in the temporary folder."""
    seeded: bool = True
    """Whether a request's seed decides its tokens. SGLang needs --enable-deterministic-inference
    for this; a server that the run starts gets this flag. false: seeds have no effect, and min_p
    can be used."""
    start_timeout_s: float = Field(default=1200.0, gt=0)
    """The time limit for the server to be ready, in seconds."""

    @property
    def rounding(self) -> list[str]:
        """The arguments that make a server of this run compute less precisely than its dtype, as
        NAME=VALUE."""
        pairs = [
            *pairwise(self.args),
            *(tuple(word.split("=", 1)) for word in self.args if "=" in word),
        ]
        return [
            f"{name}={value}" for name, value in pairs if name in ROUNDING and value not in EXACT
        ]

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        start_options = [name for name in ("command", "args", "log_file") if getattr(self, name)]
        if self.url is not None and start_options:
            raise ValueError(
                f"{start_options[0]} is for a server that this run starts: leave out url"
            )
        if self.url is None and (self.api_key or self.admin_api_key or self.ca_file):
            raise ValueError("api_key, admin_api_key and ca_file need a url")
        return self


def read_options(section: EngineSection) -> SglangOptions:
    """The options of the section. Raises the errors of `read_engine_options`, and ConfigError for a
    URL to which keys would travel unencrypted."""
    options = read_engine_options(section, SglangOptions, "SGLang")
    if options.url is not None:
        _check_url(options, options.url)
    return options


def check_options(section: EngineSection) -> None:
    """Raises the errors of `read_options` and `check_keys`, and MissingExtraError if the run would
    start a server and SGLang is not installed."""
    options = read_options(section)
    check_keys(options)
    if options.url is None and not options.command and find_spec("sglang") is None:
        raise MissingExtraError(
            "engine.type=sglang starts a server of the package 'sglang': pip install sglang, "
            "give the URL of a running server in engine.options.url, or set engine.type=torch"
        )


def check_keys(options: SglangOptions) -> tuple[str | None, str | None]:
    """The key and the admin key, from the environment. Raises ConfigError if one is missing."""
    return (
        key_of("engine.options.api_key", options.api_key),
        key_of("engine.options.admin_api_key", options.admin_api_key),
    )


def _check_url(options: SglangOptions, url: str) -> None:
    public_url = without_password(url)
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError:
        host = None

    if not host or parts.scheme not in ("http", "https") or parts.username is not None:
        raise ConfigError(
            f"engine.options.url: {public_url!r} is not the URL of a server: give one such "
            "as https://gpu-1:30000"
        )

    if is_this_machine(host):
        return

    if parts.scheme == "http":
        raise ConfigError(
            f"engine.options.url: {public_url}: keys and tokens would travel unencrypted: start "
            "the server with --ssl-certfile and --ssl-keyfile and give https://, or use a tunnel "
            "(ssh -L)"
        )

    if options.api_key is None and options.admin_api_key is None:
        raise ConfigError(
            f"engine.options.url: {public_url} is on another machine, and anyone who reaches it "
            "could replace its weights: start it with --api-key and write api_key: ${env:NAME}"
        )

    if options.weights_folder is None:
        raise ConfigError(
            f"engine.options.weights_folder: {public_url} is on another machine: give a folder "
            "that both machines see under the same path"
        )
