"""`python -m agentevo.algorithms` prints docs/algorithms.md."""

from agentevo.algorithms.describe import markdown

print(markdown(), end="")
