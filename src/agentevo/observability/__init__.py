"""Observes a run: numbers on disk, the live view, early warnings, pictures and the report.

Importing this package loads neither torch nor rich nor matplotlib.
"""

from agentevo.observability.finding_monitor import FindingMonitor, RunWarning
from agentevo.observability.live import LiveView
from agentevo.observability.metrics import (
    EvaluationMetrics,
    MetricsLog,
    MetricsRow,
    read_evaluations,
    read_metrics,
)
from agentevo.observability.plots import write_plots
from agentevo.observability.report import (
    report_at_end,
    report_from_run,
    sample_trajectories,
    write_report,
)
from agentevo.observability.trajectory_view import Decode, render_trajectory

__all__ = [
    "Decode",
    "EvaluationMetrics",
    "FindingMonitor",
    "LiveView",
    "MetricsLog",
    "MetricsRow",
    "RunWarning",
    "read_evaluations",
    "read_metrics",
    "render_trajectory",
    "report_at_end",
    "report_from_run",
    "sample_trajectories",
    "write_plots",
    "write_report",
]
