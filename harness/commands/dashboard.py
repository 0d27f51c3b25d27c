"""`meshscope dashboard`: the pages over a folder of recordings, in a browser of this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import EXIT_FAILED, EXIT_OK, InputError, UnavailableError, UsageError

ADDRESS = "127.0.0.1"
PORTS = range(8501, 8521)
START_S = 60.0
STOP_S = 10.0
POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="folder with recordings, traces and snapshots; nothing outside it is shown (default: runs)",
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help=f"port on {ADDRESS} (default: the first free one from {PORTS[0]}; 0: any)"
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="keep no result of an analysis after the end, and use none from before"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until it is interrupted, which is its good end: 0. Exits 2 for a port that is taken, 3 without a folder
    or if the server fails, 5 without Streamlit."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored in what a shell starts in the background
        signal.signal(number, signal.default_int_handler)
    directory = readable_folder(args.directory)
    port = free_port(args.port)
    with cache_folder(args.no_cache) as cache, serving(directory, port, cache) as server:
        return until_it_ends(server, port)


def readable_folder(directory: Path) -> Path:
    """Raises `InputError` for anything but a folder that can be listed."""
    try:
        next(directory.iterdir(), None)
    except NotADirectoryError:
        raise InputError(directory, "is not a folder: name the folder that holds it") from None
    except OSError as error:
        raise InputError(directory, (error.strerror or type(error).__name__).lower()) from None
    return directory.resolve()


def free_port(wanted: int | None) -> int:
    """The port that was asked for, else the first that is free. Raises `UsageError` if there is none."""
    if wanted is not None and not 0 <= wanted <= 65535:
        raise UsageError(f"--port {wanted} is no port: 0 to 65535")
    for port in PORTS if wanted is None else [wanted]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ADDRESS, port))
            except OSError as error:
                reason = (error.strerror or type(error).__name__).lower()
            else:
                return int(probe.getsockname()[1])
    taken = f"ports {PORTS[0]} to {PORTS[-1]}" if wanted is None else f"port {wanted}"
    raise UsageError(f"{taken}: {reason} (--port 0 takes any that is free)")


@contextmanager
def cache_folder(temporary: bool) -> Iterator[str | None]:
    if not temporary:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="meshscope-dashboard-") as folder:
        yield folder


@contextmanager
def serving(directory: Path, port: int, cache: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """The server as a process of its own, ended with the block."""
    found = importlib.util.find_spec("dashboard")  # found, not imported: nothing in harness knows the pages
    if found is None or found.origin is None or importlib.util.find_spec("streamlit") is None:
        raise UnavailableError("needs Streamlit and the package dashboard: pip install meshscope")
    package = Path(found.origin).parent
    path = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "MESHSCOPE_DASHBOARD_ROOT": str(directory)}
    if cache is not None:
        environment["MESHSCOPE_DASHBOARD_CACHE"] = cache
    server = subprocess.Popen(
        [sys.executable, "-P", str(package / "serve.py"), str(port)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C comes here only, and ends the server in order
    )
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def until_it_ends(server: subprocess.Popen[bytes], port: int) -> int:
    try:
        wait_until_ready(server, port)
        print(f"http://{ADDRESS}:{port}", flush=True)
        print("Ctrl-C ends it", file=sys.stderr)
        code = server.wait()
    except KeyboardInterrupt:
        return EXIT_OK
    print(f"meshscope dashboard: error: the server ended with {code}", file=sys.stderr)
    return EXIT_FAILED


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Raises `UnavailableError` if the server does not answer within START_S."""
    deadline = time.monotonic() + START_S
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{ADDRESS}:{port}/_stcore/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
        if time.monotonic() > deadline:
            raise UnavailableError(f"the server does not answer on port {port} after {START_S:.0f} s")
