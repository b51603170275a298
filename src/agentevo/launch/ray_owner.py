"""`agentevo launch own`: a launch's nodes as actors of a Ray cluster, one per bundle of a placement
group, each of which keeps one process, `agentevo launch node`.

What is lost is told and begun again: a node without the trainer by itself, while the others go on,
wherever Ray places its bundle anew; the trainer's node with the whole launch, which goes on from
where the run stands (`restarts` times). No call of Ray's is without a deadline: an actor whose node
has died answers neither yes nor no for a while. Processes end with their actor, and actors with
this owner. The launch's folder and the run's are seen by all nodes, as with other clusters.
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

import pydantic

from agentevo.config import load_config
from agentevo.console import to_stderr
from agentevo.errors import AgentEvoError, ConfigError
from agentevo.extras import load_extra
from agentevo.launch.node import GRACE_S, STOPPED
from agentevo.launch.plan import LaunchPlan, read_plan
from agentevo.launch.ray import SETTINGS, RayFleet
from agentevo.parsing import ParseError, parse_yaml
from agentevo.signals import asked_to_stop

LOOK_S = 1.0
CALL_S = 30.0
"""Deadline of one call to an actor."""
SILENT_S = 120.0
"""An actor that has answered nothing for so long is lost, whatever Ray says of it."""
WRONG = 2
"""Exit code of a wrong configuration: the same again would be as wrong."""


class RayError(AgentEvoError):
    """The cluster can't give what the launch needs, or has lost too much of it."""


class Keeper:
    """In an actor: keeps one process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Where other nodes reach this one."""
        ray: Any = load_extra("ray", "ray", "agentevo launch own")
        return str(ray.util.get_node_ip_address())

    def start(self, words: list[str], log: str) -> int:
        """Starts it, with its output added to that file; returns its id."""
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "agentevo", *words, "--parent", str(os.getpid())]
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, 128 and the number for a signal; None while it goes on."""
        assert self._process is not None
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def stop(self) -> None:
        """Asks it to end."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)


def own(
    path: Path,
    *,
    address: str | None = None,
    id: str = "",
    note: Callable[[str], None] = to_stderr,
) -> int:
    """Runs the launch to its end; blocks. `address` of the cluster, by default RAY_ADDRESS or the
    one on this machine. Returns the trainer's exit code. Raises RayError, ConfigError."""
    ray: Any = load_extra("ray", "ray", "agentevo launch own")
    plan = read_plan(path)
    fleet = _fleet(path.parent / SETTINGS)

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
        with asked_to_stop() as stop:
            return _Owner(ray, plan, fleet, path, id or f"ray-{int(time.time())}", note).run(stop)
    finally:
        ray.shutdown()


def _fleet(path: Path) -> RayFleet:
    try:
        return RayFleet.model_validate(parse_yaml(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, ParseError, pydantic.ValidationError) as error:
        raise ConfigError(
            f"{path}: this is no {SETTINGS} of `agentevo launch ray` "
            f"({str(error).splitlines()[0]}): write the folder again"
        ) from error


class _Owner:
    """See the module."""

    def __init__(
        self,
        ray: Any,
        plan: LaunchPlan,
        fleet: RayFleet,
        path: Path,
        id: str,
        note: Callable[[str], None],
    ) -> None:
        self._ray = ray
        self._plan = plan
        self._fleet = fleet
        self._path = path
        self._id = id
        self._note = note
        self._group: Any = None
        self._keepers: dict[int, Any] = {}
        self._placing: dict[int, Any] = {}
        """Of nodes that are not started yet: the answer that says where they are."""
        self._heard: dict[int, float] = {}
        """When each answered last, or was begun."""
        words = [str(path.parent / plan.recipe), *plan.overrides]
        run_dir = load_config(words[0], words[1:]).run_dir
        self._logs = run_dir.parent / f"{run_dir.name}.launch"

    def run(self, stop: Callable[[], bool]) -> int:
        """Returns the trainer's exit code."""
        self._place()
        try:
            for start in range(self._fleet.restarts + 1):
                code = self._launch(f"{self._id}-{start}", stop)
                if code is not None and (code in (0, WRONG) or stop()):
                    return code
                if stop():
                    return STOPPED

                left = self._fleet.restarts - start
                how = "was lost" if code is None else f"ended with exit code {code}"
                self._note(f"the trainer {how}; {left} restarts are left")

            raise RayError(
                f"the trainer was lost {self._fleet.restarts + 1} times: see {self._logs}"
            )
        finally:
            self._remove()

    def _launch(self, id: str, stop: Callable[[], bool]) -> int | None:
        """One start of the launch: the trainer's exit code; None where its node was lost."""
        self._make(0)
        head = self._start(0, None, id, self._fleet.placed_s)
        for number in range(1, len(self._plan.nodes)):
            self._make(number)

        asked = False
        deadline = float("inf")
        while time.monotonic() < deadline:
            if stop() and not asked:
                asked = True
                deadline = time.monotonic() + GRACE_S + SILENT_S
                with suppress(self._ray.exceptions.RayError):  # the next look says what it is
                    self._call(0, "stop")

            for number in list(self._keepers):
                code = self._look(number, head, id)
                if number == 0 and code != "goes on":
                    self._drop_all()
                    return None if code == "lost" else int(code)

                if code == "goes on":
                    continue

                self._drop(number)
                if code != "0" and not asked:
                    if code != "lost":
                        self._note(f"node {number}: ended with exit code {code}; it is begun again")
                    self._make(number)

            time.sleep(LOOK_S)

        self._drop_all()
        return None

    def _look(self, number: int, head: str, id: str) -> str:
        """Starts a node whose place is known by now; then as `_poll`."""
        placing = self._placing.get(number)
        if placing is None:
            return self._poll(number)

        if self._ray.wait([placing], timeout=0)[0]:
            try:
                self._start(number, head, id, CALL_S)
            except RayError as error:
                self._note(str(error))
                return "lost"
        elif time.monotonic() - self._heard[number] > self._fleet.placed_s:
            self._note(f"node {number}: no room for {self._fleet.placed_s:g} s; still waiting")
            self._heard[number] = time.monotonic()

        return "goes on"

    def _poll(self, number: int) -> str:
        """An exit code, "goes on" or "lost"."""
        try:
            code = self._call(number, "poll")
        except self._ray.exceptions.ActorUnavailableError:
            return self._silent(number, "its node does not answer")
        except self._ray.exceptions.RayActorError as error:
            reason = " ".join(str(error).split())[:300]
            self._note(f"node {number}: lost ({reason})")
            return "lost"
        except self._ray.exceptions.GetTimeoutError:
            return self._silent(number, f"no answer within {CALL_S:g} s")

        self._heard[number] = time.monotonic()
        return "goes on" if code is None else str(code)

    def _silent(self, number: int, what: str) -> str:
        since = time.monotonic() - self._heard[number]
        if since > SILENT_S:
            self._note(f"node {number}: lost ({what}, for {since:.0f} s)")
            return "lost"
        return "goes on"

    def _make(self, number: int) -> None:
        """Asks for a node in its bundle, which Ray may have to place anew."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=number
        )
        keeper = (
            self._ray.remote(Keeper)
            .options(
                num_cpus=self._fleet.cpus_per_node,
                num_gpus=self._fleet.gpus,
                resources=self._fleet.resources,
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            .remote()
        )
        self._keepers[number] = keeper
        self._placing[number] = keeper.address.remote()
        self._heard[number] = time.monotonic()

    def _start(self, number: int, head: str | None, id: str, within_s: float) -> str:
        """Starts the process of a node, once Ray says within `within_s` where it is; `head` is
        where node 0 is, and None for that itself. Returns its address. Raises RayError."""
        keeper = self._keepers[number]
        node = ["launch", "node", str(self._path), "--rank", str(number), "--id", id]
        log = str(self._logs / f"node-{number}.log")
        try:
            address = str(self._get(self._placing.pop(number), within_s))
            where = address if head is None else head
            process = self._get(keeper.start.remote([*node, "--head", where], log), CALL_S)
        except (self._ray.exceptions.RayError, OSError) as error:
            raise RayError(
                f"node {number} could not be started within {within_s:g} s "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]}): look at "
                "`ray status`, and raise --set placed_s=..."
            ) from error

        self._heard[number] = time.monotonic()
        self._note(f"node {number}: on {address}, process {process}, {log}")
        return address

    def _place(self) -> None:
        """Raises RayError where the cluster has no room in time."""
        one = {"CPU": float(self._fleet.cpus_per_node), **self._fleet.resources}
        if self._fleet.gpus:
            one["GPU"] = float(self._fleet.gpus)

        bundles = [one] * len(self._plan.nodes)
        strategy = "STRICT_SPREAD" if self._fleet.spread else "PACK"
        self._group = self._ray.util.placement_group(bundles, strategy=strategy)
        if not self._group.wait(self._fleet.placed_s):
            there = self._ray.cluster_resources()
            has = ", ".join(f"{name} {n:g}" for name, n in sorted(there.items()) if ":" not in name)
            self._remove()
            raise RayError(
                f"Ray has no room for {len(bundles)} x {one} ({strategy}) within "
                f"{self._fleet.placed_s:g} s; the cluster has {has}: start more nodes, ask for "
                "less, or --set spread=false"
            )

    def _call(self, number: int, method: str) -> Any:
        return self._get(getattr(self._keepers[number], method).remote(), CALL_S)

    def _get(self, reference: Any, within_s: float) -> Any:
        return self._ray.get(reference, timeout=within_s)

    def _drop(self, number: int) -> None:
        self._placing.pop(number, None)
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._keepers.pop(number))

    def _drop_all(self) -> None:
        """Nodes without the trainer end by its code within seconds; what is left is ended."""
        deadline = time.monotonic() + CALL_S
        others = [number for number in self._keepers if number and number not in self._placing]
        while others and time.monotonic() < deadline:
            others = [number for number in others if self._poll(number) == "goes on"]
            time.sleep(LOOK_S)
        for number in list(self._keepers):
            self._drop(number)

    def _remove(self) -> None:
        for number in list(self._keepers):
            self._drop(number)
        with suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._group)
