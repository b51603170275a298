"""Passes a filter of system calls to `bwrap`, as an inherited handle, and executes `bwrap`.

Run as `python -I -S hand_over.py FILTER bwrap ...`, with FILTER in base64 and HANDLE in the place
of the handle's number, because the code that starts servers can't pass handles. See
sandbox/programs.py.
"""

from __future__ import annotations

import base64
import os
import sys

HANDLE = "{filter}"


def main() -> None:
    """Passes the filter and executes `bwrap`."""
    read, write = os.pipe()
    os.write(write, base64.b64decode(sys.argv[1]))  # the filter is smaller than a pipe's buffer
    os.close(write)
    os.set_inheritable(read, True)
    words = [str(read) if word == HANDLE else word for word in sys.argv[2:]]
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
