"""The models of a server: what a client may say of one, and those that have ended."""

from __future__ import annotations

import asyncio
import time

import huggingface_hub
import pytest
from loop_client import SECTIONS, TASKS, native
from loop_server import served

import agentevo
from agentevo.errors import AgentEvoError, ConfigError, TrainingError
from agentevo.models.chat import template_rendering
from agentevo.models.tiny_tokenizer import byte_tokenizer
from agentevo.runs.orchestration.submissions import SubmittedRollouts


def with_a_server(folder, work):
    async def opened():
        async with asyncio.timeout(300), served(folder) as (client, _, server):
            await work(client, server)

    asyncio.run(opened())


async def trained(model, task):
    (group,) = await agentevo.gather([native.group(model, task, size=2)])
    return await model.train([group.with_rewards([0.0, 1.0])])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tracking": {"tensorboard": "${oc.env:SECRET_OF_THE_SERVER}"}}, r"does not resolve \$"),
        ({"model": {"name": "${oc.env:SECRET_OF_THE_SERVER}"}}, r"does not resolve \$"),
        ({"sampling": {"stop": ["${run.dir}"]}}, r"does not resolve \$"),
        ({"agent": {"type": "command", "command": ["true"]}}, "client's own function"),
        ({"model": {"name": "/etc"}}, "no path"),
        ({"model": {"name": "/no/such/folder"}}, "no path"),
        ({"model": {"name": "../models"}}, "no path"),
        ({"reward_model": {"name": "/etc/passwd"}}, "no path"),
        ({"agents": {"a": {"model": {"name": "/etc"}}}}, "no path"),
        ({"model": {"name": "tiny", "lora": {"adapter": "/etc"}}}, "not use files"),
        ({"model": {"name": "tiny", "chat_template": "/etc/passwd"}}, "not read files"),
        ({"model": {"name": "tiny", "tiny": {"hidden_size": 10**7}}}, "has at most"),
    ],
)
def test_a_client_learns_nothing_of_the_server(sections, message, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "hush")

    async def work(client, server):
        started = time.process_time()
        with pytest.raises(ConfigError, match=message) as refused:
            await client.request("POST", "/mine", {"sections": sections}, kind=dict)
        assert "hush" not in str(refused.value)
        assert time.process_time() - started < 20
        assert await client.models() == []

    with_a_server(tmp_path, work)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["model", "reward_model", "agents"])
def test_org_and_name_are_the_hubs_whatever_folder_the_server_works_in(
    place, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", out_of_reach)
    (tmp_path / "org" / "there").mkdir(parents=True)
    (tmp_path / "org" / "there" / "adapter_config.json").write_text("{}")

    def sections(name):
        own = {"name": name}
        if place == "agents":
            return SECTIONS | {"agents": {"a": {}, "b": {"model": own}}}
        return SECTIONS | {place: own}

    async def work(client, server):
        said = []
        for name in ("org/there", "org/gone"):
            with pytest.raises(AgentEvoError) as refused:
                await client.request("POST", "/mine", {"sections": sections(name)}, kind=dict)
            said.append(str(refused.value).replace(name, "NAME"))
        assert said[0] == said[1] and "out of reach" in said[0]

    with_a_server(tmp_path / "models", work)


def out_of_reach(*arguments, **options):
    raise OSError("out of reach")


@pytest.mark.slow
def test_a_model_that_has_made_its_last_step_answers_until_it_is_closed(tmp_path):
    sections = SECTIONS | {"trainer": SECTIONS["trainer"] | {"steps": 1}}

    async def work(client, server):
        async with client.open_model("mine", **sections) as model:
            assert (await trained(model, TASKS[0])).step == model.step == 1
            with pytest.raises(ConfigError, match=r"trainer\.steps=1 is reached"):
                await trained(model, TASKS[1])
            assert (await model.refresh()).step == 1
            await model.fetch(tmp_path / "weights")

        await client.close_model("mine")
        async with client.open_model("mine") as model:
            assert model.step == 1
            assert [one.is_open for one in await client.models()] == [True]

    with_a_server(tmp_path / "models", work)


@pytest.mark.slow
def test_a_model_that_has_failed_makes_room(tmp_path, monkeypatch):
    async def fails(self, step, tasks):
        raise TrainingError("the disk is full")

    async def work(client, server):
        async with client.open_model("mine", **SECTIONS) as model:
            monkeypatch.setattr(SubmittedRollouts, "round", fails)
            with pytest.raises(AgentEvoError, match="disk is full"):
                await trained(model, TASKS[0])

            monkeypatch.undo()
            while (await client.models())[0].is_open:
                await asyncio.sleep(0.01)

            async with client.open_model("another", **SECTIONS) as other:
                assert (await trained(other, TASKS[0])).step == 1

            await client.close_model("mine")
            await client.close_model("another")
            assert (await trained(model, TASKS[1])).step == 1  # opened again, by its name

    with_a_server(tmp_path, work)


@pytest.mark.slow
def test_the_template_of_a_client_is_rendered_elsewhere_within_bounds(tmp_path, monkeypatch):
    asked = []
    ask = template_rendering.JsonWorker.ask
    monkeypatch.setattr(
        template_rendering.JsonWorker, "ask", lambda *given: asked.append(1) or ask(*given)
    )
    own = byte_tokenizer(64).chat_template

    def sections(template):
        return SECTIONS | {"model": SECTIONS["model"] | {"chat_template": template}}

    async def work(client, server):
        hostile = sections("{{ 'x' * 10**10 }}" + own)
        with pytest.raises(AgentEvoError, match="more than 512 MiB of memory"):
            async with client.open_model("hostile", **hostile):
                pass

        async with client.open_model("mine", **sections("{# mine #}" + own)) as model:
            num_asked = len(asked)
            assert (await trained(model, TASKS[0])).step == 1
        assert len(asked) > num_asked

        await client.close_model("mine")
        asked.clear()
        async with client.open_model("plain", **SECTIONS) as model:
            assert (await trained(model, TASKS[0])).step == 1
        assert asked == []

    with_a_server(tmp_path, work)
