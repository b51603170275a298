"""The embedded engine keeps what every engine promises."""

from __future__ import annotations

import pytest
from engine_case import Case
from engine_conformance import ADAPTER_CHECKS, CHECKS, name_of

from agentevo.config import EngineSection
from agentevo.inference.engines import engines


@pytest.fixture(scope="module")
def case():
    made = Case.of(engines.get("torch"), EngineSection())
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_the_embedded_engine(check, case):
    case.run(check(case))


@pytest.mark.slow
@pytest.mark.parametrize("check", ADAPTER_CHECKS, ids=name_of)
def test_the_embedded_engine_with_an_adapter(check):
    made = Case.of(engines.get("torch"), EngineSection(), rank=4, targets=["q_proj", "v_proj"])
    made.run(check(made))
    made.close()
