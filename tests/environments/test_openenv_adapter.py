"""OpenEnv servers as environments, with a server that speaks its protocol and can do all that a bad
one does. A real one, of the real package, is in tests/examples/test_worlds.py."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from http import HTTPStatus
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from websockets.sync.server import serve

from agentevo.agents.environment_thread import EnvironmentThread, Pace
from agentevo.data.images import decode_image, read_image
from agentevo.data.message_images import ImageCollector
from agentevo.environments import make, openenv_adapter
from agentevo.environments.observation import Picture, read_observation, read_pictures
from agentevo.environments.openenv_adapter import OpenEnvConfig
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.runtime.trace_header import current
from agentevo.store.trace_context import TracePlace

NUMBER = {"type": "integer", "description": "a number"}
SCHEMA = {"properties": {"metadata": {"type": "object"}, "guess": NUMBER}, "required": ["guess"]}


def seen(text, reward=None, done=False, **fields):
    observation = {"hint": text, "metadata": {}, **fields}
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def failed(code, message="no"):
    return {"type": "error", "data": {"code": code, "message": message}}


class Server:
    """Answers with `says` in order, texts as they are; `hang` answers nothing, `die` ends."""

    def __init__(self, schema=SCHEMA):
        self.says = []
        self.heard = []
        self.schema = schema
        self.places = []
        self._server = serve(self._serve, "127.0.0.1", 0, process_request=self._answer)
        port = self._server.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, connection, request):
        pages = {"/schema": {"action": self.schema}, "/metadata": {"description": "Guess."}}
        if request.path in pages:
            return connection.respond(HTTPStatus.OK, json.dumps(pages[request.path]))
        return None

    def _serve(self, connection):
        self.places.append(connection.request.headers.get("traceparent"))
        for message in connection:
            self.heard.append(json.loads(message))
            said = self.says.pop(0)
            if said == "die":
                return

            if said == "hang":
                time.sleep(5)
            else:
                connection.send(said if isinstance(said, str) else json.dumps(said))

    def close(self):
        self._server.shutdown()


@pytest.fixture
def server():
    opened = Server()
    yield opened
    opened.close()


def playing(server, *says, seed=7, **options):
    environment = make(OpenEnvConfig(url=server.url, **options))
    server.says[:] = says
    observation, _ = environment.reset(seed=seed)
    return environment, observation


def test_an_episode_is_played_and_paid_by_the_server(server):
    environment, first = playing(
        server, seen("begin"), seen("higher", 0.0), seen("right", 1.5, True), reset={"level": 3}
    )
    assert first == "begin"
    assert environment.step("2")[:4] == ("higher", 0.0, False, False)

    text, reward, terminated, _, info = environment.step(" 4 ")
    assert (text, reward, terminated) == ("right", 1.5, True)
    assert info == {"valid": True, "effective": True, "success": True}
    assert server.heard == [
        {"type": "reset", "data": {"seed": 7, "level": 3}},
        {"type": "step", "data": {"guess": 2}},
        {"type": "step", "data": {"guess": 4}},
    ]

    environment.close()


def test_the_server_is_told_of_the_attempt_that_plays(server):
    place = TracePlace(7, 9, True)
    server.says[:] = [seen("begin"), seen("begin")]

    async def attempt(call):
        current.set(call)
        thread = EnvironmentThread(Pace())
        environment = await thread.call(lambda: make(OpenEnvConfig(url=server.url)))
        await thread.call(lambda: environment.reset(seed=1))
        await thread.end(environment.close)

    async def attempts():
        await asyncio.create_task(attempt(SimpleNamespace(place=place)))
        await asyncio.create_task(attempt(None))

    asyncio.run(attempts())
    assert server.places == [place.header, None]


def test_the_player_is_told_what_to_say(server):
    environment = make(OpenEnvConfig(url=server.url))
    assert environment.instructions == "Guess.\nAnswer with: a number"
    assert make(OpenEnvConfig(url=server.url, instructions="Go.")).instructions == "Go."


def test_what_is_no_action_is_invalid_and_is_not_sent(server):
    environment, _ = playing(server, seen("begin"), failed("VALIDATION_ERROR"))
    for text in ("four", "true", "2.5", "[4]"):
        text, _, _, _, info = environment.step(text)
        assert text == "begin" and not info["valid"]
    assert len(server.heard) == 1
    assert not environment.step("9")[4]["valid"]
    environment.close()


def test_several_fields_are_said_as_an_object():
    server = Server({"properties": {"kind": {"type": "string"}, "x": NUMBER, "y": NUMBER}})
    try:
        environment, _ = playing(
            server, seen("a", score=1), seen("b", 0.0), action={"kind": "move"}, seed=2**40 + 1
        )
        assert environment.observe() == "hint: a\nscore: 1"
        assert not environment.step("2")[4]["valid"]

        environment.step('{"x": 1, "y": 2}')
        assert server.heard[0]["data"] == {"seed": 1}
        assert server.heard[1]["data"] == {"x": 1, "y": 2, "kind": "move"}

        environment.close()
        with pytest.raises(ConfigError, match="no field 'z', only kind, x, y"):
            make(OpenEnvConfig(url=server.url, action_field="z"))
    finally:
        server.close()


def base64_of(pixels):
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


DARK, LIGHT = (np.full((2, 3, 3), level, np.uint8) for level in (10, 200))
SCREENS = {
    "base64": base64_of,
    "data URL": lambda pixels: f"data:image/png;base64,{base64_of(pixels)}",
    "rows of pixels": lambda pixels: pixels.tolist(),
    "a block": lambda pixels: {"type": "image", "data": base64_of(pixels), "mimeType": "image/png"},
}


@pytest.mark.parametrize("form", SCREENS)
def test_a_screenshot_comes_before_the_text(server, form):
    sent = SCREENS[form]
    environment, first = playing(
        server,
        seen("begin", screen=sent(DARK)),
        seen("begin", 0.0, screen=sent(DARK)),
        seen("begin", 0.0, screen=sent(LIGHT)),
        seen("done", 1.0, True, screen=None),
        image_fields=["screen"],
    )
    for observation, pixels in ((first, DARK), (environment.step("1")[0], DARK)):
        picture, text = read_observation(observation, "step")
        assert text == "begin"
        image = read_image(picture.source, "a screen")
        assert np.array_equal(decode_image(image, "a screen"), pixels)

    assert environment.step("1")[4]["effective"]  # another screen, with the same text
    assert environment.step("1")[:3] == ("done", 1.0, True)
    environment.close()


def test_chosen_fields_are_shown_in_their_order(server):
    _, first = playing(server, seen("a", score=3), observation_fields=["score", "hint"])
    assert first == "score: 3\nhint: a"
    _, first = playing(server, seen("a", score=3), observation_fields=["hint"])
    assert first == "a"
    with pytest.raises(EnvironmentFailure, match="no field 'gaol'"):
        playing(server, seen("a"), observation_fields=["gaol"])


def test_content_blocks_are_shown_in_place(server):
    blocks = [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64_of(DARK)}"}},
    ]
    environment, first = playing(server, seen(blocks), seen(blocks, 0.0, score=3))
    assert read_observation(first, "reset") == ("Look: ", Picture(blocks[1]))
    several = read_observation(environment.step("1")[0], "step")
    assert several == ("hint: Look: ", Picture(blocks[1]), "\nscore: 3")
    environment.close()

    texts = [{"type": "text", "text": "no image"}]
    assert playing(server, seen(texts))[1] == json.dumps(texts)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no field 'screen', only hint, metadata"),
        ({"screen": None}, "'screen' has no image: make the server send images"),
        ({"screen": 3}, "'screen' is 3, not an image: send a file in base64"),
        ({"screen": [[[300, 0, 0]]]}, r"'screen' is an array \[1, 1, 3\] of int64"),
        ({"screen": [[[1, 0, 0]], [[1, 0, 0], [1, 0, 0]]]}, "rows of pixels differ in length"),
    ],
)
def test_a_field_that_is_no_image_fails_the_attempt(server, fields, words):
    with pytest.raises(EnvironmentFailure, match=words):
        playing(server, seen("begin", **fields), image_fields=["screen"])


@pytest.mark.parametrize("path", ["/etc/passwd", "http://127.0.0.1/a.png", "a.png"])
def test_a_server_names_no_files_and_no_addresses(server, path):
    """What a server sends is data: nothing of this machine is read, and nothing is fetched."""
    block = [{"type": "image", "url": path}, {"type": "image", "path": path}]
    for images in (block[:1], block[1:]):
        _, first = playing(server, seen(images))
        with pytest.raises(EnvironmentFailure, match="image 1 of the environment's reset"):
            read_pictures(read_observation(first, "reset"), ImageCollector().read, "reset")

    _, first = playing(server, seen("a", screen=path), image_fields=["screen"])
    with pytest.raises(EnvironmentFailure, match=r"is not base64|give a whole PNG"):
        read_pictures(read_observation(first, "reset"), ImageCollector().read, "reset")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("hang", r"did not answer a step in environment.call_timeout_s=0\.3 s"),
        ("die", "did not answer a step: the connection broke"),
        ("x" * 300_000, r"with less than environment.max_message_mb=0\.1 MB"),
        (seen("x", float("nan")), "nan"),
        (seen("x", "much"), "the reward .* is 'much'"),
        (seen("x", None, True), "no step of it had a reward"),
        ("not json", "in JSON"),
        ("[1]", "as OpenEnv does"),
        ({"type": "observation", "data": {"reward": 1}}, "needs the keys `observation`"),
        (failed("EXECUTION_ERROR", "the board is gone"), "EXECUTION_ERROR.*the board is gone"),
    ],
)
def test_a_bad_server_costs_its_attempt_and_says_why(server, said, words):
    environment, _ = playing(server, seen("begin"), said, call_timeout_s=0.3, max_message_mb=0.1)
    with pytest.raises(EnvironmentFailure, match=words):
        environment.step("4")
    environment.close()


def test_a_server_without_a_free_session_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(openenv_adapter, "RETRY_S", 0.01)
    full = failed("CAPACITY_REACHED", "1 of 1 sessions")
    environment, first = playing(server, full, full, seen("begin"))
    assert first == "begin"
    environment.close()
    with pytest.raises(EnvironmentFailure, match=r"no free session \(1 of 1 sessions\)"):
        playing(server, *[full] * 100, session_timeout_s=0.1)


def test_a_url_where_nothing_answers_is_refused(server):
    with pytest.raises(ConfigError, match=r"environment.url: no OpenEnv server answers"):
        make(OpenEnvConfig(url="http://127.0.0.1:1"))

    other = Server({})
    other.schema = None
    try:
        with pytest.raises(ConfigError, match="is not an OpenEnv server"):
            make(OpenEnvConfig(url=other.url))
    finally:
        other.close()
