"""The terminal output during a run.

On a terminal, a panel stays at the bottom (phase, progress and time left, learning signals,
throughput, the last warnings), and evaluations and notes scroll above it. Anywhere else (CI, a log
file, a pipe), each step is one plain ASCII line, complete in itself.

rich's own thread draws the panel. It reads only `LiveView._state`, a frozen snapshot that the run's
thread replaces as a whole. So no lock is needed, and a slow terminal never delays training.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

import msgspec

from agentevo.observability.current_activity import Moment
from agentevo.observability.metrics import EvaluationMetrics, read_evaluations
from agentevo.observability.pages.words import sparkline
from agentevo.runtime.console import format_duration, open_console, print_line
from agentevo.runtime.progress import Hidden, hidden

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

HEARTBEAT_S = 15.0
"""In plain mode, a phase that was shown before is printed again only after this many seconds
without output."""


def format_drops(
    num_in: float | None, dropped: Mapping[str, int], masked: float | None = None
) -> str:
    """`32 in, 4 dropped: 4 zero-variance, 2 masked: too old`, with the reasons in falling order.
    `masked`: the number of trajectories whose tokens are all too old to be trained on."""
    too_old = f", {masked:.0f} masked: too old" if masked else ""
    reasons = sorted(
        ((count, reason) for reason, count in dropped.items() if count),
        key=lambda pair: (-pair[0], pair[1]),
    )
    came = "" if num_in is None else f"{num_in:.0f} in, "
    if not reasons:
        return f"{came}none dropped{too_old}"

    texts = ", ".join(f"{count} {reason.replace('_', '-')}" for count, reason in reasons)
    return f"{came}{sum(dropped.values())} dropped: {texts}{too_old}"


def step_facts(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """The most watched metrics of a step, as a map from label to text. A missing metric is left
    out, and a metric that is not a number is `nan`."""
    shown = [
        ("reward", "critic/score/mean", "{:.3f}"),
        ("success", "train/success", "{:.0%}"),
        ("loss", "sft/loss", "{:.3f}"),
        (
            "tok/s",
            _first(metrics, "perf/throughput", "perf/tokens_per_s_logical", "engine/tokens_per_s"),
            "{:,.0f}",
        ),
        ("trained tok/s", "perf/tokens_per_s_distinct", "{:,.0f}"),
        ("MFU", "perf/mfu", "{:.1%}"),
        ("s/step", _first(metrics, "timing_s/step", "perf/time_per_step"), "{:.1f}"),
        ("grad", "actor/grad_norm", "{:.2f}"),
        ("entropy", "actor/entropy", "{:.2f}"),
        ("kl", "actor/ppo_kl", "{:.1e}"),
        ("kl to teacher", "distillation/reverse_kl", "{:.2f}"),
        ("clipped", "actor/pg_clipfrac", "{:.1%}"),
        ("length", "response_length/mean", "{:.0f}"),
        ("merged", "agent/merge_rate", "{:.0%}"),
        ("critic predicts", "critic/vf_explained_var", "{:.0%}"),
        ("process reward right", "process_reward/accuracy", "{:.0%}"),
        ("pairs right", "preference/rewards/accuracies", "{:.0%}"),
        ("proposed", "selfplay/proposed", "{:.0f}"),
        ("valid", "selfplay/valid", "{:.0%}"),
        ("questions", "selfplay/questions", "{:.0f}"),
        ("solved", "selfplay/success_rate", "{:.0%}"),
        ("at the edge", "selfplay/at_edge", "{:.0%}"),
    ]
    facts = {}
    for label, key, pattern in shown:
        if key in metrics:
            value = metrics[key]
            facts[label] = "nan" if value is None or math.isnan(value) else pattern.format(value)

    return facts


def self_play_words(facts: Mapping[str, str]) -> str:
    """`8 proposed, 75% valid, 5 questions, 41% solved, 60% at the edge`, from `step_facts`. Empty
    in a run without self-play."""
    labels = ("proposed", "valid", "questions", "solved", "at the edge")
    return ", ".join(f"{facts[label]} {label}" for label in labels if label in facts)


def _first(metrics: Mapping[str, float | None], *keys: str) -> str:
    return next((key for key in keys if key in metrics), keys[0])


def evaluation_rows(result: EvaluationMetrics) -> list[tuple[str, str, str]]:
    """(player, success, reward) as texts: the agent, and the two reference players."""

    def cell(value: float | None, pattern: str) -> str:
        return "" if value is None else pattern.format(value)

    rows = [
        (
            "agent, greedy",
            cell(result.success_greedy, "{:.1%}"),
            cell(result.reward_greedy, "{:.3f}"),
        ),
        (
            "agent, sampled",
            cell(result.success_sampled, "{:.1%}"),
            cell(result.reward_sampled, "{:.3f}"),
        ),
        ("random player", cell(result.random, "{:.1%}"), ""),
        ("optimal player", cell(result.optimal, "{:.1%}"), ""),
    ]
    return [row for row in rows if row[1] or row[2]]


class ViewState(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a frame."""

    phase: str = "starting"
    detail: str = ""
    phase_since: float = 0.0
    """Unix time."""
    step: int = 0
    total: int = 0
    metrics: Mapping[str, float | None] = {}
    dropped: Mapping[str, int] = {}
    scores: tuple[float, ...] = ()
    """The mean rewards of the last steps, for the sparkline."""
    evaluations: tuple[EvaluationMetrics, ...] = ()
    warnings: tuple[str, ...] = ()
    eta_s: float | None = None
    """The time left when the last step ended, in seconds."""
    last_step_at: float = 0.0
    started_at: float = 0.0


def _nowhere(text: str) -> None:
    """Discards the text."""


def _discarding_stream(stream: TextIO) -> TextIO:
    """A replacement for a stream that can't be written any more. It discards the remaining text."""
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 (for the rest of the run)
    with suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), stream.fileno())
    return nowhere


class LiveView:
    """A context manager. The run's own thread calls all methods. `plain=None`: plain lines unless
    `stream` is a terminal."""

    def __init__(
        self,
        title: str,
        *,
        stream: TextIO | None = None,
        plain: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self.record: Callable[[str], None] = _nowhere
        """Receives the shown lines as plain text."""
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._state = ViewState(started_at=clock(), phase_since=time.time())
        self._step_ends: deque[float] = deque(maxlen=20)
        self._seen_phases: set[str] = set()
        self._last_print_at = clock()
        self._console = open_console(self._stream, plain)
        self._live: Live | None = None
        self._bars = ExitStack()
        """Closes the panel. Progress bars are drawn again."""
        self._hidden = Hidden()

    @property
    def plain(self) -> bool:
        return self._console is None

    def __enter__(self) -> Self:
        self._hidden = self._bars.enter_context(hidden())
        if self._console is not None:
            from rich.live import Live

            self._live = Live(
                get_renderable=self._panel, console=self._console, refresh_per_second=4
            )
            self._live.start()

        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._bars.close()
        if self._live is not None:
            self._change(phase="stopped" if kind is not None else "done", detail="", eta_s=None)
            self._live.stop()
            self._live = None

    def phase(self, name: str, detail: str = "") -> None:
        """Sets what the run does now, such as `phase("cold start", "epoch 2/3")`. It may be called
        many times in a step."""
        self._enter_phase(name, detail)
        if name not in self._seen_phases or (
            detail and self._clock() - self._last_print_at >= HEARTBEAT_S
        ):
            self._say(f"-- {name}: {detail}" if detail else f"-- {name}")
        self._seen_phases.add(name)

    def set_progress(self, step: int, total: float) -> None:
        """Sets the progress to `step` of `total` steps. Infinity means an unknown total."""
        self._change(step=step, total=int(total) if math.isfinite(total) else 0)

    def moment(self) -> Moment:
        """The current activity of the run. Any thread may call this."""
        state = self._state
        bar = self._hidden.newest()
        total = None if bar is None else bar.total
        done = None
        if bar is not None and total is not None:
            with suppress(OSError):  # the file may be gone by now
                done = bar.counted_now()

        return Moment(
            phase=state.phase,
            detail=state.detail,
            since=state.phase_since,
            step=state.step,
            planned=state.total or None,
            done=done,
            total=total,
            unit="" if bar is None else bar.unit,
        )

    def step(
        self, step: int, total: int, metrics: Mapping[str, float | None], dropped: Mapping[str, int]
    ) -> None:
        """Shows that step `step` of `total` has ended. `dropped` maps the reasons why trajectories
        were left out to their numbers."""
        now = self._clock()
        self._step_ends.append(now)
        score = metrics.get("critic/score/mean")
        self._change(
            step=step,
            total=total,
            metrics=dict(metrics),
            dropped=dict(dropped),
            scores=(*self._state.scores[-29:], score)
            if score is not None and math.isfinite(score)
            else self._state.scores,
            eta_s=self._time_left(step, total, metrics),
            last_step_at=now,
        )

        self._say(self._step_line())

    def evaluation(
        self, step: int, results: Mapping[str, float | None], notes: Sequence[str] = ()
    ) -> None:
        """Shows the `val-core/{environment}/...` entries of `results`, measured at `step`, with the
        notes below."""
        evaluations = read_evaluations(results)
        self._change(evaluations=tuple(evaluations))
        for result in evaluations:
            number = "" if result.n is None else f", {result.n:.0f} task{'s' * (result.n != 1)}"
            title = f"held-out evaluation at step {step}: {result.environment}{number}"
            rows = [("", "success", "reward"), *evaluation_rows(result)]
            lines = [
                f"  {player:<15}{success:>8}{reward:>9}".rstrip()
                for player, success, reward in rows
            ]
            self._say("\n".join([title, *lines]))
            if self._console is not None:
                self._console.print(_evaluation_text(title, lines), highlight=False)

        for text in notes:
            self.note(f"  {text}")

    def warn(self, text: str) -> None:
        """Shows a warning, which stays in the panel until three newer ones replace it."""
        self._change(warnings=(*self._state.warnings[-2:], text))
        self._say(f"WARNING {text}")

    def note(self, text: str) -> None:
        """Shows a line, such as a checkpoint's path."""
        self._say(text)
        if self._console is not None:
            from rich.text import Text

            self._console.print(Text(text))

    def _enter_phase(self, name: str, detail: str) -> None:
        same = (name, detail) == (self._state.phase, self._state.detail)
        since = self._state.phase_since if same else time.time()
        self._change(phase=name, detail=detail, phase_since=since)

    def _change(self, **fields: object) -> None:
        self._state = msgspec.structs.replace(self._state, **fields)

    def _say(self, text: str) -> None:
        """Records the text, and prints it if nothing is drawn."""
        self.record(text)
        self._last_print_at = self._clock()
        if not self.plain:
            return

        try:
            print_line(self._stream, text)
        except (OSError, ValueError):  # the stream's reader is gone, or its file is full
            self._stream = _discarding_stream(self._stream)

    def _time_left(
        self, step: int, total: int, metrics: Mapping[str, float | None]
    ) -> float | None:
        """The time left at the pace of the last steps, including evaluations and checkpoints
        between them."""
        if len(self._step_ends) >= 2:
            return (
                (total - step)
                * (self._step_ends[-1] - self._step_ends[0])
                / (len(self._step_ends) - 1)
            )

        pace = metrics.get("timing_s/step")
        return None if pace is None else (total - step) * pace

    def _step_line(self) -> str:
        state = self._state
        facts = step_facts(state.metrics)

        parts = [f"step {state.step:>{len(str(state.total))}}/{state.total}"]
        parts += [
            f"{label} {facts[label]}" for label in ("reward", "success", "loss") if label in facts
        ]
        if "sft/loss" not in state.metrics:
            parts.append(_drops(state))
        if proposals := self_play_words(facts):
            parts.append(proposals)

        parts += [
            f"{facts[label]} {label}" for label in ("tok/s", "MFU", "s/step") if label in facts
        ]
        if state.eta_s is not None:
            parts.append(f"eta {format_duration(state.eta_s)}")

        parts += [
            f"{label} {facts[label]}"
            for label in (
                "grad",
                "entropy",
                "critic predicts",
                "process reward right",
                "pairs right",
            )
            if label in facts
        ]
        return " | ".join(parts)

    def _panel(self) -> RenderableType:
        return _draw(self.title, self._state, self._clock())


def _evaluation_text(title: str, lines: Sequence[str]) -> RenderableType:
    from rich.text import Text

    styled = [(f"\n{line}", "cyan" if "agent, " in line else "dim") for line in lines]
    return Text.assemble((title, "bold"), *styled)


def _drops(state: ViewState) -> str:
    masked = state.metrics.get("staleness/masked_trajectories")
    return format_drops(state.metrics.get("rollout/in"), state.dropped, masked)


def _draw(title: str, state: ViewState, now: float) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    time_left = (
        ""
        if state.eta_s is None
        else f"about {format_duration(max(state.eta_s - (now - state.last_step_at), 0))} left"
    )
    progress = Table.grid(padding=(0, 2), expand=True)
    progress.add_column(no_wrap=True)
    progress.add_column(ratio=1)
    progress.add_column(no_wrap=True, justify="right")
    progress.add_row(
        f"step {state.step}/{state.total or '?'}",
        ProgressBar(total=max(state.total, 1), completed=state.step),
        time_left,
    )

    facts = step_facts(state.metrics)
    learning = Text()
    optimisation = Text()
    speed = Text()

    for label in ("success", "reward", "loss", "entropy", "grad", "kl", "clipped", "length"):
        if label in facts:
            line = learning if label in ("success", "reward", "loss") else optimisation
            line.append(f"{label} ", "dim").append(facts[label], "bold").append("   ")

    learning.append(sparkline(state.scores), "green")
    for label in ("tok/s", "trained tok/s", "MFU", "s/step"):
        if label in facts:
            speed.append(facts[label], "bold").append(f" {label}   ", "dim")

    if state.metrics and "sft/loss" not in state.metrics:
        speed.append(
            _drops(state),
            "yellow" if any(state.dropped.values()) else "dim",
        )

    lines: list[RenderableType] = [
        progress,
        *(line for line in (learning, optimisation, Text(self_play_words(facts)), speed) if line),
    ]
    for result in state.evaluations:
        players = [
            (player.removeprefix("agent, ").removesuffix(" player"), success)
            for player, success, _ in evaluation_rows(result)
        ]
        scores = "   ".join(f"{player} {success}" for player, success in players if success)
        lines.append(Text.assemble((f"held-out {result.environment}  ", "dim"), scores))

    lines += [Text(f"! {text}", "yellow") for text in state.warnings]
    heading = Text.assemble(
        (title, "bold"), "  ", state.phase, (f"  {state.detail}" if state.detail else "", "dim")
    )
    return Panel(
        Group(*lines),
        title=heading,
        title_align="left",
        subtitle=format_duration(now - state.started_at),
        subtitle_align="right",
    )
