"""Starts Python programs by a fork of a process that has the packages imported: 0.2 seconds of CPU
in place of 4.

`install()` replaces the one function by which `subprocess`, and so asyncio, starts programs. A
command starts warm if it is this interpreter with `-m MODULE` of AgentEvo or torchrun, with a
script of this repository, or with `-c` and a program of which a line imports AgentEvo. Everything
else, and whatever a fork can't imitate, starts as always. A program that was started warm starts
its own children warm.

    caller ──request, descriptors──► warm parent ──fork──► middle ──fork──► program
       ▲                                                                       │
       └───────── becomes its parent when `middle` ends: it is a subreaper ────┘

Invariant: the program is a child of its caller, which waits for it, kills it and learns of its end
as of any child, and it has the directory, environment, descriptors, limits and signals that `exec`
would have given it. What differs: the command line in /proc, the hash seed, the peak of memory,
which counts what is imported, and that packages are imported already, which a program may want to
do without. A test of these, or of the start itself, is marked `cold_start`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import re
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NoReturn

PRELOADED = (
    "agentevo.cli.main",
    "agentevo.api.run",
    "agentevo.inference.embedded.torch_engine",
    "agentevo.observability.trackers.mlflow",
    "agentevo.observability.trackers.swanlab",
    "agentevo.observability.trackers.tensorboard",
    "agentevo.observability.trackers.trackio",
    "agentevo.observability.trackers.wandb",
    "agentevo.runs.orchestration.run",
    "agentevo.runs.processes.learn",
    "agentevo.runs.processes.sample",
    "agentevo.runs.processes.serve",
    "agentevo.runs.processes.sweep",
    "agentevo.training.trainer",
    "agentevo.store.sqlite",
    "agentevo.store.postgresql",
    "agentevo.observability.plots",
    "matplotlib.backends.backend_agg",
    "peft",
    "tensorboard",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "uvicorn",
    "websockets",
)
"""What most commands import. A program imports the rest by itself."""
READ_AT_IMPORT = (
    "HF_",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "MPL",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "TORCHDYNAMO",
    "TORCHINDUCTOR",
    "TORCH_LOGS",
    "XDG_",
)
"""Prefixes of variables that libc or an imported package has read already. A program starts cold if
its environment differs there."""
IMPORT_OF_OURS = re.compile(r"^(from|import) agentevo(_\w+)?\b", re.MULTILINE)
"""A line of a program that is given by `-c`."""
OURS = ("agentevo", "agentevo_evolve", "agentevo_ui")
IMITATED = ("PYTHONPATH", "PYTHONUNBUFFERED")
INTERPRETER = sys.executable  # a test may name another one there
SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
START_WITHIN_S = 300.0
PR_SET_CHILD_SUBREAPER = 36
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WARM_PARENT = """\
import sys
sys.path.append(sys.argv[1])
import warm_processes
warm_processes.be_parent(int(sys.argv[2]))
"""

_libc = ctypes.CDLL(None, use_errno=True)
_start_cold: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]


class WarmParent:
    """The process that programs are forked from, as their caller sees it."""

    def __init__(self, connection: socket.socket, environment: dict[str, str]) -> None:
        self.caller = os.getpid()
        self._connection = connection
        self._environment = environment
        self._lock = threading.Lock()

    def can_start(self, environment: dict[str, str]) -> bool:
        return all(
            self._environment.get(name) == environment.get(name)
            for name in self._environment.keys() | environment.keys()
            if name.startswith(READ_AT_IMPORT) and name not in IMITATED
        )

    def start(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Returns the program's pid."""
        data = json.dumps(request).encode()
        with self._lock:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [struct.pack("I", len(data))], descriptors)
                self._connection.sendall(data)
                (pid,) = struct.unpack("i", _receive(self._connection, 4))
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

        return int(pid)


class _State:
    """Of this process."""

    is_warm = False
    """Whether programs start warm."""
    parent: WarmParent | None = None
    lock = threading.Lock()
    search_path: ClassVar[list[str]] = []
    """The end of `sys.path`, after what PYTHONPATH and the kind of start put there."""


def install() -> None:
    """Programs that this process starts start warm from now on."""
    subprocess._fork_exec = _start  # type: ignore[attr-defined]
    _State.is_warm = True


@contextmanager
def cold_start(is_cold: bool = True) -> Iterator[None]:
    """Programs that are started meanwhile begin with a cold interpreter."""
    before = _State.is_warm
    _State.is_warm = not is_cold
    try:
        yield
    finally:
        _State.is_warm = before


def _start(
    args: Sequence[Any],
    executables: Sequence[bytes],
    close_fds: bool,
    kept: Sequence[int],
    cwd: Any,
    environment: Sequence[bytes] | None,
    *rest: Any,
) -> int:
    """In place of `_posixsubprocess.fork_exec`, with its arguments."""
    stdin, _, _, stdout, _, stderr, _, error_pipe = rest[:8]
    restore_signals, new_session, group, gid, groups, uid, umask, preexec = rest[8:16]
    words = [os.fsdecode(word) for word in args]
    wanted = _environment(environment)

    parent = None
    if (
        _State.is_warm
        and _is_ours(words)
        and close_fds
        and restore_signals
        and (gid, groups, uid) == (None, None, None)
        and (preexec is None or "<" not in preexec.__qualname__)
        and (cwd is None or os.path.isdir(cwd))
    ):
        parent = _warm_parent()

    if parent is None or not parent.can_start(wanted):
        return _start_cold(args, executables, close_fds, kept, cwd, environment, *rest)

    passed = [number for number in kept if number != error_pipe]
    streams = [0 if stdin == -1 else stdin, 1 if stdout == -1 else stdout]
    streams.append(2 if stderr == -1 else stderr)
    request = {
        "words": [word for index, word in enumerate(words[1:]) if index or word != "-u"],
        "unbuffered": words[1] == "-u" or bool(wanted.get("PYTHONUNBUFFERED")),
        "environment": wanted,
        "cwd": os.getcwd() if cwd is None else os.fsdecode(cwd),
        "numbers": [0, 1, 2, *passed],
        "new_session": bool(new_session),
        "group": os.getpgid(0) if group == -1 else group,
        "umask": _umask() if umask == -1 else umask,
        "ignored": [number for number in HANDLED if signal.getsignal(number) is signal.SIG_IGN],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": [[kind, *resource.getrlimit(kind)] for kind in LIMITS],
        "preexec": None if preexec is None else [preexec.__module__, preexec.__qualname__],
        "caller": os.getpid(),
    }
    return parent.start(request, [*streams, *passed])


def _is_ours(words: list[str]) -> bool:
    program = words[2:] if words[1:2] == ["-u"] else words[1:]
    if words[0] != INTERPRETER or not program:
        return False
    if program[0] == "-m":
        return program[1] == "torch.distributed.run" or program[1].split(".")[0] in OURS
    if program[0] == "-c":
        return IMPORT_OF_OURS.search(program[1]) is not None
    return program[0].endswith(".py") and Path(program[0]).resolve().is_relative_to(ROOT)


def _environment(entries: Sequence[bytes] | None) -> dict[str, str]:
    if entries is None:
        return dict(os.environ)
    pairs = [os.fsdecode(entry).partition("=") for entry in entries]
    return {name: value for name, _, value in pairs}


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _warm_parent() -> WarmParent:
    """The warm parent of this process. The first caller starts it."""
    with _State.lock:
        if _State.parent is None or _State.parent.caller != os.getpid():
            _State.parent = _start_parent()
        return _State.parent


def _start_parent() -> WarmParent:
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    process = subprocess.Popen(
        [INTERPRETER, "-c", WARM_PARENT, str(SUPPORT), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    theirs.close()
    ours.settimeout(START_WITHIN_S)
    _receive(ours, 4)  # it is ready
    atexit.register(process.wait)
    atexit.register(ours.close)

    return WarmParent(ours, environment)


def preload() -> None:
    """Imports and computes what programs do."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    for name in PRELOADED:
        importlib.import_module(name)
    get_checkpoint_conversion_mapping("llama")  # whoever saves a model compiles its 700 patterns


def be_parent(number: int) -> NoReturn:
    """Imports what programs import, then serves requests until the caller has ended."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()

    before = {*_entries(os.environ.get("PYTHONPATH", "")), str(SUPPORT)}
    _State.search_path = [entry for entry in sys.path[1:] if entry not in before]
    environment = dict(os.environ)
    connection = socket.socket(fileno=number)
    connection.sendall(struct.pack("i", os.getpid()))
    _serve(connection, environment)


def _serve(connection: socket.socket, environment: dict[str, str]) -> NoReturn:
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)

    while True:
        try:
            request, descriptors = _next_request(connection)
        except (EOFError, OSError):
            os._exit(0)

        middle = os.fork()
        if middle == 0:
            break

        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)

    if os.fork() != 0:
        os._exit(0)

    while os.getppid() != request["caller"]:
        time.sleep(0.0002)

    connection.sendall(struct.pack("i", os.getpid()))
    connection.close()
    _become(request, descriptors)
    _State.parent = _fork_parent(environment)
    _run(request["words"])


def _next_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, descriptors, _, _ = socket.recv_fds(connection, 4, 64)
    if not header:
        raise EOFError
    header += _receive(connection, 4 - len(header))
    (length,) = struct.unpack("I", header)
    return json.loads(_receive(connection, length)), list(descriptors)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError("the warm parent has ended")
        data += part
    return data


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Makes this process what `exec` with the same arguments would have made of it."""
    free = max([*request["numbers"], *descriptors]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)

    for number, descriptor in zip(request["numbers"], moved, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)

    os.chdir(request["cwd"])
    if request["new_session"]:
        os.setsid()
    else:
        os.setpgid(0, request["group"])

    os.umask(request["umask"])
    for kind, soft, hard in request["limits"]:
        if resource.getrlimit(kind) != (soft, hard):
            resource.setrlimit(kind, (soft, hard))

    os.sched_setaffinity(0, request["affinity"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    for number in HANDLED:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)

    if request["preexec"] is not None:
        module, name = request["preexec"]
        attrgetter(name)(importlib.import_module(module))()

    os.environ.clear()
    os.environ.update(request["environment"])
    program = request["words"]
    named = _entries(os.environ.get("PYTHONPATH", ""))
    sys.path[:] = [_first_on_path(program[0]), *named, *_State.search_path]
    importlib.invalidate_caches()

    tempfile.tempdir = None
    time.tzset()
    sys.modules["numpy"].random.seed()
    _open_streams(request["unbuffered"])


def _first_on_path(program: str) -> str:
    """Where Python looks for modules first: `-m`, `-c` or the path of a script."""
    if program == "-c":
        return ""
    return os.getcwd() if program == "-m" else str(Path(program).resolve().parent)


def _entries(path: str) -> list[str]:
    return [os.path.abspath(entry) for entry in path.split(os.pathsep) if entry]


def _open_streams(unbuffered: bool) -> None:
    """`sys.stdin`, `sys.stdout` and `sys.stderr`, as an interpreter opens them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        is_written = number > 0
        raw = open(  # noqa: SIM115 (open for as long as the program runs)
            number,
            "wb" if is_written else "rb",
            buffering=0 if is_written and unbuffered else -1,
            closefd=False,
        )
        stream = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=is_written and not unbuffered and (number == 2 or os.isatty(number)),
            write_through=is_written and unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _fork_parent(environment: dict[str, str]) -> WarmParent:
    """A warm parent for this process, while it is as good as new."""
    ours, theirs = socket.socketpair()
    if os.fork() != 0:
        theirs.close()
        ours.settimeout(START_WITHIN_S)
        return WarmParent(ours, environment)

    nowhere = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in (nowhere, theirs.fileno()):
            with suppress(OSError):  # the descriptor of the listing is closed already
                os.close(int(entry))

    for number in (0, 1, 2):
        os.dup2(nowhere, number)

    _serve(theirs, environment)


def _run(words: list[str]) -> NoReturn:
    """Runs the program and ends the process as the interpreter does, without the destruction of
    every module, which would copy the memory that is shared with the warm parent."""
    install()
    sys.orig_argv = [INTERPRETER, *words]
    code = 0
    is_interrupted = False
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 (here ends the program)
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        is_interrupted = isinstance(error, KeyboardInterrupt)

    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()

    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

    os._exit(code & 0xFF)
