from agentevo.types import Trajectory, Turn


def test_the_context_of_a_turn_deep_in_a_conversation_is_all_that_was_before_it() -> None:
    depth = 3000  # more than Python's stack
    turns = [
        Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=[3 * index],
            completion_ids=[3 * index + 1, 3 * index + 2],
            logprobs=[0.0, 0.0],
            versions=[0, 0],
            finish_reason="stop",
        )
        for index in range(depth)
    ]
    trajectory = Trajectory(id="a", task_id="t", group_id="g", attempt=0, turns=turns)
    assert trajectory.context_ids(depth - 1) == list(range(3 * depth - 2))
    assert trajectory.context_ids(0) == [0]
