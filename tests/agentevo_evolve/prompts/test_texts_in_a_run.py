"""A whole run with texts of a file: every attempt says which, and the audit knows them."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentevo
from agentevo.config.texts import digest_of_text

TINY = {"name": "tiny", "tiny": {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}}


@pytest.mark.slow
def test_a_run_keeps_the_texts_of_its_attempts_and_the_audit_sees_a_changed_one(
    tmp_path: Path,
) -> None:
    async def says(task, policy):
        chat = [{"role": "system", "content": policy.text("system", "own")}]
        chat += [{"role": "user", "content": policy.text("rules", "Say it.") + task.query}]
        reply = await policy.generate(chat)
        return float(len(reply.text) % 3 == 0)

    (tmp_path / "texts.yaml").write_text("system: 'Be {brief}.'\n")
    run = agentevo.train(
        says,
        [agentevo.Task(id=str(n), query=f"{n}") for n in range(8)],
        model=TINY,
        agent={"type": "function", "texts": str(tmp_path / "texts.yaml")},
        sampling={"max_new_tokens": 3},
        trainer={"steps": 1, "groups_per_step": 2, "group_size": 3},
        evaluation={"tasks": 1, "samples": 0},
        tracking={"tensorboard": False, "report": False},
        run={"dir": str(tmp_path / "run")},
    )
    used = {"system": digest_of_text("Be {brief}."), "rules": digest_of_text("Say it.")}
    trajectories = run.trajectories()
    assert trajectories and all(trajectory.texts == used for trajectory in trajectories)

    audit = run.audit()
    assert audit.ok and audit.texts_gone == []
    assert {name: list(text) for name, text in audit.texts.items()} == {
        name: [digest] for name, digest in used.items()
    }

    lines = dict(audit.lines())
    assert lines["text system"].startswith(used["system"])

    kept = run.dir / "texts" / f"{used['system']}.txt"
    kept.write_text("Be long.")
    assert any("was changed" in violation.what for violation in run.audit().violations)

    kept.unlink()
    audit = run.audit()
    assert audit.texts_gone == [used["system"]]
    assert ("not vouched for", f"texts that are not in the folder: {used['system']}") in (
        audit.lines()
    )
