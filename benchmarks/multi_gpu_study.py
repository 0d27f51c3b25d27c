"""What one call brings home from a machine with several GPUs: layouts predicted, recorded and rehearsed, knobs probed.

    python benchmarks/multi_gpu_study.py --out results --budget-s 1500 [--archive-mb 40] [--training.seq_len 4096 …]

Most worth first. For every layout of the ranks there are: the ledger's prediction, written before anything runs; a
recorded run; a rehearsal of its ranks, whose allocated and reserved peaks must be the run's. Then probes, as many pairs
each as the budget leaves, fixed before its first trial; one that cannot get what a verdict needs is skipped, and that
is said. Every step is a `meshscope` command with a time limit of its own, whose words are in `WORK/logs`. The same call
goes on where the last one stopped (`WORK`, default runs/out/multi_gpu_study); `--out` gets what is worth keeping, up to
`--archive-mb`: summary.json, summary.md, pages, verdicts and as many recordings as fit.

`--predict --ranks N` only writes what the ledger says of all that, `predicted.json`; it needs no GPU.

Mode real uses the GPUs there are, a power of two of them; one GPU is shared by four ranks (mode shared-gpu, NCCL by
--nccl or $MESHSCOPE_NCCL); without one, or with --mode cpu, a debug model runs on two CPU ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import study_summary
from study_plan import MODELS, layouts_of, least_pairs, probes_of
from study_summary import Layout, Probe

from harness.cli import build_parser, split_overrides
from harness.doctor.modes import usable_devices
from harness.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    MeshscopeError,
    UnavailableError,
    UsageError,
)
from harness.ledger.prediction import predict
from harness.recipes.arguments import config_from
from harness.recording import read_json, write_json
from harness.text import one_line
from probes.experiment import DEFAULT_PAIRS

STATE = "state.json"
SHARED_RANKS = 4
CPU_RANKS = 2
MOST_RANKS = 8
# After SIGTERM a launch gives its ranks 15 s to write what they have.
ENDING_S = 40.0
# Of the budget, for the summary and for copying what is kept.
ENDING_SHARE, ENDING_MOST_S = 0.1, 120.0
START_S = 30.0
"""What a trial takes besides its steps, before any run has shown it."""


@dataclass
class Study:
    """`steps` maps the name of each step to what became of it, kept in `work`; `deadline` is of
    time.monotonic()."""

    mode: str
    ranks: int
    work: Path
    deadline: float
    step_limit_s: float
    warmup: int
    trial_steps: int
    nccl: Path | None
    overrides: list[str]
    retries: bool = False
    layouts: list[Layout] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.mode == "cpu"

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def recipe(self, layout: Layout, model: Sequence[str] = ()) -> list[str]:
        fields = {} if model else layout.fields
        words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
        return [*(model or MODELS[self.mode]), "--nproc", str(layout.ranks), *words]

    def in_mode(self) -> list[str]:
        return ["--mode", self.mode, *(["--nccl", str(self.nccl)] if self.nccl else [])]

    def folder(self, layout: Layout, what: str) -> Path:
        return self.work / layout.name / what

    def identity(self) -> dict[str, Any]:
        """What may not change between calls that go on."""
        return {"mode": self.mode, "ranks": self.ranks, "overrides": self.overrides}

    def predicted(self) -> dict[str, Any]:
        """The part of the ledger that a later run can confirm or not."""
        found = []
        for layout in self.layouts:
            words = [*self.recipe(layout), *self.overrides]
            rest, fields = split_overrides(["run", *words])
            config = config_from(build_parser("run").parse_args(rest, argparse.Namespace(overrides=fields)))
            known = predict(config, "cpu" if self.on_cpu else "cuda").to_json()
            names = ("rank", "peak_allocated_bytes", "at", "first_step_peak_allocated_bytes", "resident_bytes")
            ranks = [{name: rank[name] for name in names} for rank in known["ranks"]]
            what = {"name": layout.name, "arguments": words, "ranks": ranks}
            found.append(what | {"communication": known["communication"]})
        return {"schema_version": 1, "mode": "predicted", "layouts": found}

    def run(self) -> None:
        for layout in self.layouts:
            self.lay_out(layout)
        for probe in self.probes:
            self.probe(probe)

    def lay_out(self, layout: Layout) -> None:
        recipe = [*self.recipe(layout), *self.overrides]
        target = ["--target", "cpu" if self.on_cpu else "cuda"]
        prediction = self.folder(layout, "prediction.json")
        self.do(f"{layout.name}: ledger", ["ledger", *recipe, *target, "--json"], into=prediction)
        recorded, rehearsed = self.folder(layout, "run"), self.folder(layout, "rehearsal")
        usual = max((float(step["seconds"]) for name, step in self.steps.items() if name.endswith(": run")), default=0)
        self.do(
            f"{layout.name}: run", ["run", *recipe, *self.in_mode(), "--out", str(recorded)], recorded, needs_s=usual
        )
        device = ["--training.device", "cpu"] if self.on_cpu else []
        words = ["run", *recipe, *device, "--mode", "rehearsal", "--out", str(rehearsed)]
        self.do(f"{layout.name}: rehearsal", words, rehearsed, needs_s=usual / 2)
        page = str(self.folder(layout, "run.html"))
        if self.is_done(f"{layout.name}: run"):
            self.do(f"{layout.name}: report", ["report", str(recorded), "--html", page])

    def probe(self, probe: Probe) -> None:
        name, folder = probe.step, self.folder(probe.layout, probe.folder)
        if (known := self.steps.get(name, {})).get("arguments"):  # a plan is not changed once a trial has begun
            self.do(name, known["arguments"], into=Path(f"{folder}.json"), needs_s=0)
            return
        trial_s = self.trial_s(probe)
        for arms in probe.choices:
            least = least_pairs(len(arms), probe.metric)
            pairs = int(0.9 * min(self.left_s(), self.step_limit_s) / (trial_s * len(arms)))
            if pairs >= least or probe.known_ahead:
                words = ["probe", probe.knob, *self.recipe(probe.layout, probe.model), *self.in_mode()]
                words += [
                    "--arms",
                    ",".join(arms),
                    "--warmup",
                    str(self.warmup),
                    "--training.steps",
                    str(self.trial_steps),
                ]
                words += [
                    "--repeats",
                    str(least if probe.metric else max(least, min(pairs, DEFAULT_PAIRS))),
                    "--out",
                    str(folder),
                ]
                words += ["--metric", probe.metric] if probe.metric else []
                words += ["--html", f"{folder}.html", "--json", *([] if probe.model else self.overrides)]
                self.do(name, words, into=Path(f"{folder}.json"))
                return
        fewest = min(len(arms) * least_pairs(len(arms), probe.metric) for arms in probe.choices)
        reason = f"{fewest} trials of about {trial_s:.0f} s do not fit into {max(0.0, self.left_s()):.0f} s"
        self.note(name, state="skipped", seconds=0.0, reason=reason)

    def trial_s(self, probe: Probe) -> float:
        """What a trial will take: what the layout's run took besides its steps, and the time of a trial's steps."""
        name = f"{probe.layout.name}: run"
        if not self.is_done(name):
            return START_S
        wall_s, steps = study_summary.step_seconds(self.folder(probe.layout, "run"))
        return max(1.0, float(self.steps[name]["seconds"]) - wall_s * steps) + wall_s * self.trial_steps

    def is_done(self, name: str) -> bool:
        return self.steps.get(name, {}).get("state") == "done"

    def do(
        self, name: str, words: list[str], fresh: Path | None = None, *, into: Path | None = None, needs_s: float = 1.0
    ) -> None:
        """One command, unless it is done: within its time limit, with `fresh` removed first, its output in `into` or
        the logs. It is skipped where the budget leaves less than `needs_s`."""
        before = self.steps.get(name, {})
        if before.get("state") == "done" or (before.get("state") == "failed" and not self.retries):
            return
        limit = min(self.left_s(), self.step_limit_s)
        if limit < max(needs_s, 1.0):
            reason = f"{max(0.0, limit):.0f} s are left, it takes about {needs_s:.0f} s"
            self.note(name, **{**before, "state": "skipped", "seconds": before.get("seconds", 0.0), "reason": reason})
            return
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        say(f"{name} (at most {limit:.0f} s of {self.left_s():.0f} s left)")
        log = self.work / "logs" / f"{name.replace(': ', '-')}.log"
        kept = {"arguments": words} if words[0] == "probe" else {}
        self.note(name, state="stopped", seconds=before.get("seconds", 0.0), reason="it was interrupted", **kept)
        started = time.monotonic()
        try:
            code = command(words, log, into, limit)
        finally:
            seconds = round(before.get("seconds", 0.0) + time.monotonic() - started, 1)
            self.note(name, **{**self.steps[name], "seconds": seconds})
        if code is None:
            self.note(name, state="stopped", seconds=seconds, reason=f"ended by its limit of {limit:.0f} s", **kept)
        elif code == EXIT_OK or (kept and code == EXIT_UNAVAILABLE):  # which is what a probe found
            self.note(name, state="done", seconds=seconds, reason=None, **kept)
        else:
            self.note(name, state="failed", seconds=seconds, reason=last_line(log) or f"exit code {code}", **kept)

    def note(self, name: str, **what: Any) -> None:
        self.steps[name] = what
        write_json(self.work / STATE, {"study": self.identity(), "steps": self.steps})
        if what["state"] in ("failed", "skipped"):
            say(f"{name}: {what['state']}: {what['reason']}")


def command(words: Sequence[str], log: Path, into: Path | None, limit_s: float) -> int | None:
    """The exit code of a `meshscope` command, None where it was ended for its limit; nothing of it is left."""
    log.parent.mkdir(parents=True, exist_ok=True)
    output = into or log.with_suffix(".out")
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "wb") as said, open(log, "ab") as errors:
        program = [sys.executable, "-m", "harness.cli", *words]
        process = subprocess.Popen(
            program, stdin=subprocess.DEVNULL, stdout=said, stderr=errors, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.terminate()  # what ended is kept, as with Ctrl-C
                try:
                    process.wait(ENDING_S)
                except subprocess.TimeoutExpired:
                    process.kill()  # its ranks end with it
                    process.wait()


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((one_line(line.strip()) for line in reversed(lines) if line.strip()), "")


def say(line: str) -> None:
    print(f"multi_gpu_study: {line}", file=sys.stderr, flush=True)


def begin(args: argparse.Namespace, overrides: list[str]) -> Study:
    """Raises `UnavailableError` for a mode that this machine does not have, `UsageError` for a layout or knob that
    there is not, `InputError` for a state that cannot be read."""
    gpus, why = usable_devices()
    mode = args.mode or ("real" if gpus > 1 else "shared-gpu" if gpus else "cpu")
    if not args.predict and mode != "cpu" and gpus < (2 if mode == "real" else 1):
        raise UnavailableError(f"mode {mode}: {gpus} usable GPUs ({why or 'one is shared by --mode shared-gpu'})")
    usual = {"real": min(MOST_RANKS, 2 ** int(math.log2(max(gpus, 1)))), "shared-gpu": SHARED_RANKS, "cpu": CPU_RANKS}
    study = Study(
        mode=mode,
        ranks=args.ranks or usual[mode],
        work=args.work,
        deadline=time.monotonic() + args.budget_s - min(ENDING_SHARE * args.budget_s, ENDING_MOST_S),
        step_limit_s=args.step_limit_s,
        warmup=1 if mode == "cpu" else 8,
        trial_steps=6 if mode == "cpu" else 40,
        nccl=args.nccl if mode == "shared-gpu" else None,
        overrides=overrides,
        retries=args.retry,
    )
    layouts = layouts_of(study.ranks, mode)
    probes = probes_of(layouts, study.on_cpu)
    named = chosen("layouts", args.layouts, [layout.name for layout in layouts])
    knobs = chosen("knobs", args.knobs, [probe.knob for probe in probes])
    study.layouts = [layout for layout in layouts if layout.name in named]
    study.probes = [probe for probe in probes if probe.knob in knobs]
    if mode == "cpu":  # windows as short as they can be
        study.overrides = ["--recorder.trace.steps", "1", "--recorder.memory.steps", "1", *overrides]
    for option, folder in (("--out", args.out), *([] if args.predict else [("--work", args.work)])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{option} {folder}: {error.strerror}: name another folder") from None
    if not args.predict and (args.work / STATE).exists():
        before = read_json(args.work / STATE)
        if before.get("study") != study.identity():
            raise UsageError(f"--work {args.work} holds another study ({before.get('study')}): name a new folder")
        study.steps = before["steps"]
    return study


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def chosen(what: str, wanted: list[str] | None, known: Sequence[str]) -> list[str]:
    """Raises `UsageError` for a name that is not known."""
    if unknown := sorted(set(wanted or ()) - set(known)):
        raise UsageError(f"--{what} {','.join(unknown)}: there are {', '.join(dict.fromkeys(known))}")
    return list(known if wanted is None else wanted)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets what is worth keeping")
    parser.add_argument("--budget-s", type=float, default=None, metavar="S", help="for all of this call")
    parser.add_argument("--work", type=Path, default=Path("runs/out/multi_gpu_study"), metavar="DIR")
    parser.add_argument("--mode", choices=("real", "shared-gpu", "cpu"), help="default: what the GPUs allow")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), help="default: by the GPUs there are")
    parser.add_argument("--predict", action="store_true", help="only predict the layouts of --ranks")
    parser.add_argument("--layouts", type=names, metavar="L,…", help="only these (default: all of the ranks)")
    parser.add_argument("--knobs", type=names, metavar="K,…", help="only these (default: all of the mode)")
    parser.add_argument("--nccl", type=Path, default=os.environ.get("MESHSCOPE_NCCL"), metavar="PATH")
    parser.add_argument("--step-limit-s", type=float, default=900.0, metavar="S", help="default: %(default)g")
    parser.add_argument("--retry", action="store_true", help="try again what failed in an earlier call")
    parser.add_argument("--archive-mb", type=float, default=50.0, metavar="MB", help="most that --out holds")
    args, overrides = parser.parse_known_args()
    if args.predict:
        args.budget_s = args.budget_s or 600.0
    elif args.budget_s is None:
        parser.error("--budget-s is required")
    for name in ("budget_s", "step_limit_s", "archive_mb"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if any(not word.startswith("--") and (i % 2 == 0) for i, word in enumerate(overrides)):
        parser.error(f"{' '.join(overrides)}: fields of a run are given as --section.field VALUE")
    return args, overrides


def main() -> int:
    args, overrides = arguments()
    started = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM):  # the former is ignored in the background of a shell
        signal.signal(number, signal.default_int_handler)
    try:
        study = begin(args, overrides)
    except MeshscopeError as error:
        say(f"error: {error}")
        return error.exit_code
    say(f"{study.ranks} ranks, mode {study.mode}: {', '.join(layout.name for layout in study.layouts)}")
    if args.predict:
        write_json(args.out / "predicted.json", study.predicted())
        return EXIT_OK
    code = EXIT_OK
    try:
        study.run()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        say(f"what ended is kept: the same call goes on with {study.work}")
    found = study_summary.summary(study.work, study.mode, study.layouts, study.probes, study.steps)
    most, until = round(args.archive_mb * 1e6), started + args.budget_s
    try:
        study_summary.archive(found, study.work, args.out, most, until=until, trims=not study.on_cpu)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        say(f"--out {args.out} has what was copied until now; the same call goes on with {study.work}")
    print(study_summary.markdown(found))
    if code == EXIT_OK and any(step["state"] == "failed" for step in study.steps.values()):
        code = EXIT_FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
