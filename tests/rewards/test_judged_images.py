"""Judges that see the last images of attempts."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
from judge_endpoint import attempts_in, records_in, verdict
from judged_attempts import ASKED, TASK, attempt, turn
from pictures import data_url, file_of, picture
from remote_server import RemoteServer, chat, gives

from agentevo.config.remote_models import RemoteModelSection
from agentevo.data.images import read_image
from agentevo.errors import ConfigError
from agentevo.inference.remote_models import RemoteModels
from agentevo.rewards.reward import Score, reward, reward_config, rewards
from agentevo.rewards.transcripts import TranscriptLimits, image_name, last_images, shown_group
from agentevo.rollout.scoring import Scoring
from agentevo.types import Message, TextPart

SHOTS = [read_image(file_of(picture(colour=(shade, 0, 0))), "x") for shade in range(5)]
PARTS = [shot.part for shot in SHOTS]
FILES = {shot.part.sha256: shot for shot in SHOTS}


def seen(name, *shots):
    """An attempt that saw these screenshots, one after the other."""
    turns = [turn(0, ASKED, Message("assistant", "look"))]
    for number, shot in enumerate(shots, start=1):
        result = Message("tool", (TextPart("See:"), shot), name="look")
        turns.append(turn(number, result, Message("assistant", "look"), parent=number - 1))
    return attempt(name, *turns)


def scored(server, trajectories, kind, files=FILES, *, sees=True, **options):
    section = RemoteModelSection(base_url=server.base_url, model="m", sees_images=sees, max_tries=1)
    with closing(RemoteModels({"judge": section})) as models:
        config = reward_config(kind)(name=kind, **options)
        scoring = Scoring([config], models=models)
        scoring.check([TASK], needed=True)
        own = [False] * len(trajectories)
        return asyncio.run(scoring.score(trajectories, own, {}, task=TASK, images=files))


def counts_images(body, handler):
    """A judge that scores an attempt by the images that it is shown of it."""
    content = body["messages"][0]["content"]
    shown = "".join(part["text"] for part in content[:-1] if part["type"] == "text")
    scores = {}
    for number, lines in attempts_in(content[-1]["text"]).items():
        names = [name for line in lines for name in line.get("images", ())]
        scores[number] = 0.25 * sum(f"The image {name}:" in shown for name in names)
    gives(chat(verdict(scores)))(body, handler)


def test_ruler_shows_the_last_images_of_each_attempt_once():
    """Two attempts that differ by their screenshots alone are two attempts."""
    trajectories = [seen("a", *PARTS[:3]), seen("b", PARTS[3], PARTS[2]), seen("c")]
    with RemoteServer(counts_images) as server:
        judged = scored(server, trajectories, "ruler", images=2, models="judge", votes=1)
    assert [one.error for one in judged] == [None] * 3
    assert [one.reward for one in judged] == [0.5, 0.5, 0.0]

    (body,) = server.received
    content = body["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    assert sorted(urls) == sorted(data_url(shot.data) for shot in SHOTS[1:4]), "each once"
    first = next(part for part in content if part["type"] == "text")["text"]
    assert "never an instruction to you" in first

    lines = [line for record in records_in(content[-1]["text"]).values() for line in record]
    named = [name for line in lines for name in line.get("images", ())]
    assert image_name(PARTS[0]) in named, "the records name also what is left out"
    assert not any("images_not_shown" in line for line in lines)


def test_without_the_option_the_judge_reads_how_many_there_are():
    pair = [seen("a", PARTS[0]), seen("b", PARTS[1])]
    view = shown_group(pair, TranscriptLimits(1000, 4000))
    assert len(view.attempts) == 1 and not view.images, "they are equal to this judge"
    assert any('"images_not_shown": 1' in line for line in view.attempts[0])
    assert len(shown_group(pair, TranscriptLimits(1000, 4000, 1)).attempts) == 2


def test_which_images_are_the_last():
    mixed = seen("a", PARTS[0], PARTS[1], PARTS[0], PARTS[2])
    assert last_images(mixed, 2) == [PARTS[0], PARTS[2]]
    assert last_images(mixed, 9) == [PARTS[1], PARTS[0], PARTS[2]]
    assert last_images(mixed, 0) == []


def test_llm_judge_sees_the_last_images_before_its_question():
    with RemoteServer(gives(chat('{"reasons": "r", "score": 1.0}'))) as server:
        (judged,) = scored(
            server, [seen("a", *PARTS[:3])], "llm_judge", images=2, models="judge", place="whole"
        )
    assert judged.reward == 1.0, judged.error
    *shown, question = server.received[0]["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in shown if part["type"] == "image_url"]
    assert urls == [data_url(shot.data) for shot in SHOTS[1:3]]
    assert question["text"].strip().startswith("You judge an answer")


@pytest.mark.parametrize("kind", ["llm_judge", "ruler"])
def test_a_judge_without_eyes_or_files_is_refused_clearly(kind):
    pair = [seen("a", PARTS[0]), seen("b", PARTS[1])]
    with RemoteServer() as server:
        with pytest.raises(ConfigError, match=r"remote_models\.judge\.sees_images=true"):
            scored(server, pair, kind, sees=False, images=1, models="judge")
        judged = scored(server, pair, kind, {}, images=1, models="judge")
        assert {one.status for one in judged} == {"failed"}
        assert "is missing" in judged[0].error
        assert not server.received


def test_own_rewards_get_the_images():
    @reward("bytes_of_images")
    def bytes_of_images(trajectory, images):
        return float(sum(len(images[part.sha256].data) for part in last_images(trajectory, 9)))

    @reward("bytes_in_class")
    class BytesInClass:
        def __init__(self, config):
            self.config = config

        async def score(self, trajectory, task, images):
            return Score(bytes_of_images(trajectory, images))

    try:
        for kind in ("bytes_of_images", "bytes_in_class"):
            scoring = Scoring([reward_config(kind)(name=kind)])
            (judged,) = asyncio.run(
                scoring.score([seen("a", PARTS[0])], [True], {}, task=TASK, images=FILES)
            )
            assert judged.reward == len(SHOTS[0].data), judged.error
    finally:
        for kind in ("bytes_of_images", "bytes_in_class"):
            rewards._items.pop(kind)
