"""A program: with how many busy streams of a new CUDA context one more is held up. Prints JSON objects, one a line,
that `probes.queues` makes a number of queues of; what was printed before it hangs or dies stays good.

Stands alone in a process of its own, since CUDA_DEVICE_MAX_CONNECTIONS counts when the context is made. Needs torch's
CUDA build and no compiler: torch has a kernel that spins for a number of clock cycles, and the streams come from the
driver, since torch's own pool has 32. Nothing waits for the host, so no order of launches can dead-lock.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from harness.doctor.cuda_facts import CudaError, Driver
from harness.worker import die_with_parent

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
NON_BLOCKING = 1  # cuda.h: CU_STREAM_NON_BLOCKING, no implicit order with the default stream
CONTROLS = 3
# What others wait for must last longer than launching all of them takes, several times, since a busy host may stall.
SLEEP_NS, LAUNCHES, LONGEST_SLEEP_NS = 5_000_000, 4, 50_000_000
WORK_NS = 500_000
CALIBRATION_CYCLES = 20_000_000
PATIENCE_S = 5.0
IMPORT_S, CONTEXT_S, SHORT_S = 120.0, 60.0, 20.0


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


@contextmanager
def phase(name: str, limit_s: float) -> Iterator[None]:
    """Ends the process, whatever it hangs in, if the block takes longer."""
    say(phase=name)
    timer = threading.Timer(limit_s, _give_up, (f"{name}: no end within {limit_s:.0f} s",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(reason: str) -> None:
    say(error=reason)
    os._exit(0)  # a queue that hangs would keep an ordinary exit from ending


class Streams:
    """Streams of the driver's on cuda:0, each with an event after its last work. Needs a current context."""

    def __init__(self, driver: Driver, count: int) -> None:
        import torch

        self._cuda = torch.cuda
        device = torch.device("cuda", 0)
        self._streams = []
        for _ in range(count):
            handle = ctypes.c_void_p()
            driver.call("cuStreamCreate", ctypes.byref(handle), NON_BLOCKING)
            self._streams.append(torch.cuda.ExternalStream(handle.value, device=device))
        self._done = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        self._start, self._released = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cycles_per_ns = 1.0

    def launch(self, number: int, cycles: int) -> None:
        """A kernel of one thread that spins for so long on the stream, and its event."""
        self._cuda.set_stream(self._streams[number])
        self._cuda._sleep(max(1, cycles))
        self._done[number].record(self._streams[number])

    def launch_all(self) -> int:
        """The host's nanoseconds for work on every stream."""
        began = time.perf_counter_ns()
        for number in range(len(self._streams)):
            self.launch(number, 1)
        took = time.perf_counter_ns() - began
        self._await(self._done)
        return took

    def calibrate(self) -> None:
        """Cycles of the spinning kernel per nanosecond, at the clock that the GPU has when it works."""
        for _ in range(2):  # the first wakes it
            self._sleep(0, CALIBRATION_CYCLES)
            self._await([self._released])
            self._cycles_per_ns = CALIBRATION_CYCLES / (self._start.elapsed_time(self._released) * 1e6)

    def observe(
        self, sleeper: int, waiting: Sequence[int], others: Sequence[int], sleep_ns: int, work_ns: int = 0
    ) -> dict[str, Any]:
        """One stream sleeps, some wait for that, and the others, launched after them, depend on nothing. When each
        ended, in nanoseconds since the sleep began."""
        self._sleep(sleeper, round(sleep_ns * self._cycles_per_ns))
        for number in waiting:
            self._streams[number].wait_event(self._released)
            self.launch(number, 1)
        for number in others:
            self.launch(number, round(work_ns * self._cycles_per_ns))
        in_time = not self._released.query()
        started = [*waiting, *others]
        self._await([self._released, *(self._done[number] for number in started)])
        return {
            "released_ns": self._since_start(self._released),
            "in_time": in_time,
            "ended_ns": {number: self._since_start(self._done[number]) for number in started},
        }

    def _sleep(self, number: int, cycles: int) -> None:
        stream = self._streams[number]
        self._cuda.set_stream(stream)
        self._start.record(stream)
        self._cuda._sleep(cycles)
        self._released.record(stream)

    def _await(self, events: Sequence[Any]) -> None:
        """Polls, so that a device that hangs is noticed."""
        ends = time.monotonic() + PATIENCE_S
        for event in events:
            while not event.query():
                if time.monotonic() > ends:
                    raise TimeoutError(f"work on the GPU did not end within {PATIENCE_S:.0f} s")
                time.sleep(5e-5)

    def _since_start(self, event: Any) -> int:
        milliseconds: float = self._start.elapsed_time(event)
        return round(milliseconds * 1e6)


def round_of(streams: Streams, most: int, sleep_ns: int, draw: random.Random) -> dict[str, Any]:
    """Every number of streams from 2 to `most` once, and the controls between them, in an order that is drawn."""
    order = [*range(2, most + 1), *[None] * CONTROLS]
    draw.shuffle(order)
    latencies, controls = [], []
    for size in order:
        if size is None:
            controls.append(control_of(streams, draw.sample(range(1, most), most - 1), sleep_ns))
        else:
            latencies.append(latency_of(streams, size, sleep_ns))
    return {"latencies": latencies, "controls": controls}


def latency_of(streams: Streams, size: int, sleep_ns: int) -> dict[str, Any]:
    """Of the first `size` streams one sleeps, the last works, and those between wait."""
    row = streams.observe(0, range(1, size - 1), [size - 1], sleep_ns, WORK_NS)
    return {"streams": size, **row, "ended_ns": row["ended_ns"][size - 1]}


def control_of(streams: Streams, others: Sequence[int], sleep_ns: int) -> dict[str, Any]:
    """One stream sleeps, the others work, none waits: how many ended after the sleep."""
    row = streams.observe(0, [], others, sleep_ns)
    late = sum(ended >= row["released_ns"] for ended in row["ended_ns"].values())
    return {"others": len(others), "late": late, "in_time": row["in_time"]}


def measure(most: int, rounds: int) -> None:
    say(setting=os.environ.get(VARIABLE))
    with phase("importing torch", IMPORT_S):
        import torch

        say(torch=str(torch.__version__), cuda=torch.version.cuda)
    with phase("making the CUDA context", CONTEXT_S):
        torch.cuda.init()
        torch.zeros(1, device="cuda:0")
        torch.cuda.synchronize()
        driver = Driver()
        say(device=torch.cuda.get_device_name(0), driver_cuda=driver.number("cuDriverGetVersion"))
    with phase("warming up", SHORT_S):  # loads the kernel, starts every stream, raises the clock
        streams = Streams(driver, most)
        streams.launch_all()
        streams.calibrate()
        launch_ns = min(streams.launch_all() for _ in range(3))
        sleep_ns = min(max(SLEEP_NS, LAUNCHES * launch_ns), LONGEST_SLEEP_NS)
        say(streams=most, launch_ns=launch_ns, sleep_ns=sleep_ns)
    draw = random.Random(0)
    found = []
    for number in range(rounds):
        with phase(f"round {number + 1} of {rounds}", SHORT_S + 3e-9 * (sleep_ns + WORK_NS) * (most + CONTROLS)):
            found.append(round_of(streams, most, sleep_ns, draw))
            say(rounds=found)  # all until now: of lines with the same name the last one counts
    say(phase="complete")


def main() -> None:
    die_with_parent(signal.SIGKILL)
    parser = argparse.ArgumentParser()
    parser.add_argument("streams", type=int, help="the largest number of them, at least 2")
    parser.add_argument("rounds", type=int)
    args = parser.parse_args()
    try:
        measure(args.streams, args.rounds)
    except (RuntimeError, AssertionError, OSError, ImportError, CudaError) as error:
        # RuntimeError: of CUDA; AssertionError: a torch without CUDA; TimeoutError is an OSError.
        _give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
    sys.stdout.flush()
    os._exit(0)  # destroying the context could hang


if __name__ == "__main__":
    main()
