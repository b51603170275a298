"""The store of tasks, trajectories and steps. Importing this package loads no database driver."""

from agentevo.store.calls import CallFilter, CallState, StoredCall
from agentevo.store.clock import Clock, Now
from agentevo.store.export import check_export, export_jsonl, export_store, import_store
from agentevo.store.opening import StoreOpener, open_store, stores
from agentevo.store.records import (
    Emptied,
    Lease,
    RetryPolicy,
    Split,
    StepRecord,
    StoredTask,
    StoredTrajectory,
    TaskEvent,
    TaskState,
    TrajectoryFilter,
    TrajectoryState,
    TrajectorySummary,
)
from agentevo.store.store import Store

__all__ = [
    "CallFilter",
    "CallState",
    "Clock",
    "Emptied",
    "Lease",
    "Now",
    "RetryPolicy",
    "Split",
    "StepRecord",
    "Store",
    "StoreOpener",
    "StoredCall",
    "StoredTask",
    "StoredTrajectory",
    "TaskEvent",
    "TaskState",
    "TrajectoryFilter",
    "TrajectoryState",
    "TrajectorySummary",
    "check_export",
    "export_jsonl",
    "export_store",
    "import_store",
    "open_store",
    "stores",
]
