"""`meshscope probe`: does a setting change anything? Repeated runs of each arm, and a verdict with its interval."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from harness.commands import add_json_argument, require_page, write_page
from harness.commands.run import DEFAULT_PARENT
from harness.compare import Wanted
from harness.config import Trainer
from harness.config_json import with_overrides
from harness.doctor import Choice, choose_mode
from harness.doctor.modes import usable_devices
from harness.doctor.shared_gpu import visible_by_uuid
from harness.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_PARTIAL,
    EXIT_UNAVAILABLE,
    InputError,
    UnavailableError,
    UsageError,
)
from harness.interpreter import examine
from harness.launch import TIMEOUT_S, WORKER
from harness.modes import Start, prepare
from harness.recipes.arguments import add_recipe_arguments, config_from
from harness.recording import MODES, read_json, write_json
from harness.sources import report_errors
from harness.text import counted, one_line
from harness.validation import validate_inputs
from probes import liveness, queue_arms, text
from probes.analysis import Analysis, analyse, refused, without_trials
from probes.engine import conduct
from probes.experiment import (
    ANALYSIS,
    BUILD,
    DEFAULT_PAIRS,
    MOST_PAIRS,
    SCHEMA_VERSION,
    Experiment,
    Known,
    default_thresholds,
    locked,
    with_windows,
)
from probes.knobs import KNOBS, Arm, Knob, aspects, find_knob, max_connections, split_values
from probes.queue_arms import MOST_ROUNDS, ROUNDS
from probes.reduce import COMPARED
from probes.report.reading import is_experiment, read_analysis
from probes.surroundings import without
from probes.validity import RefusedError

TAKES_OVERRIDES = True
WARMUP, MEASURED = 10, 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "knob", nargs="?", metavar="KNOB", help=f"{', '.join(KNOBS)}; or NAME=a,b for any variable (unset is a value)"
    )
    parser.add_argument("--list", action="store_true", help="the knobs: hypothesis, where they act, what is known")
    add_recipe_arguments(parser, module="debug", config="tiny")
    parser.add_argument("--arms", metavar="A,B,…", help="values to compare, the first is the baseline")
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="VALUE",
        help="one arm more, its value may hold commas; python=PATH: its ranks run under that interpreter",
    )
    parser.add_argument(
        "--repeats", type=int, default=DEFAULT_PAIRS, metavar="N", help="pairs of trials (default: %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=int, default=WARMUP, metavar="N", help="steps of each trial to discard (default: %(default)s)"
    )
    parser.add_argument("--metric", choices=COMPARED, help="what decides (default: the knob's own)")
    parser.add_argument("--seed", type=int, default=0, help="draws the order of the trials (default: %(default)s)")
    parser.add_argument(
        "--mode",
        choices=[mode for mode in MODES if mode != "imported"],
        help="as of meshscope run; rehearsal decides about memory only",
    )
    parser.add_argument("--ranks", metavar="R,…", help="mode rehearsal: the ranks to rehearse")
    parser.add_argument("--nccl", type=Path, metavar="PATH", help="mode shared-gpu: an NCCL library of 2.30 or later")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the experiment; the same command goes on with it (default: runs/out/probe-KNOB-TIME)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help="a trial in which no rank ends a step for S seconds has hung (default: %(default)g)",
    )
    parser.add_argument(
        "--queues",
        action="store_true",
        help="max_connections: only count the hardware queues that each arm's context has",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"max_connections: counts of each arm's queues (default: {ROUNDS})"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a report as one HTML file, with pictures")
    parser.add_argument("--force", action="store_true", help="run the trials even where the verdict is known before")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Exits 0 once there is a verdict, whatever it is; 3 if trials failed so that there is none; 5 if this build or
    machine cannot run the knob."""
    if args.list:
        knobs = {"schema_version": 1, "knobs": [knob.to_json() for knob in KNOBS.values()]}
        print(json.dumps(knobs) if args.json else text.knob_list(KNOBS.values()))
        return EXIT_OK
    if args.queues:
        return count_queues(args)
    if args.html is not None:
        require_page(args.html)
    experiment = plan(args)
    known, notes = before_trials(experiment)
    if known is not None and (not args.force or len(experiment.run_arms) < 2):
        if args.html is not None:
            write_html(known, args.html)
        _print(known, args.json)
        return EXIT_UNAVAILABLE if known.verdict == "unavailable in this build" else EXIT_OK
    experiment = replace(experiment, directory=_folder(args.out, experiment))
    analysis = perform(experiment, notes, rounds=args.rounds or ROUNDS)
    if args.html is not None:
        write_html(analysis, args.html)
    _print(analysis, args.json)
    return EXIT_OK if analysis.decided else EXIT_FAILED


def report_experiment(directory: Path, *, html: Path | None, as_json: bool, wanted: Wanted) -> int | None:
    """`meshscope report` of an experiment's folder: the trials on disk analysed anew. Exits 4 if some have not ended,
    3 if none has; None for a folder that holds something else. Raises `UsageError` for a `wanted` unit."""
    if not is_experiment(directory):
        return None
    if wanted.is_named:
        raise UsageError(f"{wanted.option}: {directory} is an experiment; name one recording, a folder of its trials/")
    analysis = read_analysis(directory)
    if html is not None:
        write_html(analysis, html)
    _print(analysis, as_json)
    errors = [InputError(directory, line) for line in text.unfinished(analysis)]
    return report_errors("report", errors, read=len(analysis.progress.trials))


def write_html(analysis: Analysis, path: Path) -> None:
    """Raises `InputError` if the file cannot be written."""
    from probes.report.page import page  # matplotlib takes a second to import

    write_page(path, page(analysis))


def plan(args: argparse.Namespace) -> Experiment:
    """The experiment that the arguments mean, in no folder yet. Raises `UsageError` and `UnavailableError`."""
    knob, values = _knob(args)
    arms = knob.arms(values)
    _require(args.repeats >= 2, f"--repeats {args.repeats} must be at least 2: one pair has no interval")
    _require(args.repeats <= MOST_PAIRS, f"--repeats {args.repeats} must be at most {MOST_PAIRS:,}")
    _require(args.warmup >= 1, f"--warmup {args.warmup} must be at least 1: the first step is never like the others")
    _require(args.timeout > 0, f"--timeout {args.timeout:g} must be above 0")
    _require(args.seed >= 0, f"--seed {args.seed} must be 0 or above")
    named = {name for name, _ in args.overrides}
    for arm in arms:
        if twice := named & arm.overrides.keys():
            raise UsageError(f"--{twice.pop()} is what {knob.name} changes: leave it out, or name --arms")
    config = config_from(args)
    for option, value, needed in (("--ranks", args.ranks, "rehearsal"), ("--nccl", args.nccl, "shared-gpu")):
        _require(value is None or args.mode == needed, f"{option} is for --mode {needed} only")
    choice = choose_mode(config, args.mode)
    mode, config.training.device = choice.mode, choice.device
    validate_inputs(config)
    config = with_windows(config, warmup=args.warmup, steps=None if "training.steps" in named else MEASURED)
    primary = args.metric or knob.metric
    if mode == "rehearsal" and not COMPARED[primary].is_bytes:
        raise UsageError(f"mode rehearsal shows memory only and {primary} decides: name one in bytes with --metric")
    if choice.device == "cpu" and primary == "peak_reserved_bytes" and not knob.needs_cuda:
        raise UsageError(f"mode {mode} has no reserved bytes and {primary} decides: name another with --metric")
    configs = {arm.name: with_overrides(config, list(arm.overrides.items())) for arm in arms}
    knob = knob.in_mode(mode)
    idle = liveness.inactions(arms, knob, config, mode)
    for name, arm_config in configs.items():
        if args.force or name not in idle:
            arm_config.validate()
    not_run = {} if args.force else liveness.same_settings(arms, knob, config) | idle
    starts: dict[str, Start] = {}
    for place, arm in enumerate(arms):
        if arm.name not in not_run:
            try:
                if arm.python is not None:
                    arms[place] = replace(arm, python=examine(arm.python))
                starts[arm.name] = _start(arm, configs[arm.name], choice, args)
            except (UsageError, UnavailableError) as error:
                if not starts:  # the baseline
                    raise
                not_run[arm.name] = Known("unavailable in this build", str(error))
    return Experiment(
        directory=Path(),
        knob=knob,
        arms=arms,
        not_run=not_run,
        config=config,
        mode=mode,
        gpus=_gpus(choice, config),
        starts=starts,
        pairs=args.repeats,
        seed=args.seed,
        warmup=args.warmup,
        primary=primary,
        thresholds=default_thresholds(knob, primary, list(COMPARED)),
        timeout_s=args.timeout,
    )


def _knob(args: argparse.Namespace) -> tuple[Knob, list[str] | None]:
    """The knob, and the values of its arms where they are named. Raises `UsageError`."""
    if args.knob is None:
        raise UsageError(f"which knob? {', '.join(KNOBS)}, or NAME=a,b for a variable (--list says more)")
    knob, values = find_knob(args.knob)
    if len(also := aspects(args.knob)) > 1:
        _say(f"{args.knob} is {also[0]}; there are also {', '.join(also[1:])}")
    if args.arms or args.arm:
        if values is not None:
            raise UsageError(f"{args.knob} names its arms already: leave out --arms and --arm")
        values = [*(split_values(args.arms) if args.arms else []), *args.arm]
    counts = knob.name == max_connections.KNOB.name
    for option, given in (("--queues", args.queues), ("--rounds", args.rounds is not None)):
        _require(counts or not given, f"{option} is for {max_connections.KNOB.name} only")
    if args.rounds is not None:
        _require(2 <= args.rounds <= MOST_ROUNDS, f"--rounds {args.rounds} must be between 2 and {MOST_ROUNDS}")
    return knob, values


def count_queues(args: argparse.Namespace) -> int:
    """`--queues`: the hardware queues of each arm's context, without a trial. Exits 3 if no arm has a number, 4 if a
    measurement failed or ended early."""
    knob, values = _knob(args)
    arms = knob.arms(values or max_connections.QUEUE_VALUES, at_least=1)
    _require(
        args.mode in (None, "real", "shared-gpu"),
        f"--queues makes a CUDA context: --mode {args.mode} has none to count",
    )
    usable, why = usable_devices()
    if not usable:
        raise UnavailableError(f"--queues needs a CUDA device, here is none ({why})")
    directory, shared = _folder(args.out, None), args.mode == "shared-gpu"
    with locked(directory):
        environment = visible_by_uuid(os.environ) if shared else {}
        queue_arms.measure(
            arms, directory, rounds=args.rounds or ROUNDS, under_mps=shared, environment=environment, say=_say
        )
        found = queue_arms.read(arms, directory)
    print(json.dumps(found.to_json(), allow_nan=False) if args.json else found.text())
    for error in found.errors:
        _say(f"meshscope probe: error: {error}")
    if not found.counted:
        return EXIT_FAILED
    return EXIT_PARTIAL if found.errors else EXIT_OK


def _gpus(choice: Choice, config: Trainer.Config) -> int:
    """How many the ranks use."""
    if choice.device == "cpu":
        return 0
    return {"real": config.world_size, "shared-gpu": choice.gpus}.get(choice.mode, 1)


def _start(arm: Arm, config: Trainer.Config, choice: Choice, args: argparse.Namespace) -> Start:
    """What the mode needs for an arm. Raises `UsageError` and `UnavailableError` where they do not go together."""
    with without(arm.names()):
        settings = {name: value for name, value in arm.environment.items() if value is not None}
        start = prepare(config, choice, ranks=args.ranks, nccl=args.nccl, environment={**os.environ, **settings})
    for name, value in arm.environment.items():
        if value is None and name in start.environment:
            raise UsageError(f"{name} cannot be unset in mode {choice.mode}, which needs it: name a value")
    return start


def before_trials(experiment: Experiment) -> tuple[Analysis | None, list[str]]:
    """The verdict where it is known without a trial, and what the libraries say of the variables."""
    known: Known | None = None
    notes: list[str] = []
    if liveness.is_examined(experiment.arms):
        known, notes = liveness.dead(experiment.arms, liveness.this_build())
        if any(arm.overrides or arm.python for arm in experiment.arms):  # they differ in more than variables
            known = None
    if known is None and (known := liveness.without_device(experiment.knob, experiment.gpus)):
        notes.append(known.reason)
    if known is None and len(experiment.run_arms) < 2:
        known = next(iter(experiment.not_run.values()))
        notes += dict.fromkeys(known.reason for known in experiment.not_run.values())
    if known is None:
        liveness.require_taken(experiment.run_arms)
    if method := liveness.fsdp_method(experiment.knob):
        notes.append(f"{experiment.knob.name}: by FSDPModule.{method}")
    return None if known is None else without_trials(experiment, known, notes), notes


def perform(
    experiment: Experiment, notes: Sequence[str], program: Sequence[str] = WORKER, rounds: int = ROUNDS
) -> Analysis:
    """Runs what is left of the experiment in its folder and writes analysis.json."""
    directory = experiment.directory
    with locked(directory):
        resumed = experiment.fix()
        write_json(directory / BUILD, {"schema_version": SCHEMA_VERSION, "notes": list(notes)})
        arms = " / ".join(arm.name for arm in experiment.run_arms)
        _say(
            f"{experiment.knob.name}: {arms}, {counted(len(experiment.order()), 'trial')}, mode {experiment.mode}, "
            f"{'going on' if resumed else 'recording'} in {directory}"
        )
        try:
            if queue_arms.of_experiment(experiment):
                queue_arms.measure_for(experiment, _say, rounds)
            analysis = analyse(experiment, conduct(experiment, _say, program), notes)
        except KeyboardInterrupt:
            _say(f"trials that ended are kept: the same command with --out {directory} goes on")
            raise
        except RefusedError as error:
            _say(f"meshscope probe: error: {error}")
            analysis = refused(experiment, str(error))
        write_json(directory / ANALYSIS, analysis.to_json())
    for outcome in analysis.failures():
        _say(f"meshscope probe: error: {outcome}")
    return analysis


def _folder(wanted: Path | None, experiment: Experiment | None) -> Path:
    """The folder of the experiment, made now if need be: the one asked for, or the default one that holds the same
    plan without its end, or a new one; without an experiment it is for queues. Raises `UsageError` if it cannot be
    made."""
    try:
        if wanted is not None:
            wanted.mkdir(parents=True, exist_ok=True)
            return wanted.resolve()
        if experiment is None:
            return _new_folder("queues")
        stem = re.sub(r"[^\w.-]", "_", f"probe-{experiment.knob.name}")
        for path in sorted(DEFAULT_PARENT.glob(f"{stem}-*/experiment.json"), reverse=True):
            if not (path.parent / ANALYSIS).exists() and read_json(path) == experiment.to_json():
                return path.parent.resolve()
        return _new_folder(stem)
    except OSError as error:
        raise UsageError(f"--out {wanted or DEFAULT_PARENT}: {error.strerror}; name another folder") from None


def _new_folder(stem: str) -> Path:
    """Made under the default parent, named after the time. Raises OSError."""
    stem += time.strftime("-%Y%m%d-%H%M%S")
    names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))  # others began in this second
    directory = next(DEFAULT_PARENT / name for name in names if not (DEFAULT_PARENT / name).exists())
    directory.mkdir(parents=True)
    return directory.resolve()


def _print(analysis: Analysis, as_json: bool) -> None:
    print(json.dumps(analysis.to_json(), allow_nan=False) if as_json else text.render(analysis))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _say(line: str) -> None:
    """Progress and errors; an experiment goes on when nobody reads them any more."""
    with suppress(BrokenPipeError):
        print(one_line(line), file=sys.stderr, flush=True)
