"""`meshscope dashboard`: a real server, started, asked and ended."""

import http.client
import os
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from dashboard_server import CLI, served

RECORDED = Path(__file__).parents[2] / "runs" / "recorded"
TRACE = "h200x2_fsdp2/profiling/traces/iteration_8/rank0_trace.json.gz"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with served(RECORDED, tmp_path_factory.mktemp("cache")) as (address, process):
        yield address
    assert process.returncode == 0


def get(address: str, path: str, **headers: str) -> tuple[int, bytes]:
    """Status and body; the path is sent as it is."""
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=20)) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()


def test_page_states_its_base_and_loads_nothing_from_elsewhere(address):
    status, body = get(address, "/overview")
    html = body.decode()
    assert status == 200
    assert "BACKEND_BASE_URL" in html
    assert 'src="http' not in html


def test_other_names_of_this_machine_are_refused(address):
    assert get(address, "/", Host="example.com")[0] == 400
    assert get(address, f"/raw/{TRACE}", Host="example.com")[0] == 400


def test_server_listens_on_loopback_alone(address):
    listening = "0A"
    port = f"{urlsplit(address).port:04X}"
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            if state == listening and place.endswith(f":{port}"):
                found.add(place.partition(":")[0])
    assert found == {"0100007F"}


def test_trace_is_given_out_as_it_is(address):
    assert get(address, f"/raw/{TRACE}") == (200, (RECORDED / TRACE).read_bytes())


@pytest.mark.parametrize(
    "path",
    [
        "/raw/h200x2_fsdp2/manifest.json",
        "/raw/h200x2_fsdp2",
        "/raw/../../README.md",
        "/raw/%2e%2e/%2e%2e/README.md",
        "/raw//etc/passwd",
        "/raw/..%2f..%2fREADME.md",
    ],
)
def test_nothing_else_is_given_out(address, path):
    assert get(address, path)[0] in (400, 404)


def test_cache_is_the_users_and_goes_with_no_cache(tmp_path):
    with served(RECORDED, tmp_path, "--no-cache"):
        pass
    assert list(tmp_path.rglob("*")) == []


def failure(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    return done.returncode, done.stderr


def test_bad_folder_and_busy_port_are_one_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    assert failure(str(tmp_path / "none"))[0] == 3
    assert failure(str(file)) == (
        3,
        f"meshscope dashboard: error: {file}: is not a folder: name the folder that holds it\n",
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = failure(str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert (code, "address already in use" in said) == (2, True)
    assert failure(str(tmp_path), "--port", "99999")[0] == 2
