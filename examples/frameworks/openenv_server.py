"""The treasure hunt as an OpenEnv environment and its server. Nothing here knows AgentEvo.

python openenv_server.py 8000
"""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from hunt import INSTRUCTIONS, make_tasks


class HuntAction(Action):
    text: str = Field(description="`open COLOUR`, or the treasure in one word")


class HuntObservation(Observation):
    text: str


class HuntEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._steps = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        (self._task,) = make_tasks(1, seed or 0)
        self._steps = 0
        return HuntObservation(text=f"{INSTRUCTIONS} {self._task['query']}")

    def step(self, action, timeout_s=None, **kwargs):
        self._steps += 1
        verb, _, colour = action.text.partition(" ")
        if verb != "open":
            found = action.text.strip().lower() == self._task["answer"]
            return HuntObservation(text="The hunt is over.", reward=float(found), done=True)

        boxes = self._task["boxes"]
        if colour not in boxes:
            return HuntObservation(text="The box is empty.", reward=0.0)

        later = boxes[boxes.index(colour) + 1 :]
        treasure = f"You find a {self._task['answer']}."
        text = f"A note: open the {later[0]} box." if later else treasure
        return HuntObservation(text=text, reward=0.0)

    @property
    def state(self):
        return State(step_count=self._steps)


app = create_fastapi_app(HuntEnvironment, HuntAction, HuntObservation, max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
