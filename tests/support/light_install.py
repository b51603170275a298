"""This installation without what computes with a model: `pip install agentevo` alone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import agentevo
from agentevo.runtime.extras import TRAINING_PACKAGES

NEED_TORCH = ("bitsandbytes", "functorch", "nvidia", "peft", "torchao", "torchgen", "triton")


class LightInstall:
    """A folder of links to every installed package but torch and what needs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for place in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}:
            for entry in Path(place).iterdir():
                package = entry.name.lower().partition("-")[0].partition(".")[0]
                is_left_out = package.startswith((*TRAINING_PACKAGES, *NEED_TORCH))
                if (
                    not is_left_out
                    and entry.suffix != ".pth"
                    and not (folder / entry.name).exists()
                ):
                    (folder / entry.name).symlink_to(entry)

    def start(self, *words: str, **options: object) -> subprocess.Popen[str]:
        """Python with these arguments, in that installation."""
        source = Path(agentevo.__file__).parents[1]
        path = os.pathsep.join([str(source), str(self.folder)])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-S", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def output(self, *words: str, **options: object) -> tuple[int, str]:
        """Exit code, and what was printed."""
        with self.start(*words, **options) as process:
            printed, _ = process.communicate(timeout=300)
        return process.returncode, printed
