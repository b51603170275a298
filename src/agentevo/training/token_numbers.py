"""Measurements of an update for each token that it trained: how far its log-prob has moved since it
was sampled, and the entropy of the distribution that it was sampled from. Both are from the last
pass of the update.

    RUN/token_numbers/step_000012.bin     of one committed step, two half-precision numbers a token

The attempt and the ids of its path identify a sample, so the numbers belong to tokens in any order
of training. Only the pages that show a run read them: a missing or damaged file changes nothing
else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentevo.runtime.files import open_regular, write_atomic
from agentevo.types import Sample

FOLDER = "token_numbers"
LARGEST = 1 << 28
"""Bytes of a file that are read, before and after it is unpacked."""


class SampleNumbers(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of one sample: arrays as bytes."""

    path: bytes
    """Digest of its ids."""
    places: bytes
    """int32: the places of its trained tokens among its ids."""
    changes: bytes
    """float16: log-prob in the last pass, minus the one at sampling."""
    entropies: bytes
    """float16, in nats."""

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """places, changes, entropies. Raises ValueError if they are not equally long."""
        places = np.frombuffer(self.places, dtype="<i4")
        changes = np.frombuffer(self.changes, dtype="<f2").astype(np.float32)
        entropies = np.frombuffer(self.entropies, dtype="<f2").astype(np.float32)
        if not len(places) == len(changes) == len(entropies):
            raise ValueError("the columns of a sample differ in length")
        return places, changes, entropies


Numbers = dict[str, list[SampleNumbers]]
"""Id of an attempt -> its samples."""


class TokenNumbers:
    """Collects the numbers while a step is trained."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, bytes], SampleNumbers] = {}

    def begin(self) -> None:
        """Drops the numbers of the step before."""
        self._numbers.clear()

    def heard(self, samples: Sequence[Sample], logprobs: Any, entropies: Any) -> None:
        """A pass over these samples: tensors [S, T], a row for each, its trained tokens from the
        left. A later pass over a sample replaces an earlier one."""
        logp = logprobs.detach().float().cpu().numpy()
        entropy = entropies.detach().float().cpu().numpy()
        for row, sample in enumerate(samples):
            places = np.flatnonzero(sample.loss_mask).astype("<i4")
            size = len(places)
            changes = logp[row, :size] - sample.logprobs[places]
            path = path_of(sample.ids)
            self._numbers[sample.trajectory_id, path] = SampleNumbers(
                path, places.tobytes(), _halves(changes), _halves(entropy[row, :size])
            )

    def items(self) -> list[tuple[str, SampleNumbers]]:
        """(id of the attempt, numbers of one of its samples)."""
        return [(name, sample_numbers) for (name, _), sample_numbers in self._numbers.items()]

    def add(self, items: Iterable[tuple[str, SampleNumbers]]) -> None:
        """Adds the numbers that another process has collected."""
        self._numbers.update(
            {(name, sample_numbers.path): sample_numbers for name, sample_numbers in items}
        )

    def by_attempt(self) -> Numbers:
        """All of them."""
        numbers_by_attempt: Numbers = {}
        for name, sample_numbers in self.items():
            numbers_by_attempt.setdefault(name, []).append(sample_numbers)
        return numbers_by_attempt


def _halves(values: np.ndarray) -> bytes:
    largest = float(np.finfo(np.float16).max)
    return np.clip(np.nan_to_num(values), -largest, largest).astype("<f2").tobytes()


def path_of(ids: np.ndarray) -> bytes:
    """The key of a sample among those of its attempt."""
    return blake2b(np.asarray(ids, dtype="<i4").tobytes(), digest_size=8).digest()


def name_of(step: int) -> str:
    """The path of the file in the run's folder."""
    return f"{FOLDER}/step_{step:06d}.bin"


def write_numbers(folder: Path, step: int, numbers: Numbers) -> None:
    """Writes the file of a step, whole. Raises OSError."""
    path = folder / name_of(step)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, zlib.compress(msgspec.msgpack.encode(numbers), 1))


def largest_moves(path: Path) -> dict[str, float]:
    """Id of an attempt -> how far the log-prob of one of its tokens has moved, at most; nothing
    where the file is missing or damaged."""
    moves: dict[str, float] = {}
    try:
        for name, samples in read_numbers(path).items():
            columns = [np.frombuffer(sample.changes, dtype="<f2") for sample in samples]
            largest = (float(np.abs(changes).max()) for changes in columns if len(changes))
            moves[name] = max(largest, default=0.0)
    except ValueError:
        return {}

    return moves


def read_numbers(path: Path) -> Numbers:
    """The content of a file; nothing where it is missing or damaged."""
    try:
        with open_regular(path) as file:
            unpacked = zlib.decompressobj().decompress(file.read(LARGEST), LARGEST)
        return msgspec.msgpack.decode(unpacked, type=Numbers)
    except (OSError, zlib.error, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
