"""Texts, weights, or both: the clerk of clerk.py at its 64 held-out tasks, greedily, four times.

    python examples/prompts/table.py [--steps 4] [--seed 0] [--out runs/clerk-table]

Prompts are examples, chosen among the agent's own best attempts (few_shot). `weights only` trains
so many steps without them, `prompts, weights` as many with what was found for the frozen model, and
the last row searches once more for the trained one.
"""

import argparse
from pathlib import Path

import clerk  # noqa: F401 (registers the agent)

import agentevo


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--steps", type=int, default=4)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--attempts", type=int, default=400)
    words.add_argument("--out", type=Path, default=Path("runs/clerk-table"))
    given = words.parse_args()
    shared = {
        "model": "smollm2-135m-instruct",
        "sampling": {"max_new_tokens": 8},
    }

    def searched(name, **more):
        return agentevo.optimize(
            "clerk",
            out=given.out / name,
            resume=(given.out / name / "optimize.json").exists(),
            run={"name": "clerk", "seed": given.seed},
            optimize={"attempts": given.attempts, "tasks": 36, "rounds": 2, "beam_width": 2},
            note=print,
            **shared,
            **more,
        )

    def trained(name, **more):
        return agentevo.train(
            "clerk",
            trainer={"steps": given.steps, "groups_per_step": 8},
            evaluation={"every": given.steps, "samples": 0},
            run={"dir": str(given.out / name), "seed": given.seed},
            resume=(given.out / name / "summary.json").exists(),
            **shared,
            **more,
        )

    def greedy(run):
        return agentevo.evaluate(run)["models"][0]["pass_at"]["1"]

    first = searched("prompts")
    texts = {"type": "clerk", "texts": str(given.out / "prompts" / "texts.yaml")}
    weights = trained("weights")
    both = trained("both", agent=texts)
    again = searched("prompts-again", checkpoint=both.checkpoint, agent=texts)
    rows = {
        "own texts, frozen": first["held_out"]["before"],
        "prompts only": first["held_out"]["after" if first["better"] else "before"],
        "weights only": greedy(weights),
        "prompts, weights": greedy(both),
        "prompts, weights, prompts": again["held_out"]["after" if again["better"] else "before"],
    }
    for name, one in rows.items():
        print(f"{name:<27} {one['value']:.1%} [{one['low']:.1%}, {one['high']:.1%}]")


if __name__ == "__main__":
    main()
