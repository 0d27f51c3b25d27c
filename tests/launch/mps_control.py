"""A stand-in for nvidia-cuda-mps-control: `-d` leaves a daemon in the background, `quit` on standard input ends it.

MPS_STAND_IN says how it misbehaves: `fails`, `dies` (the daemon), `stuck` (heeds neither quit nor signals).
"""

import os
import signal
import sys
import time
from pathlib import Path

pipe, log = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])
how = os.environ.get("MPS_STAND_IN", "")

if sys.argv[1:] == ["-d"]:
    if how == "fails":
        print("Cannot find MPS control daemon process")
        sys.exit(1)
    if os.fork():
        sys.exit(0)
    os.setsid()
    if how == "dies":
        (log / "control.log").write_text("[2026-11-29] Failed to start: no permission\n")
        sys.exit(1)
    if how == "stuck":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    (pipe / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    if not os.fork():  # a server, which serves until its daemon ends
        while os.getppid() != 1:
            time.sleep(0.02)
        sys.exit(0)
    (pipe / "control").touch()
    while how == "stuck" or not (pipe / "quit").exists():
        time.sleep(0.02)
else:
    assert sys.stdin.read() == "quit\n"
    (pipe / "quit").touch()
