"""No key, token or password reaches a tracker by the configuration."""

from __future__ import annotations

import json

import pytest

from agentevo.observability.trackers.secrets import HIDDEN, without_secrets


def test_secrets_are_taken_out_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "tok-1234567890")
    tree = {
        "remote_models": {"judge": {"api_key": "${env:JUDGE_KEY}", "url": "http://host/v1"}},
        "agent": {
            "tools": [
                {"headers": {"Authorization": "Bearer hush", "X-Api-Key": "hush"}},
                {"env": {"GITHUB_TOKEN": "hush", "PATH": "/bin"}},
                {"url": "https://host/mcp?access_token=hush"},
                {"args": ["--key", "sk-hushhushhushhush", "tok-1234567890 in a text"]},
            ]
        },
        "store": {"url": "postgresql://me:hush@host/db"},
        "sampling": {"max_new_tokens": 64, "stop": ["token"]},
        "trainer": {"micro_batch_tokens": 100},
    }
    clean = without_secrets(tree)
    text = json.dumps(clean)
    assert "hush" not in text
    assert "tok-1234567890" not in text
    assert clean["remote_models"]["judge"]["api_key"] == "${env:JUDGE_KEY}"
    assert clean["sampling"] == tree["sampling"]
    assert clean["trainer"] == tree["trainer"]
    assert clean["agent"]["tools"][1]["env"] == {"GITHUB_TOKEN": HIDDEN, "PATH": "/bin"}


def test_a_secret_of_many_lines_and_a_long_text_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_PRIVATE_KEY", "-----BEGIN-----\nabcdefgh")
    tree = {"notes": "a" * 1_000_000 + "-----BEGIN-----\nabcdefgh"}
    assert without_secrets(tree)["notes"].endswith(f"a{HIDDEN}")
