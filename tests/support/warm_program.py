"""What a program is told of itself: tests/test_warm_processes.py starts it cold and warm."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys

facts = {
    "parent": os.getppid(),
    "group": os.getpgid(0),
    "session": os.getsid(0),
    "cwd": os.getcwd(),
    "argv": sys.argv,
    "path": sys.path[:2],
    "name": __name__,
    "variable": os.environ.get("VARIABLE"),
    "home": os.environ.get("HOME"),
    "umask": os.umask(0o022),
    "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "interrupts": str(signal.getsignal(signal.SIGINT)).split(" at ")[0],
    "hang up": str(signal.getsignal(signal.SIGHUP)),
    "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.errors],
    "by line": [sys.stdout.line_buffering, sys.stderr.line_buffering],
}
how = sys.argv[1]
if how == "facts":
    print(json.dumps(facts))
elif how == "exit":
    sys.exit({"nothing": None, "words": "some words"}.get(sys.argv[2], 3))
elif how == "raise":
    raise ValueError("on purpose")
elif how == "interrupt":
    raise KeyboardInterrupt
elif how == "echo":
    print(sys.stdin.read().upper())
    print("said", file=sys.stderr)
elif how == "wait":
    print("ready", flush=True)
    signal.pause()
elif how == "descriptor":
    os.write(int(sys.argv[2]), b"through")
elif how == "child":
    inner = [sys.executable, __file__, "facts"]
    done = subprocess.run(inner, capture_output=True, text=True, check=True)
    print(json.dumps({"pid": os.getpid(), "child": json.loads(done.stdout)}))
