"""What is sent to SGLang fits the types of its own wheel, where that is at hand: `pip download
--no-deps sglang==0.5.23`, unpack it, and put the folder into PYTHONPATH. Its modules are read and
not imported, since they need CUDA; only the generated types of its HTTP interface stand alone."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import sglang_server

from agentevo.inference.sglang.wire import ServerFacts, generate_body
from agentevo.types import SamplingParams

FACTS = ServerFacts(1024, 1000, 10_000, 4096, True, True, True)
TYPES = {
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}


@pytest.fixture
def wheel() -> Path:
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        pytest.skip("SGLang's wheel is not here")
    return Path(found.origin).parent


def fields_of(module: Path) -> dict[str, set[str]]:
    classes = [n for n in ast.parse(module.read_text()).body if isinstance(n, ast.ClassDef)]
    return {
        one.name: {
            part.target.id
            for part in one.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        for one in classes
    }


def test_the_fields_that_are_sent_are_those_of_its_types(wheel):
    types = fields_of(wheel / "srt/managers/io_struct.py")
    for path, name in TYPES.items():
        assert sglang_server.FIELDS[path] <= types[name] | types["BaseReq"], path
    assert sglang_server.FIELDS["/generate"] <= types["GenerateReqInput"]

    sampling = fields_of(wheel / "srt/sampling/sampling_params.py")["SamplingParams"]
    assert sampling >= sglang_server.SAMPLING

    routes = (wheel / "srt/entrypoints/http_server.py").read_text()
    for path in [*TYPES, "/generate", "/flush_cache", "/server_info", "/model_info", "/health"]:
        assert f'"{path}"' in routes, path


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(top_k=5, top_logprobs=3),
        SamplingParams(stop_token_ids=(3,), stop_strings=("end",), seed=2**64 - 1),
    ],
)
def test_a_request_keeps_the_contract_of_its_interface(wheel, sampling):
    path = wheel / "api/v1/api_types.py"
    spec = importlib.util.spec_from_file_location("sglang_api_types", path)
    assert spec is not None and spec.loader is not None

    types = sys.modules["sglang_api_types"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(types)
    body = generate_body(
        "a", [1, 2], sampling, FACTS, vocabulary=300, max_new_tokens=8, seeded=True, stream=False
    )
    read = types.GenerateRequest.from_json_value(body)
    assert read.input_ids is not None and read.sampling_params is not None
