"""How long a step took and what it logged, without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import torch

Scalar = float | int | torch.Tensor

POLL_S = 0.0001


class StepClock(Protocol):
    """Times one step and keeps its logged numbers; after `is_done` it may start the next."""

    source: str

    def start(self) -> None: ...

    def stop(self, values: Mapping[str, Scalar]) -> None:
        """Ends the step; later changes of the tensors in `values` do not count."""
        ...

    def is_done(self) -> bool:
        """Whether the results are there; never waits. Raises what the device reports (RuntimeError)."""
        ...

    def wall_ns(self) -> int: ...

    def numbers(self) -> dict[str, float]:
        """The logged values, which are let go: to be called once."""
        ...


def wait_for(clock: StepClock, timeout_s: float | None = None) -> bool:
    """Whether the results came within `timeout_s` (None: waits as long as it takes).

    Polls, because a thread inside cudaEventSynchronize handles no SIGTERM: a rank whose collective hangs could not
    save its recording.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not clock.is_done():
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


class HostClock:
    """The time of the thread that runs the step."""

    source = "host"
    __slots__ = ("_started_ns", "_stopped_ns", "_values")

    def start(self) -> None:
        self._started_ns = time.perf_counter_ns()

    def stop(self, values: Mapping[str, Scalar]) -> None:
        self._stopped_ns = time.perf_counter_ns()
        self._values: Mapping[str, Scalar] = values

    def is_done(self) -> bool:
        return True

    def wall_ns(self) -> int:
        return self._stopped_ns - self._started_ns

    def numbers(self) -> dict[str, float]:
        values, self._values = self._values, {}
        return {name: float(value) for name, value in values.items()}


class CudaClock:
    """Two events on the current stream: the device's time from reaching the step to ending its last work there.

    A host that runs ahead only knows when work was enqueued. Consecutive steps do not overlap, since a start event
    fires when the work before it has ended. Work on a side stream counts once the current one waits for it, as FSDP2
    and torch's collectives make it do by the end of a step.
    """

    source = "cuda_events"
    __slots__ = ("_buffers", "_device", "_end", "_start", "_values")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._buffers: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        self._start.record(torch.cuda.current_stream(self._device))

    def stop(self, values: Mapping[str, Scalar]) -> None:
        self._values: Mapping[str, Scalar] = {name: self._to_host(name, value) for name, value in values.items()}
        self._end.record(torch.cuda.current_stream(self._device))

    def _to_host(self, name: str, value: Scalar) -> Scalar:
        """`value` for later: a tensor of this device on its way into pinned memory, in front of the end event.

        The same type and shape on both sides, so that the copy allocates nothing on the device.
        """
        if not isinstance(value, torch.Tensor) or value.device != self._device:
            return value
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype is not value.dtype or buffer.shape != value.shape:
            buffer = self._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        return buffer.copy_(value, non_blocking=True)

    def is_done(self) -> bool:
        done: bool = self._end.query()
        return done

    def wall_ns(self) -> int:
        milliseconds: float = self._start.elapsed_time(self._end)
        return round(milliseconds * 1e6)

    def numbers(self) -> dict[str, float]:
        values, self._values = self._values, {}
        return {name: float(value) for name, value in values.items()}
