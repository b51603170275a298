"""What the clients of real frameworks have asked of the gateway within a run (gateway/
recorded_requests), asked of `agentevo serve --openai`: one process answers all of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from chat_templates import HERMES, tokenizer_with
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from transformers import LlamaConfig, LlamaForCausalLM

RECORDINGS = sorted((Path(__file__).parents[2] / "gateway" / "recorded_requests").glob("*.json"))
START_S = 300.0
MESSAGE_KEYS = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
"""Of an answer of Anthropic's API."""


def make_model(folder: Path) -> None:
    """A Llama of random weights, with room for the longest recording."""
    tokenizer = tokenizer_with(HERMES)
    tokenizer.model_max_length = 32_768
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def served_process(tmp_path_factory):
    """A client of a started `agentevo serve`, which has to be there still at the end."""
    folder = tmp_path_factory.mktemp("served_clients")
    make_model(folder / "model")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "environment": {"type": "coins"},
                "model": {"name": str(folder / "model"), "dtype": "float32"},
                "sampling": {"max_new_tokens": 24},
                "run": {"dir": str(folder / "run"), "threads": 1},
            }
        )
    )
    command = [sys.executable, "-m", "agentevo", "serve", str(recipe), "--openai"]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--port", "0"], stdout=output, stderr=output)

    serving = folder / "run" / "serving"
    try:
        until = time.monotonic() + START_S
        while not (serving / "url").is_file():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)

        base = (serving / "url").read_text().strip()
        key = (serving / "secret").read_text().strip()
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=base, headers=headers, timeout=300) as client:
            yield client
        assert process.poll() is None, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(300)


@pytest.mark.slow
@pytest.mark.parametrize("file", RECORDINGS, ids=[file.stem for file in RECORDINGS])
def test_a_recorded_client_gets_answers_in_its_api_s_form(served_process, file):
    for exchange in json.loads(file.read_text())["exchanges"]:
        answer = served_process.request(
            exchange["method"],
            exchange["path"],
            content=json.dumps(exchange["request"]),
            headers=exchange["headers"],
        )
        assert answer.status_code == 200, answer.text
        check_form(exchange["path"].partition("?")[0], answer)


def check_form(path: str, answer: httpx.Response) -> None:
    """OpenAI's answers fit the types of its SDK, and Anthropic's have the keys of its reference;
    a stream goes on to its end."""
    streams = answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text) if streams else []
    if path == "/v1/chat/completions" and not streams:
        completion = ChatCompletion.model_validate(answer.json())
        assert completion.choices[0].finish_reason in ("stop", "length", "tool_calls")
    elif path == "/v1/chat/completions":
        assert answer.text.endswith("data: [DONE]\n\n")
        chunks = [ChatCompletionChunk.model_validate(event) for event in events]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert any(choice.finish_reason for chunk in chunks for choice in chunk.choices)
    elif path == "/v1/responses" and not streams:
        assert Response.model_validate(answer.json()).status in ("completed", "incomplete")
    elif path == "/v1/responses":
        known = TypeAdapter(ResponseStreamEvent)
        types = [known.validate_python(event).type for event in events]
        assert types[0] == "response.created"
        assert types[-1] in ("response.completed", "response.incomplete")
    elif not streams:
        assert path == "/v1/messages"
        assert answer.json().keys() == MESSAGE_KEYS
    else:
        assert path == "/v1/messages"
        assert events[0]["type"] == "message_start"
        assert events[0]["message"].keys() == MESSAGE_KEYS
        assert events[-2]["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
        assert events[-1]["type"] == "message_stop"


def events_of(stream: str) -> list[dict]:
    """What the events of a stream say; the mark of its end is left out."""
    lines = (line.removeprefix("data: ") for line in stream.splitlines() if line[:6] == "data: ")
    return [json.loads(line) for line in lines if line != "[DONE]"]
