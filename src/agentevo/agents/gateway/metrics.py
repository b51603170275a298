"""The gateway's own metrics, in the text format of Prometheus:
https://prometheus.io/docs/instrumenting/exposition_formats/

It belongs to the gateway's event loop. The metrics contain no session, key or text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from agentevo.agents.gateway.request import ModelReply

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets of durations."""


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*SECONDS, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum:.6f}"
        yield f"{name}_count{{{labels}}} {total}"


class GatewayMetrics:
    """See the module."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        """Answers by path of the API and status; a stream counts by the status that it began
        with."""
        self._durations: dict[str, Durations] = {}
        """Path -> times from a request's headers to the end of its answer."""
        self._waits: dict[str, Durations] = {}
        """Path -> times from a request's headers to the beginning of its answer."""
        self._tokens: Counter[str] = Counter()
        self.num_under_way = 0

    def count_answer(self, path: str, status: int, wait_s: float, duration_s: float) -> None:
        """An answer has ended; `wait_s` passed before it began."""
        self._answers[path, status] += 1
        self._durations.setdefault(path, Durations()).add(duration_s)
        self._waits.setdefault(path, Durations()).add(wait_s)

    def count_tokens(self, replies: Sequence[ModelReply]) -> None:
        """Counts the tokens of a request's completions, and of their prompt once."""
        prompt = replies[0].prompt
        self._tokens["cached"] += prompt.num_cached
        self._tokens["prompt"] += prompt.num_tokens - prompt.num_cached
        self._tokens["completion"] += sum(len(reply.turn.completion_ids) for reply in replies)

    def text(self, num_sessions: int) -> str:
        """All metrics in Prometheus's text format."""
        lines = [
            "# TYPE agentevo_gateway_sessions gauge",
            "# HELP agentevo_gateway_sessions Attempts whose key opens a session.",
            f"agentevo_gateway_sessions {num_sessions}",
            "# TYPE agentevo_gateway_requests_under_way gauge",
            "# HELP agentevo_gateway_requests_under_way Requests without the end of their answer.",
            f"agentevo_gateway_requests_under_way {self.num_under_way}",
            "# TYPE agentevo_gateway_tokens_total counter",
            "# HELP agentevo_gateway_tokens_total Tokens of answered requests; cached are those of"
            " prompts that their conversation had already.",
            *(
                f'agentevo_gateway_tokens_total{{kind="{kind}"}} {self._tokens[kind]}'
                for kind in ("prompt", "cached", "completion")
            ),
            "# TYPE agentevo_gateway_requests_total counter",
            "# HELP agentevo_gateway_requests_total Answers by API and status.",
            *(
                f'agentevo_gateway_requests_total{{path="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._answers.items())
            ),
        ]
        lines += _histogram("request_seconds", "Until an answer ended.", self._durations)
        lines += _histogram("first_byte_seconds", "Until an answer began.", self._waits)
        return "\n".join(lines) + "\n"


def _histogram(name: str, meaning: str, by_path: dict[str, Durations]) -> Iterable[str]:
    name = f"agentevo_gateway_{name}"
    yield f"# TYPE {name} histogram"
    yield f"# HELP {name} {meaning}"
    for path, durations in sorted(by_path.items()):
        yield from durations.lines(name, f'path="{path}"')
