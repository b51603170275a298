"""What an answer is worth: 1 where the line `Answer: N` has the right number, 0.1 for such a line
with another, 0 without it or with several."""

import re

import agentevo


@agentevo.reward("right_number")
def right_number(completion: str, answer: str) -> agentevo.Score:
    numbers = re.findall(r"^Answer: (-?\d+)$", completion.strip(), re.MULTILINE)
    if len(numbers) != 1:
        return agentevo.Score(0.0, success=False)
    is_right = numbers[0] == str(answer)
    return agentevo.Score(1.0 if is_right else 0.1, success=is_right)
