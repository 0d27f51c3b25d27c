"""Going on from a checkpoint is as if nothing had happened, on any layout, after any death; else a line says why."""

from __future__ import annotations

import ast
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from saving import configuration, losses_of, tensors_of

from harness.checkpoints import checkpoint_path, complete_checkpoints, find_checkpoint, read_header
from harness.config import Recorder, Window
from harness.config_json import with_overrides
from harness.errors import InputError, UsageError
from harness.recipes import load_config
from harness.recording import read_recording
from harness.validation import validate_inputs


@pytest.fixture(scope="module")
def saved(documents, tmp_path_factory) -> Path:
    """A recording of 4 steps in one process, with its checkpoints. To be copied by those who change it."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    configuration(documents, steps=4).build(directory).train()
    return directory


@pytest.mark.parametrize("tied", [False, True])
def test_going_on_gives_the_losses_of_a_run_without_interruption(documents, tmp_path, tied):
    def train(name: str, **changes) -> list[float]:
        config = configuration(documents, **changes)
        config.model.tied_embeddings = tied
        return config.build(tmp_path / name).train()

    random = torch.get_rng_state()
    whole = train("whole", steps=6)
    assert torch.equal(torch.get_rng_state(), random), "a run draws random numbers, whose state no checkpoint holds"
    assert train("first", steps=3, interval=3) == whole[:3]
    assert train("second", steps=6, load=tmp_path / "first", interval=3) == whole[3:]
    rows = read_recording(tmp_path / "second").steps[0]
    assert [row["step"] for row in rows] == [3, 4, 5]
    first, second = (tensors_of(find_checkpoint(tmp_path / name)) for name in ("whole", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert ("model.lm_head.weight" in first) is not tied, "a shared parameter is stored once"


def test_every_interval_and_the_last_step_are_saved_and_the_latest_kept(documents, tmp_path):
    configuration(documents, steps=7, interval=3).build(tmp_path / "run").train()
    rows = read_recording(tmp_path / "run").steps[0]
    assert [row["step"] for row in rows if "checkpoint" in row["tags"]] == [2, 5, 6]
    kept = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in kept] == ["step_000000000006", "step_000000000007"]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [path.name for path in kept]
    header = read_header(kept[-1])
    assert (header.step, header.world_size, header.mesh) == (7, 1, {"dp_shard": 1})
    assert header.data["sample"] == 7 * 8


def test_a_recording_or_a_checkpoint_of_it_can_be_named(saved):
    latest = checkpoint_path(saved, 4)
    assert find_checkpoint(saved) == latest
    assert find_checkpoint(saved / "checkpoints") == latest
    assert find_checkpoint(checkpoint_path(saved, 2)) == checkpoint_path(saved, 2)


def test_half_written_checkpoints_are_ignored_and_removed_later(documents, saved, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(saved, old)
    dead, alive, torn = (checkpoint_path(old, step) for step in (6, 8, 10))
    dead, alive = (path.with_name(path.name + ".partial") for path in (dead, alive))
    for folder in (dead, alive, torn):
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"half of it")
    writer = os.open(alive, os.O_RDONLY)
    fcntl.flock(writer, fcntl.LOCK_EX)
    try:
        assert find_checkpoint(old) == checkpoint_path(old, 4)
        configuration(documents, steps=5, load=old).build(tmp_path / "new").train()
    finally:
        os.close(writer)
    assert not dead.exists()
    assert alive.exists(), "another run is writing it"
    assert list(losses_of(tmp_path / "new")) == [4]


def test_nothing_to_go_on_from_is_said_before_anything_starts(documents, saved, tmp_path):
    def refused(load: Path, steps: int = 9) -> str:
        with pytest.raises(UsageError) as caught:
            validate_inputs(configuration(documents, steps=steps, load=load))
        return str(caught.value)

    assert refused(tmp_path / "none") == f"checkpoint.load={tmp_path / 'none'}: there is no such folder"
    assert "there is no checkpoint in it; a run saves one every --checkpoint.interval steps" in refused(tmp_path)
    (tmp_path / "checkpoints" / "step_000000000002.partial").mkdir(parents=True)
    assert "only step_000000000002.partial, which was never finished" in refused(tmp_path)
    assert refused(saved, steps=4).endswith("is at step 4, training.steps=4: set it above 4 to go on")


MODELS = [
    ({"ffn_dim": 60}, r"model\.layers\.0\.feed_forward\.w1\.weight is \[58, 36\], this model's is \[60, 36\]"),
    ({"n_layers": 3}, r"this model has model\.layers\.2\.attention_norm\.weight, the checkpoint has not"),
    ({"n_layers": 1}, r"it has model\.layers\.1\.attention_norm\.weight, this model has not"),
    ({"tied_embeddings": True}, r"it has model\.lm_head\.weight, this model has not"),
    ({"n_heads": 2, "n_kv_heads": 2}, r"model\.layers\.0\.attention\.wk\.weight is \[12, 36\]"),
    ({"rope_theta": 1e4}, r"its model\.rope_theta is 500000\.0, this model's is 10000\.0"),
]


@pytest.mark.parametrize(("change", "message"), MODELS)
def test_another_model_is_named_by_its_first_difference(documents, saved, tmp_path, change, message):
    config = configuration(documents, steps=9, load=saved)
    for name, value in change.items():
        setattr(config.model, name, value)
    with pytest.raises(UsageError, match=message) as caught:
        config.build(tmp_path / "new").train()
    assert "\n" not in str(caught.value)
    assert read_recording(tmp_path / "new").ranks[0]["exception"] == str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("checkpoint.json", b"{", r"checkpoint\.json: is not a JSON object"),
        (
            "checkpoint.json",
            b'{"schema_version": 9}',
            r"checkpoint\.json: has schema_version 9; this meshscope reads 1",
        ),
        ("checkpoint.json", b'{"schema_version": 1}', r"checkpoint\.json: is not the header of a checkpoint"),
        (".metadata", b"\x80\x04", r"step_000000000004: cannot be read: "),
        ("__0_0.distcp", b"short", r"step_000000000004: cannot be read: "),
        ("__0_0.distcp", None, r"step_000000000004: cannot be read: FileNotFoundError"),
    ],
)
def test_an_unreadable_checkpoint_is_one_line(documents, saved, tmp_path, file, content, message):
    shutil.copytree(saved, tmp_path / "old")
    broken = checkpoint_path(tmp_path / "old", 4) / file
    if content is None:
        broken.unlink()
    else:
        broken.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        configuration(documents, steps=9, load=tmp_path / "old").build(tmp_path / "new").train()
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_cannot_be_written_is_one_line(documents, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(InputError, match=r"step_000000000002\.partial: cannot be written: ") as caught:
        configuration(documents, steps=2).build(tmp_path / "run").train()
    assert "\n" not in str(caught.value)


def test_windows_and_step_numbers_go_on(documents, saved, tmp_path):
    config = configuration(documents, steps=9, load=saved)
    config.recorder.trace, config.recorder.memory = Window(start=2, steps=1), Window(start=1, steps=1)
    config.build(tmp_path / "on").train()
    recording = read_recording(tmp_path / "on")
    tags = {row["step"]: row["tags"] for row in recording.steps[0]}
    assert list(tags) == [4, 5, 6, 7, 8]
    assert [step for step in tags if "warmup" in tags[step]] == [4]
    assert [step for step in tags if "memory_history" in tags[step]] == [5]
    assert [step for step in tags if "profiled" in tags[step]] == [6]
    assert [path.name for path in (tmp_path / "on" / "profiling" / "traces").iterdir()] == ["iteration_7"]
    assert recording.manifest["steps_completed"] == 9
    assert recording.ranks[0]["environment_after"] is not None


@pytest.fixture(scope="module")
def prose(tmp_path_factory) -> Path:
    """The docstrings of Python's own library, some 100 KiB of English."""
    documents = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        documents.append(ast.get_docstring(ast.parse(file.read_bytes())))
    path = tmp_path_factory.mktemp("prose") / "prose.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents if text))
    return path


@pytest.mark.distributed
def test_the_loss_of_real_text_falls(prose, pool, tmp_path):
    """The recipe, FSDP2 × TP2. Bytes of English that are known to be such have about 3.1 nats."""
    same = {"data.path": prose, "training.steps": 40, "training.seq_len": 64, "optimizer.warmup_steps": 5}
    config = with_overrides(load_config("debug", "text"), [(name, str(value)) for name, value in same.items()])
    config.recorder = Recorder.Config(trace=Window(steps=0), memory=Window(steps=0))
    pool.train(config, tmp_path / "run")
    losses = list(losses_of(tmp_path / "run").values())
    assert losses[0] == pytest.approx(math.log(config.model.vocab_size), rel=0.02), "before the first step: no guess"
    assert sum(losses[-5:]) / 5 < 3.3


RUN = [sys.executable, "-m", "harness.cli", "run", "--mode", "cpu", "--module", "debug", "--config", "text"]
PATIENCE_S = 180


@pytest.mark.distributed
def test_a_run_whose_processes_are_all_killed_goes_on_exactly(documents, pool, tmp_path):
    """FSDP2 × TP2 by the command line; SIGKILL to every rank and the launcher at once, in the middle of training."""
    small = {"model.dim": 64, "model.n_layers": 2, "training.seq_len": 64, "data.path": documents}
    same = small | {"optimizer.schedule": "constant", "recorder.trace.steps": 0, "recorder.memory.steps": 0}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in the pool: sums in the same order

    def command(name: str, **more: object) -> list[str]:
        options = same | {field.replace("__", "."): value for field, value in more.items()}
        return [*RUN, *(f"--{field}={value}" for field, value in options.items()), "--out", str(tmp_path / name)]

    first = command("first", training__steps=100_000, checkpoint__interval=2)
    with subprocess.Popen(first, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        rows = tmp_path / "first" / "steps" / "rank0.jsonl"
        deadline = time.monotonic() + PATIENCE_S
        while not rows.exists() or rows.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < deadline
            assert process.poll() is None, "the first run ended by itself"
            time.sleep(0.01)
        ranks = read_recording(tmp_path / "first").ranks.values()
        for pid in [*(rank["pid"] for rank in ranks), process.pid]:
            os.kill(pid, signal.SIGKILL)

    step = read_header(find_checkpoint(tmp_path / "first")).step
    assert 4 <= step <= len(losses_of(tmp_path / "first", complete=False))
    second = command("second", training__steps=step + 4, checkpoint__load=tmp_path / "first")
    done = subprocess.run(second, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr

    overrides = [(name, str(value)) for name, value in (same | {"training.steps": step + 4}).items()]
    pool.train(
        with_overrides(load_config("debug", "text"), [*overrides, ("training.device", "cpu")]), tmp_path / "whole"
    )
    whole, rest = losses_of(tmp_path / "whole"), losses_of(tmp_path / "second")
    assert list(rest) == [step, step + 1, step + 2, step + 3]
    assert rest == {step: whole[step] for step in rest}
    loaded = read_recording(tmp_path / "second").manifest["config"]["checkpoint"]["load"]
    assert loaded == str(checkpoint_path(tmp_path / "first", step)), "which one it was is in the recording"
