"""Pairwise comparisons in both orders, by judges that are programs behind a real endpoint."""

import asyncio
import json
import re

import pytest
from judge_endpoint import attempts_in, judge, number_in
from judged_attempts import TASK, group
from remote_server import RemoteServer, chat, gives

from agentevo.config.remote_models import RemoteModelSection
from agentevo.remote_models import RemoteModels
from agentevo.rewards.pairwise import pairs_of
from agentevo.rewards.reward import reward_config
from agentevo.rollout.scoring import Scoring


def compares(better):
    """Answers with what `better` says of two worths, in the order in which they are shown."""

    def answer(body, handler):
        one, two = (number_in(record) for _, record in sorted(attempts_of(body).items()))
        said = {"explanation": f"{one} against {two}", "better": better(one, two)}
        gives(chat(f"So: {json.dumps(said)}"))(body, handler)

    return answer


def attempts_of(body):
    return attempts_in(body["messages"][0]["content"])


def larger(one, two):
    return 0 if one == two else 1 if one > two else 2


def scored(answer, trajectories, **options):
    config = reward_config("pairwise")(name="pairwise", **options)
    with RemoteServer(answer) as server:
        models = RemoteModels({"judge": RemoteModelSection(**judge(server, max_tries=1))})
        scoring = Scoring([config], models=models)
        own = [True] * len(trajectories)
        judged = asyncio.run(scoring.score(trajectories, own, {}, task=TASK))
        models.close()

    return judged, server


def test_an_attempt_is_worth_the_share_of_comparisons_that_it_wins():
    judged, server = scored(compares(larger), group(0.2, 0.9, 0.5, 0.2))
    assert [one.reward for one in judged] == [0.0, 1.0, 0.5, 0.0], "equal ones are compared once"
    assert len(server.received) == 6
    asked = [[number_in(one) for one in attempts_of(body).values()] for body in server.received]
    assert sorted(asked) == sorted(pair[::-1] for pair in asked), "both orders"


def test_a_judge_that_goes_by_places_gives_no_scores_and_one_contradiction_is_a_tie():
    judged, _ = scored(compares(lambda one, two: 1), group(0.2, 0.9, 0.5))
    assert {one.status for one in judged} == {"failed"}
    assert "Disagreement: in 2 of 2 comparisons" in judged[0].error
    judged, _ = scored(
        compares(lambda one, two: 1 if {one, two} == {0.5, 0.9} else larger(one, two)),
        group(0.2, 0.9, 0.5),
    )
    assert [one.reward for one in judged] == [0.0, 0.75, 0.75]


@pytest.mark.parametrize("said", ["none", '{"better": 3}', '{"better": true}', '{"better": null}'])
def test_an_answer_that_says_nothing_is_asked_about_once_and_is_no_score(said):
    judged, server = scored(gives(chat(said)), group(0.2, 0.9))
    assert {one.status for one in judged} == {"failed"} and len(server.received) == 4
    assert re.search(r'"better" is 1, 2 or 0', judged[0].error)


def test_everybody_meets_as_many_others():
    assert len(pairs_of(6, None, 1)) == 15 == len(pairs_of(6, 5, 1))
    for opponents, met in ((2, 2), (3, 4), (1, 2)):
        pairs = pairs_of(9, opponents, 1)
        assert {sum(place in pair for pair in pairs) for place in range(9)} == {met}
    assert pairs_of(9, 2, 1) != pairs_of(9, 2, 2)
    assert pairs_of(2, 2, 0) == [(0, 1)]
