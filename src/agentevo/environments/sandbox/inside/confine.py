"""Confines this process with kernel features that need no package, and executes another program.

Run as `python -I -S confine.py SETTINGS PROGRAM...`, with SETTINGS in JSON, before any code of a
model's runs. In this order: namespaces (processes, network, mounts) where they are requested, a
work folder in memory, another user, landlock, the filter of system calls. Any failure ends the
process with a message, so the program never starts partly confined.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import struct
import sys
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)

_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
_USER_NAMESPACE = 0x10000000
_PRIVATE = 1 << 18
_RECURSIVE = 1 << 14
_BIND = 1 << 12
_REMOUNT = 1 << 5
_READ_ONLY = 1
_NO_SETUID = 2
_NO_DEVICES = 4
_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_FILTER = 2

_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_FOLDER = 8
_MAKE_DEVICES = 1 << 6 | 1 << 11
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL_DEVICE = 1 << 15
_MOUNT_SETATTR = 442
_CURRENT_FOLDER = -100
_BELOW = 0x8000
_CREATE_RULESET = 444
"""A system call with this number on every architecture."""
_ADD_RULE = 445
"""Likewise."""
_RESTRICT = 446
"""Likewise."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def landlock_version() -> int:
    """The kernel's version of landlock. 0 if it is missing or disabled."""
    return max(0, LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def main() -> None:
    settings = json.loads(sys.argv[1])
    program = sys.argv[2:]
    with open(settings["filter"], "rb") as file:
        seccomp = file.read()

    if settings["namespaces"]:
        enter_namespaces(settings)
        make_mounts(settings)

    if settings["uid"]:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)

    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    restrict_files(settings)
    filter_calls(seccomp)
    os.chdir(settings["work"])
    os.execve(program[0], program, {})


def enter_namespaces(settings: dict[str, Any]) -> None:
    """Enters new namespaces. Returns in a child that is process 1 of its namespace. The parent
    process waits for the child and ends."""
    uid = os.getuid()
    gid = os.getgid()
    if settings["user_namespace"]:
        call("unshare", _NAMESPACES | _USER_NAMESPACE)
        for path, text in (
            ("setgroups", "deny"),
            ("uid_map", f"1000 {uid} 1"),
            ("gid_map", f"1000 {gid} 1"),
        ):
            with open(f"/proc/self/{path}", "w") as file:
                file.write(text)
    else:
        call("unshare", _NAMESPACES)

    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    pid = os.fork()
    if pid:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        end_as(os.waitpid(pid, 0)[1])

    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def make_mounts(settings: dict[str, Any]) -> None:
    """Mounts the work folder in memory, the processes of this namespace, and the folders that must
    be readable."""
    mount("none", "/", "", _PRIVATE | _RECURSIVE)
    # landlock lets a file's owner change its mode and times. A read-only mount prevents that.
    read_only = struct.pack("=4Q", _READ_ONLY | _NO_SETUID, 0, 0, 0)
    call(
        "syscall",
        _MOUNT_SETATTR,
        _CURRENT_FOLDER,
        b"/",
        _BELOW,
        read_only,
        ctypes.c_size_t(len(read_only)),
        what="mount_setattr",
    )
    owner = settings["uid"] or os.getuid()
    size = f"size={settings['disk_mib']}m,nr_inodes={settings['max_files'] + 16}"
    handles = [(path, os.open(path, os.O_PATH)) for path in settings["unreachable"]]

    closed = {first_closed_folder(path) for path in settings["unreachable"]} - {None}
    for folder in closed:
        mount("tmpfs", str(folder), "tmpfs", _NO_SETUID | _NO_DEVICES, "mode=0755,size=64k")

    for path, handle in handles:
        os.makedirs(path, mode=0o755, exist_ok=True)
        mount(f"/proc/self/fd/{handle}", path, "", _BIND | _RECURSIVE)
        mount("none", path, "", _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID | _NO_DEVICES)
        os.close(handle)

    options = f"{size},mode=0700,uid={owner},gid={owner}"
    mount("tmpfs", settings["work"], "tmpfs", _NO_SETUID | _NO_DEVICES, options)
    mount("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES)


def first_closed_folder(path: str) -> str | None:
    """The uppermost folder above a path that other users may not enter."""
    parts = path.split("/")
    for index in range(2, len(parts)):
        above = "/".join(parts[:index])
        if not os.stat(above).st_mode & stat.S_IXOTH:
            return above
    return None


def restrict_files(settings: dict[str, Any]) -> None:
    """Restricts opening to the named paths, by landlock."""
    version = landlock_version()
    if version < 1:
        raise OSError("the kernel has no landlock")

    rights = (1 << 13) - 1
    rights |= (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    rights |= _IOCTL_DEVICE if version >= 5 else 0
    networks = 3 if version >= 4 else 0
    scopes = 3 if version >= 6 else 0
    attributes = struct.pack("=QQQ", rights, networks, scopes)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = call("syscall", _CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    readable = _EXECUTE | _READ_FILE | _READ_FOLDER
    proc = ["/proc"] if settings["namespaces"] else []
    for path in (*settings["readable"], *proc):
        allow(ruleset, path, readable)
    for path in DEVICES:
        allow(ruleset, path, _READ_FILE | _WRITE_FILE)

    allow(ruleset, settings["work"], rights & ~_MAKE_DEVICES & ~_IOCTL_DEVICE)
    call("syscall", _RESTRICT, ruleset, 0)
    os.close(ruleset)


def allow(ruleset: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return

    if not stat.S_ISDIR(os.fstat(handle).st_mode):
        rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

    rule = struct.pack("=Qi", rights, handle)
    call("syscall", _ADD_RULE, ruleset, 1, rule, 0)
    os.close(handle)


def filter_calls(program: bytes) -> None:
    """Installs the filter of seccomp.py for this process and every program that it executes."""
    buffer = ctypes.create_string_buffer(program, len(program))
    line = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    call("prctl", _PR_SET_SECCOMP, _SECCOMP_FILTER, line, 0, 0)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
        what=target,
    )


def call(name: str, *arguments: Any, what: str = "") -> int:
    converted = [
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    ]
    result = getattr(LIBC, name)(*converted)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} {what}: {os.strerror(number)}")
    return int(result)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # noqa: BLE001 (the host shows the last line)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
