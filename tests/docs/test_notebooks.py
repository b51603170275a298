"""The cells of the notebooks run in order, as in a kernel: in a thread with a running event loop.
They train the smallest model for one step."""

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import pytest
from slow import soak

import agentevo

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
SMALL = [
    "model={name: tiny, tiny: {tokenizer: byte, hidden_size: 32, num_layers: 1}}",
    "trainer.groups_per_step=1",
    "trainer.group_size=2",
    "evaluation.tasks=1",
    "evaluation.samples=0",
]


def cells(notebook: Path) -> list[str]:
    parsed = json.loads(notebook.read_text(encoding="utf-8"))
    codes = [cell for cell in parsed["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in codes), "clear the outputs before you commit"
    return ["".join(cell["source"]) for cell in codes]


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook", [NOTEBOOKS[0], *soak(*NOTEBOOKS[1:])], ids=lambda path: path.stem
)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    display = ModuleType("IPython.display")
    shown = []
    display.clear_output = lambda wait: shown.append(wait)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    monkeypatch.setattr(agentevo, "train", partial(agentevo.train, overrides=SMALL))
    variables: dict[str, object] = {}

    async def kernel() -> None:
        for cell in cells(notebook):
            exec(cell, variables)
            if "STEPS = " in cell:
                variables["STEPS"] = 1

    asyncio.run(kernel())
    assert variables["run"].summary["steps"] == 1
    assert shown
    plt.close("all")
