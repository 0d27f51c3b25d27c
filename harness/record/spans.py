"""The recorder's `with` blocks. Classes, since the generators of contextlib.contextmanager cost several times as
much."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.profiler import record_function

from harness.record.step import Phase, Step
from harness.record.windows import Windows


class StepSpan:
    __slots__ = ("_close", "_open")

    def __init__(self, open_step: Callable[[], None], close_step: Callable[[BaseException | None], None]) -> None:
        self._open = open_step
        self._close = close_step

    def __enter__(self) -> None:
        self._open()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(error)


class PhaseSpan:
    """Peaks and host time of one passage of a phase; without a step it does nothing."""

    __slots__ = ("_name", "_phase", "_range", "_relabel", "_started_ns", "_step", "_windows")

    def __init__(self, name: str, step: Step | None, windows: Windows, relabel: Callable[[], None]) -> None:
        self._name = name
        self._step = step
        self._windows = windows
        self._relabel = relabel

    def __enter__(self) -> None:
        step, windows = self._step, self._windows
        if step is None:
            return
        step.take(windows.memory.read())
        phase = step.phases.get(self._name)
        if phase is None:
            phase = step.phases[self._name] = Phase()
        self._phase = phase
        self._range = record_function(self._name) if windows.annotating else None
        if self._range is not None:
            self._range.__enter__()
        step.open_phases.append(self._name)
        if windows.labelling:
            self._relabel()
        self._started_ns = time.perf_counter_ns()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        step, windows = self._step, self._windows
        if step is None:
            return
        self._phase.wall_ns += time.perf_counter_ns() - self._started_ns
        self._phase.count += 1
        if error is not None and step.failed_phase is None:
            step.failed_phase = self._name
        step.take(windows.memory.read())
        step.open_phases.pop()
        if windows.labelling:
            self._relabel()
        if self._range is not None:
            self._range.__exit__(None, None, None)


class CategorySpan:
    __slots__ = ("_categories", "_name", "_relabel")

    def __init__(self, name: str, categories: list[str], relabel: Callable[[], None]) -> None:
        self._name = name
        self._categories = categories
        self._relabel = relabel

    def __enter__(self) -> None:
        self._categories.append(self._name)
        self._relabel()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._categories.pop()
        self._relabel()
