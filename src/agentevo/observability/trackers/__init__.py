"""Where a run's numbers go in addition to its folder: TensorBoard, W&B, MLflow, SwanLab, trackio,
and trackers of other packages.

    run's thread ──► Tracking ──► one Delivery (thread, bounded queue) for each ──► Tracker

The run's thread never waits for a tracker, except for `flush_s` seconds at its end. Only committed
rows are delivered. Each step is delivered once, even in a resumed run.
"""

from agentevo.observability.trackers.tracker import (
    TrackedRow,
    TrackedRun,
    TrackedTable,
    Tracker,
    TrackerConfig,
    TrackingBegun,
    trackers,
)
from agentevo.observability.trackers.tracking import Tracking

__all__ = [
    "TrackedRow",
    "TrackedRun",
    "TrackedTable",
    "Tracker",
    "TrackerConfig",
    "Tracking",
    "TrackingBegun",
    "trackers",
]
