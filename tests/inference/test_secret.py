"""One secret per run, whoever comes first."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from agentevo.errors import EngineError
from agentevo.inference.serving.secret import RunSecret


def test_it_is_made_once_and_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        found = RunSecret(tmp_path / "run" / "engines").value()
    finally:
        os.umask(before)

    file = tmp_path / "run" / "engines" / "secret"
    assert file.read_text() == found + "\n" and len(bytes.fromhex(found)) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert RunSecret(tmp_path / "run" / "engines").value() == found
    assert RunSecret(tmp_path / "other").value() != found
    assert [path.name for path in file.parent.iterdir()] == ["secret"]


def test_whoever_comes_first_makes_it_for_all(tmp_path):
    found = []
    start = threading.Barrier(16)

    def ask():
        start.wait()
        found.append(RunSecret(tmp_path).value())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 16 and len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_only_the_whole_header_counts(tmp_path):
    secret = RunSecret(tmp_path)
    value = secret.value()
    assert secret.header() == {"Authorization": f"Bearer {value}"}
    assert secret.matches_header(f"Bearer {value}")

    for wrong in (
        None,
        "",
        value,
        f"Bearer {value[:-1]}",
        f"Bearer {value}0",
        f"bearer {value}",
        f"Bearer {value.upper()}x",
        "\xe9",
    ):
        assert not secret.matches_header(wrong), wrong


@pytest.mark.parametrize("content", [b"", b"short", b"z" * 64, b"\xff" * 64], ids=repr)
def test_a_file_that_is_none_is_said(content, tmp_path):
    (tmp_path / "secret").write_bytes(content)
    for ask in (
        RunSecret(tmp_path).value,
        lambda: RunSecret(tmp_path).matches_header("Bearer " + 64 * "0"),
    ):
        with pytest.raises(EngineError, match=rf"{tmp_path}/secret holds no secret: delete it"):
            ask()
    assert (tmp_path / "secret").read_bytes() == content


def test_a_file_that_can_not_be_read_is_said(tmp_path):
    (tmp_path / "secret").mkdir()
    with pytest.raises(
        EngineError,
        match=rf"{tmp_path}/secret can't be used .*run all processes of a run as one user",
    ):
        RunSecret(tmp_path).value()
