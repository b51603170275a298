"""What a user's code may do to the event loop that it runs on."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from agentevo.runtime import event_loop
from agentevo.runtime.event_loop import TaskScope, outside_scopes, run_coroutine
from agentevo.runtime.signals import Interrupt
from agentevo.store.opening import open_store


async def pause() -> str:
    await asyncio.sleep(0.01)
    return "went on"


async def swallow() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


def beside(act) -> str:
    """What becomes of a run beside a user's task that does `act()`."""

    async def theirs() -> None:
        act()
        await asyncio.sleep(0)

    async def main() -> str:
        task = TaskScope().start(theirs())
        await asyncio.wait([task])
        task.cancelled() or task.exception()  # it is theirs
        return await pause()

    return run_coroutine(main())


def raising(error):
    def act() -> None:
        raise error

    return act


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def leave_an_interrupting_task() -> None:
    async def interrupt() -> None:
        raise KeyboardInterrupt

    asyncio.current_task().left = asyncio.ensure_future(interrupt())


@pytest.mark.parametrize(
    "act",
    [
        raising(KeyboardInterrupt()),
        raising(SystemExit(3)),
        raising(GeneratorExit()),
        raising(BaseExceptionGroup("several", [KeyboardInterrupt()])),
        lambda: asyncio.get_running_loop().stop(),
        lambda: asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop),
        cancel_all,
        leave_an_interrupting_task,
    ],
)
def test_a_users_task_ends_nothing_else(act):
    assert beside(act) == "went on"


def test_a_scope_ends_its_own_tasks_alone():
    async def main() -> tuple[bool, ...]:
        scope = TaskScope()
        ours = asyncio.create_task(asyncio.sleep(3600))
        started: list[asyncio.Task[None]] = []

        async def theirs() -> None:
            started.append(asyncio.create_task(asyncio.sleep(3600)))
            with outside_scopes():
                started.append(asyncio.create_task(asyncio.sleep(3600)))
            assert not ours.cancel()
            await asyncio.sleep(3600)

        task = scope.start(theirs())
        await asyncio.sleep(0)
        scope.cancel()
        await asyncio.wait([task, started[0]])

        return task.cancelled(), started[0].cancelled(), started[1].done(), ours.done()

    assert run_coroutine(main()) == (True, True, False, False)


def test_timeouts_inside_a_scope_work():
    async def theirs() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(3600)
        except TimeoutError:
            return await asyncio.wait_for(pause(), 300)
        return "no timeout"

    async def main() -> str:
        return await TaskScope().start(theirs())

    assert run_coroutine(main()) == "went on"


def test_what_swallows_its_cancellation_or_hangs_in_a_thread_is_left_behind(monkeypatch):
    monkeypatch.setattr(event_loop, "CLOSE_TIMEOUT_S", 0.1)
    go = threading.Event()

    async def main() -> str:
        TaskScope().start(swallow())
        TaskScope().start(asyncio.to_thread(go.wait, 300))
        return await pause()

    started = time.monotonic()
    assert run_coroutine(main()) == "went on"
    assert time.monotonic() - started < 150

    go.set()


def test_calls_of_to_thread_that_hang_keep_nobody_waiting(monkeypatch, tmp_path):
    monkeypatch.setattr(event_loop, "CLOSE_TIMEOUT_S", 0.1)
    go = threading.Event()

    async def main() -> int:
        hanging = [TaskScope().start(asyncio.to_thread(go.wait, 300)) for _ in range(40)]
        await asyncio.sleep(0.05)
        async with await open_store(
            f"sqlite:///{tmp_path / 'store.sqlite'}", timeout_s=300
        ) as store:
            await store.write_trajectories([], split="train", step=0)
        answer = await asyncio.wait_for(asyncio.to_thread(int, 7), 300)
        assert not any(one.done() for one in hanging)
        return answer

    assert run_coroutine(main()) == 7

    go.set()


class Hello(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *arguments: object) -> None: ...


@pytest.mark.slow
def test_a_client_that_outlives_a_loop_works_on_the_next(caplog):
    """Its connections of the first loop are closed with that, and not when somebody uses them."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hello)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    clients = [httpx.AsyncClient(trust_env=False)]

    async def ask() -> list[str]:
        url = f"http://127.0.0.1:{server.server_port}/"
        answers = await asyncio.gather(*(clients[0].get(url) for _ in range(3)))
        return [answer.text for answer in answers]

    try:
        for _ in range(3):
            assert run_coroutine(ask()) == ["hello"] * 3
    finally:
        server.shutdown()
        server.server_close()

    clients.clear()
    gc.collect()
    assert not caplog.records


def test_what_a_user_left_unread_says_nothing_at_the_end(caplog):
    async def numbers():
        try:
            for number in range(9):
                yield number
        finally:
            raise OSError("nobody reads on")

    kept = []

    async def leave() -> int:
        kept.append(numbers())
        return await anext(kept[0])

    assert run_coroutine(leave()) == 0
    assert not caplog.records


def test_errors_of_the_work_itself_come_out():
    for error in (ValueError("ours"), SystemExit(2), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            run_coroutine(_raise(error))


async def _raise(error: BaseException) -> None:
    raise error


def test_ctrl_c_cancels_and_interrupts_even_while_a_users_code_runs():
    handler = signal.getsignal(signal.SIGINT)
    ended = []

    async def main() -> None:
        async def theirs() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(3600)

        try:
            TaskScope().start(theirs())
            await asyncio.sleep(3600)
        finally:
            ended.append("in order")

    with pytest.raises(KeyboardInterrupt):
        run_coroutine(main())

    assert ended == ["in order"] and signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_is_a_persons_and_ends_everything():
    async def main() -> None:
        async def theirs() -> None:
            raise Interrupt

        task = TaskScope().start(theirs())
        await asyncio.wait([task])

    with pytest.raises(Interrupt):
        run_coroutine(main())


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_the_command_alive(tmp_path):
    """The run has made its steps, and the process ends with exit code 0."""
    (tmp_path / "hung.py").write_text(
        textwrap.dedent("""
            import asyncio, time
            import agentevo

            @agentevo.agent("hung")
            async def hung(task, policy):
                reply = await policy.generate([agentevo.Message("user", task.query)])
                if task.id == "t0":
                    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
                return len(reply.text) % 2
        """)
    )
    (tmp_path / "tasks.jsonl").write_text(
        "".join(f'{{"id": "t{n}", "query": "q{n}"}}\n' for n in range(5))
    )
    (tmp_path / "recipe.yaml").write_text(
        "import: [hung.py]\nagent: {type: hung}\ntasks: tasks.jsonl\n"
        "model: {name: tiny, tiny: {hidden_size: 16, num_layers: 1, num_heads: 1, "
        "tokenizer: byte}}\nsampling: {max_new_tokens: 2}\n"
        "trainer: {steps: 2, groups_per_step: 4, group_size: 2}\n"
        "evaluation: {tasks: 1, samples: 0}\n"
        "tracking: {tensorboard: false, report: false}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "agentevo", "train", "recipe.yaml"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, b"step 2/2" in done.stdout) == (0, True), done.stderr
