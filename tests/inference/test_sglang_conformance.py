"""SGLang's adapter keeps what every engine promises, over a server with SGLang's routes and fields
that computes with a real model (there is no SGLang without CUDA)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import sglang_server
from engine_case import Case
from engine_conformance import CHECKS, name_of

from agentevo.config import EngineSection
from agentevo.inference.engines import engines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def case():
    options = {"command": [sys.executable, str(Path(sglang_server.__file__))]}
    made = Case.of(engines.get("sglang"), EngineSection(type="sglang", options=options))
    yield made
    made.close()


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_sglang(check, case):
    case.run(check(case))
