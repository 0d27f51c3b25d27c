"""`meshscope run --mode rehearsal`: one rank of a world that is not there holds what it would hold in it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_end_to_end import configuration

from harness.config import Decoder, Parallelism, Recorder, Trainer, Training, Window
from harness.launch import launch
from harness.postmortem import OUT_OF_MEMORY
from harness.recording import Recording, read_recording
from harness.rehearsal import parse_ranks, ranks_to_rehearse
from harness.report import build
from harness.report.text import render

pytestmark = pytest.mark.distributed

COMMAND = [sys.executable, "-m", "harness.cli"]
RUN = [*COMMAND, "run", "--module", "debug", "--config", "tiny", "--mode", "rehearsal", "--training.device", "cpu"]
PATIENCE_S = 180


def meshscope(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)


def tracked_peaks(recording: Recording, rank: int) -> list[int]:
    rows = recording.steps[rank]
    return [row["peak_allocated_bytes"] for row in rows if row["memory_source"] == "tensor_storages"]


def uncounted(config: Trainer.Config) -> int:
    """What is tracked and not the ledger's to count: losses that the trainer keeps, and on CPU the mesh's own tensor of
    ranks. The most of it, in bytes."""
    return 128 + 4 * config.world_size


def rehearsed(config: Trainer.Config, directory: Path, *ranks: int) -> Recording:
    directory.mkdir()
    status = launch(config, directory, mode="rehearsal", rehearse=ranks, environment={"OMP_NUM_THREADS": "1"})
    assert (status.state, status.reason) == ("complete", None)
    return read_recording(directory)


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """FSDP4 × TP2 on eight ranks that are not there, from the command line."""
    folder = tmp_path_factory.mktemp("rehearsal")
    layout = ["--nproc", "8", "--parallelism.dp_shard", "4", "--training.steps", "5"]
    done = meshscope([*RUN, *layout, "--ranks", "0,5", "--out", "run"], folder)
    assert done.returncode == 0, done.stderr
    assert "tiny: ranks 0, 5 of 8, mode rehearsal (on the CPU, as asked for)" in done.stderr
    assert [line.split("  ")[:2] for line in done.stderr.splitlines() if line.startswith("step ")] == [
        [f"step {step}/5", f"rank {rank}"] for rank in (0, 5) for step in range(1, 6)
    ]
    (folder / "stdout").write_text(done.stdout)
    return folder / "run"


def test_recording_of_ranks_of_a_world_that_is_not_there(out):
    recording = read_recording(out)

    assert recording.errors == []
    assert (recording.mode, recording.status.state) == ("rehearsal", "complete")
    assert (recording.manifest["world_size"], recording.manifest["recorded_ranks"]) == (8, [0, 5])
    assert recording.manifest["mesh"] == {"dp_shard": [0, 2, 4, 6], "tp": [0, 1]}
    assert {rank: document["mesh"] for rank, document in recording.ranks.items()} == {
        0: {"dp_shard": [0, 2, 4, 6], "tp": [0, 1]},
        5: {"dp_shard": [1, 3, 5, 7], "tp": [4, 5]},
    }
    assert len({document["pid"] for document in recording.ranks.values()}) == 2, "each in a process of its own"
    assert recording.ranks[0]["ended_unix_ns"] < recording.ranks[5]["started_unix_ns"], "one after the other"
    for rows in recording.steps.values():
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
        for row in rows:
            unknown = ("loss", "grad_norm", "tokens_per_s", "tflops_per_s", "mfu_pct")
            assert [row[name] for name in unknown] == [None] * 5
            assert not any(tag.startswith("non_finite") for tag in row["tags"])
    assert not (out / "profiling" / "traces").exists(), "a trace without communication"


def test_peak_is_the_ledgers(out):
    report = build(out)
    for rank in (0, 5):
        peaks = tracked_peaks(report.recording, rank)
        assert len(peaks) == 2
        for peak in peaks:
            assert 0 <= peak - report.prediction.ranks[rank].peak_allocated_bytes < uncounted(report.config)
    assert [rank.rank for rank in report.prediction.ranks if rank.measured_peak_allocated_bytes] == [0, 5]


@pytest.mark.parametrize("name", ["fsdp2_tp2", "hsdp2x2_tied_accumulate2", "cp2_fsdp2_ring"])
def test_peak_is_that_of_real_ranks_to_the_byte(tmp_path, name):
    """In one of two tracked steps, and never above: gloo's thread may let go of what it gathered only after the peak.
    Step by step, because the trainer keeps four bytes more of losses with each."""
    (tmp_path / "real").mkdir()
    launch(configuration(name), tmp_path / "real", mode="cpu", environment={"OMP_NUM_THREADS": "1"})
    real = read_recording(tmp_path / "real")
    found = rehearsed(configuration(name), tmp_path / "rehearsal", 0, 3)

    for rank in (0, 3):
        held = [there - here for here, there in zip(tracked_peaks(found, rank), tracked_peaks(real, rank), strict=True)]
        assert min(held) == 0, held


def uneven() -> Trainer.Config:
    """Five shards of matrices whose rows do not divide by five: the last rank holds less."""
    return Trainer.Config(
        world_size=5,
        model=Decoder.Config(vocab_size=512, dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=176),
        parallelism=Parallelism.Config(dp_shard=5),
        training=Training.Config(device="cpu", steps=4, seq_len=64, mixed_precision_param="float32"),
        recorder=Recorder.Config(trace=Window(), memory=Window(start=1, steps=2)),
    )


def test_one_rank_of_each_kind_is_rehearsed_unless_ranks_are_named(tmp_path):
    config = uneven()
    ranks = ranks_to_rehearse(config, None)
    assert ranks == [0, 4]
    assert ranks_to_rehearse(config, [3, 1]) == [3, 1]
    assert parse_ranks("3, 1,3") == [3, 1]

    recording = rehearsed(config, tmp_path / "run", *ranks)
    predicted = build(tmp_path / "run").prediction.ranks
    for rank in ranks:
        assert 0 <= min(tracked_peaks(recording, rank)) - predicted[rank].peak_allocated_bytes < uncounted(config)
    assert max(tracked_peaks(recording, 4)) < min(tracked_peaks(recording, 0))


def test_rank_of_a_large_world(tmp_path):
    config = uneven()
    config.world_size, config.parallelism = 512, Parallelism.Config(dp_replicate=8, dp_shard=16, tp=4)
    recording = rehearsed(config, tmp_path / "run", 511)

    assert recording.manifest["mesh"]["tp"] == [508, 509, 510, 511]
    predicted = build(tmp_path / "run").prediction.ranks[511]
    assert 0 <= min(tracked_peaks(recording, 511)) - predicted.peak_allocated_bytes < uncounted(config)


def test_rank_that_does_not_fit_is_named_and_ends_the_run(tmp_path):
    """A limit on the address space stands for a GPU that is full."""
    program = tmp_path / "limited.py"
    program.write_text(
        "import resource, sys\nfrom pathlib import Path\nimport torch\nfrom harness.worker import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))\nmain(Path(sys.argv[1]))\n"
    )
    config = copy.deepcopy(uneven())
    config.model.dim, config.model.ffn_dim, config.model.vocab_size = 2048, 16384, 65536
    (tmp_path / "run").mkdir()

    status = launch(config, tmp_path / "run", mode="rehearsal", rehearse=[0, 4], program=(str(program),))

    assert status.state == "failed"
    assert status.reason.startswith("rank 0 of 5 does not fit: "), status.reason
    assert "\n" not in status.reason
    assert read_recording(tmp_path / "run").steps.get(4) is None, "no further rank was begun"


@pytest.mark.parametrize(
    "line",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 139.81 GiB",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "MemoryError",
    ],
)
def test_what_says_that_memory_is_full(line):
    assert OUT_OF_MEMORY.search(line)
    assert not OUT_OF_MEMORY.search("ValueError: a MemoryError is not this one")


def test_reports_say_nothing_about_time_and_overlap(out):
    text = (out.parent / "stdout").read_text()
    assert text.splitlines()[1:] == render(build(out)).splitlines()[1:]
    assert "mode rehearsal" in text.splitlines()[0]
    assert "Steps: peak memory of each rank\n  step " in text
    assert "  8 ranks alike: 0–7; rehearsed: 0, 5\n" in text
    for word in ("overlap", "hidden", "exposed", "slowest", "collectives", " ms"):
        assert word not in text.lower(), word

    done = meshscope([*COMMAND, "report", str(out), "--json", "--html", "report.html"], out.parent)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["overlap"] is None
    unknown = [name for name in report["metrics"] if not name.endswith("_bytes")]
    assert {name: report["metrics"][name] for name in unknown} == dict.fromkeys(unknown)
    assert report["metrics"]["peak_allocated_bytes"] > 0
    page = (out.parent / "report.html").read_text()
    assert "communication did not happen" in page
    assert page.count("a rehearsal has neither times nor communication") == 4

    done = meshscope([*COMMAND, "overlap", str(out)], out.parent)
    assert done.returncode == 3
    assert done.stderr == f"meshscope overlap: error: {out}: is a rehearsal, in which nothing was communicated: " + (
        "there is no overlap\n"
    )
