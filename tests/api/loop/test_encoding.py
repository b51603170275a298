"""Records as JSON, in the threads of a client."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import msgspec
from agentevo.api.loop import encoding, records

sys.setswitchinterval(1e-6)
kinds = [kind for kind in vars(records).values() if isinstance(kind, type)]
kinds = [kind for kind in kinds if issubclass(kind, msgspec.Struct)]
barrier = threading.Barrier(8)

def decode_all():
    for kind in kinds:
        barrier.wait()
        for name in kind.__struct_encode_fields__:
            for value in ("null", "[]", "{}", '""', "0"):
                try:
                    encoding.decode(f'{{"{name}":{value}}}'.encode(), kind)
                except Exception:
                    pass

threads = [threading.Thread(target=decode_all) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(kinds))
"""


@pytest.mark.slow
def test_threads_may_decode_a_record_for_the_first_time_at_once():
    """With `msgspec.json.decode(content, type=kind)`, seven of ten such processes ended with
    SIGSEGV."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0 and int(done.stdout) > 5, done.stderr
