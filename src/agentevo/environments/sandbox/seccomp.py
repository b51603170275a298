"""The system calls that are forbidden in a sandbox, as a program of the kernel's filter (BPF).

Refused with EPERM: networks, other processes' memory, namespaces and mounts, memory that no limit
counts (System V segments, memfd, message queues), kernel interfaces with a history of holes
(io_uring, bpf, keyrings, userfaultfd, perf), clocks, modules, and limits or scheduling of
other processes. `clone3` and calls newer than this list do not exist (ENOSYS: programs use older
ones). A call in the notation of another architecture ends the process.

`socketpair` stays, for event loops; `socket` does not, of any family.
"""

from __future__ import annotations

import platform
import struct

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NEWEST = 462
"""The last known call number. Calls with larger numbers do not exist for the code. These numbers
are equal on all architectures."""

# name: number on x86_64, number on aarch64; None where the architecture has no such call
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "vhangup": (153, 58),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "vmsplice": (278, 75),
}
_NETWORK = ("socket", "connect", "bind", "listen")
_OF_OTHER_PROCESSES = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
"""Calls that are refused unless their first argument, a process, is 0 (the caller)."""
_ATTRIBUTES = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "inotify_add_watch": (254, 27),
}
"""Calls that landlock permits on files of the same user."""
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_IOCTL = (16, 29)
_PERSONALITY = (135, 92)
_NEW_NAMESPACES = 0x02000000 | 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000
_NEW_NAMESPACES |= 0x20000000 | 0x40000000 | 0x00000080
_TERMINAL_INPUT = (0x5412, 0x541C, 0x541D)
"""TIOCSTI, TIOCLINUX, TIOCCONS: they simulate input of the terminal's user."""

_LOAD = 0x20
_EQUAL = 0x15
_ABOVE = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_EPERM = 1
_ENOSYS = 38
_X32 = 0x40000000
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_ARGUMENTS_AT = 16


def is_supported() -> bool:
    return platform.machine() in _ARCHITECTURES


def seccomp_program(*, keeps_attributes: bool = False, network: bool = False) -> bytes:
    """The filter, as `bwrap --seccomp` and the kernel's `sock_fprog` take it.

    `keeps_attributes`: calls that change owner, mode, times and attributes of files succeed
    without effect. `network`: sockets are allowed. Raises KeyError on architectures other than
    x86_64 and aarch64."""
    architecture, column = _ARCHITECTURES[platform.machine()]
    lines = [
        _line(_LOAD, _ARCHITECTURE_AT),
        _line(_EQUAL, architecture, 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER_AT),
        *_if(_ABOVE, _X32, _ERRNO | _ENOSYS),
        *_if(_ABOVE, _NEWEST, _ERRNO | _ENOSYS),
        *_if(_EQUAL, _CLONE3[column], _ERRNO | _ENOSYS),
    ]
    for name, numbers in _REFUSED.items():
        number = numbers[column]
        if number is not None and not (network and name in _NETWORK):
            lines += _if(_EQUAL, number, _ERRNO | _EPERM)

    if keeps_attributes:
        for numbers in _ATTRIBUTES.values():
            number = numbers[column]
            if number is not None:
                lines += _if(_EQUAL, number, _ERRNO)

    lines += _on_argument(_CLONE[column], 0, _if(_ANY_BIT, _NEW_NAMESPACES, _ERRNO | _EPERM))
    terminal = [line for code in _TERMINAL_INPUT for line in _if(_EQUAL, code, _ERRNO | _EPERM)]
    lines += _on_argument(_IOCTL[column], 1, terminal)
    plain = [*_if(_EQUAL, 0, _ALLOW), *_if(_EQUAL, 0xFFFFFFFF, _ALLOW)]
    lines += _on_argument(_PERSONALITY[column], 0, [*plain, _line(_RETURN, _ERRNO | _EPERM)])
    for numbers in _OF_OTHER_PROCESSES.values():
        rules = [*_if(_EQUAL, 0, _ALLOW), _line(_RETURN, _ERRNO | _EPERM)]
        lines += _on_argument(numbers[column], 0, rules)

    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _if(test: int, value: int, result: int) -> list[bytes]:
    return [_line(test, value, 0, 1), _line(_RETURN, result)]


def _on_argument(number: int, index: int, rules: list[bytes]) -> list[bytes]:
    """The rules on the low half of an argument of one call. Other calls skip them."""
    body = [_line(_LOAD, _ARGUMENTS_AT + 8 * index), *rules, _line(_LOAD, _NUMBER_AT)]
    return [_line(_EQUAL, number, 0, len(body)), *body]
