"""OpenAI's SDK for Node: one process per attempt (node_openai/agent.js)."""

from pathlib import Path

from learn import learn

if __name__ == "__main__":
    learn(command=["node", str(Path(__file__).parent / "node_openai" / "agent.js")])
