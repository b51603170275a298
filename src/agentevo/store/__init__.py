"""Where tasks, trajectories and steps live. Importing this loads no database driver."""

from agentevo.store.export import export_jsonl
from agentevo.store.store import (
    Lease,
    Split,
    StepRecord,
    Store,
    StoredTrajectory,
    StoreOpener,
    TaskState,
    TrajectoryFilter,
    TrajectoryState,
    TrajectorySummary,
    open_store,
    stores,
)

__all__ = [
    "Lease",
    "Split",
    "StepRecord",
    "Store",
    "StoreOpener",
    "StoredTrajectory",
    "TaskState",
    "TrajectoryFilter",
    "TrajectoryState",
    "TrajectorySummary",
    "export_jsonl",
    "open_store",
    "stores",
]
