"""What a client of a server may set: every key is allowed or refused, and nothing that is allowed
names a file, an address or code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from agentevo.api.loop import client_sections, service
from agentevo.api.loop.client_sections import KEYS, REFUSED, check_sections, only_from_the_hub
from agentevo.api.loop.encoding import encode
from agentevo.api.loop.local import loop_config
from agentevo.api.loop.service import LoopService
from agentevo.api.loop.wire import failure_of
from agentevo.config import RunConfig
from agentevo.config.named_agents import NamedAgentSection
from agentevo.errors import BadRequestError, ConfigError, EngineUnavailableError
from agentevo.inference.vllm.options import VllmOptions


def sections_within(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_within(argument)


def undecided(place: str, section: type[BaseModel], keys: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are neither allowed nor refused, and those that are there no more."""
    refused = {key.rpartition(".")[2] for key in REFUSED if key.rpartition(".")[0] == place}
    for name in {*section.model_fields} ^ (keys.keys() | refused):
        yield f"{place}.{name}"
    for name, inner in keys.items():
        if isinstance(inner, Mapping) and name not in ("config_overrides", "options"):
            for model in sections_within(section.model_fields[name].annotation):
                yield from undecided(f"{place}.{name}".removeprefix("agents."), model, inner)


def test_every_key_is_allowed_or_refused() -> None:
    missing = [
        key
        for name in KEYS.keys() - {"agent"}
        for section in sections_within(RunConfig.model_fields[name].annotation)
        for key in undecided(name, section, KEYS[name])
    ]
    missing += undecided("agents", NamedAgentSection, client_sections._AGENT)
    missing += undecided("engine.options", VllmOptions, KEYS["engine"]["options"])
    assert missing == []


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"algorithm": {"reference_model": "/etc"}}, "algorithm.reference_model"),
        ({"algorithm": {"reference_model": "./model"}}, "algorithm.reference_model"),
        ({"algorithm": {"credit": "mine"}}, "algorithm.credit"),
        ({"trainer": {"optimizer_from": "/etc"}}, "trainer.optimizer_from"),
        ({"trainer": {"parallel": {"shard": 2}}}, "trainer.parallel"),
        ({"engine": "sglang"}, "engine.type"),
        ({"engine": {"type": "sglang", "options": {"url": "http://10.0.0.1"}}}, "engine.type"),
        ({"engine": {"type": "agent_lightning"}}, "engine.type"),
        ({"engine": {"options": {"url": "http://10.0.0.1"}}}, "engine.options.url"),
        ({"engine": {"type": "vllm", "options": {"start_timeout_s": 9e9}}}, "start_timeout_s"),
        ({"rollout": {"engine_urls": ["http://10.0.0.1"]}}, "rollout.engine_urls"),
        ({"rollout": {"weights": {"url": "file:///etc"}}}, "rollout.weights"),
        ({"rollout": {"samplers": 1000}}, "rollout.samplers"),
        ({"algorithm": {"replay_successes": 1}}, "algorithm.replay_successes"),
        ({"model": {"config_overrides": {"_attn_implementation": "a/b"}}}, "_attn_implementation"),
        ({"model": {"lora": {"rank": 4, "targets": "(a+)+$"}}}, "model.lora.targets"),
        ({"model": {"lora": {"rank_pattern": {"(a+)+$": 2}}}}, "model.lora.rank_pattern"),
        ({"model": {"lora": {"rank": 4, "targets": 5}}}, "model.lora.targets: 5: give names"),
        ({"model": {"lora": {"exclude": True}}}, "model.lora.exclude: True: give names"),
        ({"model": {"lora": {"targets": ["\ud800"]}}}, "model.lora.targets"),
        ({"model": {"chat_template": "{{ 1 }}" + " " * 2**20}}, "model.chat_template"),
        ({"agents": {"a": {"model": "/etc"}}}, "agents.a.model.name"),
        ({"agents": {"a": {"model": {"lora": {"adapter": "x"}}}}}, "agents.a.model.lora.adapter"),
        ({"run": {"dir": "/tmp/x"}}, "run.dir"),
        ({"import": ["./evil.py"]}, "import"),
        ({"tracking": {"backends": ["wandb"]}}, "tracking.backends"),
        ({"trainer": {"stepps": 3}}, "did you mean trainer.steps"),
    ],
)
def test_no_key_of_a_client_names_a_file_an_address_or_code(section, key) -> None:
    with pytest.raises(ConfigError) as refused:
        check_sections(section)
    assert key in str(refused.value)


def test_an_answer_of_a_failure_can_be_sent_whatever_its_text() -> None:
    status, failure = failure_of(ConfigError("model.chat_template: \ud800 of a template"))
    assert status == 400
    assert b"? of a template" in encode(failure)
    with pytest.raises(BadRequestError, match="can't be sent"):
        encode({"text": "\ud800"})


def test_usual_sections_pass() -> None:
    sections = {
        "model": {"name": "org/name", "lora": {"rank": 4, "targets": ["q_proj", "model.v_proj"]}},
        "algorithm": {"name": "grpo", "reference_model": "org/name"},
        "engine": {"type": "vllm", "options": {"max_model_len": 4096}},
        "agents": {"a": {"train": False}, "b": {"model": "org/other"}},
        "run": {"seed": 3},
        "reward_model": {"name": None},
    }
    check_sections(sections)
    named = only_from_the_hub(sections)
    assert named["algorithm"]["reference_model"] == "hf://org/name"
    assert named["agents"]["b"]["model"] == "hf://org/other"


def test_a_run_that_is_still_opened_ends_at_once(tmp_path, monkeypatch) -> None:
    """Such as one whose engine takes for ever to start."""
    begun = asyncio.Event()

    async def never_opens(*arguments, **options):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(service, "run_training", never_opens)
    config = loop_config(tmp_path / "mine", {"model": {"name": "tiny", "tiny": TINY}})

    async def work():
        loop = LoopService(config, resume=False, gateway=None, note=lambda line: None)
        opening = asyncio.create_task(loop.start())
        while not begun.is_set():
            await asyncio.sleep(0.01)
        await loop.close()
        with pytest.raises(EngineUnavailableError, match="it was closed"):
            await opening

    asyncio.run(work())


TINY = {"tokenizer": "byte", "hidden_size": 32, "num_layers": 1}
