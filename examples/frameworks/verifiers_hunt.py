"""Any environment of verifiers trains as it is: verifiers_world.py knows nothing of AgentEvo.

pip install agentevo 'verifiers<0.4'; python verifiers_hunt.py
"""

import verifiers_world
from agentevo.integrations.verifiers import world
from agentevo.types import Task
from learn_world import learn_world


class Teacher:
    """Plays the hunts of the cold start in an environment of the same kind."""

    def __init__(self):
        made = world(
            verifiers_world.load_environment(train=64, held_out=2, seed=1), name="demonstrations"
        )
        self._player = made(None)
        self._player.tasks()

    async def run(self, task, policy):
        number = task.id.rpartition("-")[2]
        return await self._player.run(Task(id=f"train-{number}"), policy)


if __name__ == "__main__":
    learn_world(world(verifiers_world.load_environment()), Teacher())
