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
        (gives(completion(None, -1.0, None, -3.0, -4.0)), "no log-probs of the prompt's tokens"),
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


def test_a_busy_server_is_asked_again():
    good = gives(completion(None, -1.0, -2.0, -3.0, -4.0))
    with RemoteServer(fails(503), good) as server:
        model = RemoteModel("t", RemoteModelSection(base_url=server.base_url, model="m"))
        assert scores(model) == [-3.0, -4.0]
        model.close()


def test_anthropics_api_has_no_log_probs():
    model = RemoteModel("t", RemoteModelSection(api="anthropic", model="m"))
    with pytest.raises(RemoteModelError, match="its API gives no log-probs"):
        scores(model)
    model.close()
