"""The treasure hunt as an environment of verifiers (before 0.4): rows, one
tool with hidden arguments, a rubric. Nothing here knows AgentEvo."""

import verifiers as vf
from datasets import Dataset

from hunt import INSTRUCTIONS, MAX_TURNS, make_tasks


def open_box(colour: str, boxes: list[str], treasure: str) -> str:
    """Opens the box of a colour.

    Args:
        colour: The colour of the box.
    """
    if colour not in boxes:
        return "The box is empty."
    later = boxes[boxes.index(colour) + 1 :]
    return f"A note: open the {later[0]} box." if later else f"You find a {treasure}."


class HuntEnv(vf.StatefulToolEnv):
    def __init__(self, **options):
        super().__init__(**options)
        self.add_tool(open_box, args_to_skip=["boxes", "treasure"])

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        hidden = {"boxes": state["info"]["boxes"], "treasure": state["answer"]}
        return {**tool_args, **hidden} if tool_name == "open_box" else tool_args


def found(completion, answer) -> float:
    """1 for the treasure in one word, else 0."""
    return float(str(completion[-1]["content"]).strip().lower() == answer)


def boxes_opened(completion) -> float:
    """A metric: it weighs nothing."""
    return float(sum(message["role"] == "tool" for message in completion))


def rows(count: int, seed: int) -> Dataset:
    return Dataset.from_list(
        [
            {"question": one["query"], "answer": one["answer"], "info": {"boxes": one["boxes"]}}
            for one in make_tasks(count, seed)
        ]
    )


def load_environment(train: int = 1200, held_out: int = 64, seed: int = 0) -> vf.Environment:
    return HuntEnv(
        dataset=rows(train, seed),
        eval_dataset=rows(held_out, seed + 2),
        system_prompt=INSTRUCTIONS,
        rubric=vf.Rubric(funcs=[found, boxes_opened], weights=[1.0, 0.0]),
        max_turns=MAX_TURNS,
    )
