"""Any OpenEnv server is an environment by its URL: openenv_server.py knows nothing of AgentEvo.

pip install agentevo openenv; python openenv_hunt.py
"""

import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx

from agentevo.agents.environment_agent import EnvironmentAgent
from agentevo.config import EnvironmentAgentSection
from agentevo.environments import make
from agentevo.environments.openenv_adapter import OpenEnvConfig
from agentevo.types import Task
from hunt import MAX_TURNS
from learn_world import learn_world

AGENT = {"type": "environment", "format": "plain", "max_turns": MAX_TURNS}


@contextmanager
def serving():
    """The URL of a server, started for this block."""
    server = Path(__file__).with_name("openenv_server.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, str(server), str(port)])
    try:
        ends_at = time.monotonic() + 900
        while process.poll() is None and time.monotonic() < ends_at:
            try:
                httpx.get(f"{url}/health", timeout=5.0, trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.2)

        yield url
    finally:
        process.kill()
        process.wait()


class Teacher:
    """Plays the hunts of the cold start in the same environment."""

    def __init__(self, config):
        section = EnvironmentAgentSection(**AGENT)
        self._player = EnvironmentAgent(section, lambda: make(config))

    async def run(self, task, policy):
        number = int(task.id.rpartition("-")[2])
        return await self._player.run(Task(id=task.id, seed=number), policy)


if __name__ == "__main__":
    with serving() as url:
        config = OpenEnvConfig(url=url, max_actions=MAX_TURNS)
        learn_world(config, Teacher(config), opens="open {}".format, agent=AGENT)
