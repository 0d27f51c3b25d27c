"""What is kept about the machine and the program, and what must never be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.record import provenance
from harness.record.memory import ProcessMemory


def test_environment_is_allow_listed_and_masked() -> None:
    kept = provenance.environment(
        {
            "NCCL_DEBUG": "INFO",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "RANK": "3",
            "CUDA_API_TOKEN": "abc",
            "TORCH_HUB_PROXY": "http://me:pw@proxy:80/x",
            "AWS_SECRET_ACCESS_KEY": "abc",
            "HOME": "/root",
            "RANKING": "no",
        }
    )
    assert kept == {
        "CUDA_API_TOKEN": "***",
        "NCCL_DEBUG": "INFO",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "RANK": "3",
        "TORCH_HUB_PROXY": "http://***@proxy:80/x",
    }


def test_git_state_clean_dirty_and_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = provenance.git_state(tmp_path)
    assert (absent["sha"], absent["dirty"]) == (None, None)
    assert "not a git repository" in absent["reason"]

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = provenance.git_state(tmp_path)
    assert (len(clean["sha"]), clean["dirty"], clean["reason"]) == (40, False, None)
    (tmp_path / "a").write_text("2")
    assert provenance.git_state(tmp_path) == {**clean, "dirty": True}

    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state(tmp_path)["reason"] == "git is not installed"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make a library")
def test_version_of_nccl_is_that_of_the_library_in_the_process(tmp_path: Path) -> None:
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *version) { *version = 23007; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    program = "from harness.record.provenance import loaded_nccl; print(loaded_nccl())"
    environment = {**os.environ, "LD_PRELOAD": str(library)}

    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("2.30.7\n", "")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc (Linux)")
def test_resident_memory_and_its_peak() -> None:
    memory = ProcessMemory()
    if memory.peak_reason:  # some containers forbid resetting the high-water mark, and rows then say null
        pytest.skip(memory.peak_reason)
    memory.start()
    before, _ = memory.read()
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
    del block
    after, peak = memory.read()
    assert before is not None
    assert after is not None
    assert peak is not None
    assert peak >= before + (60 << 20)
    memory.start()
    _, fresh = memory.read()
    assert fresh is not None
    assert fresh < peak
