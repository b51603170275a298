"""Judges behind OpenAI's API on loopback, as programs: each reads the records out of the prompt
that it is really sent, and answers as its rule says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from remote_server import RemoteServer, chat, gives

Record = list[dict[str, Any]]
"""The lines of one attempt."""
_FENCED = re.compile(
    r"^--- (?P<mark>[0-9a-f]{32}) begin of (?P<what>[^\n]*) ---\n"
    r"(?P<lines>.*?)^--- (?P=mark) end of (?P=what) ---$",
    re.DOTALL | re.MULTILINE,
)


def records_in(prompt: str) -> dict[str, Record]:
    """What a prompt shows, by its name: a fence is known by the mark of the first one."""
    found = list(_FENCED.finditer(prompt))
    mark = found[0]["mark"]
    assert all(one["mark"] == mark for one in found)
    return {one["what"]: [json.loads(line) for line in one["lines"].splitlines()] for one in found}


def attempts_in(prompt: str) -> dict[int, Record]:
    """The attempts of a prompt, by their number."""
    return {
        int(what.removeprefix("attempt ")): lines
        for what, lines in records_in(prompt).items()
        if what.startswith("attempt ")
    }


def words_of(record: Record) -> str:
    """All that was said in an attempt."""
    return "\n".join(str(line.get("content", "")) for line in record)


def number_in(record: Record) -> float:
    """The number that the attempt states last behind `worth`, from 0 to 1; 0 without one."""
    found = re.findall(r"worth (\d+(?:\.\d+)?)", words_of(record))
    return min(1.0, float(found[-1])) if found else 0.0


def verdict(scores: Mapping[int, float]) -> str:
    """An answer in the form that is asked for."""
    rows = [{"id": one, "explanation": f"worth {s:g}", "score": s} for one, s in scores.items()]
    return f"I have compared them.\n```json\n{json.dumps({'scores': rows})}\n```"


def ranks(worth: Callable[[Record, int, int], float] | None = None) -> Any:
    """Answers every question by the worth of each attempt, given its record, its number and how
    many there are."""

    def answer(body: Any, handler: Any) -> None:
        attempts = attempts_in(body["messages"][0]["content"])
        scores = {
            number: number_in(record) if worth is None else worth(record, number, len(attempts))
            for number, record in attempts.items()
        }
        gives(chat(verdict(scores)))(body, handler)

    return answer


def likes_early(record: Record, number: int, num: int) -> float:
    """A judge that gives half of its score for the place."""
    return 0.5 * number_in(record) + 0.5 * (num - number) / max(1, num - 1)


def obeys(record: Record, number: int, num: int) -> float:
    """A judge that believes whoever asks it for a high score."""
    asks = re.search(r"score|rating|verdict|judge|best", words_of(record), re.IGNORECASE)
    return 1.0 if asks else number_in(record)


def judge(server: RemoteServer, **options: Any) -> dict[str, Any]:
    """A section of `remote_models`."""
    return {"base_url": server.base_url, "model": "m", **options}
