"""The teacher's advantages against a plain computation, and which teacher a task has."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentevo.algorithms.distillation import teacher_advantage
from agentevo.config import build_config
from agentevo.config.distillation import DistillationSection
from agentevo.errors import ConfigError
from agentevo.rollout.teachers import check_teachers, teacher_of
from agentevo.runs.orchestration.players import check_play
from agentevo.types import Task

LOGPROBS = st.lists(
    st.lists(
        st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=3, max_size=3
    ),
    min_size=1,
    max_size=4,
).filter(lambda rows: any(cell[2] for row in rows for cell in row))


@given(LOGPROBS, st.one_of(st.none(), st.floats(0.1, 20)))
def test_each_trained_token_gets_its_clipped_log_ratio(rows, clip):
    teacher, policy = (torch.tensor([[cell[k] for cell in row] for row in rows]) for k in (0, 1))
    mask = torch.tensor([[cell[2] for cell in row] for row in rows])
    teacher[~mask] = math.nan
    advantages, metrics = teacher_advantage(teacher, policy, mask, clip=clip)

    gaps = []
    for row, (of_teacher, of_policy) in enumerate(
        zip(teacher.tolist(), policy.tolist(), strict=True)
    ):
        for place in range(3):
            expected = 0.0
            if mask[row, place]:
                gap = of_teacher[place] - of_policy[place]
                gaps.append(gap)
                expected = gap if clip is None else max(-clip, min(clip, gap))
            assert float(advantages[row, place]) == pytest.approx(expected, abs=1e-9)

    assert metrics["distillation/reverse_kl"] == pytest.approx(-sum(gaps) / len(gaps), abs=1e-9)
    if clip is not None:
        share = sum(abs(gap) > clip for gap in gaps) / len(gaps)
        assert metrics["distillation/clipfrac"] == pytest.approx(share)


def test_the_expected_gradient_is_that_of_the_reverse_kl():
    """Over all tokens that a policy may draw, advantage times the gradient of the log-prob."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)

    policy = logits.log_softmax(0)
    advantages, _ = teacher_advantage(
        teacher[None], policy[None], torch.ones(1, 7, dtype=torch.bool)
    )
    loss = -(policy.exp().detach() * advantages[0] * policy).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, expected)


def test_centred_advantages_have_the_mean_0():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    teacher = -torch.arange(6.0).view(2, 3)
    advantages, metrics = teacher_advantage(teacher, torch.zeros(2, 3), mask, clip=4.5, center=True)
    limited = [0.0, -1.0, -3.0, -4.0, -4.5]
    expected = [value - sum(limited) / 5 for value in limited]
    assert advantages[mask].tolist() == pytest.approx(expected)
    assert float(advantages[0, 2]) == 0.0
    assert metrics["distillation/reverse_kl"] == pytest.approx(13 / 5)


def test_a_log_prob_that_is_not_finite_is_refused():
    ones = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"at \[0, 1\] are -inf and 0.0"):
        teacher_advantage(torch.tensor([[0.0, -math.inf]]), torch.zeros(1, 2), ones)


def test_a_task_has_the_teacher_of_its_source_its_environment_or_the_others():
    section = DistillationSection(teachers={"gsm8k": "maths", "coins": "coins", "default": "rest"})
    tasks = {
        "maths": Task(id="a", environment="coins", metadata={"data_source": "gsm8k"}),
        "coins": Task(id="b", environment="coins", metadata={"data_source": "unknown"}),
        "rest": Task(id="c"),
    }
    assert {name: teacher_of(task, section) for name, task in tasks.items()} == {
        name: name for name in tasks
    }

    for odd in (["gsm8k"], {"name": "gsm8k"}, 5, True):
        assert teacher_of(Task(id="d", metadata={"data_source": odd}), section) == "rest"

    only_one = DistillationSection(teachers={"gsm8k": "maths"})
    check_teachers([tasks["maths"]], only_one)
    with pytest.raises(ConfigError, match=r"the task 'b' of the source 'unknown' has no teacher"):
        check_teachers([tasks["maths"], tasks["coins"]], only_one)
    with pytest.raises(
        ConfigError, match="the task 'c' without a data_source has no teacher: give"
    ):
        check_teachers([tasks["rest"]], only_one)


def test_a_source_that_no_task_has_is_refused():
    task = Task(id="a", metadata={"data_source": "gsm8k"})
    section = DistillationSection(teachers={"gsm8K": "maths", "default": "rest"})
    with pytest.raises(ConfigError, match=r"teachers.gsm8K: no task .* did you mean gsm8k\?"):
        check_teachers([task], section)
    check_teachers([], section)


def test_a_data_source_that_is_no_text_names_no_teacher():
    task = Task(id="a", metadata={"data_source": ["gsm8k"]})
    assert teacher_of(task, DistillationSection(teachers={"default": "rest"})) == "rest"


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (["gsm8k"], None),
        (["gsm8k", "code"], "the source 'code' has no teacher"),
    ],
)
def test_only_tasks_to_train_on_need_a_teacher(tmp_path, sources, words):
    files = {"train": sources, "eval": ["other"]}
    for name, column in files.items():
        rows = [
            {
                "question": f"{name} {number}",
                "answer": "1",
                "data_source": column[number % len(column)],
            }
            for number in range(8)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = build_config(
        {
            "agent": {"type": "single_turn"},
            "rewards": [{"name": "numeric"}],
            "tasks": {name: str(tmp_path / f"{name}.jsonl") for name in files},
            "remote_models": {"t": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}},
            "distillation": {"teachers": {"gsm8k": "t"}},
            "trainer": {"groups_per_step": 4},
        }
    )
    if words is None:
        check_play(config, None)
    else:
        with pytest.raises(ConfigError, match=words):
            check_play(config, None)


def test_a_source_that_an_environment_has_not_is_refused():
    config = build_config(
        {
            "environment": {"type": "coins"},
            "remote_models": {"t": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}},
            "distillation": {"teachers": {"coins": "t", "gsm8k": "t"}},
        }
    )
    with pytest.raises(ConfigError, match=r"distillation\.teachers\.gsm8k: no task to train on"):
        check_play(config, None)


ENGINE = {"t": {"api": "engine", "model": "m"}}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"distillation": {"weight": 2.0}}, "distillation has no teacher"),
        (
            {"distillation": {"teachers": {"default": "u"}}},
            "distillation.teachers.default: there is no remote model 'u'",
        ),
        (
            {
                "distillation": {"teachers": {"default": "t"}},
                "remote_models": {"t": {"api": "anthropic", "model": "m"}},
            },
            "gives no log-probs",
        ),
        (
            {"distillation": {"teachers": {"gsm8k": "t"}}},
            "the environment coins has no teacher",
        ),
        (
            {"distillation": {"teachers": {"default": "t"}}, "algorithm": {"name": "dpo"}},
            "algorithm.name=dpo: not supported",
        ),
        (
            {"distillation": {"teachers": {"default": "t"}}, "algorithm": {"keep_groups": 0.5}},
            "algorithm.keep_groups chooses groups by their rewards",
        ),
        (
            {
                "distillation": {"teachers": {"default": "t"}, "reward_weight": 1},
                "trainer": {"group_size": 1},
            },
            "trainer.group_size is 1",
        ),
    ],
)
def test_recipes_that_can_not_work_are_refused(tree, words):
    with pytest.raises(ConfigError, match=words):
        build_config({"environment": {"type": "coins"}, "remote_models": ENGINE} | tree)


def test_groups_of_one_are_enough_for_a_teacher_alone():
    config = build_config(
        {
            "environment": {"type": "coins"},
            "remote_models": ENGINE,
            "distillation": {"teachers": {"default": "t"}},
            "trainer": {"group_size": 1},
        }
    )
    assert config.credit_rule.startswith("distillation (default: t; weight=1.0")
    assert "center" not in config.credit_rule
    weighted = config.distillation.model_copy(
        update={"reward_weight": 0.5, "clip": 2.0, "center": True}
    )
    assert weighted.rule.endswith("reward_weight=0.5, clip=2.0, center)")
    both = config.model_copy(update={"distillation": weighted})
    assert both.credit_rule.startswith("grpo (") and "distillation (" in both.credit_rule
