"""`python .ci/install.py ARG...` is `pip install ARG...` by uv, in a quarter of the time.

uv doesn't read pip's settings, so those that say where packages come from are handed on. Where uv
fails, for example behind a proxy that only pip knows, pip installs.
"""

import ast
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
HANDED_ON = ("index-url", "extra-index-url", "find-links", "trusted-host", "constraint")
TRUE = ("1", "true", "yes", "on")


def main(arguments: list[str]) -> int:
    arguments = ["--constraint", "constraints.txt", *arguments]
    uv = [*PIP, "install", "--quiet", "--constraint", "constraints.txt", "uv"]
    if not subprocess.run(uv, check=False).returncode and not install_by_uv(arguments):
        return 0
    return subprocess.run([*PIP, "install", *arguments], check=False).returncode


def install_by_uv(arguments: list[str]) -> int:
    """The exit code of uv, told where pip would look."""
    settings = read_settings()
    install = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    install += ["--index-strategy", "unsafe-best-match"]  # the newest of all indexes, as pip has it
    install += ["--no-index"] if settings.get("no-index", "0").lower() in TRUE else []
    for name in HANDED_ON:
        if f"--{name}" not in arguments or name == "constraint":
            for value in settings.get(name, "").split():
                install += [f"--{name}", value]

    environment = {"UV_HTTP_TIMEOUT": settings.get("default-timeout", "60"), **os.environ}
    if "cert" in settings:
        environment.setdefault("SSL_CERT_FILE", settings["cert"])
    return subprocess.run([*install, *arguments], env=environment, check=False).returncode


def read_settings() -> dict[str, str]:
    """pip's settings by their names without a section; those of the environment win."""
    listing = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    pairs = [line.partition("=") for line in listing.stdout.splitlines()]
    pairs.sort(key=lambda pair: pair[0].startswith(":env:"))
    return {key.rpartition(".")[2]: ast.literal_eval(value) for key, _, value in pairs}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
