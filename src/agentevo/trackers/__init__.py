"""Where a run's numbers go beside its own folder: TensorBoard, W&B, MLflow, SwanLab, trackio, and
those of other packages.

    run's thread ──► Tracking ──► one Delivery (thread, bounded queue) for each ──► Tracker

The run's thread never waits for a tracker but for `flush_s` at its end. What is delivered is
committed: a row for each step, once, also by a run that is resumed.
"""

from agentevo.trackers.tracker import (
    TrackingBegun,
    TrackedRow,
    TrackedTable,
    TrackedRun,
    Tracker,
    TrackerConfig,
    trackers,
)
from agentevo.trackers.tracking import Tracking

__all__ = [
    "TrackingBegun",
    "TrackedRow",
    "TrackedTable",
    "TrackedRun",
    "Tracker",
    "TrackerConfig",
    "Tracking",
    "trackers",
]
