"""How fast the dashboard shows and zooms a large run: `python benchmarks/dashboard.py [--ranks 8] [--events 1000000]`.

Writes synthetic traces as torch.profiler writes them (FSDP2 × TP2: kernels with their launches, collectives with
their metadata, FSDP's ranges, steps), starts the dashboard on them, and drives a headless Chromium. Figures:

`prepare_s`: analysing the traces once, in a process of its own; lanes of a rank can be seen as soon as it is read.
`first_lanes_s` (cold): from opening the page to the first rank's lanes, while the others are still being read.
`paint_s`: from opening the page to its lanes drawn, with results on disk; cold is the first visit after a start of the
server, warm the next ones.
`zoom_s`: from a key that zooms or moves to the finer picture drawn, the server's work and both ways included, and the
time that the view rests before it is asked for; median and highest of many.
`visit_cpu_s`, `zoom_cpu_s`: CPU time of server and browser for a whole page and for a zoom, which is what remains of a
time on the clock where nothing else runs.
`server_rss_bytes`, `heap_bytes`: of the server, and of the page's JavaScript, after each quarter of the interactions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

# This file's folder, which Python searches first, would make it the package of the same name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

CHROMIUM = "/usr/bin/chromium"
STEP_EVENTS = 20_000
LAYERS = 32
KERNELS = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, 3>(int)",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(int)",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>, false, true>(Flash_fwd_params)",
)
COLLECTIVES = (
    ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "dp", 22),
    (
        "_reduce_scatter_base",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "dp",
        26,
    ),
    ("allreduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "tp", 7),
)


def write_trace(path: Path, rank: int, ranks: int, events: int) -> None:
    """A rank's trace with `events` device events, each with its launch. Collectives end at the same time on all."""
    shared, own = np.random.default_rng(1), np.random.default_rng(100 + rank)
    groups = {"dp": list(range(rank % 2, ranks, 2)), "tp": [rank - rank % 2, rank - rank % 2 + 1]}
    info = {
        "backend": "nccl",
        "rank": rank,
        "world_size": ranks,
        "pg_config": [
            {"pg_name": f"{name}{members[0]}", "pg_desc": f"mesh_{name}", "ranks": members}
            for name, members in groups.items()
        ],
    }
    head = {"schemaVersion": 1, "distributedInfo": info, "baseTimeNanoseconds": 1_790_000_000_000_000_000}
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        now_us = 1000.0
        for first in range(0, events, STEP_EVENTS):
            count = min(STEP_EVENTS, events - first)
            lines, end_us = step_lines(first, count, now_us, groups, shared, own)
            file.write(("" if first == 0 else ",\n") + ",\n".join(lines))
            now_us = end_us + 50
        file.write("\n]}\n")


def step_lines(
    first: int, count: int, now_us: float, groups: dict[str, list[int]], shared: Any, own: Any
) -> tuple[list[str], float]:
    """One step: every 25th event is a collective, on the stream of its kind, the rest are kernels on stream 7."""
    shared_us = shared.gamma(2.0, 6.0, count)
    durations = np.maximum(shared_us * own.normal(1, 0.05, count), 0.4)
    lines = []
    at, launched = now_us, now_us - 20
    free = dict.fromkeys((7, 22, 26), now_us)
    per_layer = max(1, count // LAYERS)
    for index in range(count):
        correlation = first + index + 1
        duration = float(durations[index])
        if index % per_layer == 0:
            layer = min(index // per_layer, LAYERS - 1)
            room = float(durations[index : index + per_layer].sum())
            lines.append(
                f'{{"ph": "X", "cat": "user_annotation", "name": "FSDP::pre_forward (layers.{layer})", "pid": 9, '
                f'"tid": 9, "ts": {launched:.3f}, "dur": {room * 0.9:.3f}}}'
            )
        if index % 25 == 24:
            kind, name, axis, stream = COLLECTIVES[(index // 25) % 3]
            members = groups[axis]
            duration *= 6
            args = (
                f', "Collective name": "{kind}", "In msg nelems": 4096, "Out msg nelems": 8192, "dtype": "BFloat16", '
                f'"Process Group Name": "{axis}{members[0]}", "Process Group Description": "mesh_{axis}", '
                f'"Process Group Ranks": "{members}"'
            )
        else:
            name, stream, args = KERNELS[index % 4], 7, ""
        begins = max(at, free[stream])
        free[stream] = begins + duration + 0.3
        lines.append(
            f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, '
            f'"ts": {launched:.3f}, "dur": 4.100, "args": {{"correlation": {correlation}}}}}'
        )
        lines.append(
            f'{{"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream}, "ts": {begins:.3f}, '
            f'"dur": {duration:.3f}, "args": {{"device": 0, "stream": {stream}, "correlation": {correlation}{args}}}}}'
        )
        launched += float(shared_us[index])
        at = free[7]
    number = first // STEP_EVENTS
    lines.append(
        f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{number}", "pid": 9, "tid": 9, '
        f'"ts": {now_us - 25:.3f}, "dur": {launched - now_us + 25:.3f}}}'
    )
    return lines, max(free.values())


VIEW = """() => {
  const roots = [...document.querySelectorAll("*")].map((one) => one.shadowRoot).filter(Boolean);
  const found = roots.map((root) => root.querySelector(".timeline")).filter(Boolean)[0];
  return found ? { ...found.dataset } : null;
}"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(root: Path, cache: Path) -> Iterator[tuple[str, int]]:
    """A dashboard over `root`; (its address, the server's process id)."""
    port = free_port()
    environment = {**os.environ, "MESHSCOPE_DASHBOARD_ROOT": str(root), "MESHSCOPE_DASHBOARD_CACHE": str(cache)}
    command = [sys.executable, "-P", "-m", "dashboard.serve", str(port)]
    started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", started.pid
    finally:
        started.terminate()
        started.wait(30)


def cpu_s(*, server: int) -> dict[str, float]:
    """Seconds of CPU that the server and the browser's processes have used: what other work on the machine adds to no
    more than cold caches, unlike the times on the clock."""
    parents, used, names = {}, {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, fields = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # ended since
            continue
        numbers = fields.split()
        pid = int(folder.name)
        parents[pid], names[pid] = int(numbers[1]), name
        used[pid] = (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    def below(pid: int, root: int) -> bool:
        while pid > 1:
            if pid == root:
                return True
            pid = parents.get(pid, 0)
        return False

    return {
        "server": sum(seconds for pid, seconds in used.items() if below(pid, server)),
        "browser": sum(s for pid, s in used.items() if "chrom" in names[pid] and below(pid, os.getpid())),
    }


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Visit:
    """One browser tab on the overlap page."""

    def __init__(self, browser: Any, address: str, run: str, query: str = "") -> None:
        self.page = browser.new_page(viewport={"width": 1400, "height": 1000})
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.started = time.monotonic()
        self.page.goto(f"{address}/overlap?run={run}{query}", wait_until="commit")

    def view(self) -> dict[str, str]:
        found: dict[str, str] | None = self.page.evaluate(VIEW)
        return found or {}

    def wait(self, until: Any, timeout_s: float = 900.0) -> float:
        """Seconds since the visit began when `until(view)` is true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if until(self.view()):
                return time.monotonic() - self.started
            time.sleep(0.02)
        raise TimeoutError(f"not after {timeout_s} s: {self.view()}")

    def painted(self) -> float:
        return self.wait(lambda view: "drawn" in view)

    def press(self, key: str) -> float:
        """Seconds from a key to the picture that the server made for the view that it led to."""
        before = int(self.view().get("replies", 0))
        begun = time.monotonic()
        self.page.keyboard.press(key)
        deadline = begun + 30
        while time.monotonic() < deadline:
            if int(self.view().get("replies", 0)) > before:
                return time.monotonic() - begun
            time.sleep(0.005)
        raise TimeoutError(f"no reply to {key}")

    def heap_bytes(self) -> int:
        session = self.page.context.new_cdp_session(self.page)
        session.send("HeapProfiler.collectGarbage")
        used: int = session.send("Runtime.getHeapUsage")["usedSize"]
        session.detach()
        return used


def measure(root: Path, run: str, interactions: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    cache = root.parent / "cache"
    result: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        with server(root, cache) as (address, _):
            first = Visit(browser, address, run)
            result["first_lanes_s"] = first.painted()
            first.page.get_by_role("tab", name="Collectives").wait_for(timeout=900_000)
            result["prepare_s"] = time.monotonic() - first.started
            first.page.close()
        with server(root, cache) as (address, pid):
            visits = []
            before = cpu_s(server=pid)
            for _ in range(4):
                visit = Visit(browser, address, run)
                visits.append(visit.painted())
                visit.page.get_by_role("tab", name="Collectives").wait_for(timeout=300_000)
                visit.page.close()
            result["visit_cpu_s"] = {name: (used - before[name]) / 4 for name, used in cpu_s(server=pid).items()}
            result["paint_cold_s"], result["paint_warm_s"] = visits[0], statistics.median(visits[1:])
            result |= interact(Visit(browser, address, run), pid, interactions)
        browser.close()
    result["cache_bytes"] = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    return result


def interact(visit: Visit, pid: int, interactions: int) -> dict[str, Any]:
    """Zooms in and out and moves about, and watches the memory of the server and of the page."""
    visit.painted()
    visit.page.get_by_role("tab", name="Collectives").wait_for(timeout=300_000)
    visit.page.wait_for_timeout(2000)
    visit.page.locator("canvas.lanes").click(position={"x": 300, "y": 8})
    keys = [*"wwwwdwwwadwwwwdasssdssswwasssss", "Home"]
    times, rss, heap = [], [rss_bytes(pid)], [visit.heap_bytes()]
    before = cpu_s(server=pid)
    for number in range(interactions):
        times.append(visit.press(keys[number % len(keys)]))
        if (number + 1) % max(1, interactions // 4) == 0:
            rss.append(rss_bytes(pid))
            heap.append(visit.heap_bytes())
    assert not visit.errors, visit.errors
    ordered = sorted(times)
    return {
        "zoom_median_s": statistics.median(times),
        "zoom_p95_s": ordered[int(0.95 * (len(ordered) - 1))],
        "zoom_highest_s": ordered[-1],
        "zoom_cpu_s": {name: (used - before[name]) / interactions for name, used in cpu_s(server=pid).items()},
        "interactions": interactions,
        "server_rss_bytes": rss,
        "heap_bytes": heap,
    }


def cut_times(folder: Path) -> dict[str, float]:
    """Seconds to cut windows out of the indexes on disk, without browser and server: from all to a thousandth."""
    from dashboard import store
    from dashboard.lanes.detail import LaneIndex
    from dashboard.lanes.picture import Shown, View, picture

    indexes = [LaneIndex(store.load(path)) for path in sorted(folder.glob("*/lanes/*"))]
    origin = min(index.values["start_ns"] for index in indexes)
    extent = max(index.values["end_ns"] for index in indexes) - origin
    shown = [
        Shown(index=index, device=device, group=f"rank {index.rank}", offset_ns=index.values["base_ns"] - origin)
        for index in indexes
        for device in index.devices
    ]
    found = {}
    for share in (1, 10, 100, 1000):
        times = []
        for place in range(12):
            start = int(place / 12 * (extent - extent // share))
            view = View(start_ns=start, end_ns=start + extent // share, extent_ns=extent, width=1200, view_id="")
            begun = time.perf_counter()
            picture(shown, view)
            times.append(time.perf_counter() - begun)
        found[f"1/{share}"] = statistics.median(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--events", type=int, default=1_000_000, help="device events of each rank")
    parser.add_argument("--interactions", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="keep traces and results here, and use the traces that are there")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="dashboard-benchmark-"))
    try:
        traces = folder / "root" / "run"
        traces.mkdir(parents=True, exist_ok=True)
        missing = [
            (path, rank, arguments.ranks, arguments.events)
            for rank in range(arguments.ranks)
            if not (path := traces / f"rank{rank}_trace.json.gz").exists()
        ]
        with ProcessPoolExecutor(2) as pool:
            for written in [pool.submit(write_trace, *one) for one in missing]:
                written.result()
        shutil.rmtree(folder / "cache", ignore_errors=True)
        result = {
            "ranks": arguments.ranks,
            "events_per_rank": arguments.events,
            "trace_bytes": sum(path.stat().st_size for path in traces.iterdir()),
            **measure(folder / "root", "run", arguments.interactions),
            "cut_s": cut_times(folder / "cache"),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[1],
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
