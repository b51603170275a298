"""OpenMP's settings under which PyTorch's results are wrong are refused."""

import pytest
import torch

from agentevo.agents.tools.corpus import Encoder
from agentevo.config import ModelSection
from agentevo.errors import ModelError
from agentevo.models.files.load import load_model
from agentevo.runtime.cpu_threads import missing_threads

TINY = ModelSection.model_validate({"name": "tiny", "tiny": {"tokenizer": "byte"}, "device": "cpu"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"OMP_THREAD_LIMIT": "1"}, "OMP_THREAD_LIMIT=1: unset it, or set OMP_NUM_THREADS=1 too"),
        ({"OMP_THREAD_LIMIT": " +1 "}, "OMP_NUM_THREADS=1 too"),
        ({"OMP_MAX_ACTIVE_LEVELS": "0"}, "OMP_MAX_ACTIVE_LEVELS=0: unset it"),
        ({"OMP_DYNAMIC": "TRUE"}, "OMP_DYNAMIC=true: unset it"),
        ({"OMP_DYNAMIC": "1"}, "OMP_DYNAMIC=1"),
        ({}, None),
        ({"OMP_THREAD_LIMIT": "2"}, None),
        ({"OMP_THREAD_LIMIT": "0"}, None),
        ({"OMP_THREAD_LIMIT": "many"}, None),
        ({"OMP_MAX_ACTIVE_LEVELS": "1"}, None),
        ({"OMP_DYNAMIC": "false"}, None),
    ],
)
def test_what_keeps_openmp_from_two_threads(settings, words):
    """Which a thread asks for that begins later, whatever PyTorch's own number is."""
    found = missing_threads(1, {"OMP_NUM_THREADS": "2", **settings})
    assert missing_threads(2, {"OMP_NUM_THREADS": "1", **settings}) == found
    assert found is None if words is None else words in found


@pytest.mark.parametrize("wanted", ["1", "2"])
def test_a_model_is_not_loaded_where_its_results_were_wrong(wanted, monkeypatch):
    """What a thread that begins later asks for counts, not only PyTorch's number."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")

    torch.set_num_threads(1)
    try:
        if wanted == "1":
            load_model(TINY)
        else:
            with pytest.raises(ModelError, match="wrong under OMP_THREAD_LIMIT=1: unset it"):
                load_model(TINY)
    finally:
        torch.set_num_threads(before)


def test_nor_is_an_encoder_of_passages(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    with pytest.raises(ModelError, match="wrong under OMP_DYNAMIC=true: unset it"):
        Encoder(tmp_path)
