"""A program for a sandbox. It runs a reply's code, then calls the code's function or runs
assertions on it, and writes each result.

It reads {"code", "setup", "function", "calls", "asserts", "limit_s", "mark"} as JSON on stdin. For
each call or assertion, it writes a line `MARK {"index", "value"}` to its original stdout. The
output of the code itself is discarded. The values are compared outside, where the code has no
access.
"""

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    """Reads the input, runs the code, and writes the results."""
    spec = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")

    null_device = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null_device, handle)

    mark = spec.pop("mark")
    limit_s = spec["limit_s"]

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(spec["setup"], "setup", "exec"), names)
    exec(compile(spec["code"], "solution", "exec"), names)

    for index, test in enumerate(spec["calls"] or spec["asserts"]):
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            if spec["calls"]:
                value = _function(names, spec["function"])(*test)
            else:
                exec(compile(test, "test", "exec"), dict(names))
                value = True
            line = json.dumps({"index": index, "value": value})
        except BaseException:  # noqa: BLE001 (any exception fails the test)
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

        print(mark, line, file=output, flush=True)


def _function(names: dict[str, Any], name: str) -> Any:
    """The function of that name, or the method of a class Solution."""
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


if __name__ == "__main__":
    main()
