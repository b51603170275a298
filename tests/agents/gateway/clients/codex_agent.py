"""Codex CLI with the hunt's MCP server; $NODE_FOLDER has its package."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import hunt
from cold_start import call
from hunt import INSTRUCTIONS, Hunt

TEACHER = {"opens": lambda colour: call("mcp__hunt__open_box", colour=colour)}
SERVER = Path(hunt.__file__).with_name("hunt_server.py")
SETTINGS = {
    "model": "policy",
    "web_search": "disabled",
    "features.goals": False,
    "features.multi_agent": False,
    "features.shell_tool": False,
    "model_provider": "agentevo",
    "model_providers.agentevo.name": "agentevo",
    "model_providers.agentevo.env_key": "AGENTEVO_KEY",
    "model_providers.agentevo.wire_api": "responses",
    "mcp_servers.hunt.required": True,
    "mcp_servers.hunt.command": sys.executable,
    "mcp_servers.hunt.args": [str(SERVER)],
    "mcp_servers.hunt.env_vars": ["AGENTEVO_TASK", "PYTHONPATH"],
    "mcp_servers.hunt.default_tools_approval_mode": "approve",
}


def rollout(task, policy):
    settings = SETTINGS | {"model_providers.agentevo.base_url": policy.base_url}
    with TemporaryDirectory() as home:
        answer = Path(home) / "answer.txt"
        variables = {
            "AGENTEVO_KEY": policy.api_key,
            "AGENTEVO_TASK": json.dumps({"metadata": dict(task.metadata)}),
            "CODEX_HOME": home,
        }
        done = subprocess.run(
            [
                f"{os.environ['NODE_FOLDER']}/node_modules/.bin/codex",
                "exec",
                "--skip-git-repo-check",
                f"--output-last-message={answer}",
                *(f"--config={key}={json.dumps(value)}" for key, value in settings.items()),
                f"{INSTRUCTIONS} {task.query}",
            ],
            cwd=home,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not done.returncode, done.stderr
        return Hunt(task).reward(answer.read_text())
