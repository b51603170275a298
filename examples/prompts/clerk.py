"""README's clerk, with its texts by name: one tool, `count THING`, two turns, one reward."""

import random

import agentevo
from agentevo.types import Message, Task

THINGS = ["apples", "books", "boxes", "candles", "chairs", "clocks", "cups", "hats"]
THINGS += ["keys", "lamps", "pears", "pens", "plates", "ropes", "shirts", "spoons"]
QUESTION = "How many {}? Say count and the thing."
EXAMPLE = [
    Message("user", QUESTION.format("doors")),
    Message("assistant", "count doors"),
    Message("user", "Result: 12"),
    Message("assistant", "There are 12 doors."),
]


@agentevo.agent("clerk")
class Clerk:
    brings_tasks = True

    async def run(self, task, policy):
        chat = [*EXAMPLE, *policy.examples(), Message("user", task.query)]
        call = await policy.generate(chat)
        thing = call.text.removeprefix("count ")
        if thing not in task.metadata:
            return 0.0

        chat += [call.message, Message("user", f"Result: {task.metadata[thing]}")]
        answer = await policy.generate(chat)
        return float(answer.text == task.answer)

    def tasks(self):
        every = [customer(number) for number in range(400)]
        return every[:-64], every[-64:]


def customer(number):
    draw = random.Random(number)
    stock = {thing: draw.randint(10, 99) for thing in THINGS}
    thing = draw.choice(THINGS)
    answer = f"There are {stock[thing]} {thing}."
    return Task(id=str(number), query=QUESTION.format(thing), answer=answer, metadata=stock)
