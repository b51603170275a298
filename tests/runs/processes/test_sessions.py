"""`serve --gateway`: sessions that agents outside open, reward and end, and what becomes of them
in the run's store."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

import httpx
import pytest
from opened_sessions import ASK, TASK, asked, bearer, opened

from agentevo.errors import EngineUnavailableError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task


@pytest.mark.slow
def test_a_group_of_sessions_is_what_a_trainer_finds(gateways):
    async def work():
        async with gateways(["left", "right", "left"]) as gateway:
            first = await opened(gateway, task=TASK, group="g1")
            second = await opened(gateway, group="g1")
            said = await asked(gateway, first)
            again = [*ASK["messages"], said, {"role": "user", "content": "Go on."}]
            await asked(gateway, first, again)
            await asked(gateway, second)

            for turn, reward in ((0, 0.25), (1, 0.5)):
                body = {"turn": turn, "reward": reward}
                await gateway.http.post(first["reward_url"], json=body)

            one = (await gateway.http.post(f"/sessions/{first['id']}/end")).json()
            mine = await gateway.http.get(f"/sessions/{first['id']}/trajectory")
            before = await gateway.store.ready_groups("train", size=2, limit=9)
            end = {"rewards": {"right": 1.0, "short": 0.5}}
            two = (
                await gateway.http.post(second["end_url"], json=end, headers=bearer(second))
            ).json()
            (group,) = await gateway.store.ready_groups("train", size=2, limit=9)
            rows = [row async for row in gateway.store.trajectories(group_id=group)]
            exported = (await gateway.http.get(f"/sessions/{first['id']}/trajectory")).json()
            late = await gateway.http.post("/sessions", json={"group": "g1", "task": TASK})
            used = await gateway.http.get(f"{first['base_url']}/models", headers=bearer(first))
            task = await gateway.store.task("maze")
            return one, mine.json(), before, two, rows, exported, late, used, task

    one, mine, before, two, rows, exported, late, used, task = run_coroutine(work())
    assert (one["is_written"], one["turns"], before) == (False, 2, [])
    assert [turn["reward"] for turn in mine["turns"]] == [0.25, 0.5]
    assert (two["state"], two["is_written"]) == ("completed", True)

    trajectories = [row.trajectory for row in rows]
    assert [trajectory.reward for trajectory in trajectories] == [0.75, 1.5]
    assert trajectories[1].reward_parts == {"right": 1.0, "short": 0.5}
    assert {row.step for row in rows} == {4}  # the engine serves version 3
    assert [turn.parent for turn in trajectories[0].turns] == [None, 0]

    for turn, stored in zip(exported["turns"], trajectories[0].turns, strict=True):
        assert turn["completion_ids"] == list(stored.completion_ids)
        assert turn["logprobs"] == pytest.approx(list(stored.logprobs))
        assert turn["versions"] == list(stored.versions)

    assert (late.status_code, used.status_code) == (409, 401)
    assert task.metadata == {"size": 4}


@pytest.mark.slow
def test_a_session_without_a_group_is_kept_and_never_trained_on(gateways):
    async def work():
        async with gateways(["left"]) as gateway:
            session = await opened(gateway)
            await asked(gateway, session)
            await gateway.http.post(f"/sessions/{session['id']}/reward", json={"reward": 0.5})
            early = await gateway.http.get(f"/sessions/{session['id']}/trajectory")
            ended = await gateway.http.post(f"/sessions/{session['id']}/end")
            twice = await gateway.http.post(f"/sessions/{session['id']}/end", json={"reward": 9.0})
            exported = await gateway.http.get(f"/sessions/{session['id']}/trajectory")
            return early, ended.json(), twice.json(), exported.json(), await gateway.store.counts()

    early, ended, twice, exported, counts = run_coroutine(work())
    assert early.status_code == 409
    assert ended == twice
    assert (exported["reward"], exported["status"], len(exported["turns"])) == (0.5, "completed", 1)
    assert (counts["trajectories/eval/ready"], counts["trajectories/train/ready"]) == (1, 0)


@pytest.mark.slow
def test_a_session_that_nobody_ends_expires_and_fails(gateways):
    async def work():
        async with gateways(["left"], "agent.timeout_s=0.3") as gateway:
            session = await opened(gateway, task=TASK, group="g")
            async with asyncio.timeout(300):
                while await gateway.store.ready_groups("train", size=1, limit=1) or not (
                    rows := await gateway.store.summaries(split="train")
                ):
                    await asyncio.sleep(0.02)

            used = await gateway.http.get(f"{session['base_url']}/models", headers=bearer(session))
            state = (await gateway.http.get(f"/sessions/{session['id']}")).json()
            return rows, used.status_code, state

    rows, used, state = run_coroutine(work())
    assert [row.status for row in rows] == ["failed", "failed"]
    assert "longer than agent.timeout_s" in rows[0].error
    assert "no client opened this attempt" in rows[1].error
    assert (used, state["state"]) == (401, "failed")


@pytest.mark.slow
def test_what_an_agent_says_of_its_failure_and_what_an_engine_fails_is_no_reward(gateways):
    async def work():
        async with gateways(["left", EngineUnavailableError("gone")]) as gateway:
            failed = await opened(gateway)
            broken = await opened(gateway)
            await asked(gateway, failed)

            said = {"error": "the page did not load", "reward": 1.0}
            first = await gateway.http.post(f"/sessions/{failed['id']}/end", json=said)
            url = f"{broken['base_url']}/chat/completions"
            lost = await gateway.http.post(url, json=ASK, headers=bearer(broken))
            second = await gateway.http.post(f"/sessions/{broken['id']}/end", json={"reward": 1.0})
            return first.json(), lost.status_code, second.json(), await gateway.store.counts()

    first, lost, second, counts = run_coroutine(work())
    assert (first["state"], first["error"]) == ("failed", "OutsideFailure: the page did not load")
    assert (lost, second["state"]) == (503, "cancelled")
    assert "nothing was written" in second["error"]
    assert (counts["trajectories/eval/failed"], counts["trajectories/eval/ready"]) == (1, 0)


@pytest.mark.slow
def test_keys_open_what_is_theirs_alone(gateways):
    async def work():
        async with gateways(["left"]) as gateway:
            mine = await opened(gateway)
            other = await opened(gateway)
            path = f"/sessions/{other['id']}"
            async with httpx.AsyncClient(base_url=gateway.http.base_url) as stranger:
                none = [
                    (await stranger.post("/sessions")).status_code,
                    (await stranger.get("/stats")).status_code,
                    (await stranger.get(path)).status_code,
                ]
                theirs = [
                    (await stranger.get(path, headers=bearer(mine))).status_code,
                    (await stranger.post(f"{path}/end", headers=bearer(mine))).status_code,
                    (await stranger.post("/sessions", headers=bearer(mine))).status_code,
                    (await stranger.get(path, headers=bearer(other))).status_code,
                    (await stranger.get(path, headers={"x-api-key": other["key"]})).status_code,
                ]

            stats = (await gateway.http.get("/stats")).json()
            return none, theirs, stats

    none, theirs, stats = run_coroutine(work())
    assert none == [401] * 3
    assert theirs == [401, 401, 401, 200, 200]
    assert stats["sessions/open"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"group": "no/slash"}, "group"),
        ({"group": "g", "size": 1}, "trainer.group_size=2"),
        ({"size": 2}, "size"),
        ({"tasks": 1}, "unknown field"),
        ({"str": 1}, "unknown field `str`"),
        ({"task": {"id": 3}}, "Expected string, got integer - at `$.task.id`"),
        ({"group": ["g"]}, "Expected string or null, got array"),
        ([1], "not a JSON object"),
    ],
    ids=str,
)
def test_what_can_t_be_opened_is_a_400_that_says_so(gateways, body, problem):
    async def work():
        async with gateways([]) as gateway:
            answer = await gateway.http.post("/sessions", json=body)
            return answer, await gateway.store.counts()

    answer, counts = run_coroutine(work())
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]
    assert counts["tasks/completed"] == 0


@pytest.mark.slow
def test_an_unknown_route_of_sessions_is_answered_in_the_form_of_the_others(gateways):
    async def work():
        async with gateways([]) as gateway:
            return [await gateway.http.get(f"/sessions/{place}") for place in ("a", "a/b", "a/b/c")]

    answers = run_coroutine(work())
    assert [answer.status_code for answer in answers] == [404] * 3
    assert {answer.json()["error"]["type"] for answer in answers} == {"invalid_request_error"}


@pytest.mark.slow
def test_a_group_is_refused_where_nobody_would_train_on_it(gateways):
    async def work():
        async with gateways([], "rollout.policy=wait") as gateway:
            return await gateway.http.post("/sessions", json={"group": "g"})

    answer = run_coroutine(work())
    assert answer.status_code == 400
    assert "rollout.policy=mask" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_what_is_open_when_it_stops_is_written_as_cancelled(gateways):
    async def work():
        async with gateways(["left", "right"]) as gateway:
            first = await opened(gateway, group="g")
            await opened(gateway, group="g")
            await asked(gateway, first)
            await gateway.http.post(f"/sessions/{first['id']}/end", json={"reward": 1.0})
            await gateway.sessions.close()
            return await gateway.store.summaries(split="train")

    rows = run_coroutine(work())
    assert [row.status for row in rows] == ["completed", "cancelled"]


@pytest.mark.slow
def test_the_runs_own_tasks_are_handed_out_once_each(gateways):
    tasks = [
        Task(id=f"t{n}", query=f"{n} ?", answer="left", metadata={"level": n}) for n in range(5)
    ]
    overrides = ("trainer.groups_per_step=1", "trainer.minibatches=1", "evaluation.tasks=1")
    overrides += ("rewards=[exact_match]",)

    async def work():
        async with gateways(["left", "right", "left", "left"], *overrides, tasks=tasks) as gateway:
            sessions = [await opened(gateway, next=True) for _ in range(4)]
            full = await gateway.http.post("/sessions", json={"next": True})
            both = await gateway.http.post("/sessions", json={"next": True, "task": TASK})

            for session in sessions:
                await asked(gateway, session)
                await gateway.http.post(f"/sessions/{session['id']}/end")

            groups = await gateway.store.ready_groups("train", size=2, limit=9)
            rows = [row.trajectory async for row in gateway.store.trajectories(split="train")]
            known = [task.task.id async for task in gateway.store.tasks()]
            return sessions, full, both, groups, rows, known

    sessions, full, both, groups, found, known = run_coroutine(work())
    assert [session["task"]["id"] for session in sessions] == [known[0]] * 2 + [known[1]] * 2
    assert set(known) < {"t0", "t1", "t2", "t3"}, "the last one is held out"
    assert sessions[0]["task"]["metadata"] == {"level": int(known[0][1])}
    assert "answer" not in sessions[0]["task"]
    assert (full.status_code, both.status_code) == (503, 400)
    assert "ask again" in full.json()["error"]["message"]
    assert len(groups) == 2
    assert sorted(one.reward for one in found) == [0.0, 1.0, 1.0, 1.0]

    async def again():
        """Another gateway of the run."""
        async with gateways([], *overrides, "rollout.staleness=2", tasks=tasks) as gateway:
            return (await opened(gateway, next=True))["task"]["id"]

    assert run_coroutine(again()) not in known


@pytest.mark.slow
def test_a_task_whose_gateway_was_killed_is_handed_out_again(gateways, tmp_path):
    """And only once its lease has run out; a gateway that lives keeps it."""
    tasks = [Task(id=f"t{n}", query=f"{n} ?") for n in range(3)]
    overrides = ("trainer.groups_per_step=1", "trainer.minibatches=1", "evaluation.tasks=1")
    overrides += ("rollout.lease_s=3", "trainer.steps=1", "rollout.staleness=1")

    def ledger(statement):
        with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as store:
            rows = store.execute(statement).fetchall()
            store.commit()
            return rows

    ends = "SELECT lease_expires_at FROM tasks WHERE state = 'leased'"

    async def killed():
        async with gateways(["left"], *overrides, tasks=tasks) as gateway:
            session = await opened(gateway, next=True)
            (first,) = ledger(ends)
            async with asyncio.timeout(300):
                while ledger(ends) == [first]:  # until it has been renewed
                    await asyncio.sleep(0.1)

            playing = [group.playing for group in gateway.sessions._groups.values()]
            for one in playing:
                one.cancel()  # it writes nothing and gives nothing back
            await asyncio.gather(*playing, return_exceptions=True)
            return session["task"]["id"]

    async def again():
        async with gateways(["left", "left"], *overrides, tasks=tasks) as gateway:
            ledger("UPDATE tasks SET lease_expires_at = 1 WHERE state = 'leased'")
            sessions = [await opened(gateway, next=True) for _ in range(2)]
            assert [session["task"]["id"] for session in sessions] == [lost] * 2
            for session in sessions:
                await asked(gateway, session)
                await gateway.http.post(f"/sessions/{session['id']}/end", json={"reward": 1.0})
            states = {task.task.id: task.state async for task in gateway.store.tasks()}
            return states[lost]

    lost = run_coroutine(killed())
    assert run_coroutine(again()) == "completed"


@pytest.mark.slow
def test_after_the_last_step_no_task_is_left_to_begin(gateways):
    """The group that is under way is still filled."""
    tasks = [Task(id=f"t{n}", query=f"{n} ?") for n in range(4)]

    async def work():
        async with gateways(
            [],
            "trainer.steps=1",
            "trainer.groups_per_step=1",
            "trainer.minibatches=1",
            "evaluation.tasks=1",
            tasks=tasks,
        ) as gateway:
            first = await opened(gateway, next=True)
            await gateway.store.commit_step(1, {})
            second = await opened(gateway, next=True)
            over = [await gateway.http.post("/sessions", json={"next": True}) for _ in range(2)]
            return first, second, over

    first, second, over = run_coroutine(work())
    assert first["group"] == second["group"]
    assert [answer.status_code for answer in over] == [404, 404]
    assert "last step" in over[0].json()["error"]["message"]


@pytest.mark.slow
def test_a_run_without_tasks_of_its_own_has_none_to_hand_out(gateways):
    async def work():
        async with gateways([]) as gateway:
            return await gateway.http.post("/sessions", json={"next": True})

    answer = run_coroutine(work())
    assert (answer.status_code, "no tasks of its own" in answer.text) == (400, True)


@pytest.mark.slow
def test_a_group_s_name_serves_once_whatever_the_weights_and_the_task(gateways):
    async def work():
        async with gateways(["left"] * 4) as gateway:
            sessions = [await opened(gateway, task=TASK, group="g1") for _ in range(2)]
            for session in sessions:
                await asked(gateway, session)
                await gateway.http.post(f"/sessions/{session['id']}/end", json={"reward": 1.0})

            gateway.engine.version += 1
            bodies = [{"task": TASK, "group": "g1"}, {"task": {"id": "other"}, "group": "g1"}]
            again = [await gateway.http.post("/sessions", json=body) for body in bodies]
            gateway.sessions._names = None  # as after a start
            again += [await gateway.http.post("/sessions", json=body) for body in bodies]
            taken = [
                await gateway.http.post("/sessions", json={"group": name})
                for name in ("train", "greedy", "baseline")
            ]
            return again, taken, await gateway.store.ready_groups("train", size=2, limit=9)

    again, taken, ready = run_coroutine(work())
    assert [answer.status_code for answer in again] == [409] * 4
    assert [answer.status_code for answer in taken] == [400] * 3
    assert ready == ["maze/g1@4"]


@pytest.mark.slow
def test_a_task_that_can_t_be_judged_or_is_another_by_its_id_opens_nothing(gateways):
    async def work():
        async with gateways([]) as gateway:
            await opened(gateway, task=TASK)
            wrong = {"task": {"id": "n", "scorer": "nope"}}
            scorer = await gateway.http.post("/sessions", json=wrong)
            other = await gateway.http.post(
                "/sessions", json={"task": {"id": "maze", "query": "?"}}
            )
            return scorer, other, len(gateway.sessions.all())

    scorer, other, open_ones = run_coroutine(work())
    assert (scorer.status_code, other.status_code, open_ones) == (400, 409, 1)
    assert "no reward is called 'nope'" in scorer.json()["error"]["message"]
    assert "has other content in this run" in other.json()["error"]["message"]


def test_a_group_that_fails_for_whatever_reason_is_told_and_forgotten_in_its_time(
    gateways, monkeypatch
):
    async def work():
        async with gateways(["left"]) as gateway:

            async def broken(*args, **options):
                raise RuntimeError("nobody thought of it")

            session = await opened(gateway, task=TASK)
            await asked(gateway, session)
            monkeypatch.setattr(gateway.store, "write_trajectories", broken)
            ended = await gateway.http.post(session["end_url"], json={"reward": 1.0})
            return ended, list(gateway.sessions._ended), session["id"], gateway.notes

    ended, forgettable, session, notes = run_coroutine(work())
    assert (ended.status_code, ended.json()["state"]) == (200, "cancelled")
    assert "nobody thought of it" in ended.json()["error"] and "nobody thought" in notes[0]
    assert forgettable == [session]


WRONG = [
    {"reward": 1e300},
    {"rewards": {"a": 1e308, "b": 1e308}},
    {"rewards": {"x" * 100_000: 1.0}},
    {"turn": 0, "rewards": {"a": 1.0}},
    {"turn": 1, "reward": 1.0},
    {"reward": 1.0, "agent": ""},
    {},
]


@pytest.mark.slow
def test_a_wrong_reward_is_refused_when_it_is_posted(gateways):
    async def work():
        async with gateways(["left"]) as gateway:
            session = await opened(gateway, task=TASK)
            await asked(gateway, session)
            answers = [await gateway.http.post(session["reward_url"], json=body) for body in WRONG]
            many = {f"n{number}": 0.0 for number in range(150)}
            names = [
                await gateway.http.post(session["reward_url"], json={"rewards": rewards})
                for rewards in (many, {f"other {name}": 0.0 for name in many})
            ]

            half = {"rewards": {"right": 1.0}, "reward": 1e300}
            end = await gateway.http.post(session["end_url"], json=half)
            state = (await gateway.http.get(f"/sessions/{session['id']}")).json()
            ended = (await gateway.http.post(session["end_url"])).json()
            return answers, names, end, state, ended

    answers, names, end, state, ended = run_coroutine(work())
    assert [answer.status_code for answer in answers] == [400] * len(WRONG)
    assert [answer.status_code for answer in names] == [200, 400] and end.status_code == 400
    assert len(state["posted"]) == 1 and (ended["state"], ended["reward"]) == ("completed", 0.0)


@pytest.mark.slow
def test_a_turn_s_reward_is_of_the_turn_that_its_client_received(gateways):
    """The first answer is lost: the client counts from the second."""

    async def work():
        async with gateways(["left", "right", "left"]) as gateway:
            session = await opened(gateway, task=TASK)
            await asked(gateway, session)
            own = gateway.sessions.find(session["id"])
            own.policy.conversation.discard(0)
            await asked(gateway, session)

            body = {"turn": 0, "reward": 0.5}
            first = await gateway.http.post(session["reward_url"], json=body)
            none = await gateway.http.post(session["reward_url"], json=body | {"turn": 1})
            await gateway.http.post(session["end_url"])
            exported = await gateway.http.get(f"/sessions/{session['id']}/trajectory")
            return first, none, exported.json()

    first, none, exported = run_coroutine(work())
    assert (first.status_code, none.status_code) == (200, 400)
    assert [turn["reward"] for turn in exported["turns"]] == [0.5]
    assert (exported["reward"], exported["status"]) == (0.5, "completed")
