"""What a sandbox starts waits for its host, however slow the machine is."""

import os
import socket

from agentevo.environments.sandbox.inside import frames, supervisor


def test_settings_may_come_after_it_has_looked_for_the_dead(monkeypatch):
    host, inside = socket.socketpair()
    settings = {"work": "anywhere"}

    def nobody_has_died(*_):
        host.sendall(frames.encode(settings))
        raise ChildProcessError

    monkeypatch.setattr(os, "waitpid", nobody_has_died)
    monkeypatch.setattr(supervisor, "POLL_INTERVAL_S", 0.01)
    with host, inside:
        assert supervisor.SandboxSupervisor(inside.fileno())._settings == settings
