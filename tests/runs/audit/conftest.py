"""A recorded run: whole, and a copy that may be changed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from audited_run import fill


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    folder.mkdir()
    asyncio.run(fill(folder))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))
