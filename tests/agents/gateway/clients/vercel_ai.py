"""Vercel's AI SDK with one of its providers; $NODE_FOLDER has the packages."""

import json
import os
import subprocess
from pathlib import Path

PROGRAM = Path(__file__).with_suffix(".mjs")


def rollout(task, policy, provider):
    told = {"query": task.query, "answer": task.answer, "metadata": dict(task.metadata)}
    variables = {
        "OPENAI_BASE_URL": policy.base_url,
        "OPENAI_API_KEY": policy.api_key,
        "AGENTEVO_TASK": json.dumps(told),
    }
    done = subprocess.run(
        ["node", str(PROGRAM), provider],
        cwd=os.environ["NODE_FOLDER"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["reward"]
