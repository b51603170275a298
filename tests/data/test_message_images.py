"""Images of rows and messages become parts by digest, each in its place; a row whose images do not
fit its text is a bad row."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agentevo.agents.single_turn import conversation_of
from agentevo.config.tasks import TaskFields, TasksSection
from agentevo.data import RowError
from agentevo.data.message_images import ImageCollector
from agentevo.data.messages import messages_of
from agentevo.errors import BadRequestError, ConfigError, ImageError
from agentevo.rollout.given_tasks import read_tasks, task_of
from agentevo.types import ImagePart, TextPart
from agentevo.types.images import images_of_task


def png(value):
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


A, B = png(1), png(2)


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def read(row, images):
    return task_of(row, TaskFields(), images=images)


def shape(task):
    """The chat as texts and the first bytes of digests, message by message."""
    chat = conversation_of(task, system=None, instruction=None)
    return [
        [part.text if isinstance(part, TextPart) else part.sha256[:8] for part in m.content]
        if not isinstance(m.content, str)
        else m.content
        for m in chat
    ]


def test_every_place_for_an_image():
    images = ImageCollector()
    a, b = (images.read(data, "x").sha256[:8] for data in (A, B))
    image = {"bytes": A, "path": None}
    chat = [{"role": "user", "content": "<image>Find x in <image>."}]
    empty = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    ]
    parts = [{"type": "image_url", "image_url": {"url": url(B)}}, {"type": "text", "text": "?"}]
    for row, expected in [
        ({"query": "What?", "image": image}, [[a, "What?"]]),
        ({"query": "What?", "image": {"image_url": {"url": url(B)}}}, [[b, "What?"]]),
        ({"query": "What?", "images": [image, B]}, [[a, b, "What?"]]),
        ({"prompt": chat, "images": [A, url(B)]}, [[a, "Find x in ", b, "."]]),
        ({"prompt": empty, "images": [A]}, ["Look.", [a, "What?"]]),
        ({"query": [{"role": "user", "content": parts}]}, [[b, "?"]]),
        ({"query": "What?", "image": Image.open(io.BytesIO(A))}, None),
        ({"query": "Write <image> in HTML."}, ["Write <image> in HTML."]),
        ({"query": "Mend it.", "image": "python:3.11"}, ["Mend it."]),
    ]:
        task = read(row, images)
        json.dumps(task.metadata)
        assert expected is None or shape(task) == expected, row
        assert set(images_of_task(task)) <= set(images.files)

    assert {part.part.sha256[:8] for part in images.files.values()} >= {a, b}


def test_a_task_is_named_by_its_images():
    """The same picture in another form is the same task; another picture is another one."""
    images = ImageCollector()
    ids = [
        read({"query": "What?", "image": form}, images).id
        for form in ({"bytes": A, "path": None}, [url(A)], np.array(Image.open(io.BytesIO(A))), B)
    ]
    assert ids[0] == ids[1] and ids[0] != ids[3]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"query": "<image>What?", "images": [A, B]}, "2 images, and 1 places for them"),
        ({"query": "<image><image>?", "images": [A]}, "1 images, and 2 places"),
        ({"query": "What?", "images": [b"GIF89a"]}, "image 1: it is a image/gif whose header"),
        ({"query": "What?", "images": ["https://example.org/a.png"]}, "no image is fetched"),
        ({"query": "What?", "image": "https://example.org/a?width=9"}, "no image is fetched"),
        ({"query": "What?", "image": base64.b64encode(A).decode()}, "give a data URL"),
        ({"query": "What?", "image": "a.tiff"}, "paths are not read here"),
        ({"query": "What?", "images": ["a.png"]}, "paths are not read here"),
        ({"query": [{"role": "user", "content": [{"type": "image"}]}]}, "empty part of type image"),
        ({"query": [{"role": "system", "content": "x"}], "image": A}, "no message of the user"),
    ],
)
def test_images_that_do_not_fit(row, why):
    with pytest.raises(RowError, match=why) as error:
        read(row, ImageCollector())
    assert error.value.reason == "image"


def test_sounds_and_films_stay_refused():
    for row in ({"query": "?", "audios": ["a.wav"]}, {"query": "?", "videos": ["a.mp4"]}):
        with pytest.raises(RowError, match="models read only text here"):
            read(row, ImageCollector())


def test_files_of_rows(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "a.png").write_bytes(A)
    (tmp_path / "b.gif").write_bytes(B)
    lines = [
        {"id": "1", "query": "What?", "image": "shots/a.png"},
        {"id": "2", "query": "And?", "images": ["b.gif", "shots/a.png"]},
        {"id": "3", "query": "Gone?", "images": ["c.png"]},
        {"id": "4", "query": "No picture."},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    table = [{"id": "5", "query": "What?", "images": [{"bytes": A, "path": "x"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "rows.parquet")

    files = [str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.parquet")]
    given = read_tasks(TasksSection(train=files))
    assert [task.id for task in given.train] == ["1", "2", "4", "5"]
    assert given.reports[0].counts() == {"image": 1}
    assert sorted(image.data for image in given.images.values()) == sorted([A, B])
    named = {digest for task in given.train for digest in images_of_task(task)}
    assert named == set(given.images)

    (tmp_path / "rows.jsonl").write_text(json.dumps(lines[2]))
    with pytest.raises(ConfigError, match="an image that can't be used"):
        read_tasks(TasksSection(train=files[:1]))


def test_messages_of_clients():
    images = ImageCollector()
    anthropic = {
        "type": "image",
        "source": {"type": "base64", "data": base64.b64encode(A).decode()},
    }
    given = [{"role": "user", "content": [anthropic, {"type": "text", "text": "what?"}]}]
    (message,) = messages_of(given, images)
    assert message.content == (next(iter(images.files.values())).part, TextPart("what?"))
    assert isinstance(message.content[0], ImagePart) and len(images.files) == 1

    path = [{"role": "user", "content": [{"type": "image_url", "image_url": "/etc/hosts"}]}]
    with pytest.raises(ImageError, match="message 1, part 1 is the text '/etc/hosts', and paths"):
        messages_of(path, images)
    for messages in (path, given):
        with pytest.raises(BadRequestError):
            messages_of(messages)


def test_instructions_follow_images():
    task = read({"query": "What?", "image": A}, ImageCollector())
    (message,) = conversation_of(task, system=None, instruction="Say why.")
    assert message.text == "What?\nSay why." and isinstance(message.content[0], ImagePart)
