"""Executes a program within limits, as an unused user.

Run as `python -I -S run_limited.py SETTINGS PROGRAM...`, with SETTINGS in JSON, inside a sandbox's
namespaces; see sandbox/programs.py.
"""

from __future__ import annotations

import json
import os
import resource
import sys


def main() -> None:
    """Limits this process and executes the program. Any failure ends the process, so the program
    never starts partly confined."""
    settings = json.loads(sys.argv[1])
    program = sys.argv[2:]
    for name, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))

    os.makedirs("/sandbox/.tmp", exist_ok=True)
    os.chmod("/sandbox/.tmp", 0o1777)
    if settings["uids"]:
        first, count = settings["uids"]
        uid = first + int.from_bytes(os.urandom(8)) % count
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)

    os.execvp(program[0], program)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 (the host shows the last line)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
