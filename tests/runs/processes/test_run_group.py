"""What is told of a command that failed, out of its log."""

from __future__ import annotations

import pytest

from agentevo.runs.processes.run_group import last_lines, why_failed

FIRST = "error: the first step: 2 of 2 failed\nerror: nothing was trained\n"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (FIRST, "the first step: 2 of 2 failed"),
        ("step 1\n\n" + FIRST + "\n  a leaked semaphore\n", "the first step: 2 of 2 failed"),
        ("error: of the life before\nstep 2\n" + FIRST, "the first step: 2 of 2 failed"),
        ("error: b\n" + "error:   File x\n" * 3000, "b"),
    ],
)
def test_the_error_that_a_command_ended_with_is_one_line(tmp_path, log, reason):
    file = tmp_path / "rl.log"
    file.write_text(log)
    assert why_failed("rl", "failed", file) == f"rl: failed: {reason} (all of it: {file})"


def test_a_command_that_said_no_error_is_told_by_the_end_of_its_log(tmp_path):
    file = tmp_path / "rl.log"
    for begin in ("", "error: of the life before\n"):
        file.write_text(begin + "".join(f"step {number}\n" for number in range(20)))
        lines = why_failed("rl", "killed by signal 9", file).splitlines()
        assert lines[0] == f"rl: killed by signal 9; the end of {file}:"
        assert lines[1:] == [f"    step {number}" for number in range(12, 20)]

    file.write_text("")
    assert why_failed("rl", "killed", file) == f"rl: killed; the end of {file}:"
    assert last_lines(file, 1) == ""
