"""A pipeline: a small graph of stages, each an ordinary run with its own folder.

    pipeline = load_pipeline("r1")                     # or a file; or build_pipeline(mapping)
    results = run_pipeline(pipeline, resume=False)     # blocks; pipeline.json records the state

`stage_kinds.register(NAME)` adds a kind of stage (see `StageKind`). Another package can list a kind
under the entry-point group `agentevo.stage_kinds`. More: docs/pipelines.md.
"""

from agentevo_evolve.pipeline.kinds import Job, NoOptions, StageKind, StageResult, stage_kinds
from agentevo_evolve.pipeline.plan import Instance, PipelinePlan
from agentevo_evolve.pipeline.reading import (
    Pipeline,
    build_pipeline,
    load_pipeline,
    packaged_pipelines,
)
from agentevo_evolve.pipeline.runner import StageChoice, run_pipeline
from agentevo_evolve.pipeline.schema import PipelineConfig, StageConfig
from agentevo_evolve.pipeline.state import PipelineState, StageState, read_state

__all__ = [
    "Instance",
    "Job",
    "NoOptions",
    "Pipeline",
    "PipelineConfig",
    "PipelinePlan",
    "PipelineState",
    "StageChoice",
    "StageConfig",
    "StageKind",
    "StageResult",
    "StageState",
    "build_pipeline",
    "load_pipeline",
    "packaged_pipelines",
    "read_state",
    "run_pipeline",
    "stage_kinds",
]
