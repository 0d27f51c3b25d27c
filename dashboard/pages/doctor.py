"""What this machine can run: `meshscope doctor`, run beside the server so that torch is not imported into it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import streamlit as st

import harness
from dashboard import commands, states, tables
from harness.errors import InputError

TITLE, ICON, ORDER, ABOUT = "Doctor", ":material/stethoscope:", 90, "folder"

LIMIT_S = 180.0
SIGNS = {"ok": "✓", "missing": "✗", "warning": "!", "optional": "–"}


def page() -> None:
    st.title("Doctor")
    report = examined()
    modes(report)
    checks(report)
    variables(report)
    states.partial([error | {"offset": error.get("offset")} for error in report["errors"]])
    if st.button("Examine again", icon=":material/refresh:", shortcut="E"):
        examined.clear()
        st.rerun()
    commands.show(["meshscope doctor"])


@st.cache_data(ttl=3600, show_spinner="Examining this machine")
def examined() -> dict[str, Any]:
    """The object of `meshscope doctor --json`; raises `InputError` if it says nothing."""
    package = str(Path(harness.__file__).parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "harness.cli", "doctor", "--json"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        found: dict[str, Any] = msgspec.json.decode(done.stdout, type=dict[str, Any])
    except subprocess.TimeoutExpired:
        raise InputError("meshscope doctor", f"did not end within {LIMIT_S:.0f} s") from None
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="backslashreplace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise InputError("meshscope doctor", said[-1]) from None
    return found


def modes(report: dict[str, Any]) -> None:
    st.subheader("Modes")
    rows = [
        {
            "mode": name,
            "can": "✓ yes" if mode["available"] else "✗ no",
            "ranks": ranks_of(mode),
            "reason": mode["reason"],
        }
        for name, mode in report["modes"].items()
    ]
    tables.show(rows, {"mode": "mode", "can": "here", "ranks": "ranks, up to", "reason": "why not"})


def ranks_of(mode: dict[str, Any]) -> str | None:
    if not mode["available"]:
        return None
    return "any number" if mode["max_ranks"] is None else f"{mode['max_ranks']:,}"


def checks(report: dict[str, Any]) -> None:
    st.subheader("Checks")
    rows = [check | {"state": f"{SIGNS[check['state']]} {check['state']}"} for check in report["checks"]]
    tables.show(rows, {name: name for name in ("state", "group", "name", "value", "fix")})


def variables(report: dict[str, Any]) -> None:
    st.subheader("Variables")
    here = [variable for variable in report["variables"] if variable["value"] is not None]
    headers = {"name": "variable", "value": "set to", "state": "state", "evidence": "evidence", "note": "note"}
    if here:
        tables.show(here, headers)
    else:
        st.caption("None of those known is set here.")
    with st.expander("All known variables, and what this build does with them"):
        tables.show(report["variables"], headers)
