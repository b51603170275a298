"""`agentevo serve RUN --openai`: a trained model behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import ssl

import httpx
import pytest
from openai import OpenAI
from served_model import served

from agentevo.cli.main import main
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.runs.orchestration.components import load_policy
from agentevo.training.checkpoint import Checkpoints

ASK = [{"role": "user", "content": "heads or tails ?"}]


@pytest.fixture(scope="module")
def trained(small_config, tmp_path_factory):
    """The configuration of a run that has a checkpoint of step 3."""
    config = small_config(
        tmp_path_factory.mktemp("served") / "run",
        "engine.kv_cache_gb=0.1",
        "model.tiny.context_length=512",
    )
    ensure_run_folder(config)
    loaded = load_policy(config)
    Checkpoints(config.run_dir / "checkpoints", 1).save(
        3, loaded.model, loaded.tokenizer, {}, {}, None
    )
    return config


@pytest.mark.slow
def test_a_usual_client_gets_answers_of_the_checkpoint(trained):
    def work(base, key):
        client = OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)
        asked = {"model": "any", "messages": ASK, "seed": 5, "max_tokens": 4}
        more = {"extra_body": {"return_token_ids": True}}
        first, same = (client.chat.completions.create(**asked, **more) for _ in range(2))
        greedy = client.chat.completions.create(**asked, temperature=0, logprobs=True)
        said = [*ASK, first.choices[0].message.model_dump(), {"role": "user", "content": "again"}]
        longer = client.chat.completions.create(**asked | {"messages": said}, **more)

        with httpx.Client(base_url=base) as http:
            wrong = http.get("/v1/models", headers={"Authorization": f"Bearer {key[:-1]}x"})
            posted = http.post(f"/s/{key}/reward", json={"reward": 1.0})

        names = [model.id for model in client.models.list()]
        return first, same, greedy, longer, wrong.status_code, posted.status_code, names

    first, same, greedy, longer, wrong, posted, names = served(trained, work)
    assert first.choices[0].token_ids == same.choices[0].token_ids
    assert first.choices[0].versions == [3] * len(first.choices[0].token_ids)
    assert {token.logprob for token in greedy.choices[0].logprobs.content} == {0.0}

    known = len(first.prompt_token_ids) + len(first.choices[0].token_ids)
    assert longer.usage.prompt_tokens_details.cached_tokens == known
    assert longer.prompt_token_ids[:known] == first.prompt_token_ids + first.choices[0].token_ids
    assert (wrong, posted, names) == (401, 404, ["run"])


@pytest.mark.slow
def test_beyond_this_machine_it_encrypts_with_a_certificate_that_usual_clients_can_trust(trained):
    pytest.importorskip("cryptography")

    def work(base, key):
        port = base.rpartition(":")[2]
        trust = ssl.create_default_context(cafile=trained.run_dir / "serving" / "certificate.pem")
        trust.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does
        with httpx.Client(verify=trust, base_url=f"https://127.0.0.1:{port}") as http:
            headers = {"x-api-key": key}
            body = {"model": "any", "max_tokens": 3, "messages": ASK}
            answer = http.post("/v1/messages", json=body, headers=headers)
            return base, answer.json()

    base, answer = served(trained, work, host="0.0.0.0", name="mine")
    assert base.startswith("https://")
    assert answer["usage"]["output_tokens"] <= 3

    private, public = (
        trained.run_dir / "serving" / name for name in ("tls.pem", "certificate.pem")
    )
    assert private.stat().st_mode & 0o077 == 0
    assert "PRIVATE" not in public.read_text()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["coins", "--openai"], "is not the folder of a run"),
        (["coins", "--checkpoint", "last"], "add --openai"),
    ],
)
def test_what_can_t_be_served_is_refused(words, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *words]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
