"""`agentevo tools serve` refuses what it can't serve before it listens."""

import pytest

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["databse"], "did you mean 'database'?"),
        (["files", "rot=3"], "FileTools takes no option 'rot' (options: root, read_only)"),
        (["files", "root"], "write key=value"),
        (["calculator", "size=3"], "is a function, and a function takes no options"),
        (["calculator", "--port", "80"], "are for --http"),
        (["calculator", "--http", "--host", "0.0.0.0"], "give a key, --api-key"),
        (["calculator", "--http", "--api-key", "sesame"], "write ${env:NAME}"),
        (["calculator", "--http", "--api-key", "${env:NOT_SET_HERE}"], "NOT_SET_HERE"),
        (["calculator", "--http", "--host", "256.0.0.1", "--api-key", "${env:KEY}"], "listen"),
        (["calculator", "--import", "./none.py"], "none.py"),
    ],
)
def test_what_can_not_be_served_is_refused(words, problem, agentevo, monkeypatch):
    monkeypatch.setenv("KEY", "sesame")
    code, out, err = agentevo("tools", "serve", *words)
    assert (code, out) == (2, "") and problem in err


def test_a_task_that_is_none_is_refused(agentevo, monkeypatch):
    monkeypatch.setenv("AGENTEVO_TASK", "{")
    code, _, err = agentevo("tools", "serve", "calculator")
    assert code == 2 and "AGENTEVO_TASK" in err
