"""Which process is put on which node and device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.errors import ConfigError
from agentevo.runs.launch.fleet import Fleet


@given(
    st.integers(1, 4), st.integers(0, 8), st.integers(0, 20), st.integers(1, 8), st.integers(0, 9)
)
def test_every_device_has_one_process_and_everything_is_placed(
    trainer_nodes, gpus, engines, gpus_per_engine, samplers
):
    fleet = Fleet(
        trainer_nodes=trainer_nodes,
        gpus=gpus,
        engines=engines,
        gpus_per_engine=gpus_per_engine,
        samplers=samplers,
    )
    try:
        nodes = fleet.place()
    except ConfigError:
        assert bool(engines) != bool(samplers) or gpus_per_engine > gpus > 0
        return

    assert sum(len(node.engines) for node in nodes) == engines
    assert sum(node.samplers for node in nodes) == samplers
    assert [node.trainer > 0 for node in nodes[:trainer_nodes]] == [True] * trainer_nodes

    for node in nodes:
        used = [*node.trainer_devices, *(d for devices in node.engines for d in devices)]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(gpus))
        assert all(len(devices) == (gpus_per_engine if gpus else 0) for devices in node.engines)
        assert node.trainer == 0 or node.trainer == max(len(node.trainer_devices), 1)


def test_one_node_is_shared_by_trainer_and_engines():
    (node,) = Fleet(gpus=8, engines=4, samplers=2).place()
    assert node.trainer_devices == (0, 1, 2, 3)
    assert node.engines == ((4,), (5,), (6,), (7,))
    assert node.samplers == 2


def test_engines_without_room_get_nodes_of_their_own():
    nodes = Fleet(gpus=4, engines=3, gpus_per_engine=2, samplers=5).place()
    assert [len(node.engines) for node in nodes] == [0, 2, 1]
    assert [node.samplers for node in nodes] == [2, 2, 1]


def test_without_devices_engines_go_to_their_nodes():
    nodes = Fleet(engines=3, engine_nodes=2, samplers=1).place()
    assert [len(node.engines) for node in nodes] == [0, 2, 1]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"engines": 1}, "samplers=0"),
        ({"samplers": 1}, "engines=0"),
        ({"gpus": 2, "engines": 1, "gpus_per_engine": 4, "samplers": 1}, "gpus_per_engine=4"),
        ({"gpus": 2, "trainer_gpus": 3}, "trainer_gpus=3"),
        ({"gpus": 2, "trainer_gpus": 0}, "trainer_gpus=0"),
        ({"engines": 1, "engine_nodes": 2, "samplers": 1}, "engine_nodes=2"),
        ({"gpus": 1, "engines": 1, "engine_nodes": 1, "samplers": 1}, "engine_nodes=1"),
        ({"gpus": 1, "engines": 2000, "samplers": 1}, "engines=2000"),
    ],
)
def test_what_does_not_fit_is_refused(values, word):
    with pytest.raises(ConfigError, match=word):
        Fleet(**values).place()
