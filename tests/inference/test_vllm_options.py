"""`engine.options` of vLLM: which are refused before a run, and what the others become. Where vLLM
is installed (`make test-vllm`), its own argument list decides."""

from __future__ import annotations

import argparse
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from engine_case import PROMPT, TOLERANCE, Case, sampled

from agentevo.config import EngineSection
from agentevo.errors import ConfigError, EngineError, MissingExtraError
from agentevo.inference.engines import check_engine, engines
from agentevo.inference.vllm import arguments, terms
from agentevo.inference.vllm.options import read_options
from agentevo.runs.orchestration.supervisor import devices_per_engine
from agentevo.types import SamplingParams
from agentevo.types.penalties import Penalties

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: `make test-vllm`")


def section(**options: Any) -> EngineSection:
    return EngineSection(type="vllm", kv_cache_gb=0.5, max_running=16, options=options)


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for vLLM's argument list."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(message)

    made = Parser(add_help=False)
    made.add_argument("--kv-cache-dtype", choices=["auto", "fp8"])
    made.add_argument("--block-size", type=int)
    made.add_argument("--enable-dbo", action=argparse.BooleanOptionalAction)
    made.add_argument("--cudagraph-capture-sizes", type=int, nargs="+")
    made.add_argument("--cpu-offload-params", nargs="+")
    monkeypatch.setattr(terms, "load_vllm", lambda timeout_s: None)
    monkeypatch.setattr(arguments, "_vllm_parser", lambda: made)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"max_num_seqs": 8}, "engine.options.max_num_seqs: set engine.max_running"),
        ({"enable_prefix_caching": True}, "set engine.prefix_sharing"),
        ({"kv_cache_memory_bytes": 1}, "set engine.kv_cache_gb"),
        ({"hf_overrides": {}}, "set model.config_overrides"),
        ({"logprobs_mode": "raw_logprobs"}, "the distribution drawn from"),
        ({"hf_token": "secret"}, "environment variable HF_TOKEN"),
        ({"max_model_len": "long"}, "engine.options.max_model_len"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size: got '2': give a whole number"),
        ({"pipeline_parallel_size": True}, "got True: give a whole number"),
        ({"prefill_context_parallel_size": 0}, "got 0: give a whole number of at least 1"),
    ],
)
def test_an_argument_that_agentevo_sets_is_refused_with_its_key(
    options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        read_options(section(**options))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kv_cache_dtyp": "fp8"}, "no such argument: did you mean kv_cache_dtype"),
        ({"kv_cache_dtype": "fp9"}, r"kv_cache_dtype: vLLM refuses 'fp9' .*'fp8'"),
        ({"block_size": "x"}, "block_size: vLLM refuses 'x'"),
        ({"enable_dbo": "yes"}, "enable_dbo: got 'yes': give true or false"),
        ({"tensor_parallel": 2}, "did you mean tensor_parallel_size"),
        (
            {"cpu_offload_params": ["a", "--block-size=3", "b"]},
            "cpu_offload_params: '--block-size=3' in the list begins with --",
        ),
    ],
)
@pytest.mark.usefixtures("parser")
def test_a_name_or_a_value_that_vllm_does_not_have_is_refused(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        arguments.vllm_arguments(read_options(section(**options)))


@pytest.mark.usefixtures("parser")
def test_values_get_the_types_of_vllms_arguments() -> None:
    options = {
        "kv_cache_dtype": "fp8",
        "block_size": 32,
        "enable_dbo": False,
        "cudagraph_capture_sizes": [1, 2],
        "cpu_offload_params": None,
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
    }
    own = section(**options)
    given = options.keys() - {"cpu_offload_params", "dtype", "tensor_parallel_size"}
    assert devices_per_engine(own) == 6
    del own.options["pipeline_parallel_size"]
    expected = {name: options[name] for name in given - {"pipeline_parallel_size"}}
    assert arguments.vllm_arguments(read_options(own)) == expected


@pytest.mark.parametrize("is_drafting", [False, True])
def test_ids_that_are_never_sampled_may_lie_among_the_tokens(
    is_drafting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stand for images."""
    monkeypatch.setattr(terms, "load_vllm", lambda: SimpleNamespace(SamplingParams=dict))
    monkeypatch.setattr(terms, "output_kind", str)
    params = terms.sampling_params_of(
        SamplingParams(), 6, [3, 6, 7], streams=False, is_drafting=is_drafting
    )
    if is_drafting:
        assert params["allowed_token_ids"] == [0, 1, 2, 4, 5]
    else:
        assert params["logit_bias"] == dict.fromkeys((3, 6, 7), terms.NEVER)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_refusal_says_what_could_not_be_checked() -> None:
    with pytest.raises(MissingExtraError, match=r"engine.options.quantization can't be checked"):
        check_engine(section(quantization="fp8"))


@pytest.mark.parametrize(
    "sampling", [sampled(min_p=0.1), sampled(penalties=Penalties(logit_bias=((3, 1.0),)))]
)
def test_what_vllm_leaves_out_while_it_drafts_is_refused(sampling: Any) -> None:
    terms.check_sampling(sampling)
    with pytest.raises(EngineError, match="speculative_config"):
        terms.check_sampling(sampling, is_drafting=True)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quantisation": "fp8"}, "did you mean quantization"),
        ({"quantization": "int8"}, "vLLM has no 'int8': did you mean .*experts_int8"),
        ({"quantization": "awq"}, "is for weights that are stored so"),
        ({"kv_cache_dtype": "fp9"}, "vLLM refuses 'fp9'"),
        ({"speculative_config": 5}, "give a mapping"),
        ({"speculative_config": {"methd": "ngram"}}, "did you mean method"),
        ({"speculative_config": {"method": "ngrm"}}, "speculative_config.method: vLLM refuses"),
        ({"compilation_config": {"mod": 3}}, "vLLM refuses {'mod': 3}"),
    ],
)
def test_vllm_itself_refuses(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_engine(section(**options))


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        {"quantization": "experts_int8"},
        {"speculative_config": {"method": "eagle3", "model": "x", "num_speculative_tokens": 2}},
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        {"compilation_config": {"mode": 3}, "block_size": 16, "attention_backend": "FLASH_ATTN"},
        {"cudagraph_capture_sizes": [1, 2], "cpu_offload_gb": 1, "enable_dbo": True},
    ],
)
def test_vllm_itself_takes(options: dict[str, Any]) -> None:
    check_engine(section(**options))


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_drafting_vllm_reports_the_policys_log_probs() -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    case = Case.of(engines.get("vllm"), section(speculative_config=drafting))
    prompt = PROMPT[:10] * 4

    async def work() -> None:
        await case.begin()
        for temperature in (1.0, 0.3):
            sampling = sampled(max_new_tokens=60, temperature=temperature)
            drawn = await case.draw(sampling, prompt)
            assert case.difference(case.old, drawn, sampling, prompt).max() < TOLERANCE

        await case.engine.publish(2, case.new, deadline_s=600)
        drawn = await case.draw(sampled(max_new_tokens=60), prompt)
        assert set(drawn.versions) == {2}
        difference = case.difference(case.new, drawn, sampled(max_new_tokens=60), prompt)
        assert difference.max() < TOLERANCE

    try:
        case.run(work())
    finally:
        case.close()
