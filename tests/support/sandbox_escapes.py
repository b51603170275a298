"""Programs that try to get out of a sandbox, or to harm its host.

Each ends with the exception that refuses it (`refused`), with a value that shows nothing was won
(`value`), or with what ended it (`ended`). FILE, FOLDER, PID, PORT, SOCKET and NAME stand for
the host's canaries; `call(number, ...)` makes a system call and raises OSError.
"""

from __future__ import annotations

from typing import NamedTuple

PREPARED = """
import ctypes, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*given):
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in given]
    if libc.syscall(*given) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return "escaped"
"""


class Escape(NamedTuple):
    """One try."""

    code: str
    refused: tuple[str, ...] = ()
    """Types of exceptions, one of which the code ends with."""
    value: str | None = None
    ended: tuple[str, ...] = ()
    """Types of failures that cost the interpreter or the sandbox."""


GONE = ("PermissionError", "FileNotFoundError", "NotADirectoryError", "OSError")
REFUSED = ("PermissionError",)
DENIED = ("PermissionError", "OSError")

FILES = {
    "read a file": Escape("open('FILE').read()", GONE),
    "overwrite a file": Escape("open('FILE', 'w').write('x')", GONE),
    "append to a file": Escape("open('FILE', 'a').write('x')", GONE),
    "truncate a file": Escape("os.truncate('FILE', 0)", GONE),
    "delete a file": Escape("os.remove('FILE')", GONE),
    "rename a file into the work folder": Escape("os.rename('FILE', 'mine')", GONE),
    "link a file": Escape("os.link('FILE', 'mine'); open('mine').read()", GONE),
    "change a file's mode": Escape("os.chmod('FILE', 0o777)", GONE),
    "change a file's owner": Escape("os.chown('FILE', os.getuid(), -1)", GONE),
    "follow a symbolic link": Escape("os.symlink('FILE', 'l1'); open('l1').read()", GONE),
    "follow a link to a folder": Escape("os.symlink('FOLDER', 'l2'); os.listdir('l2')", GONE),
    "list the host's folder": Escape("os.listdir('FOLDER')", GONE),
    "make a file on the host": Escape("open('FOLDER/new', 'w')", GONE),
    "go up by ..": Escape("open('../' * 40 + 'FILE'[1:]).read()", GONE),
    "read by /proc/self/root": Escape("open('/proc/self/root' + 'FILE').read()", GONE),
    "read by /proc/1/root": Escape("open('/proc/1/root' + 'FILE').read()", GONE),
    "read by a parent's cwd": Escape("os.listdir(f'/proc/{os.getppid()}/cwd/..')", GONE),
    "read /etc/shadow": Escape("open('/etc/shadow').read()", GONE),
    "read ssh keys": Escape("os.listdir(os.path.expanduser('~root/.ssh'))", GONE),
    "write into /usr": Escape("open('/usr/bin/evil', 'w')", DENIED),
    "write beside Python": Escape("open(os.__file__, 'a').write('x')", DENIED),
    "write the supervisor": Escape(
        "import glob\nopen(sys.modules['frames'].__file__, 'a').write('x')", DENIED
    ),
    "make a block device": Escape("os.mknod('disk', 0o60600, os.makedev(8, 0))", DENIED),
    "make a memory device": Escape("os.mknod('mem', 0o20600, os.makedev(1, 1))", DENIED),
    "open the machine's memory": Escape("open('/dev/mem', 'rb').read(1)", GONE),
    "open a disk": Escape("[open('/dev/' + d) for d in ('vda', 'sda', 'nvme0n1')]", GONE),
    "read the kernel's log": Escape("open('/dev/kmsg').read(1)", GONE),
    "set the core pattern": Escape("open('/proc/sys/kernel/core_pattern', 'w').write('|x')", GONE),
    "pull the SysRq lever": Escape("open('/proc/sysrq-trigger', 'w').write('c')", GONE),
    "write a release agent": Escape("open('/sys/fs/cgroup/release_agent', 'w')", GONE),
    "set an out-of-memory score": Escape(
        "os.write(os.open('/proc/self/oom_score_adj', 1), b'-1000')", DENIED
    ),
    "raise a map of users": Escape("os.write(os.open('/proc/self/uid_map', 1), b'0 0 1')", DENIED),
}
NETWORK = {
    "connect to the host": Escape("socket.create_connection(('127.0.0.1', PORT), 5)", DENIED),
    "send a datagram": Escape("socket.socket(type=socket.SOCK_DGRAM)", REFUSED),
    "open a raw socket": Escape("socket.socket(type=socket.SOCK_RAW, proto=1)", REFUSED),
    "connect to a unix socket": Escape("socket.socket(socket.AF_UNIX).connect('SOCKET')", REFUSED),
    "connect to an abstract socket": Escape(
        "socket.socket(socket.AF_UNIX).connect('\\0NAME')", REFUSED
    ),
    "talk to the kernel by netlink": Escape("socket.socket(16, socket.SOCK_RAW)", REFUSED),
    "talk to a hypervisor by vsock": Escape("socket.socket(40, socket.SOCK_STREAM)", REFUSED),
    "connect over IPv6": Escape("socket.socket(socket.AF_INET6)", REFUSED),
    "listen": Escape("socket.create_server(('127.0.0.1', 0))", REFUSED),
    "turn a pair of sockets into a connection": Escape(
        "socket.socketpair()[0].connect('SOCKET')", REFUSED
    ),
    "resolve a name": Escape("socket.getaddrinfo('example.com', 80)", ("gaierror", *DENIED)),
    "fetch a page": Escape(
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:PORT', timeout=5)",
        ("URLError",),
    ),
    "open a ring of the kernel": Escape("call(425, 8, ctypes.create_string_buffer(256))", REFUSED),
}
PROCESSES = {
    "kill a process of the host": Escape("os.kill(PID, 9)", ("ProcessLookupError", *REFUSED)),
    "stop a process of the host": Escape("os.kill(PID, 19)", ("ProcessLookupError", *REFUSED)),
    "kill by a handle": Escape(
        "signal.pidfd_send_signal(os.pidfd_open(PID), 9)",
        ("ProcessLookupError", *DENIED),
    ),
    "trace a process of the host": Escape("call(101, 16, PID, 0, 0)", REFUSED),
    "read another process's memory": Escape("call(310, PID, 0, 0, 0, 0, 0)", REFUSED),
    "read another process's variables": Escape(
        "open('/proc/PID/environ', 'rb').read()", ("ProcessLookupError", *GONE)
    ),
    "see processes of the host": Escape(
        "sum(d.isdigit() for d in os.listdir('/proc')) < 5", value="True"
    ),
    "read the supervisor's memory": Escape("open(f'/proc/{os.getppid()}/mem', 'rb')", GONE),
    "read the supervisor's variables": Escape("open(f'/proc/{os.getppid()}/environ').read()", GONE),
    "take the supervisor's socket": Escape("os.listdir(f'/proc/{os.getppid()}/fd')", GONE),
    "copy the supervisor's socket": Escape("call(438, os.pidfd_open(os.getppid()), 0, 0)", REFUSED),
    "become root": Escape("os.setuid(0)", DENIED),
    "become root for files": Escape("os.setresuid(-1, 0, -1)", DENIED),
    "join another group": Escape("os.setgroups([0])", REFUSED),
    "become root by su": Escape(
        "import subprocess\nsubprocess.run(['su', '-c', 'id -u'], capture_output=True, "
        "stdin=subprocess.DEVNULL).stdout.strip() == b'0'",
        value="False",
    ),
    "limit another process": Escape(
        "import resource\nresource.prlimit(PID, resource.RLIMIT_CPU, (0, 0))",
        ("ProcessLookupError", *REFUSED),
    ),
    "raise a limit": Escape(
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        ("ValueError", *REFUSED),
    ),
    "take priority": Escape("os.nice(-10)", DENIED),
    "see the host's variables": Escape(
        "sorted(os.environ)",
        value="['HOME', 'LANG', 'PATH', 'PYTHONDONTWRITEBYTECODE', 'TMPDIR', 'USER']",
    ),
    "see the host's words": Escape("sys.argv", value="['']"),
}
KERNEL = {
    "mount": Escape("call(165, b'none', b'.', b'tmpfs', 0, 0)", REFUSED),
    "bind a folder": Escape("call(165, b'/', b'.', 0, 4096, 0)", REFUSED),
    "change the root": Escape("os.chroot('/')", REFUSED),
    "make a user namespace": Escape("call(272, 0x10000000)", REFUSED),
    "clone into a user namespace": Escape("call(56, 0x10000011, 0, 0, 0, 0)", REFUSED),
    "clone by structure": Escape(
        "call(435, struct.pack('=8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)", DENIED
    ),
    "enter a namespace": Escape("call(308, os.open('/proc/self/ns/net', 0), 0)", DENIED),
    "open by handle": Escape("call(304, -100, ctypes.create_string_buffer(64), 0)", REFUSED),
    "call in x32": Escape("call(0x40000000 + 41, 2, 1, 0)", DENIED),
    "call what is newer than the list": Escape("call(466, 0, 0)", DENIED),
    "load a module": Escape("call(175, 0, 0, b'')", REFUSED),
    "load a program into the kernel": Escape("call(321, 0, 0, 0)", REFUSED),
    "watch the processor": Escape("call(298, 0, 0, -1, -1, 0)", REFUSED),
    "use keyrings": Escape("call(250, 0, -3, 1)", REFUSED),
    "handle page faults": Escape("call(323, 0)", REFUSED),
    "set the clock": Escape("time.clock_settime(time.CLOCK_REALTIME, 0)", REFUSED),
    "name the host": Escape("socket.sethostname('evil')", REFUSED),
    "restart the machine": Escape("call(169, 0xfee1dead, 672274793, 0x1234567, 0)", REFUSED),
    "hide memory in a file": Escape("os.memfd_create('x')", REFUSED),
    "hide memory in a segment": Escape("call(29, 0, 1 << 20, 0o1600)", REFUSED),
    "hide memory in a queue": Escape("call(240, b'x', 0o102, 0o600, 0)", REFUSED),
    "type for the user": Escape("import fcntl\nfcntl.ioctl(0, 0x5412, b'x')", DENIED),
    "change its personality": Escape("call(135, 0x0400000)", REFUSED),
    "call as 32-bit code does": Escape(
        "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
        "a = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(a)()",
        ended=("InterpreterDied",),
    ),
}
TALK = {
    "write garbage to the supervisor": Escape(
        "os.write(200, b'x' * 64); time.sleep(5)", ended=("ProtocolViolation",)
    ),
    "announce a huge message": Escape(
        "os.write(200, struct.pack('>I', 2**32 - 1)); time.sleep(5)", ended=("ProtocolViolation",)
    ),
    "send what is no message": Escape(
        "os.write(200, struct.pack('>I', 2) + b'[]'); time.sleep(5)", ended=("ProtocolViolation",)
    ),
    "send a deep message": Escape(
        't = b\'{"call":"x","arguments":\' + b\'[\' * 500_000\n'
        "s = socket.socket(fileno=200)\ns.sendall(struct.pack('>I', len(t)) + t); time.sleep(5)",
        ended=("ProtocolViolation",),
    ),
    "send a pickle": Escape(
        "import pickle\nt = pickle.dumps(print)\n"
        "os.write(200, struct.pack('>I', len(t)) + t); time.sleep(5)",
        ended=("ProtocolViolation",),
    ),
    "forge a result of another form": Escape(
        "import json\nfor n in range(2000):\n"
        "    t = json.dumps({'done': n, 'value': {'a': [1]}, 'error': 7}).encode()\n"
        "    os.write(200, struct.pack('>I', len(t)) + t)\ntime.sleep(5)",
        ended=("ProtocolViolation",),
    ),
    "close the connection": Escape("os.close(200)", ended=("ProtocolViolation", "InterpreterDied")),
    "end the interpreter": Escape("os._exit(0)", ended=("InterpreterDied",)),
    "crash the interpreter": Escape("ctypes.string_at(0)", ended=("InterpreterDied",)),
    "kill the interpreter": Escape("os.kill(os.getpid(), 9)", ended=("InterpreterDied",)),
    "kill the supervisor": Escape("os.kill(os.getppid(), 9); 'alive'", value="'alive'"),
    "stop the supervisor": Escape("os.kill(os.getppid(), 19); 'alive'", value="'alive'"),
    "kill everybody": Escape("os.kill(-1, 9); 'alive'", refused=("ProcessLookupError",)),
    "close the outputs": Escape("os.close(1); os.close(2); print('x'); 'alive'", value="'alive'"),
    "raise in repr": Escape(
        "class Bad:\n    def __repr__(self): raise SystemExit(3)\nBad()", refused=("SystemExit",)
    ),
    "give a repr that is no text": Escape(
        "class Text(str):\n    def __str__(self): return self\n"
        "    def __len__(self): return 3\nclass Bad:\n"
        "    def __repr__(self): return Text('x' * 9)\nBad()",
        value="xxxxxxxxx",
    ),
    "print what is no UTF-8": Escape(
        "sys.stdout.buffer.write(b'\\xff\\0\\x1b[2J'); 'x'", value="'x'"
    ),
    "raise with half a character": Escape("raise ValueError('\\ud800\\0')", ("ValueError",)),
    "replace the builtins": Escape(
        "import builtins\nbuiltins.repr = builtins.str = builtins.len = None\n1",
        ended=("InterpreterDied",),
    ),
}
