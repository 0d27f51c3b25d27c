"""One rank of a launched run: `python -m harness.worker DIR`, started by torchrun or, to rehearse it, by the launcher
itself, which say which rank it is.

Reads DIR/config.json, trains, and leaves every way of ending in the recording: stdout and stderr in the rank's log
from the first line on, an exception as one line in ranks/rank{r}.json. SIGTERM is the recorder's to handle: it
unwinds the loop and writes what it has; before there is a recorder, nothing is lost.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from harness import recording
from harness.config_json import from_json
from harness.errors import InputError, MeshscopeError

# Marks every process of one launch, so that its launcher finds those that outlived their parent.
LAUNCH_ID_VARIABLE = "MESHSCOPE_LAUNCH_ID"
# Makes a rank write the stack of all its threads to its log; sent to ranks that hang.
STACKS_SIGNAL = signal.SIGUSR1
EXIT_TERMINATED = 128 + signal.SIGTERM


def main(directory: Path) -> None:
    rank = int(os.environ["RANK"])
    prepare(directory, rank)
    from_json((directory / "config.json").read_bytes()).build(directory).train()


def prepare(directory: Path, rank: int) -> None:
    """What a rank sets up before anything that can fail or hang."""
    die_with_parent(signal.SIGKILL)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun and os.environ.get(LAUNCH_ID_VARIABLE) and not _parent_is_of_this_launch():
        sys.exit(EXIT_TERMINATED)  # torchrun died before the line above took effect
    _capture_output(recording.log_path(directory, rank))
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    sys.excepthook = _failure_recorder(directory, rank)


def die_with_parent(signal_number: signal.Signals) -> None:
    """Asks Linux to send this process a signal when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    torchrun gives each rank a session of its own, so no signal to its group reaches them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal_number), 0, 0, 0)


def _parent_is_of_this_launch() -> bool:
    mark = f"{LAUNCH_ID_VARIABLE}={os.environ[LAUNCH_ID_VARIABLE]}".encode()
    environment = Path(f"/proc/{os.getppid()}/environ")
    try:
        return mark in environment.read_bytes().split(b"\0")
    except OSError:  # no /proc here, or the parent went away just now: then the signal above has been sent
        return True


def _capture_output(log: Path) -> None:
    """Points file descriptors 1 and 2 at one file, so that C++ warnings are kept too and the order is true."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _failure_recorder(
    directory: Path, rank: int
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # torch.distributed calls this hook with sys.stderr replaced, to print what it wrote after it returns.
        traceback.print_exception(kind, error, trace, file=sys.__stderr__)
        path = recording.rank_path(directory, rank)
        try:
            known = recording.read_json(path)
        except InputError:  # failed before the recorder existed
            known = {"rank": rank, "pid": os.getpid()}
        if known.get("end_state") is None:
            line = str(error) if isinstance(error, MeshscopeError) else exception_line(error)
            failed = {"end_state": "failed", "exception": line, "failed_unix_ns": time.time_ns()}
            recording.write_json(path, {**known, **failed})
        sys.stdout.flush()
        os._exit(1)  # tearing down a process group whose peers wait in a collective can hang

    return record


def exception_line(error: BaseException) -> str:
    """`ValueError: what it says`, first line only."""
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
