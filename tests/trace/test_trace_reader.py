"""Reading traces: exact nanoseconds, every layout, and files that are damaged or hostile."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trace_builder import complete, kernel, launch, nccl, step, write

from harness.errors import InputError
from harness.sources import find_sources
from harness.trace import analyse, stream
from harness.trace.events import MISSING, NeedsDecimalsError, Trace, read_trace, to_ns


def text(tmp_path: Path, content: str | bytes, name: str = "t.json") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def events(body: str) -> str:
    return '{"schemaVersion": 1, "traceEvents": [' + body + "]}"


GEMM = '{"ph":"X","cat":"kernel","name":"gemm","ts":10,"dur":5,"args":{"device":0,"stream":7}}'


def test_nanoseconds_are_exact_below_the_float_limit() -> None:
    """Times as torch prints them now: µs with three decimals after a base less than 92 days ago."""
    random = np.random.default_rng(1)
    ns = random.integers(0, 7_889_238 * 10**9, 20_000)
    values = [float(f"{t // 1000}.{t % 1000:03d}") for t in ns.tolist()]
    assert (to_ns(values) == ns).all()


def test_integer_epochs_stay_exact() -> None:
    values = [1694128201429795, 1694128201429796]
    assert to_ns(values).tolist() == [value * 1000 for value in values]


def test_absolute_float_epochs_are_read_from_the_text(tmp_path: Path) -> None:
    with pytest.raises(NeedsDecimalsError):
        to_ns([1712195495519689.047])
    body = ",".join(
        f'{{"ph":"X","cat":"kernel","name":"gemm","ts":1712195495519{n}.{n},"dur":1.001}}' for n in (689, 790)
    )
    trace = read_trace(text(tmp_path, events(body)))
    assert trace.device.start.tolist() == [1712195495519689689, 1712195495519790790]
    assert trace.device.dur.tolist() == [1001, 1001]


def test_what_is_no_time_is_missing() -> None:
    values: list[Any] = [None, float("nan"), float("inf"), 10**400, -(10**30), "12.5", "x", Decimal("Infinity"), True]
    assert to_ns(values).tolist() == [MISSING] * 5 + [12_500] + [MISSING] * 3
    assert to_ns([1.5, None, 2]).tolist() == [1500, MISSING, 2000]


def test_text_times_and_unusual_values(tmp_path: Path) -> None:
    """A value of an unexpected type is left out, not the event; an event that is no object is counted."""
    body = ",".join(
        [
            '{"ph":"X","cat":"kernel","name":"a","ts":"10.5","dur":"5","args":{"device":"0","stream":"7"}}',
            '{"ph":"X","cat":"kernel","name":"b","ts":20,"dur":5,"args":[1,2]}',
            '{"ph":"X","cat":"kernel","name":null,"ts":30,"dur":5,"args":"none"}',
            '{"ph":"X","cat":"kernel","name":{"x":1},"ts":40,"dur":5,"args":{"device":0,"stream":[7]}}',
            '{"ph":"X","cat":"kernel","name":"dup","ts":1,"ts":50,"dur":5,"dur":6}',
            '{"ph":"X","cat":"kernel","name":"huge","ts":60,"dur":5,"args":{"correlation":' + "9" * 60 + "}}",
            '{"ph":"X","cat":"kernel","name":"z","ts":' + "9" * 5000 + ',"dur":5}',
            '{"ph":"X","cat":"kernel","name":"z","ts":1e400,"dur":5}',
            '{"ph":"X","cat":"kernel","name":"z","ts":true,"dur":5}',
            '{"ph":7,"cat":["kernel"],"name":"z","ts":1,"dur":5}',
            '"text"',
            "null",
            "5",
        ]
    )
    trace = read_trace(text(tmp_path, events(body)))
    assert trace.device.start.tolist() == [10_500, 20_000, 30_000, 40_000, 50_000, 60_000]
    assert trace.device.dur.tolist() == [5_000] * 4 + [6_000, 5_000]
    assert trace.device.correlation.tolist() == [MISSING] * 6
    assert trace.dropped == {"event is not an object": 3, "unreadable number": 1, "no finite ts": 2}


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"])
def test_words_that_are_no_numbers(tmp_path: Path, word: str) -> None:
    """In a value they are null; in a duration the event is dropped and counted; in a name they stay."""
    body = ",".join(
        [
            '{"ph":"X","cat":"kernel","name":"inf, nan: NaN","ts":10,"dur":5,"args":{"bandwidth": ' + word + "}}",
            '{"ph":"X","cat":"kernel","name":"gemm","ts":10,"dur":' + word + "}",
        ]
    )
    trace = read_trace(text(tmp_path, events(body)))
    assert trace.labels[0].name == "inf, nan: NaN"
    assert trace.device.dur.tolist() == [5_000]
    assert trace.dropped == {"no finite dur": 1}
    assert trace.notes == ["2 times: inf or nan read as null"]


def test_strings_that_are_no_json(tmp_path: Path) -> None:
    """Unescaped backslashes, control characters and broken UTF-8, as older tracers write them."""
    body = rb'{"ph":"X","cat":"kernel","name":"C:\q\"x' + b"\n\xff" + rb'","ts":10,"dur":5}'
    trace = read_trace(text(tmp_path, b'{"traceEvents": [' + body + b"]}"))
    assert trace.labels[0].name == 'C:\\q"x \ufffd'
    assert trace.device.dur.tolist() == [5_000]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"traceEvents": {"0": {}}}', "an object, not a list"),
        ('{"traceEvents": null}', "is null"),
        ('{"traceEvents": 5}', "a number, not a list"),
        ("{}", "has no traceEvents"),
        ("[]", "no complete event"),
        ('{"traceEvents": [{"ph":"M","name":"process_name"}]}', "no complete event"),
        ('{"a": "traceEvents"}', "has no traceEvents"),
        ("{" + '"x": ' + "[" * 200_000, "nested too deeply"),
        (events(GEMM) + "trailing", "trailing"),
    ],
)
def test_no_trace(tmp_path: Path, content: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read_trace(text(tmp_path, content))


def test_nesting_inside_an_event(tmp_path: Path) -> None:
    body = '{"ph":"X","cat":"kernel","name":"gemm","ts":1,"dur":1,"args":{"x":' + "[" * 100_000 + "]" * 100_000 + "}}"
    with pytest.raises(InputError, match="nested too deeply"):
        read_trace(text(tmp_path, events(body)))


def test_damage_in_the_middle_is_named_by_its_byte(tmp_path: Path) -> None:
    content = events(",".join([GEMM] * 5 + ['{"ph":!}'] + [GEMM] * 5))
    with pytest.raises(InputError, match="is not JSON") as caught:
        read_trace(text(tmp_path, content))
    assert caught.value.offset == content.index("!")


@pytest.mark.parametrize("cut", [1, 30, 60, 200, 400])
def test_cut_anywhere(tmp_path: Path, cut: int) -> None:
    content = events(",".join([GEMM] * 8))[:-cut]
    with pytest.raises(InputError, match="ends early") as caught:
        read_trace(text(tmp_path, content))
    assert caught.value.offset == len(content)
    packed = gzip.compress(content.encode())
    with pytest.raises(InputError, match=f"byte {len(content)} of the decompressed text"):
        read_trace(text(tmp_path, packed, "t.json.gz"))
    with pytest.raises(InputError, match="compressed data ends early") as caught:
        read_trace(text(tmp_path, gzip.compress(events(GEMM).encode())[:-9], "u.json.gz"))
    assert caught.value.offset == len(gzip.compress(events(GEMM).encode())) - 9


def test_damaged_gzip(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(json.dumps({"traceEvents": [{"n": i} for i in range(999)]}).encode()))
    packed[len(packed) // 2 : len(packed) // 2 + 20] = b"\x00" * 20
    with pytest.raises(InputError, match=r"gzip|JSON|ends early"):
        read_trace(text(tmp_path, bytes(packed)))


def test_gzip_of_several_members(tmp_path: Path) -> None:
    content = events(GEMM).encode()
    packed = gzip.compress(content[:40]) + gzip.compress(content[40:]) + bytes(512)
    assert read_trace(text(tmp_path, packed)).device.dur.tolist() == [5_000]


def same(a: Trace, b: Trace) -> bool:
    columns = zip((*a.device, *a.launches, *a.annotations), (*b.device, *b.launches, *b.annotations), strict=True)
    return all((x == y).all() for x, y in columns) and (a.labels, a.rank, a.events) == (b.labels, b.rank, b.events)


def test_layouts_and_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key order, spaces, keys after the list, a bare list, and pieces of any size give the same trace."""
    rows: list[Any] = [step(1, 0, 5000)]
    for index in range(300):
        name = ('gemm "},{" [x]', "нccl → ☃", "plain")[index % 3]
        nested = {"occupancy": [{"a": {}}, {"b": [{}, {}]}], "correlation": index, "device": 0, "stream": 7}
        rows += [launch(index, index), kernel(name, 10 * index, 5) | {"args": nested}]
    header = {"distributedInfo": {"rank": 1, "world_size": 2}, "deviceProperties": [{"id": 0}, {"id": 1}, {"id": 2}]}
    document = {**header, "traceEvents": rows}
    reference = read_trace(text(tmp_path, json.dumps(document)))
    turned = [dict(reversed(row.items())) for row in rows]
    layouts = {
        "compact": json.dumps(document, separators=(",", ":")),
        "indented": json.dumps(document, indent=2, ensure_ascii=False),
        "turned": json.dumps({**header, "traceEvents": turned}),
        "keys after": json.dumps({"traceEvents": rows, **header, "traceName": 'x"}],{"'}),
        "many keys after": json.dumps({"traceEvents": rows, **header, "more": [{"k": i} for i in range(5000)]}),
    }
    for size in (64, 1000, 1 << 20):
        monkeypatch.setattr(stream, "CHUNK_BYTES", size)
        monkeypatch.setattr(stream, "BLOCK_BYTES", max(37, size // 3))
        for name, content in layouts.items():
            assert same(read_trace(text(tmp_path, content)), reference), (size, name)
        bare = read_trace(text(tmp_path, json.dumps(rows)))
        assert bare.rank is None
        assert (bare.device.start == reference.device.start).all()


def test_dropped_events_are_counted(tmp_path: Path) -> None:
    rows = [
        kernel("a", 0, -7),
        kernel("b", None, 5),
        kernel("c", 5, None),
        kernel("d", 0, 5),
        {"ph": "B", "cat": "kernel", "name": "e", "ts": 9},
        complete("gpu_memset", "Memset", 9, -1),
        complete("cpu_op", "host", 9, -1),
    ]
    [entry] = analyse(find_sources(write(tmp_path / "t.json", rows)))["ranks"]
    assert entry["dropped"] == {"negative dur": 2, "no finite ts": 1, "no finite dur": 1, "ph is not X": 1}
    assert entry["window"]["compute_ns"] == 5_000


def test_categories_in_any_case(tmp_path: Path) -> None:
    rows = [
        complete("Operator", "ProfilerStep#5", 0, 100),
        complete("Runtime", "cudaLaunchKernel", 1, 1, args={"correlation": 1}),
        complete("Kernel", "gemm", 10, 10, args={"device": 0, "stream": 7, "correlation": 1}),
        complete("Memcpy", "Memcpy HtoD", 15, 10, args={"device": 0, "stream": 7, "correlation": 2}),
        complete("gpu_user_annotation", "ProfilerStep#5", 0, 10),
        complete("cuda_sync", "Stream Wait Event", 0, 999),
    ]
    [entry] = analyse(find_sources(write(tmp_path / "t.json", rows)))["ranks"]
    assert (entry["window"]["compute_ns"], entry["window"]["memory_ns"]) == (10_000, 10_000)
    assert entry["window"]["span_ns"] == 15_000
    assert [s["compute_ns"] for s in entry["steps"]] == [10_000, 10_000]


def test_overlap_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "a b.json", [kernel("gemm", 0, 10), nccl("AllReduce", 5, 10)])
    program = "import sys; sys.modules['torch'] = None; from harness.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "overlap", str(path), "--json"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ranks"][0]["window"]["overlap_ns"] == 5_000


@pytest.mark.parametrize("rank", [-1, 10**7, 2**63, 10**30, "first", 3.5, True, [1]])
def test_a_rank_that_is_none_is_said_and_the_name_counts(tmp_path: Path, rank: Any) -> None:
    path = write(tmp_path / "rank7_trace.json", [kernel("k", 0, 1)], rank=rank)
    entry = analyse(find_sources(path))["ranks"][0]
    assert entry["rank"] == 7
    assert f"distributedInfo says rank {rank}, which is none: not used" in entry["notes"]


def test_a_rank_written_as_text_is_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [kernel("k", 0, 1)], rank="3")  # type: ignore[arg-type]
    assert read_trace(path).rank == 3
