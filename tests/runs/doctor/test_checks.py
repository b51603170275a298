"""The doctor's judgement: which numbers are good, which are wrong, and that the advice names what
to change."""

import math

import pytest
from made_attempts import make_group

from agentevo.observability.attempt_facts import AttemptFacts, facts_of
from agentevo.observability.findings import Recipe
from agentevo.observability.remedies import remedies_of
from agentevo.runs.doctor import checks as v

GIB = v.GIB
RECIPE = Recipe(
    remedies=remedies_of({"agent": {"system_prompt": None}, "environment": {"type": "coins"}})
)


def test_a_verdict_reads_as_one_line_and_its_advice_as_another():
    assert str(v.Check("rewards", "good", "fine")) == "good     rewards: fine"
    assert (
        str(v.Check("rewards", "wrong", "bad", "mend it"))
        == "wrong    rewards: bad\n         -> mend it"
    )


@pytest.mark.parametrize(
    ("check", "status", "advice"),
    [
        (v.judge_attempts(8, []), "good", ""),
        (v.judge_attempts(8, ["took longer than agent.timeout_s=3 s"]), "warning", "raise agent"),
        (v.judge_attempts(2, ["broken", "broken"]), "wrong", "never trained"),
        (v.judge_token_ids(20, 0, 8, 0), "good", ""),
        (v.judge_token_ids(20, 0, 8, 3), "good", ""),
        (v.judge_token_ids(20, 1, 8, 0), "wrong", "policy handle"),
        (v.judge_drift(9, 0, ["joined/name_dropped 3"]), "good", ""),
        (v.judge_drift(9, 1, ["content_edited 1"]), "warning", "append to its history"),
        (v.judge_logprobs(100, 3e-6, "float32"), "good", ""),
        (v.judge_logprobs(100, 2e-4, "float32"), "wrong", "report the difference"),
        (v.judge_logprobs(100, 0.05, "bfloat16"), "good", ""),
        (v.judge_logprobs(100, 0.5, "bfloat16"), "wrong", "model.dtype=float32"),
        (v.judge_logprobs(100, math.nan, "float32"), "wrong", "report the difference"),
        (v.judge_logprobs(100, math.inf, "bfloat16"), "wrong", "model.dtype=float32"),
        (v.judge_logprobs(0, 0.0, "float32"), "wrong", "attempts"),
        (
            v.before_cold_start(v.Check("rewards", "warning", "x", "y")),
            "warning",
            "before the cold",
        ),
        (v.before_cold_start(v.Check("rewards", "good", "x")), "good", ""),
        (v.judge_context(300, 900, 1024), "good", ""),
        (v.judge_context(300, 1025, 1024), "warning", "agent.max_turns"),
        (v.judge_context(1024, 1025, 1024), "wrong", "sampling.max_new_tokens"),
        (v.judge_turns(8, 4, 10, 10), "good", ""),
        (v.judge_turns(8, 5, 10, 10), "warning", "environment.max_actions"),
        (v.judge_turns(8, 8, 1, 1), "good", ""),
        (v.judge_turns(8, 8, 4, None), "warning", "raise agent.max_turns"),
        (v.judge_kv_cache(32, 100, 65536, 1e5, 256), "good", ""),
        (
            v.judge_kv_cache(32, 4000, 65536, 1e5, 256),
            "warning",
            "engine.kv_cache_gb=11.93 would sample all",
        ),
        (v.judge_kv_cache(32, 100, 65536, 1e5, 8), "warning", "engine.max_running=32"),
        (v.judge_kv_cache(32, 4000, 2000, 1e5, 256), "wrong", "engine.kv_cache_gb=0.38 or more"),
        (v.judge_memory({"gradients": 1 * GIB, "activations": 2 * GIB}, 8 * GIB), "good", ""),
        (
            v.judge_memory(
                {"activations": 7 * GIB},
                8 * GIB,
                {"a.b=1": 6.9 * GIB, "c.d=full": 2 * GIB, "e=8": 1 * GIB},
            ),
            "warning",
            "set c.d=full, which saves 5.00 GiB",
        ),
        (
            v.judge_memory(
                {"optimizer": 30 * GIB},
                8 * GIB,
                {"a.b=4": 20 * GIB, "a.b=2": 16 * GIB, "c.d=full": 12 * GIB, "e=8": 30 * GIB},
            ),
            "wrong",
            "no single change is enough: c.d=full saves 18.00 GiB, a.b=2 saves 14.00 GiB; combine",
        ),
        (v.judge_memory({"optimizer": 9 * GIB}, 8 * GIB), "wrong", "smaller model"),
        (v.judge_version("torch", "2.13.0", ">=2.6"), "good", ""),
        (v.judge_version("torch", None, ">=2.6"), "wrong", "pip install 'torch>=2.6'"),
        (v.judge_threads(2, 2), "good", ""),
        (v.judge_threads(4, 2), "warning", "run.threads=2"),
        (v.judge_threads(1, 2), "warning", "OMP_NUM_THREADS"),
        (v.judge_threads(2, 2, "OMP_DYNAMIC=1: unset it"), "wrong", "unset it"),
        (v.judge_processor("AVX512", True), "good", ""),
        (v.judge_processor("DEFAULT", True), "warning", "slower"),
        (v.judge_processor("AVX2", False), "warning", "oneDNN"),
        (v.judge_disk(20 * GIB, "."), "good", ""),
        (v.judge_disk(3 * GIB, "."), "warning", "checkpoint.keep_last=1"),
        (v.judge_disk(0.5 * GIB, "."), "wrong", "run.dir"),
    ],
)
def test_judgements(check, status, advice):
    assert check.status == status
    assert advice in check.advice
    assert bool(check.advice) == (status != "good"), (
        "advice where something is to be changed, and only there"
    )
    assert check.finding


def test_findings_carry_the_numbers():
    assert "3 of 8 attempts would have changed" in v.judge_token_ids(20, 0, 8, 3).finding
    memory = v.judge_memory({"gradients": GIB, "activations": 2 * GIB}, GIB)
    assert (
        memory.finding
        == "needs about 3.00 GiB more (gradients 1.00, activations 2.00), 1.00 GiB are free"
    )


def play(group):
    return {c.name: c for c in v.judge_play(facts_of(group), [t.reward for t in group], RECIPE)}


def test_play_is_judged_by_the_findings_of_a_run():
    healthy = play(make_group(rewards=[0, 1, 0, 0], calls=2, offered=["search"]))
    assert {check.status for check in healthy.values()} == {"good"}
    assert list(healthy) == ["rewards", "completions", "calls", "tools", "exploration"]
    assert healthy["rewards"].finding == (
        "mean 0.25, spread 0.433 over 4 attempts, 1 solved the task (pass@1 25%, pass@4 100%)"
    )

    assert healthy["completions"].finding.startswith("the token limit left 0 of ")

    bad = play(
        make_group(rewards=[0] * 4, is_cut=True, malformed=3, offered=["search"], is_same=True)
    )
    assert {name: check.status for name, check in bad.items()} == dict.fromkeys(healthy, "warning")
    assert "run.seed=1" in bad["rewards"].advice and "cold_start" in bad["rewards"].advice
    assert "sampling.max_new_tokens" in bad["completions"].advice
    assert "agent.system_prompt" in bad["tools"].advice
    assert "sampling.temperature" in bad["exploration"].advice

    (solved, *_) = play(make_group(rewards=[1] * 4)).values()
    assert solved.status == "warning" and "make the tasks harder" in solved.advice


def test_one_attempt_can_not_be_compared():
    for group in ([], make_group(rewards=[1])):
        (first, *_) = play(group).values()
        assert (first.name, first.status) == ("rewards", "wrong")
        assert "trainer.group_size" in first.advice
    assert v.judge_play(AttemptFacts(), [], RECIPE)[0].status == "wrong"
