"""The names that this package adds to `agentevo list`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentevo.cli.listings import Row, first_comment


def pipelines() -> list[Row]:
    """Packaged pipelines; the line is the first paragraph of each file's comment."""
    from agentevo_evolve.pipeline import packaged_pipelines

    return [(name, first_comment(path)) for name, path in packaged_pipelines().items()]


def stages() -> list[Row]:
    """Kinds of stages."""
    from agentevo_evolve.pipeline import stage_kinds

    return [(name, stage_kinds.get(name).about) for name in stage_kinds.names()]


LISTS: Mapping[str, Callable[[], list[Row]]] = {"pipelines": pipelines, "stages": stages}
KINDS: Mapping[str, str] = {
    "pipelines": "several runs as one, for `agentevo pipeline NAME`",
    "stages": "what a stage of a pipeline does: its kind",
}
