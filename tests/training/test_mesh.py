"""Processes that share a training in every way come to what one process comes to."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
from several_processes import run_processes
from slow import soak

sys.path.insert(0, str(Path(__file__).parent))
import mesh_runs as runs

pytestmark = pytest.mark.slow
MORE_THAN_CASES = pytest.mark.parametrize(
    "found", ["2 processes", *soak(*runs.CASES_OF_SOAK)], indirect=True
)


@functools.cache
def alone(single):
    """What one process comes to."""
    cases = [case for of_count in runs.CASES.values() for case in of_count]
    return runs.trained(next(case for case in cases if runs.single(case) == single), None)


@pytest.fixture(
    scope="module",
    params=[*runs.CASES_OF_CI, *soak(*runs.CASES_OF_SOAK)],
)
def found(request, tmp_path_factory):
    """Of each process: case -> how far it is from one process, what a shared reward model's rewards
    are apart, and the memory of a stage of a pipeline."""
    folder = tmp_path_factory.mktemp("mesh")
    name = request.param
    expected = folder / "alone"
    torch.save({single: alone(single) for single in map(runs.single, runs.CASES[name])}, expected)
    outs = [folder / f"{process}.pt" for process in range(runs.num_processes(name))]
    run_processes(
        runs.__file__,
        [(name, process, folder / "meeting", expected, out) for process, out in enumerate(outs)],
        within_s=900,
    )

    return [
        (list(zip(runs.CASES[name], cases, strict=True)), rewards, peaks)
        for cases, rewards, peaks in map(torch.load, outs)
    ]


def test_weights_and_metrics_are_those_of_one_process(found):
    wrong = []
    for of_process, _, _ in found:
        for case, differences in of_process:
            apart = max(differences["weights"], differences["metrics"])  # 1e-6 where measured
            if apart > 1e-5 or differences["moved"] < runs.RATE:
                wrong.append((case, differences))
    assert not wrong


def test_each_process_keeps_its_part_of_all_models(found):
    """Of the policy and of what stands beside it, moments included. Norms, and key heads that are
    fewer than processes, are whole under tensor parallelism; so are a base's under adapters. Of
    stages the first and the last have embeddings and output layer, a third of these models."""
    wrong = []
    for of_process, _, _ in found:
        for (model, kind, _, sizes), differences in of_process:
            tensor = sizes.get("tensor", 1)
            stages = sizes.get("pipeline", 1)
            most = 1.15 / sizes.get("shard", 1) / tensor / stages
            most += 0.1 if max(tensor, stages) > 2 else 0.0
            held = differences["held"] if "+" not in model else 0.0
            if max(held, differences["moments"]) > most:
                wrong.append((model, kind, sizes, differences))

    assert not wrong


@MORE_THAN_CASES
def test_a_shared_reward_model_gives_the_rewards_of_a_whole_one(found):
    for _, rewards, _ in found:
        assert max(rewards.values()) < 1e-5, rewards  # 2e-6 where it was measured


@MORE_THAN_CASES
def test_a_stage_keeps_as_many_micro_batches_as_there_are_stages(found):
    """However many a step has; the last stage keeps those of one."""
    peaks = [of_stage for _, _, of_stage in found]
    for few, many in peaks:
        assert many < 1.1 * few, peaks
    assert peaks[0][0] > 1.2 * peaks[-1][0], "though the first one has no output layer"
