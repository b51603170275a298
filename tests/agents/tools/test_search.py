"""Search in a corpus and by a retriever."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from agentevo.agents.tools.corpus import Passage, WordIndex, corpus_index, passage_of
from agentevo.agents.tools.search import CorpusSearch
from agentevo.errors import ConfigError, ToolError, ToolUnavailableError

PASSAGES = [
    {"id": "1", "title": "Perth", "text": "Perth is a city in Western Australia."},
    {"id": "2", "contents": "Canberra\nCanberra is the capital city of Australia."},
    {"id": "3", "text": "Cats sleep a lot."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, PASSAGES)) + "\n\n", encoding="utf-8")
    return str(path)


def test_the_best_passage_comes_first(corpus):
    search = CorpusSearch(corpus=corpus, top_k=2)
    assert search.search("What is the capital of Australia?") == (
        "[1] Canberra\nCanberra is the capital city of Australia.\n"
        "[2] Perth\nPerth is a city in Western Australia."
    )
    assert search.search("sleeping cat").startswith("[1] Cats sleep")
    assert search.search("zebra") == "Nothing was found."
    assert corpus_index(corpus) is corpus_index(corpus)


UNSPACED = [
    "杜甫是唐代诗人，后世称他为诗圣。",
    "李白是唐代诗人，人称诗仙。",
    "圣诞节的诗很多。",
    "日本の首都は東京です。富士山は高い。",
    "서울은 대한민국의 수도이다.",
    "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย",
    "The capital of Peru is Lima.",
    "GPT模型由OpenAI发布于2018年。",
]


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("诗圣", 0),
        ("谁被称为诗圣？", 0),
        ("诗仙是谁", 1),
        ("圣诞节", 2),
        ("東京", 3),
        ("富士山の高さ", 3),
        ("서울", 4),
        ("대한민국", 4),
        ("เมืองหลวง", 5),
        ("Lima", 6),
        ("OpenAI", 7),
        ("2018", 7),
        ("哪个模型发布于2018年", 7),
    ],
)
def test_scripts_without_spaces_are_searched_by_their_letters(query, best):
    index = WordIndex([Passage(str(n), "", text) for n, text in enumerate(UNSPACED)])
    found = index.find(query, 3)
    assert found and found[0][0].id == str(best)
    assert index.find("猫", 3) == []


def test_a_long_question_without_spaces_is_read_to_its_end():
    passages = [Passage("0", "", "春" * 40), Passage("1", "", "长城有两万公里。")]
    letters = "".join(chr(number) for number in range(0x5000, 0x5000 + 50))
    assert WordIndex(passages).find(f"{letters}长城", 1)[0][0].id == "1"


@pytest.mark.parametrize(
    "query", ['"', "* OR (", "NEAR(a b)", "text:x", "", "?" * 10_000, "a " * 10_000]
)
def test_any_text_is_a_query(query):
    assert isinstance(WordIndex([Passage("0", "", "a cat")]).find(query, 3), list)


def test_a_corpus_that_can_not_be_read_says_where(tmp_path):
    path = tmp_path / "corpus.jsonl"
    with pytest.raises(ConfigError, match="can't be read"):
        CorpusSearch(corpus=str(path))

    path.write_text('{"text": "fine"}\n{"words": "odd"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"corpus.jsonl:2: not a passage"):
        CorpusSearch(corpus=str(path))

    path.write_text('{"text": "half of a pair: \\ud800"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"corpus.jsonl:1: .*half of a surrogate pair"):
        CorpusSearch(corpus=str(path))

    path.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no passages"):
        CorpusSearch(corpus=str(path))
    with pytest.raises(ConfigError, match="needs one of the options `corpus`"):
        CorpusSearch()
    assert passage_of({"title": "", "text": "x"}).contents == "x"

    row = {"id": 7, "contents": "T\nx\ny"}
    assert passage_of(row) == Passage("7", "T", "x\ny") and passage_of(row).contents == "T\nx\ny"


@pytest.fixture
def retriever():
    """A retriever's URL; `answers` is what it says next: a status and a value."""
    asked = []
    answers = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, value = answers.pop(0)
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve", asked, answers
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_retriever_is_asked_as_search_r1_does(retriever):
    url, asked, answers = retriever
    search = CorpusSearch(url=url, top_k=1)
    answers.append((200, {"result": [[{"document": {"contents": "T\nx"}, "score": 1.0}]]}))

    assert search.search("who?") == "[1] T\nx"
    assert asked == [{"queries": ["who?"], "topk": 1, "return_scores": True}]
    for answer in [(500, {}), (200, {"result": 3}), (200, [1]), (200, {"result": [[{"a": 1}]]})]:
        answers.append(answer)
        with pytest.raises(ToolError, match="nonsense"):
            search.search("who?")

    with pytest.raises(ToolUnavailableError) as raised:
        CorpusSearch(url="http://127.0.0.1:9/retrieve").search("who?")

    assert raised.value.was_sent is False


def test_a_name_of_several_words_is_found_as_a_whole():
    """Its words are in many passages, and more often."""
    named = "Of Ana Bel Cor: a weaver whose loom is old."
    others = ["Cor Bel Cor Bel Ana Cor.", "Cor Cor Bel Bel Ana.", "Bel Bel Ana Cor Ana Cor."]
    others += [f"Nothing of {word}." for word in ("cats", "dogs", "cows", "pigs", "hens")]
    index = WordIndex([Passage(str(n), "", text) for n, text in enumerate([*others, named])])
    for query in ("Ana Bel Cor", "What does Ana Bel Cor do?"):
        ((first, _),) = index.find(query, 1)
        assert first.contents == named
