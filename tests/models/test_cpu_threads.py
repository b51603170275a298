"""OpenMP's settings under which PyTorch's results are wrong are followed, or refused."""

import pytest
import torch

from agentevo.config import ModelSection
from agentevo.errors import ModelError
from agentevo.models.load import load_model

TINY = ModelSection.model_validate({"name": "tiny", "tiny": {"tokenizer": "byte"}, "device": "cpu"})


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("limit", "count"), [("1", 1), (" 1 ", 1), ("2", 2), ("64", 2), ("0", 2), ("many", 2), ("", 2)]
)
def test_a_limit_holds_for_pytorch(limit, count, two_threads, monkeypatch):
    monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    load_model(TINY)
    assert torch.get_num_threads() == count


@pytest.mark.parametrize("value", ["true", "TRUE", "1"])
def test_a_number_of_threads_that_nobody_knows_is_refused(value, monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", value)
    with pytest.raises(ModelError, match=f"OMP_DYNAMIC={value} is set, .*: unset OMP_DYNAMIC"):
        load_model(TINY)


def test_its_default_is_none(monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "false")
    load_model(TINY)
