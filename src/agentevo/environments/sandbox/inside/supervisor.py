"""The first process of a sandbox: it executes the host's requests, and owns the interpreter and the
programs.

It runs with the rights of the code, but does not trust it: it reads frames of bounded length from
the interpreter, keeps a bounded part of the output, and, at a limit, ends everything else in the
sandbox. The host does not trust the supervisor either; see local.py.

Run as `python -I -S supervisor.py`, with the socket to the host as stdin and stdout. The first
message of the host is the settings.
"""

from __future__ import annotations

import base64
import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
if TYPE_CHECKING:
    from agentevo.environments.sandbox.inside import frames, interpreter, work_folder
else:
    import frames
    import interpreter
    import work_folder
sys.path.pop(0)

GRACE_S = 1.0
"""The seconds from the deadline, at which the interpreter interrupts itself, until it is killed."""
KILLING_S = 2.0
POLL_INTERVAL_S = 1.0
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1
MIB = 2**20


class ProgramOutput:
    """The head and tail of a program's output stream."""

    def __init__(self, handle: int, limit: int) -> None:
        self.handle = handle
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    def read(self) -> bool:
        """Reads the available bytes. False at the end of the stream."""
        try:
            chunk = os.read(self.handle, 2**16)
        except BlockingIOError:
            return True

        self._num_bytes += len(chunk)
        room = self._half - len(self._head)
        self._head += chunk[:room]

        self._tail += chunk[room:] if room > 0 else chunk
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

        return bool(chunk)

    def drain(self) -> None:
        """Reads the written bytes, at most a full pipe, since other processes can continue to
        write."""
        for _ in range(32):
            before = self._num_bytes
            if not self.read() or self._num_bytes == before:
                return

    def take(self) -> str:
        """The text kept since the last call."""
        tail = self._tail[-self._half :] if len(self._tail) > self._half else self._tail
        left_out = self._num_bytes - len(self._head) - len(tail)
        note = f"\n... {left_out} bytes left out ...\n".encode() if left_out else b""
        text = (bytes(self._head) + note + bytes(tail)).decode("utf-8", "replace")
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0
        return text


class SandboxedChild:
    """A process that runs the code: the interpreter, or a program."""

    def __init__(
        self, pid: int, outputs: tuple[ProgramOutput, ProgramOutput], control: int | None
    ) -> None:
        self.pid = pid
        self.outputs = outputs
        self.control = control
        self.messages = frames.Frames(4 * frames.LARGEST_CALL)
        self.status: int | None = None

    def close(self) -> None:
        for handle in (self.outputs[0].handle, self.outputs[1].handle, self.control):
            if handle is not None:
                os.close(handle)


class SandboxSupervisor:
    """See the module."""

    def __init__(self, host: int) -> None:
        self._host = host
        self._incoming = frames.Frames(2**31)
        self._interpreter: SandboxedChild | None = None
        self._interpreter_died = False
        self._settings = self._wait_for_host()

    def serve(self) -> None:
        settings = self._settings
        become_ordinary(settings)
        os.chdir(settings["work"])
        os.makedirs(work_folder.HIDDEN, exist_ok=True)
        self._folder = work_folder.WorkFolder(settings["max_files"], settings["file_mib"] * MIB)
        self._interpreter = self._start_interpreter()
        self._send({"ready": sys.version.split()[0]})

        while True:
            request = self._wait_for_host()
            if request["do"] == "answer":  # a late answer to an interrupted call
                continue

            try:
                reply = getattr(self, f"_do_{request['do']}")(request)
            except work_folder.RefusedFile as refusal:
                reply = {"refused": str(refusal)}
            except OSError as error:
                reply = {"refused": f"{error.strerror or error}"}

            self._send({"id": request["id"], **reply})

    def _do_run(self, request: dict[str, Any]) -> dict[str, Any]:
        is_new = self._interpreter_died
        self._interpreter_died = False
        if self._interpreter is not None:
            self._reap()
            if self._interpreter.status is not None:
                is_new = True
                self._end_interpreter()

        if self._interpreter is None:
            self._interpreter = self._start_interpreter()

        child = self._interpreter
        before = self._folder.snapshot()

        keys = ("id", "code", "deadline_s", "tools")
        outcome: dict[str, Any]
        try:
            self._write_control(child, {key: request[key] for key in keys})
            outcome = self._attend(child, request["deadline_s"] + GRACE_S, request["id"])
        except frames.BadFrame as error:
            outcome = _failure("ProtocolViolation", f"the interpreter sent {error}, and was ended")
        except ConnectionError:
            outcome = self._describe_death(child)

        is_alive = "value" in outcome
        for output in child.outputs:
            output.drain()

        if not is_alive:
            self._kill_all(child)

        stdout, stderr = (output.take() for output in child.outputs)
        if not is_alive:
            self._end_interpreter()
            self._interpreter_died = True

        return {
            "stdout": stdout,
            "stderr": stderr,
            "value": outcome.get("value"),
            "error": outcome["error"],
            "files": self._folder.list_changed(before),
            "is_alive": is_alive,
            "is_new": is_new,
        }

    def _do_execute(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._interpreter is not None:
            self._kill_all(self._interpreter)
            self._end_interpreter()
            self._interpreter_died = True

        before = self._folder.snapshot()
        argv = list(request["argv"])
        if argv[0] == "python":
            argv = [
                sys.executable,
                "-s",
                *([] if self._settings["packages"] else ["-S"]),
                *argv[1:],
            ]

        try:
            stdin = self._folder.open_unlinked(base64.b64decode(request["stdin"]))
        except OSError as error:
            reason = f"stdin can't be written into the work folder: {error.strerror}"
            return {
                "stdout": "",
                "stderr": "",
                "exit_code": None,
                "files": [],
                **_failure("DiskFull", reason),
            }

        try:
            child = self._start(stdin=stdin, argv=argv)
        finally:
            os.close(stdin)

        outcome = self._attend(child, request["deadline_s"], request["id"])
        self._kill_all(child)
        for output in child.outputs:
            output.drain()

        stdout, stderr = (output.take() for output in child.outputs)
        child.close()
        return {
            "stdout": stdout,
            "stderr": stderr,
            "exit_code": outcome.get("exit_code"),
            "error": outcome["error"],
            "files": self._folder.list_changed(before),
        }

    def _do_files(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"files": self._folder.sizes()}

    def _do_read(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"content": base64.b64encode(self._folder.read(request["path"])).decode()}

    def _do_write(self, request: dict[str, Any]) -> dict[str, Any]:
        self._folder.write(request["path"], base64.b64decode(request["content"]))
        return {}

    def _attend(self, child: SandboxedChild, deadline_s: float, request_id: int) -> dict[str, Any]:
        """Waits until the child ends or completes its request, or until the deadline."""
        until = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as ready:
            for output in child.outputs:
                ready.register(output.handle, selectors.EVENT_READ, output)

            ready.register(self._host, selectors.EVENT_READ, "host")
            if child.control is not None:
                ready.register(child.control, selectors.EVENT_READ, "control")

            while (remaining := until - time.monotonic()) > 0:
                for key, _ in ready.select(
                    min(remaining, 0.01 if child.control is None else POLL_INTERVAL_S)
                ):
                    if isinstance(key.data, ProgramOutput):
                        if not key.data.read():
                            ready.unregister(key.fileobj)
                    elif key.data == "host":
                        self._pass_answer(child)
                    else:
                        outcome = self._read_message(child, request_id)
                        if outcome is not None:
                            return outcome

                self._reap(child)
                if child.status is not None:
                    return self._describe_death(child)

        return _failure("Timeout", f"it ran for {deadline_s:g} s and was killed")

    def _read_message(self, child: SandboxedChild, request_id: int) -> dict[str, Any] | None:
        """Reads a message of the interpreter: its result, which ends the call, or a tool's call."""
        assert child.control is not None
        try:
            chunk = os.read(child.control, 2**16)
        except ConnectionResetError:
            chunk = b""

        if not chunk:
            return self._describe_death(child)

        child.messages.feed(chunk)
        while (message := child.messages.next()) is not None:
            if message.get("done") == request_id:
                return {"value": message.get("value"), "error": message.get("error")}
            if not isinstance(message.get("call"), str):
                raise frames.BadFrame("a message that is neither a result nor a tool's call")

            try:
                keys = ("call", "number", "arguments")
                self._send({"id": request_id, **{key: message.get(key) for key in keys}})
            except (ValueError, RecursionError) as error:
                raise frames.BadFrame("arguments that are no JSON") from error

        return None

    def _pass_answer(self, child: SandboxedChild) -> None:
        answer = self._wait_for_host()
        if answer["do"] != "answer":
            raise frames.BadFrame("a request while another one is under way")
        self._write_control(child, {k: v for k, v in answer.items() if k != "do"})

    def _write_control(self, child: SandboxedChild, message: dict[str, Any]) -> None:
        """Sends a message to the interpreter. Raises BadFrame if it does not read, as for invalid
        data from it."""
        assert child.control is not None

        view = memoryview(frames.encode(message))
        until = time.monotonic() + GRACE_S
        while view:
            try:
                view = view[os.write(child.control, view) :]
            except BlockingIOError:
                if time.monotonic() > until:
                    raise frames.BadFrame("nothing, and does not read what it is sent") from None
                time.sleep(0.001)

    def _describe_death(self, child: SandboxedChild) -> dict[str, Any]:
        until = time.monotonic() + GRACE_S
        while child.status is None and time.monotonic() < until:
            self._reap(child)
            time.sleep(0.002)

        if child.control is None and child.status is not None:
            return {"exit_code": os.waitstatus_to_exitcode(child.status), "error": None}
        if child.status is None:
            return _failure("ProtocolViolation", "the interpreter closed its connection")

        code = os.waitstatus_to_exitcode(child.status)
        is_signal = -code in set(signal.Signals)
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if is_signal:
            how = signal.Signals(-code).name

        return _failure("InterpreterDied", f"the interpreter ended with {how}")

    def _start_interpreter(self) -> SandboxedChild:
        own_end, child_end = socket.socketpair()
        with child_end:
            own_end.setblocking(False)
            null = os.open(os.devnull, os.O_RDONLY)
            try:
                return self._start(stdin=null, control=(own_end.detach(), child_end.fileno()))
            finally:
                os.close(null)

    def _start(
        self, *, stdin: int, argv: list[str] | None = None, control: tuple[int, int] | None = None
    ) -> SandboxedChild:
        """Starts a program with `argv`, or the interpreter, with both ends of its socket."""
        out = os.pipe()
        err = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_child(stdin, out[1], err[1], argv, None if control is None else control[1])

        os.close(out[1])
        os.close(err[1])
        for handle in (out[0], err[0]):
            os.set_blocking(handle, False)

        limit = self._settings["output_kib"] * 1024
        outputs = (ProgramOutput(out[0], limit), ProgramOutput(err[0], limit))
        return SandboxedChild(pid, outputs, None if control is None else control[0])

    def _be_child(
        self, stdin: int, out: int, err: int, argv: list[str] | None, control: int | None
    ) -> None:
        """The child's side of a fork; it never returns."""
        try:
            control_handle = None if control is None else os.dup2(control, 200, inheritable=False)
            for number, handle in enumerate((stdin, out, err)):
                os.dup2(handle, number)

            os.closerange(3, 200)
            os.closerange(201, 1024)
            os.setsid()
            limit_child(self._settings)

            if argv is not None:
                os.execvpe(argv[0], argv, os.environ)
            assert control_handle is not None

            _prctl(_PR_SET_DUMPABLE, 1)
            sys.stdin, sys.stdout, sys.stderr = (
                open(number, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
                for number, mode in ((0, "r"), (1, "w"), (2, "w"))
            )
            sys.path[:] = [os.getcwd(), *sys.path, *self._settings["packages"]]
            sys.argv = [""]
            interpreter.Interpreter(control_handle, self._settings["output_kib"] * 1024).serve()
        except BaseException as error:  # noqa: BLE001 (a child that returned would be a second us)
            with contextlib.suppress(BaseException):
                message = f"{argv[0] if argv else 'the interpreter'}: {error}\n"
                os.write(2, message.encode("utf-8", "replace"))
            os._exit(127)

    def _end_interpreter(self) -> None:
        if self._interpreter is not None:
            self._interpreter.close()
            self._interpreter = None

    def _kill_all(self, child: SandboxedChild) -> None:
        """Ends all processes of the sandbox except this one."""
        kill_target = -1 if self._settings["is_alone"] else -child.pid
        until = time.monotonic() + KILLING_S
        while time.monotonic() < until:
            with contextlib.suppress(PermissionError):
                try:
                    os.kill(kill_target, signal.SIGKILL)
                except ProcessLookupError:
                    self._reap(child)
                    if child.status is not None:
                        return

            self._reap(child)
            time.sleep(0.001)

    def _reap(self, child: SandboxedChild | None = None) -> None:
        """Collects ended children, including adopted ones."""
        child = child or self._interpreter
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if child is not None and reaped[0] == child.pid:
                    child.status = reaped[1]

    def _wait_for_host(self) -> dict[str, Any]:
        """Waits for the host's next message. The sandbox ends if the host is gone."""
        while (message := self._incoming.next()) is None:
            with selectors.DefaultSelector() as ready:
                ready.register(self._host, selectors.EVENT_READ)
                while not ready.select(POLL_INTERVAL_S):
                    self._reap()

            chunk = os.read(self._host, 2**20)
            if not chunk:
                if self._interpreter is not None:
                    self._kill_all(self._interpreter)
                os._exit(0)

            self._incoming.feed(chunk)

        return message

    def _send(self, message: dict[str, Any]) -> None:
        frames.write_all(self._host, frames.encode(message))


def become_ordinary(settings: dict[str, Any]) -> None:
    """Drops rights and sets the limits of the sandbox."""
    if settings["uid"]:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)

    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_DUMPABLE, 0)  # hides its memory and files from processes of the same user
    os.umask(0o077)
    os.environ.clear()
    os.environ.update(settings["env"])

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)

    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_NOFILE, 256)
    _limit(resource.RLIMIT_FSIZE, settings["file_mib"] * MIB)

    if settings["counts_processes"]:
        _limit(resource.RLIMIT_NPROC, settings["processes"] + 2)


def limit_child(settings: dict[str, Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _limit(resource.RLIMIT_AS, settings["memory_mib"] * MIB)
    cpu_s = max(1, round(settings["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # so that SIGXCPU shows the reason


def _limit(what: int, value: int) -> None:
    """Lowers a resource limit permanently."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _prctl(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "traceback": ""}}


if __name__ == "__main__":
    SandboxSupervisor(0).serve()
