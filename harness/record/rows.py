"""Step rows on their way to the file: each is written once the device has ended its step, in order."""

from __future__ import annotations

from harness.record.ending import one_line
from harness.record.files import RankFiles
from harness.record.step import Step
from harness.record.throughput import Throughput
from harness.record.timing import wait_for

# After a failure the device may never end what was given to it, and a rank that is being stopped has little time.
WAIT_AFTER_FAILURE_S = 5.0


class Rows:
    """At most one row waits, that of the last step, and it is written in `add`: there the device has the work of
    another step before it, so neither waiting for the last one nor writing lets it run dry."""

    def __init__(self, files: RankFiles, throughput: Throughput) -> None:
        self._files = files
        self._throughput = throughput
        self._last: Step | None = None

    def add(self, step: Step) -> None:
        """A step that has ended on the host. Raises what the device reports (RuntimeError) and OSError."""
        self.finish()
        self._last = step
        if step.clock.is_done():
            self._write(finished=True)

    def finish(self) -> None:
        """Writes the row that waits, as soon as the device is done; raises as `add`."""
        if self._last is not None:
            wait_for(self._last.clock)
            self._write(finished=True)

    def rescue(self, timeout_s: float = WAIT_AFTER_FAILURE_S) -> str | None:
        """Writes the row that waits after a failure, without the device's figures if it cannot give them any more;
        returns why it could not. Raises OSError."""
        if self._last is None:
            return None
        number, reason = self._last.number, None
        try:
            finished = wait_for(self._last.clock, timeout_s)
            if not finished:
                reason = f"the device had not ended step {number} {timeout_s:g} s after the failure"
        except RuntimeError as error:
            finished = False
            reason = f"the device did not end step {number}: {one_line(error)}"
        self._write(finished=finished)
        return reason

    def _write(self, *, finished: bool) -> None:
        step, self._last = self._last, None
        assert step is not None
        self._files.append_step(step.row(self._throughput, finished=finished))
