"""Log-probs of given tokens: from an engine of ours, and from servers with echo."""

from __future__ import annotations

import asyncio

import pytest
import torch
from remote_server import RemoteServer, chat, fails, gives

from agentevo.config import ModelSection, TinyModel
from agentevo.config.remote_models import RemoteModelSection
from agentevo.errors import BadRequestError
from agentevo.inference.remote_models import RemoteModel
from agentevo.inference.remote_models.ledger import RemoteModelError
from agentevo.models.files.load import load_model
from agentevo.models.files.save import save_model

CONTEXT = [70, 71, 72]
IDS = [80, 81]


def scores(model: RemoteModel, context=CONTEXT, ids=IDS) -> list[float]:
    return asyncio.run(model.score(context, ids, role="teacher", attempt="a"))


def completion(*logprobs, usage=True):
    body = {"choices": [{"text": "?", "logprobs": {"token_logprobs": list(logprobs)}}]}
    return body | ({"usage": {"prompt_tokens": 5, "completion_tokens": 1}} if usage else {})


def test_an_engine_scores_as_transformers_does(tmp_path):
    shape = TinyModel(tokenizer="byte", hidden_size=32, num_layers=1)
    loaded = load_model(ModelSection(name="tiny", tiny=shape), seed=1)
    folder = save_model(loaded.model, loaded.tokenizer, tmp_path / "model")
    model = RemoteModel(
        "t", RemoteModelSection(api="engine", model=str(folder), device="cpu"), tmp_path
    )
    found = scores(model)
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([CONTEXT + IDS]), use_cache=False).logits[0]
    expected = [float(logits.log_softmax(-1)[place, CONTEXT_AND[place + 1]]) for place in (2, 3)]
    assert found == pytest.approx(expected, abs=1e-4)

    with pytest.raises(RemoteModelError, match=r"too long|tokens"):
        scores(model, CONTEXT * 2000)
    with pytest.raises(BadRequestError, match="at least one token each"):
        scores(model, CONTEXT, [])
    assert scores(model) == found
    (total,) = model.ledger.totals()
    assert total["role"] == "teacher" and total["answers"] == 2
    model.close()


CONTEXT_AND = CONTEXT + IDS


@pytest.mark.parametrize("extra", [(), (-9.0,)], ids=["the prompt alone", "with a new token"])
def test_a_server_echoes_the_prompt(extra):
    answer = completion(None, -1.0, -2.0, -3.0, 1e-7, *extra)
    with RemoteServer(gives(chat("hello")), gives(answer), gives(chat("again"))) as server:
        model = RemoteModel("t", RemoteModelSection(base_url=server.base_url, model="m"))
        ask = [{"role": "user", "content": "?"}]
        assert asyncio.run(model.generate(ask)).text == "hello"
        assert scores(model) == [-3.0, 0.0], "no log-prob is above 0"
        assert asyncio.run(model.generate(ask)).text == "again"
        model.close()
        bodies = server.received
        assert server.paths[1] == "/v1/completions"

    assert bodies[1] == {
        "model": "m",
        "prompt": CONTEXT + IDS,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 1.0,
    }


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (gives(completion(None, -1.0, -2.0)), "3 log-probs for 5 tokens: its server must accept"),
        (gives(completion(None, *[-1.0] * 6)), "7 log-probs for 5 tokens"),
        (gives(completion(None, -1.0, None, -3.0, -4.0)), "None is none"),
        (gives(completion(None, -1.0, -2.0, 0.3, 0.9)), "0.3 is none .* not above 0"),
        (gives(completion(None, -1.0, -2.0, True, -4.0)), "True is none"),
        (gives(completion(None, -1.0, -2.0, "-3", -4.0)), "-3 is none"),
        (gives(completion(None, -1.0, -2.0, -1e300, -4.0)), r"-1e\+300 is none"),
        (gives(completion(None, -1.0, -2.0, -(10**400), -4.0)), "-10000.* is none"),
        (
            gives(
                completion(None, -9.0, -1.0, -2.0, -3.0, -4.0)
                | {"usage": {"prompt_tokens": 6, "completion_tokens": 1}}
            ),
            "counts 6 tokens in a prompt of 5",
        ),
        (gives(chat("hello")), "no log-probs of the prompt's tokens"),
        (fails(404, "no such route"), "answered 404: no such route"),
    ],
)
def test_what_is_no_score_is_refused(answer, words):
    with RemoteServer(answer) as server:
        section = RemoteModelSection(base_url=server.base_url, model="m", max_tries=1)
        model = RemoteModel("t", section)
        with pytest.raises(RemoteModelError, match=words):
            scores(model)
        model.close()


GOOD = completion(None, -1.0, -2.0, -3.0, -4.0)


def test_an_answer_of_another_length_is_asked_for_again_and_never_cached(tmp_path):
    with RemoteServer(gives(completion(None, -1.0)), gives(GOOD)) as server:
        section = RemoteModelSection(base_url=server.base_url, model="m", cache=True)
        model = RemoteModel("t", section, tmp_path)
        assert scores(model) == scores(model) == [-3.0, -4.0]
        assert len(server.received) == 2, "the second call is answered by the cache"
        model.close()


def test_further_fields_change_nothing_that_is_asked():
    with RemoteServer(gives(GOOD)) as server:
        extra = {"prompt": "hello", "echo": False, "logprobs": True, "priority": 1}
        section = RemoteModelSection(base_url=server.base_url, model="m", extra=extra)
        model = RemoteModel("t", section)
        assert scores(model) == [-3.0, -4.0]
        model.close()
        (body,) = server.received

    assert body["prompt"] == CONTEXT + IDS and body["echo"] is True and body["logprobs"] == 1
    assert body["priority"] == 1


def test_a_servers_pause_holds_for_every_api(monkeypatch):
    with RemoteServer(gives(GOOD)) as server:
        model = RemoteModel("t", RemoteModelSection(base_url=server.base_url, model="m"))
        slept = []
        monkeypatch.setattr("agentevo.inference.remote_models.http.time.sleep", slept.append)
        model._server.pause_requests(50.0)
        assert scores(model) == [-3.0, -4.0]
        assert 40 < slept[0] <= 50
        model.close()


def test_a_busy_server_is_asked_again():
    good = gives(GOOD)
    with RemoteServer(fails(503), good) as server:
        model = RemoteModel("t", RemoteModelSection(base_url=server.base_url, model="m"))
        assert scores(model) == [-3.0, -4.0]
        model.close()


def test_anthropics_api_has_no_log_probs():
    model = RemoteModel("t", RemoteModelSection(api="anthropic", model="m"))
    with pytest.raises(RemoteModelError, match="its API gives no log-probs"):
        scores(model)
    model.close()
