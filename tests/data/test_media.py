"""Rows with pictures, sounds or films are bad rows in every form, and are never read as text."""

import json

import pytest

from agentevo.config.tasks import TaskFields
from agentevo.data import RowError, RowReport, read_conversations
from agentevo.data.conversation import check_no_media
from agentevo.errors import ConfigError
from agentevo.rollout.given_tasks import task_of
from agentevo.training.pair_file import read_pair_file

GEO3K = {
    "data_source": "hiyouga/geometry3k",
    "prompt": [{"role": "user", "content": "<image>Find x."}],
    "images": [{"bytes": b"\x89PNG", "path": None}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
}
PART = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
SAID = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
ROWS = [
    GEO3K,
    {"query": "What is it?", "answer": "a cat", "image": {"bytes": b"x", "path": None}},
    {"query": "What is it?", "image": b"\x89PNG"},
    {"query": "What is it?", "image": "cat.JPG"},
    {"query": "What is it?", "image": ["data:image/png;base64,AA"]},
    {"query": "What is said?", "audios": ["a.wav"]},
    {"query": "What happens?", "videos": '["a.mp4"]'},
    {"messages": SAID, "images": ["cat.png"]},
    {"messages": [{"role": "user", "content": PART}]},
    {"query": [{"role": "user", "content": [{"type": "image", "sha256": "00"}]}]},
    {"conversations": [{"from": "human", "value": PART}]},
    {"image": object()},
]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_with_something_to_look_at_or_listen_to(row):
    with pytest.raises(RowError, match="models read only text here") as error:
        check_no_media(row)
    assert error.value.reason == "media"


@pytest.mark.parametrize(
    "row",
    [
        {"query": "Write <image> in HTML.", "images": [], "videos": None, "audios": ""},
        {"query": "Mend it.", "image": "python:3.11", "video": None, "audio": False},
        {"query": "Mend it.", "image": {"name": "python", "tag": "3.11"}, "images": "[]"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "image"}]}]},
        {"messages": "no list", "prompt": [1, None, {"content": [2]}]},
    ],
)
def test_a_row_of_text(row):
    check_no_media(row)


def test_tasks_conversations_and_pairs_refuse_them(tmp_path):
    with pytest.raises(RowError, match="the column images"):
        task_of(GEO3K, TaskFields())

    path = tmp_path / "rows.jsonl"
    rows = [{"messages": SAID, "images": ["cat.png"]}, {"messages": SAID}]
    path.write_text("\n".join(map(json.dumps, rows)))
    report = RowReport("train")
    assert len(list(read_conversations(str(path), "auto", report))) == 1
    assert report.counts() == {"media": 1} and "pictures" in report.lines()[1]

    pair = {"prompt": SAID[:1], "chosen": "a cat", "rejected": "a dog", "images": ["cat.png"]}
    path.write_text(json.dumps(pair))
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: image 1: .*cat.png: can.t be read"):
        read_pair_file(path, "dpo")
