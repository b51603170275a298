"""`python -m agentevo.catalogue` prints docs/algorithms.md."""

from agentevo.catalogue.describe import markdown

print(markdown(), end="")
