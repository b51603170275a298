"""The sampler as a process: what it needs of the model, and how it ends."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentevo.config import build_config
from agentevo.errors import StoreUnavailableError
from agentevo.models.chat.chat_format import ChatFormat
from agentevo.models.files.save import save_model
from agentevo.runs.orchestration.components import load_policy
from agentevo.runs.processes import sample as module
from agentevo.runs.processes.sample import chat_of_recipe
from agentevo.store import open_store

TINY = {"environment": {"type": "coins"}, "model": {"name": "tiny"}}


@pytest.mark.slow
@pytest.mark.parametrize("saved", [False, True])
def test_conversations_are_encoded_as_the_trainers(saved, tmp_path):
    config = build_config(TINY)
    if saved:
        loaded = load_policy(config)
        loaded.model.generation_config.eos_token_id = [loaded.tokenizer.eos_token_id, 7]
        config = build_config(
            TINY
            | {
                "model": {
                    "name": str(save_model(loaded.model, loaded.tokenizer, tmp_path / "model"))
                }
            }
        )

    loaded = load_policy(config)
    if saved:
        for weights in (tmp_path / "model").glob("*.safetensors"):  # they are not read
            weights.write_bytes(b"none")

    chat, length = chat_of_recipe(config)
    expected = ChatFormat(loaded.tokenizer, loaded.model.generation_config)
    assert (chat.end_ids, chat.end_of_turn_id) == (expected.end_ids, expected.end_of_turn_id)
    assert (7 in chat.end_ids) == saved
    assert chat.tokenizer.get_vocab() == expected.tokenizer.get_vocab()
    assert length == loaded.model.config.max_position_embeddings


class Engine:
    async def refresh(self):
        return


class Service:
    stopping = False

    def __init__(self, error=None, deaf=False):
        self.error = error
        self.deaf = deaf
        self.ended = ""

    async def run(self, stop):
        try:
            while self.deaf or not stop():
                await asyncio.sleep(0.01)
                if self.error:
                    raise self.error
            self.ended = "asked"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


def serve(tmp_path, service, *, stop=lambda: False, ends=True, commit=False, steps=1):
    async def work():
        async with await open_store(f"sqlite:///{tmp_path / 'store.sqlite'}") as store:
            if commit:
                await store.commit_step(1, {})
            await asyncio.wait_for(
                module._serve(service, Engine(), store, steps, stop, ends_with_run=ends), 30
            )

    asyncio.run(work())


def test_it_ends_with_the_runs_last_step(tmp_path):
    service = Service()
    serve(tmp_path, service, commit=True)
    assert service.ended == "asked"


def test_with_a_parent_it_waits_to_be_stopped(tmp_path):
    service = Service()
    begun = time.monotonic()
    serve(tmp_path, service, commit=True, ends=False, stop=lambda: time.monotonic() > begun + 0.5)
    assert service.ended == "asked" and time.monotonic() >= begun + 0.5


def test_a_service_that_waits_for_something_is_stopped_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    service = Service(deaf=True)
    serve(tmp_path, service, stop=lambda: True)
    assert service.ended == "cancelled"


def test_what_fails_in_the_service_is_raised(tmp_path):
    with pytest.raises(StoreUnavailableError, match="gone for good"):
        serve(tmp_path, Service(StoreUnavailableError("gone for good")))
