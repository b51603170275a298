"""`agentevo launch-own`: a launch's nodes as actors of a Ray cluster, one actor per bundle of a
placement group. Each actor keeps one process, `agentevo launch-node`.

A lost node is reported and restarted. A node without the trainer restarts alone, on the Ray node
that Ray chooses for its bundle, while the others continue. If the trainer's node is lost, the whole
launch restarts (at most `restarts` times) and resumes the run. Every call to Ray has a deadline,
because an actor whose node has died does not answer for a while. Processes end with their actor,
and actors with this owner. All nodes see the folders of the launch and the run, as on other
clusters.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentevo.config import load_config
from agentevo.errors import AgentEvoError
from agentevo.runs.launch.node import GRACE_S, STOPPED, to_exit_code
from agentevo.runs.launch.plan import LaunchPlan, read_file
from agentevo.runs.launch.targets import RayCluster
from agentevo.runtime.console import to_stderr
from agentevo.runtime.extras import load_extra
from agentevo.runtime.signals import catch_stop_signals

POLL_INTERVAL_S = 1.0
CALL_TIMEOUT_S = 30.0
"""The deadline of a call to an actor, in seconds."""
SILENCE_TIMEOUT_S = 120.0
"""An actor that has not answered for this time is lost, whatever Ray reports."""
CONFIG_ERROR_CODE = 2
"""The exit code of a wrong configuration, which a restart would not fix."""
LOST_CODE = -1
"""Replaces the exit code if the node's actor is lost, and its process with it."""


class RayError(AgentEvoError):
    """The cluster lacks the resources that the launch needs, or has lost too many of them."""


class ProcessKeeper:
    """Runs in an actor, and keeps one process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, words: list[str], head: str | None, log: str) -> tuple[str, int]:
        """Starts the process, and appends its output to that file. `head`: the address of node 0,
        None for node 0 itself. Returns the address at which other nodes reach this node, and the
        process's id."""
        ray: Any = load_extra("ray", "ray", "agentevo launch-own")
        address = str(ray.util.get_node_ip_address())
        node = [*words, "--head", head or address, "--parent", str(os.getpid())]
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentevo", *node],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return address, self._process.pid

    def poll(self) -> int | None:
        """The process's exit code (128 plus the number for a signal). None while it runs."""
        assert self._process is not None
        return to_exit_code(self._process.poll())

    def stop(self) -> None:
        """Sends the process a stop signal."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)


def run_owner(
    path: Path,
    *,
    address: str | None = None,
    id: str = "",
    note: Callable[[str], None] = to_stderr,
) -> int:
    """Runs the launch to its end, and blocks. `address`: the address of the cluster, by default
    RAY_ADDRESS or the cluster on this machine. Returns the trainer's exit code. Raises RayError,
    ConfigError."""
    ray: Any = load_extra("ray", "ray", "agentevo launch-own")
    plan = read_file(path, LaunchPlan)
    cluster = read_file(path.parent / RayCluster.file, RayCluster)

    try:
        ray.init(
            address=address or os.environ.get("RAY_ADDRESS") or "auto",
            namespace=f"agentevo-{plan.name}",
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RayError(
            f"no Ray cluster at {address or 'RAY_ADDRESS'} ({str(error).splitlines()[0]}): start "
            "one with `ray start --head`, or give --address"
        ) from error

    try:
        with catch_stop_signals() as stop:
            return _Owner(ray, plan, cluster, path, id or f"ray-{int(time.time())}", note).run(stop)
    finally:
        ray.shutdown()


class _Owner:
    """The owner of a launch."""

    def __init__(
        self,
        ray: Any,
        plan: LaunchPlan,
        cluster: RayCluster,
        path: Path,
        id: str,
        note: Callable[[str], None],
    ) -> None:
        self._ray = ray
        self._plan = plan
        self._cluster = cluster
        self._path = path
        self._id = id
        self._note = note
        self._group: Any = None
        self._keepers: dict[int, Any] = {}
        self._starting: dict[int, Any] = {}
        """For nodes whose process has not started yet: the pending reply with the node's
        address."""
        self._last_reply_at: dict[int, float] = {}
        """The time of each node's last reply, or of its start."""
        recipe = [str(path.parent / plan.recipe), *plan.overrides]
        run_dir = load_config(recipe[0], recipe[1:]).run_dir
        self._logs = run_dir.parent / f"{run_dir.name}.launch"

    def run(self, stop: Callable[[], bool]) -> int:
        """Runs the launch, restarts included. Returns the trainer's exit code."""
        self._place()
        try:
            for restarts_left in range(self._cluster.restarts, -1, -1):
                code = self._run_once(f"{self._id}-{self._cluster.restarts - restarts_left}", stop)
                if code != LOST_CODE and (code in (0, CONFIG_ERROR_CODE) or stop()):
                    return code
                if stop():
                    return STOPPED

                how = "was lost" if code == LOST_CODE else f"ended with exit code {code}"
                self._note(f"the trainer {how}; {restarts_left} restarts are left")

            raise RayError(
                f"the trainer was lost {self._cluster.restarts + 1} times: see {self._logs}"
            )
        finally:
            self._drop_all()
            with suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(self._group)

    def _place(self) -> None:
        """Requests the placement group. Raises RayError if the cluster has no room in time."""
        bundle = {"CPU": float(self._cluster.cpus_per_node), **self._cluster.resources}
        if self._cluster.gpus:
            bundle["GPU"] = float(self._cluster.gpus)

        bundles = [bundle] * len(self._plan.nodes)
        strategy = "STRICT_SPREAD" if self._cluster.spread else "PACK"
        self._group = self._ray.util.placement_group(bundles, strategy=strategy)
        if not self._group.wait(self._cluster.placed_s):
            resources = sorted(self._ray.cluster_resources().items())
            has = ", ".join(f"{name} {n:g}" for name, n in resources if ":" not in name)
            with suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(self._group)
            raise RayError(
                f"Ray has no room for {len(bundles)} x {bundle} ({strategy}) within "
                f"{self._cluster.placed_s:g} s; the cluster has {has}: start more nodes, ask for "
                "less, or --set spread=false"
            )

    def _run_once(self, id: str, stop: Callable[[], bool]) -> int:
        """Runs the launch once. Returns the trainer's exit code, or LOST_CODE."""
        self._start(0, None, id)
        head = self._wait_for_start(0, self._cluster.placed_s)
        for number in range(1, len(self._plan.nodes)):
            self._start(number, head, id)

        is_stopping = False
        deadline = float("inf")
        while time.monotonic() < deadline:
            if stop() and not is_stopping:
                is_stopping = True
                deadline = time.monotonic() + GRACE_S + SILENCE_TIMEOUT_S
                with suppress(self._ray.exceptions.RayError):  # the next poll reports it
                    self._call(0, "stop")

            for number in list(self._keepers):
                code = self._poll(number)
                if code is None:
                    continue

                if number == 0:
                    self._wait_for_others()
                    self._drop_all()
                    return code

                self._drop(number)
                if code != 0 and not is_stopping:
                    if code != LOST_CODE:
                        self._note(f"node {number}: ended with exit code {code}; it is restarted")
                    self._start(number, head, id)

            time.sleep(POLL_INTERVAL_S)

        self._drop_all()
        return LOST_CODE

    def _start(self, number: int, head: str | None, id: str) -> None:
        """Requests a node's process in its bundle. Ray may have to place the bundle again. `head`:
        the address of node 0, None for node 0 itself."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=number
        )
        options = self._ray.remote(ProcessKeeper).options(
            num_cpus=self._cluster.cpus_per_node,
            num_gpus=self._cluster.gpus,
            resources=self._cluster.resources,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        words = ["launch-node", str(self._path), "--rank", str(number), "--id", id]
        keeper = self._keepers[number] = options.remote()
        self._starting[number] = keeper.start.remote(words, head, self._log(number))
        self._last_reply_at[number] = time.monotonic()

    def _wait_for_start(self, number: int, within_s: float) -> str:
        """The address of a node, after its process has started within that time. Raises
        RayError."""
        try:
            address, process = self._ray.get(self._starting.pop(number), timeout=within_s)
        except (self._ray.exceptions.RayError, OSError) as error:
            raise RayError(
                f"node {number} could not be started within {within_s:g} s "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]}): look at "
                "`ray status`, and raise --set placed_s=..."
            ) from error

        self._last_reply_at[number] = time.monotonic()
        self._note(f"node {number}: on {address}, process {process}, {self._log(number)}")
        return str(address)

    def _poll(self, number: int) -> int | None:
        """The node's exit code, or LOST_CODE. None while it runs or starts."""
        try:
            if number in self._starting:
                self._poll_start(number)
                return None
            code: int | None = self._call(number, "poll")
        except RayError as error:
            self._note(str(error))
            return LOST_CODE
        except self._ray.exceptions.ActorUnavailableError:
            silence = "its node does not answer"
        except self._ray.exceptions.RayActorError as error:
            self._note(f"node {number}: lost ({' '.join(str(error).split())[:300]})")
            return LOST_CODE
        except self._ray.exceptions.GetTimeoutError:
            silence = f"no answer within {CALL_TIMEOUT_S:g} s"
        else:
            self._last_reply_at[number] = time.monotonic()
            return code

        since = time.monotonic() - self._last_reply_at[number]
        if since <= SILENCE_TIMEOUT_S:
            return None

        self._note(f"node {number}: lost ({silence}, for {since:.0f} s)")
        return LOST_CODE

    def _poll_start(self, number: int) -> None:
        """Raises RayError if the process can't be started."""
        if self._ray.wait([self._starting[number]], timeout=0)[0]:
            self._wait_for_start(number, CALL_TIMEOUT_S)
        elif time.monotonic() - self._last_reply_at[number] > self._cluster.placed_s:
            self._note(f"node {number}: no room for {self._cluster.placed_s:g} s; still waiting")
            self._last_reply_at[number] = time.monotonic()

    def _wait_for_others(self) -> None:
        """Waits for the nodes without the trainer, which end within seconds and with its exit
        code."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        other_nodes = [
            number for number in self._keepers if number and number not in self._starting
        ]
        while other_nodes and time.monotonic() < deadline:
            other_nodes = [number for number in other_nodes if self._poll(number) is None]
            time.sleep(POLL_INTERVAL_S)

    def _drop_all(self) -> None:
        for number in list(self._keepers):
            self._drop(number)

    def _drop(self, number: int) -> None:
        self._starting.pop(number, None)
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._keepers.pop(number))

    def _call(self, number: int, method: str) -> Any:
        return self._ray.get(
            getattr(self._keepers[number], method).remote(), timeout=CALL_TIMEOUT_S
        )

    def _log(self, number: int) -> str:
        return str(self._logs / f"node-{number}.log")
