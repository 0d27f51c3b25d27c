"""Only what is in the folder is shown, whatever the URL or a link says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from written import write_kernels, write_recording

from dashboard import discover, store
from dashboard.discover import confined, find_runs, fingerprint, links_out, run_at
from dashboard.store import Extract
from harness.errors import InputError


@pytest.fixture
def places(tmp_path):
    """A folder that is shown, and one beside it that is not."""
    shown = tmp_path / "shown"
    write_recording(shown / "run")
    write_recording(tmp_path / "secret")
    return shown.resolve(), (tmp_path / "secret").resolve()


@pytest.mark.parametrize("name", ["../secret", "run/../../secret", "/etc", "run/../..", "a\0b", "nothing", "run" * 200])
def test_names_that_lead_out_are_refused(places, name):
    with pytest.raises(InputError):
        confined(places[0], name)


def test_absolute_name_of_what_is_outside_is_refused(places):
    with pytest.raises(InputError, match="leads out of"):
        confined(places[0], str(places[1]))


def test_links_lead_nowhere_else(places):
    shown, secret = places
    (shown / "folder_link").symlink_to(secret)
    with pytest.raises(InputError, match="leads out of"):
        confined(shown, "folder_link")
    (shown / "within").symlink_to(shown / "run")
    assert confined(shown, "within") == shown / "run"
    assert [run.name for run in find_runs(shown)[0]] == ["run"]


@pytest.mark.parametrize("page", ["overview", "overlap", "ledger", "files"])
@pytest.mark.parametrize("name", ["../secret", "/etc"])
def test_pages_say_so(open_page, places, page, name):
    app = open_page(places[0], page, run=name)
    assert not app.exception
    assert len(app.error) == 1
    assert "only what is in that folder is shown" in app.error[0].value.replace("\\", "")


def test_compare_says_so(open_page, places):
    write_recording(places[0] / "second")
    app = open_page(places[0], "compare", a="../secret", b="run")
    assert not app.exception
    assert len(app.error) == 1


def test_recording_with_a_link_to_elsewhere_is_not_read(open_page, places):
    shown, secret = places
    write_kernels(secret / "rank0_trace.json.gz", [("matmul", None, 7, 10, 100)])
    (shown / "run" / "rank0_trace.json.gz").symlink_to(secret / "rank0_trace.json.gz")
    run = run_at(shown, "run")
    assert links_out(shown, run) == [shown / "run" / "rank0_trace.json.gz"]
    for page in ("overview", "overlap", "files"):
        app = open_page(shown, page, run="run")
        assert not app.exception
        assert "leads out of" in app.error[0].value.replace("\\", "")


def test_fingerprint_is_of_every_file_and_of_a_live_run_of_its_doubling(places):
    shown = places[0]
    run = run_at(shown, "run")
    before, before_live = fingerprint(run), fingerprint(run, live=True)
    with (shown / "run" / "steps" / "rank0.jsonl").open("a") as file:
        file.write("\n")
    assert fingerprint(run) != before
    assert fingerprint(run, live=True) == before_live
    path = shown / "run" / "steps" / "rank0.jsonl"
    path.write_text(4 * path.read_text())
    assert fingerprint(run, live=True) != before_live


@pytest.mark.parametrize("page", ["runs", "overview", "compare", "ab"])
def test_names_that_are_no_text_cost_only_themselves(open_page, places, page):
    shown = places[0]
    nameless = Path(os.fsdecode(os.fsencode(shown) + b"/caf\xe9"))
    shutil.copytree(shown / "run", nameless)
    assert [run.name for run in find_runs(shown)[0]] == ["run"]
    app = open_page(shown, page, run="run")
    assert not app.exception
    assert page != "runs" or "not UTF-8 (rename them)" in app.warning[0].value

    nameless.rename(shown / "run" / nameless.name)
    app = open_page(shown, page, run="run")
    assert not app.exception
    assert page != "overview" or "rename it" in app.error[0].value


def test_queues_of_an_experiment_are_no_traces(places):
    experiment = places[0] / "probe"
    (experiment / "queues").mkdir(parents=True)
    for name in ("experiment.json", "queues/unset.json"):
        (experiment / name).write_text("{}")
    shutil.copytree(places[0] / "run", experiment / "trials" / "00-unset")
    assert [run.name for run in find_runs(places[0])[0]] == ["probe", "probe/trials/00-unset", "run"]


def test_search_ends(places, monkeypatch):
    monkeypatch.setattr(discover, "FOLDERS_SEARCHED", 1)
    assert find_runs(places[0]) == ([], False)


def test_store_keeps_what_was_used_last(tmp_path):
    for name in ("old", "new"):
        store.save(tmp_path / name / "x", Extract(values={"n": 1}, columns={"c": np.arange(1000)}))
    store.touch(tmp_path / "new")
    loaded = store.load(tmp_path / "new" / "x")
    assert (loaded.values, loaded.columns["c"].sum()) == ({"n": 1}, 499500)
    assert not loaded.columns["c"].flags.writeable
    os.utime(tmp_path / "old", (1, 1))
    store.prune(tmp_path, kept_bytes=9000)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_pages_need_no_torch():
    program = (
        "import sys, importlib, pkgutil; sys.modules['torch'] = None; import dashboard; "
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(dashboard.__path__, 'dashboard.')]; "
        "assert 'matplotlib' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
