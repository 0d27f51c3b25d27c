"""A rank that measures nothing: each section of its plan is written as it comes, but those that are to fail.

TORCH_FAILING of the environment (a name that the launcher passes on) names them. `meshscope calibrate` starts it as its
own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from harness import recording
from harness.calibration import machine_path, read_plan, section_path
from harness.worker import prepare

POINTS = {
    "kernels": [{"kind": "elementwise", "bytes": 1000, "ns": 10}],
    "matrix_products": [{"dtype": "bfloat16", "layout": "forward", "m": 10, "n": 10, "k": 10, "ns": 20}],
    "collectives": [{"kind": "all_gather", "ranks": 2, "bytes": 8, "ns": -1}],
}

directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
prepare(directory, rank)
if rank == 0:
    recording.write_json(machine_path(directory), {"device": "a device", "torch": "2.11"})
    rows = recording.steps_path(directory, rank)
    rows.parent.mkdir()
    for number, section in enumerate(read_plan(directory).sections):
        if section in os.environ["TORCH_FAILING"].split(","):
            raise RuntimeError(f"no {section} today")
        points = POINTS.get(section, [])
        recording.write_json(section_path(directory, section), {"points": points})
        with open(rows, "a", encoding="utf-8") as file:
            print(json.dumps({"step": number, "section": section, "points": len(points), "seconds": 0.1}), file=file)
