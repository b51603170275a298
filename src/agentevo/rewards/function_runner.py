"""A program for a sandbox. It runs a reply's code, then calls the code's function or runs
assertions on it, and writes each result.

It reads {"code", "setup", "function", "calls", "asserts", "limit_s", "mark"} as JSON on stdin. For
each call or assertion, it writes a line `MARK {"index", "value"}` or `MARK {"index", "error"}` to
its original stdout. If the setup or the code itself raises an exception, the only line is `MARK
{"failed": "setup", "error"}` or `MARK {"failed": "code", "error"}`. The output of the code is
discarded. The values are compared outside, where the code has no access.
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
        raise TimeoutError(f"not finished within {limit_s:g} s")

    def write(line: str) -> None:
        print(mark, line, file=output, flush=True)

    signal.signal(signal.SIGALRM, late)
    names: dict[str, Any] = {"__name__": "solution"}
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    for part in ("setup", "code"):
        try:
            exec(compile(spec[part], part, "exec"), names)
        except BaseException as error:  # noqa: BLE001 (the code may raise anything)
            write(json.dumps({"failed": part, "error": _describe(error)}))
            return

    for index, test in enumerate(spec["calls"] or spec["asserts"]):
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            if spec["calls"]:
                value = _function(names, spec["function"])(*test)
            else:
                exec(compile(test, "test", "exec"), dict(names))
                value = True
            line = json.dumps({"index": index, "value": value})
        except BaseException as error:  # noqa: BLE001 (any exception fails the test)
            line = json.dumps({"index": index, "error": _describe(error)})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

        write(line)


def _function(names: dict[str, Any], name: str) -> Any:
    """The function of that name, or the method of a class Solution."""
    if name in names:
        return names[name]
    return getattr(names["Solution"](), name)


def _describe(error: BaseException) -> str:
    """The type and the message of an exception, in at most 200 characters of UTF-8."""
    try:
        message = str(error)[:200]
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        return text[:200].encode("utf-8", "replace").decode()
    except BaseException:  # noqa: BLE001 (its `__str__` may raise anything)
        return "an exception that can't be shown, since its __str__ raises"


if __name__ == "__main__":
    main()
