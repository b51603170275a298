"""`agentevo doctor` without a recipe: can this machine, as installed, train?"""

from __future__ import annotations

import asyncio
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
import torch

from agentevo.environments.sandbox import cgroups
from agentevo.environments.sandbox.open_sandbox import ORDER, problem_of
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.inference.default_engine import OWN, choose_engine, installed_engines
from agentevo.models.compute.cpu_kernels import why_not
from agentevo.models.files.cache import cache_folder, is_complete
from agentevo.models.files.known_models import known_models
from agentevo.runs.doctor import checks
from agentevo.runs.doctor.checks import GIB, Check
from agentevo.runtime.cpu_threads import allowed_cpus, missing_threads
from agentevo.runtime.device_names import CUDA
from agentevo.runtime.devices import all_of, find, is_accelerator, memory, name_of


def check_installation() -> list[Check]:
    """Checks versions, processor, CPU kernels (which this builds), threads, memory, disk, GPU and
    models. It downloads nothing."""
    version = platform.python_version()
    advice = "" if sys.version_info >= (3, 11) else "AgentEvo needs Python 3.11 or newer"
    results = [
        Check(
            "python",
            "wrong" if advice else "good",
            f"{version} ({platform.system()} {platform.machine()})",
            advice,
        )
    ]
    results += [
        checks.judge_version(name, _installed_version(name), requirement)
        for name, requirement in _required_versions().items()
    ]

    num_threads = torch.get_num_threads()
    available = psutil.virtual_memory()
    memory = f"{available.available / GIB:.1f} of {available.total / GIB:.1f} GiB are free"
    short = (
        ""
        if available.available > 3 * GIB
        else "training smollm2-135m-instruct takes about 3 GiB: close other programs, or use "
        "model.name=tiny"
    )
    results += [
        checks.judge_processor(
            torch.backends.cpu.get_cpu_capability(), torch.backends.mkldnn.is_available()
        ),
        checks.judge_kernels(*why_not()),
        checks.judge_threads(num_threads, num_cores(), missing_threads(num_threads)),
        Check("memory", "warning" if short else "good", memory, short),
        checks.judge_disk(shutil.disk_usage(Path.cwd()).free, str(Path.cwd())),
        *_gpus(),
        *_sandboxes(),
        *(_model(name) for name in known_models.names()),
    ]
    return results


def num_cores() -> int:
    """Cores that this process may use, counted as cores and not as hardware threads; at least 1."""
    allowed = allowed_cpus()
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _required_versions() -> dict[str, str]:
    """Package -> version that training needs, from AgentEvo's metadata; the essential packages if
    AgentEvo is not installed as a package."""
    try:
        requirements = metadata.requires("agentevo") or []
    except metadata.PackageNotFoundError:
        requirements = ["torch", "transformers", "pydantic", "sqlalchemy"]

    plain = [
        requirement.split(";")[0].strip()
        for requirement in requirements
        if "extra ==" not in requirement or re.search("extra == ['\"]train['\"]", requirement)
    ]
    names = {
        requirement: next(
            (i for i, char in enumerate(requirement) if char in "<>=!~ ["), len(requirement)
        )
        for requirement in plain
    }
    return {requirement[:end]: requirement[end:].strip() for requirement, end in names.items()}


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[Check]:
    """Each device of the kind that recipes use by default."""
    device = find("auto")
    if not is_accelerator(device):
        return [Check("gpu", "good", "PyTorch finds none; training runs on the CPU")]

    devices = all_of(device)
    results = []
    for gpu in devices:
        free, total = memory(gpu)
        finding = f"{name_of(gpu)}, {free / GIB:.1f} of {total / GIB:.1f} GiB are free"
        place = f"number {gpu.index} of {len(devices)}: " if len(devices) > 1 else ""
        results.append(Check("gpu", "good", place + finding))

    return [*results, judge_engine(device.type)]


def judge_engine(device: str) -> Check:
    """The default engine of `agentevo train` on such a device."""
    choice = choose_engine(device, installed_engines())
    is_slow = device == CUDA and choice.type == OWN
    finding = f"engine.type={choice.type} if a recipe does not set it, {choice.why}"
    advice = "install vLLM, or continue with slow sampling" if is_slow else ""
    return Check("engine", "warning" if is_slow else "good", finding, advice)


def _sandboxes() -> list[Check]:
    """A trial of each sandbox kind that protects."""
    section = SandboxSection()
    problems = {kind: asyncio.run(problem_of(kind, section)) for kind in ORDER}
    works = [kind for kind, problem in problems.items() if not problem]
    advice = "" if works else "model-written code can't run in a sandbox here: see docs/sandbox.md"
    results = []
    for kind, problem in problems.items():
        chosen = ", and `auto` chooses it" if works[:1] == [kind] else ""
        finding = f"can't be used: {problem}" if problem else f"works{chosen}"
        status: Literal["good", "warning"] = "good" if works else "warning"
        results.append(Check(f"sandbox {kind}", status, finding, advice))

    cgroup_place = cgroups.place()
    limits = ", ".join(sorted(cgroup_place.controllers))
    walls = f"the kernel limits {limits}, in {cgroup_place.folder}"
    if cgroup_place.folder is None:
        walls = f"none can be used ({cgroup_place.problem}): memory and processes are watched"

    return [*results, Check("sandbox cgroups", "good", walls)]


def _model(name: str) -> Check:
    folder = cache_folder(name)
    if is_complete(known_models.get(name), folder):
        return Check(f"model {name}", "good", f"is in {folder}")
    return Check(
        f"model {name}",
        "good",
        f"is not here yet; `agentevo models {name}` or the first run downloads it",
    )
