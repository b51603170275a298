"""A model of this machine in the place of a server, and answers that are kept within a limit."""

import asyncio
import json
import os

import pytest
from remote_server import RemoteServer, chat, gives

from agentevo.config import ModelSection, TinyModel
from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import ConfigError
from agentevo.inference.remote_models import RemoteModel, RemoteModels
from agentevo.inference.remote_models.ledger import RemoteModelError
from agentevo.inference.remote_models.model import check_keys
from agentevo.models.files.load import load_model
from agentevo.models.files.save import save_model

ASKED = [{"role": "user", "content": "How good is 4?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = TinyModel(tokenizer="byte", hidden_size=32, num_layers=1)
    loaded = load_model(ModelSection(name="tiny", tiny=shape), seed=1)
    return save_model(loaded.model, loaded.tokenizer, tmp_path_factory.mktemp("m") / "model")


def section(folder, **options):
    return RemoteModelSection(
        api="engine", model=str(folder), device="cpu", max_new_tokens=12, **options
    )


def asked(model, messages=ASKED, **options):
    return asyncio.run(model.generate(messages, role="judge", attempt="a", **options))


@pytest.mark.slow
def test_a_local_model_answers_is_logged_and_kept_until_its_weights_change(folder, tmp_path):
    model = RemoteModel("j", section(folder, cache=True, budget={"requests": 3}), tmp_path)
    first = asked(model)
    again = asked(model)
    assert first.text and first.text == again.text and again.is_cached and not first.is_cached
    assert 0 < first.usage.completion_tokens <= 12 < first.usage.prompt_tokens

    sampled = RemoteModel("k", section(folder, temperature=1.0))
    one, same, other = (asked(sampled, seed=seed).text for seed in (1, 1, 2))
    assert one == same != other

    model.close()
    with pytest.raises(RemoteModelError, match="the run has ended"):
        asked(model, [{"role": "user", "content": "And now?"}])

    os.utime(folder / "model.safetensors", (1, 1))
    newer = RemoteModel("j", section(folder, cache=True), tmp_path)
    assert not asked(newer).is_cached

    lines = [json.loads(line) for line in (tmp_path / "j.jsonl").read_text().splitlines()]
    assert [line["state"] for line in lines] == ["begun", "completed", "cached", "completed"]
    for one in (sampled, newer):
        one.close()


def test_what_a_local_model_can_not_answer_is_said_and_does_not_end_it(folder):
    model = RemoteModel("j", section(folder))
    with pytest.raises(RemoteModelError, match=r"j \(engine\) gave no answer: the conversation"):
        asked(model, [{"role": "user", "content": "x" * 5000}])
    with pytest.raises(RemoteModelError, match="calls no tools"):
        asked(model, tools=[{"type": "function", "function": {"name": "f"}}])
    assert asked(model).text
    model.close()


def test_it_stands_in_for_a_server_that_is_away(folder):
    from agentevo.rewards.judging import UnusableError, ask_in_order

    def read(text):
        if text == "broken":
            raise UnusableError("it is broken")
        return text

    with RemoteServer(gives(chat("broken"))) as server:
        sections = {
            "away": RemoteModelSection(base_url=server.base_url, model="m"),
            "local": section(folder),
        }
        models = RemoteModels(sections)
        found = asyncio.run(
            ask_in_order(
                models,
                list(sections),
                "?",
                read,
                until=float("inf"),
                attempt="a",
                correction=str,
                schema={"type": "integer", "enum": [0, 1]},
            )
        )
        models.close()

    assert found.model == "local" and found.value in ("0", "1"), "held to the schema"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"base_url": "http://127.0.0.1:1"}, "remove base_url, api_key and extra"),
        ({"model": "tiny"}, "has random weights"),
    ],
)
def test_a_local_model_with_a_server_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        RemoteModelSection(**{"api": "engine", "model": "x", **given})


def test_a_local_model_that_is_not_here_is_refused_before_anything_is_created(tmp_path):
    sections = {"judge": RemoteModelSection(api="engine", model=str(tmp_path / "none"))}
    with pytest.raises(ConfigError, match=r"remote_models.judge.model: .* not at that place"):
        check_keys(sections)


@pytest.mark.slow
def test_kept_answers_stay_within_their_limit_and_may_be_shared(tmp_path):
    options = {"model": "m", "cache": True, "cache_dir": tmp_path / "shared", "cache_mib": 1}
    with RemoteServer(gives(chat("y" * 2**17))) as server:
        sections = RemoteModelSection(base_url=server.base_url, **options)
        first, other = (RemoteModel("j", sections, tmp_path / run) for run in ("one", "two"))
        for number in range(20):
            asked(first, [{"role": "user", "content": str(number)}])

        assert asked(other, [{"role": "user", "content": "19"}]).is_cached
        assert not asked(other, [{"role": "user", "content": "0"}]).is_cached

        kept = sum(path.stat().st_size for path in (tmp_path / "shared").glob("*/*.json"))
        assert 2**18 < kept <= 2**20 + 2**18
        for one in (first, other):
            one.close()
