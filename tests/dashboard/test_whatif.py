"""Other allocator settings on the memory page: the figures of `meshscope whatif --json`, asked for once."""

from __future__ import annotations

import json
import pickle
import shlex

import pytest
from whatif.program import MIB, Program

from harness.cli import main

URL = {
    "conf": ["expandable_segments:True", "roundup_power2_divisions:4"],
    "own_conf": " max_split_size_mb:64 ",
    "limit_gib": "0.3",
    "without_pending": "true",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two ranks: holes of 30 MiB, of which the last rank has one block more pending, then 50 MiB."""
    folder = tmp_path_factory.mktemp("shown")
    for rank in range(2):
        program = Program()
        blocks = [program.alloc(30 * MIB, line=1) for _ in range(10)]
        for block in blocks[::2]:
            program.free(block, pending=rank == 1 and block is blocks[0])
        program.alloc(50 * MIB, line=2)
        path = folder / "run" / f"rank{rank}_snapshot.pickle"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(program.snapshot(), protocol=4))
    return folder


def opened(open_page, folder, **query):
    app = open_page(folder, "memory", run="run", **query)
    assert not app.exception
    return app


def button(app):
    return [one for one in app.button if one.label == "Replay"]


def cases(app):
    return [frame.value for frame in app.dataframe if "device_allocations" in frame.value.columns]


def test_the_table_is_the_commands_json_and_stays_in_the_url(open_page, folder, capsys):
    app = opened(open_page, folder, replayed="rank 1", **URL)
    assert not cases(app), "nothing is replayed before it is asked for"
    command = next(code.value for code in app.code if code.value.startswith("meshscope whatif"))
    [replay] = button(app)
    app = replay.click().run()
    assert not app.exception
    [shown] = cases(app)
    assert not button(app)

    assert main([*shlex.split(command)[1:], "--json"]) == 0
    [file] = json.loads(capsys.readouterr().out)["files"]
    assert file["rank"] == 1
    expected = file["devices"][0]["cases"]
    assert [case["alloc_conf"] for case in expected][-3:] == [*URL["conf"], URL["own_conf"].strip()]
    for name in ("peak_reserved_bytes", "device_allocations", "retries"):
        assert shown[name].tolist() == [case[name] for case in expected]
    for name in ("allocated_bytes", "unused_bytes"):
        assert shown[name].tolist() == [case["at_peak"][name] for case in expected]
    assert shown["case"].tolist()[2].endswith("recorded, without pending, limit 0.3 GiB")
    outcomes = shown["outcome"].tolist()
    assert outcomes[0] == ""
    failed = [case["out_of_memory"] for case in expected]
    assert outcomes[1:] == ["OUT OF MEMORY" if one else "fits" for one in failed[1:]]
    assert 0 < sum(map(bool, failed)) < len(failed) - 1
    told = next(frame.value for frame in app.dataframe if "largest_free_bytes" in frame.value.columns)
    for name in ("requested_bytes", "reserved_bytes", "allocated_bytes", "largest_free_bytes", "site"):
        assert told[name].tolist() == [oom[name] for oom in failed if oom]
    pools = next(frame.value for frame in app.dataframe if "pool" in frame.value.columns)
    assert pools["unused_bytes"].sum() == shown["unused_bytes"].sum()

    again = opened(open_page, folder, replayed="rank 1", **URL)
    assert cases(again)[0].equals(shown), "kept, and shown to whoever opens the URL"


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("max_split_size:64", "torch has no setting max_split_size"),
        ("max_split_size_mb:1", "must be at least 20"),
        ("per_process_memory_fraction:0.5", "a fraction of how much?"),
    ],
)
def test_a_setting_that_torch_would_refuse_is_one_line(open_page, folder, conf, said):
    app = opened(open_page, folder, own_conf=conf)
    [error] = app.error
    assert said in error.value.replace("\\", "")
    assert not button(app)
    app.text_input(key="own_conf").set_value("").run()
    assert not app.error
    assert button(app)


@pytest.mark.parametrize("limit", ["-1", "nan", "1e300"])
def test_a_limit_that_no_memory_has_is_none(open_page, folder, limit):
    app = opened(open_page, folder, limit_gib=limit)
    assert app.number_input(key="limit_gib").value is None
    assert button(app)


def test_snapshots_of_one_name_are_told_apart_by_their_folders(open_page, folder, tmp_path):
    for name in ("a", "b"):
        path = tmp_path / "run" / name / "snapshot.pickle"
        path.parent.mkdir(parents=True)
        path.write_bytes((folder / "run" / "rank0_snapshot.pickle").read_bytes())
    app = opened(open_page, tmp_path, replayed="b/snapshot.pickle")
    assert app.selectbox(key="replayed").options == ["a/snapshot.pickle", "b/snapshot.pickle"]
    assert any(f"{tmp_path}/run/b/snapshot.pickle --alloc-conf" in code.value for code in app.code)


def test_what_cannot_be_replayed_is_said(open_page, tmp_path):
    """A block that lies in none of the segments."""
    program = Program()
    program.alloc(30 * MIB)
    content = program.snapshot()
    content["device_traces"][0].append({"action": "free_requested", "addr": 1 << 50, "size": MIB, "stream": 0})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "snapshot.pickle").write_bytes(pickle.dumps(content, protocol=4))
    app = button(opened(open_page, tmp_path))[0].click().run()
    assert not app.exception
    assert (
        app.error[-1]
        .value.replace("\\", "")
        .endswith(f"snapshot.pickle**: the block at {1 << 50:#x} lies in no segment")
    )
    assert not cases(app)
