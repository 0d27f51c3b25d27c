"""From which streams waited for which to a number of hardware queues; what the numbers of several arms mean."""

import json
import random
from dataclasses import asdict, replace
from itertools import product

import msgspec
import pytest
import torch
from experiments import experiment
from queue_worlds import RELEASED_NS, observe, round_robin

from harness import cli
from harness.doctor.modes import usable_devices
from harness.errors import EXIT_UNAVAILABLE, EXIT_USAGE
from harness.recording import write_json
from probes import queue_arms
from probes.analysis import analyse
from probes.engine import survey
from probes.knobs.max_connections import KNOB
from probes.queue_findings import ArmQueues, counts, findings, took_effect
from probes.queues import Observations, Round, estimate, parse

without_gpu = pytest.mark.skipif(bool(usable_devices()[0]), reason="needs a machine without a CUDA device")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("queues", [1, 2, 3, 8, 16, 31, 32, 33])
@pytest.mark.parametrize("sleeper_blocks", [False, True])
def test_queues_are_counted_whether_or_not_the_awaited_kernel_holds_up_its_own(queues, sleeper_blocks):
    found = estimate(observe(round_robin(queues), sleeper_blocks=sleeper_blocks))

    assert (found.count, found.low, found.high) == (queues, queues, queues)
    assert (found.at_least, found.stable, found.reason) == (False, True, None)
    assert sum(found.class_sizes) == 96
    assert found.class_sizes[0] - found.class_sizes[-1] <= 1
    assert found.words() == f"{queues} queue{'s' * (queues > 1)} ({queues} in each of 3 rounds)"


def test_classes_are_the_streams_of_each_queue():
    (first, *_) = estimate(observe(round_robin(8, 97))).rounds

    assert first.classes == [[*range(queue, 97, 8)] for queue in range(8)]
    assert (first.asymmetric_pairs, first.nontransitive_pairs) == (0, 0)
    assert first.sharing_pairs == 7 * (12 * 11 // 2) + 13 * 12 // 2


def test_any_mapping_is_found_whatever_the_streams_are_called():
    for seed in range(20):
        draw = random.Random(seed)
        mapping = [draw.randrange(1 + seed) for _ in range(96)]
        found = estimate(observe(mapping, seed=seed))
        sizes = sorted((mapping.count(queue) for queue in set(mapping)), reverse=True)
        assert (found.count, found.class_sizes, found.at_least) == (len(sizes), sizes, 1 in sizes)


@pytest.mark.parametrize(
    "noise",
    [
        {"flips": 0.003},
        {"flips": 0.01},
        {"flips": 0.3},
        {"missing": 0.1},
        {"missing": 0.3},
        {"missing": 0.7},
        {"stalled": 0.2},
        {"stalled": 0.4},
        {"stalled": 0.7},
    ],
    ids=str,
)
def test_noise_widens_the_interval_or_leaves_no_number(noise):
    for queues, seed in product([2, 8, 32], range(3)):
        found = estimate(observe(round_robin(queues), seed=seed, **noise))
        if found.count is None:
            assert found.reason
            assert (found.low, found.high, found.class_sizes) == (None, None, [])
        else:
            assert found.low <= queues <= found.high
            assert found.low <= found.count <= found.high


@pytest.mark.parametrize("noise", [{"flips": 0.002}, {"missing": 0.1}, {"stalled": 0.1}], ids=str)
def test_little_noise_changes_no_count(noise):
    for queues in (1, 8, 32):
        assert estimate(observe(round_robin(queues), **noise)).count == queues


def test_moments_in_which_everything_was_late_are_left_out_and_counted():
    found = estimate(observe(round_robin(32), stalled=0.05))

    assert found.count == 32
    assert sum(item.stalled_rows for item in found.rounds) > 3


def test_streams_that_move_between_rounds_are_counted_and_said_to_move():
    found = estimate(observe(round_robin(8), moving=True))

    assert (found.count, found.stable) == (8, False)


def test_more_queues_than_streams_is_a_lower_bound():
    found = estimate(observe(round_robin(200)))

    assert (found.count, found.at_least) == (96, True)
    assert found.words() == "at least 96 queues (96 streams)"


def test_relation_that_holds_in_one_direction_gives_no_number():
    found = observe(round_robin(96))
    for row in (row for item in found.rounds for row in item.rows if row.stream is not None):
        for step in range(1, 20):  # each holds up the next ones, which hold up others
            row.ended_ns[(row.stream + step) % 96] = RELEASED_NS + 1

    refused = estimate(found)

    assert refused.count is None
    assert refused.reason.startswith("3 of 3 rounds cannot be used: sharing a queue is no consistent relation")
    assert refused.words() == f"no number ({refused.reason})"


def test_chain_of_neighbours_gives_no_number():
    found = observe(round_robin(96))
    for row in (row for item in found.rounds for row in item.rows if row.stream is not None):
        for step in (-1, 1):
            row.ended_ns[(row.stream + step) % 96] = RELEASED_NS + 1

    assert estimate(found).count is None
    assert "contradict the other pairs" in estimate(found).reason


def test_rows_launched_too_late_say_nothing():
    found = observe(round_robin(8))
    slow = [Round(rows=[replace(row, in_time=False) for row in item.rows]) for item in found.rounds]

    assert "launching took longer than the kernel waited for" in estimate(replace(found, rounds=slow)).reason
    one_slow = estimate(replace(found, rounds=[slow[0], *found.rounds[1:]]))
    assert (one_slow.count, one_slow.rounds[0].count) == (8, None)


def test_stream_that_did_not_wait_says_nothing():
    found = observe(round_robin(8))
    for row in (row for item in found.rounds for row in item.rows if row.stream is not None):
        row.ended_ns[row.stream] = RELEASED_NS - 1

    assert estimate(found).reason.startswith("3 of 3 rounds cannot be used: 0 of 96 streams can be used")


def test_rounds_that_do_not_agree_give_no_number():
    rounds = [observe(round_robin(queues), rounds=1).rounds[0] for queues in (8, 16, 8)]

    assert estimate(Observations(streams=96, rounds=rounds)).reason == "the rounds do not agree: 8, 16, 8 queues"


def test_rounds_that_nearly_agree_give_an_interval():
    rounds = [observe(round_robin(queues), rounds=1).rounds[0] for queues in (31, 32, 32)]
    found = estimate(Observations(streams=96, rounds=rounds))

    assert found.words() == "32 queues (31 to 32 in each of 3 rounds)"


def test_measurement_that_ended_early_keeps_what_it_has():
    none = estimate(Observations(streams=96, error="importing torch: no end within 120 s"))
    assert (none.count, none.reason) == (None, "importing torch: no end within 120 s")

    some = estimate(replace(observe(round_robin(8)), phase="latency", error="latency: no end within 20 s"))
    assert (some.count, some.error) == (8, "latency: no end within 20 s")


@pytest.mark.parametrize(
    ("queues", "four_wait", "twelve_wait"), [(1, True, True), (2, True, True), (8, False, True), (16, False, False)]
)
def test_simple_form_shows_when_independent_work_waits(queues, four_wait, twelve_wait):
    found = estimate(observe(round_robin(queues), sleeper_blocks=False))

    assert (found.latency_ns[4] > 5_000_000, found.latency_ns[12] > 5_000_000) == (four_wait, twelve_wait)
    assert found.delayed_from == max(3, queues + 2)  # the first stream, which works itself, holds up none


def of_arms(**queues: int) -> list[ArmQueues]:
    """`arm_16=8`: asked for 16, has 8."""
    arms = []
    for name, number in queues.items():
        value = name.removeprefix("arm_")
        given = None if value == "unset" else value
        arms.append(ArmQueues(arm=value, value=given, estimate=estimate(observe(round_robin(number)))))
    return arms


def test_arms_that_get_what_they_ask_for():
    arms = of_arms(arm_unset=8, arm_1=1, arm_32=32)

    assert counts(arms) == [
        "unset: 8 queues (8 in each of 3 rounds)",
        "1: 1 queue (1 in each of 3 rounds)",
        "32: 32 queues (32 in each of 3 rounds)",
    ]
    assert findings(arms, "8") == ["the setting took effect: contexts have from 1 to 32 queues"]


def test_arms_that_do_not_are_findings():
    lines = findings(of_arms(arm_unset=32, arm_1=2, arm_2=2, arm_16=8, arm_32=4), "8")

    assert "unset: not the documented default of 8: 32 queues (32 in each of 3 rounds)" in lines
    assert "asked for 1, this context has 2" in lines
    assert "asked for 16, this context has 8" in lines
    assert not any(line.startswith("asked for 2,") for line in lines)
    assert "32 asks for more than 16 and has fewer: 4 against 8" in lines
    assert "alike in their queues, so that these make no difference between them: 1, 2 (2 queues)" in lines


def test_setting_without_effect_is_said():
    arms = of_arms(arm_1=8, arm_8=8, arm_32=8)

    assert took_effect(arms) is False
    assert findings(arms, "8")[-1] == "the arms' contexts do not differ in their queues: the setting has no effect here"


def test_nothing_is_said_of_an_effect_where_fewer_than_two_have_a_number():
    lost = ArmQueues(arm="2", value="2", estimate=estimate(Observations(error="no device")))
    arms = [*of_arms(arm_1=1), lost]

    assert took_effect(arms) is None
    assert findings(arms, "8") == ["2: no number (no device)"]
    assert counts(arms) == ["1: 1 queue (1 in each of 3 rounds)"]


def test_lower_bound_is_no_mismatch_and_no_likeness():
    arms = of_arms(arm_96=96, arm_200=96)

    assert took_effect(arms) is False
    assert not any("asked for" in line or "alike" in line for line in findings(arms, "8"))


def test_value_that_is_no_number_is_said():
    arm = ArmQueues(arm="many", value="many", estimate=estimate(observe(round_robin(8))))

    assert findings([arm], "8")[-1] == "many is no number of queues"


def write_observations(directory, arm: str, queues: int, **changed: object) -> None:
    seen = asdict(observe(round_robin(queues), rounds=2))
    value = None if arm == "unset" else arm
    (directory / "queues").mkdir(exist_ok=True)
    document = {**seen, "setting": value, "arm": arm, "under_mps": False, "seconds": 5.25, **changed}
    write_json(directory / "queues" / f"{arm}.json", document)


def test_what_was_printed_is_read_as_it_is():
    seen = observe(round_robin(8), rounds=1)

    assert parse(json.loads(json.dumps(asdict(seen)))) == seen
    with pytest.raises(msgspec.ValidationError, match="not of 95 streams"):
        parse(asdict(seen) | {"streams": 95})


def test_study_is_read_from_its_folder(tmp_path):
    for arm, queues in (("unset", 8), ("1", 1), ("32", 32)):
        write_observations(tmp_path, arm, queues)

    found = queue_arms.read(KNOB.arms(["unset", "1", "32"]), tmp_path)

    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (document["schema_version"], document["took_effect"], document["errors"]) == (1, True, [])
    assert [(arm["arm"], arm["asked"], arm["count"]) for arm in document["arms"]] == [
        ("unset", None, 8),
        ("1", 1, 1),
        ("32", 32, 32),
    ]
    text = found.text().splitlines()
    assert text[0] == "hardware queues of a CUDA context by CUDA_DEVICE_MAX_CONNECTIONS, a GPU"
    assert text[3].split() == ["1", "1", "1–1", "96", "0.00", "%", "5.507", "5.507", "3", "5.2", "s"]
    assert "note: measured in one process on the first device" in text


def test_file_that_is_damaged_or_of_another_setting_is_named(tmp_path):
    write_observations(tmp_path, "1", 1)
    write_observations(tmp_path, "8", 8, setting="16")
    (tmp_path / "queues" / "unset.json").write_text("{")

    found = queue_arms.read(KNOB.arms(["unset", "1", "8"]), tmp_path)

    assert [arm.arm for arm in found.arms] == ["1"]
    damaged, other = found.errors
    assert "unset.json: is not a JSON object" in str(damaged)
    assert "8.json: is not of arm 8: it was measured with CUDA_DEVICE_MAX_CONNECTIONS 16" in str(other)


def test_whole_measurements_stay_and_others_are_made_again(tmp_path):
    write_observations(tmp_path, "unset", 8)
    write_observations(tmp_path, "1", 1)
    arms, said = KNOB.arms(["unset", "1"]), []

    queue_arms.measure(arms, tmp_path, rounds=2, under_mps=False, environment={}, say=said.append)

    assert said == []


def test_verdict_on_trials_says_whether_the_setting_took_effect(tmp_path):
    planned = replace(experiment(tmp_path, "max_connections", "--arms", "unset,1"), gpus=1)
    assert analyse(planned, survey(planned)).queues is None
    write_observations(tmp_path, "unset", 8)
    write_observations(tmp_path, "1", 1)

    analysis = analyse(planned, survey(planned))

    assert analysis.to_json()["queues"]["took_effect"] is True
    assert "hardware queues: 1: 1 queue (1 in each of 2 rounds)" in analysis.notes
    assert "hardware queues: the setting took effect: contexts have from 1 to 8 queues" in analysis.notes


def test_counting_takes_no_other_knob_mode_or_number_of_rounds(capsys):
    for words, message in (
        (["threads", "--queues"], "--queues is for max_connections only"),
        (["threads", "--rounds", "3"], "--rounds is for max_connections only"),
        (["max_connections", "--queues", "--rounds", "1"], "--rounds 1 must be between 2 and 50"),
        (["max_connections", "--queues", "--mode", "cpu"], "--mode cpu has none to count"),
    ):
        assert cli.main(["probe", *words]) == EXIT_USAGE
        assert message in capsys.readouterr().err


@without_gpu
def test_counting_without_a_gpu_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert cli.main(["probe", "max_connections", "--queues", "--json"]) == EXIT_UNAVAILABLE

    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("meshscope probe: error: --queues needs a CUDA device, here is none")
    assert list(tmp_path.iterdir()) == []


@without_gpu
def test_program_says_why_it_cannot_measure_and_is_tried_again(tmp_path):
    arms, said = [KNOB.arms(["unset", "1"])[1]], []

    for _ in range(2):
        queue_arms.measure(arms, tmp_path, rounds=2, under_mps=False, environment={}, say=said.append)

    found = queue_arms.read(arms, tmp_path)
    assert len(said) == 2
    assert not found.counted
    assert json.loads((tmp_path / "queues" / "1.json").read_text())["setting"] == "1"
    assert found.findings[0].startswith("1: no number (")
    assert "CUDA" in found.findings[0] or "NVIDIA" in found.findings[0]


@with_gpu
def test_gpu_gives_fewer_queues_where_fewer_are_asked_for(tmp_path):
    arms, said = KNOB.arms(["1", "8", "32"]), []

    queue_arms.measure(arms, tmp_path, rounds=2, under_mps=False, environment={}, say=said.append)

    found = queue_arms.read(arms, tmp_path)
    numbers = [arm.estimate.count for arm in found.arms]
    assert None not in numbers, found.text()
    assert numbers == sorted(numbers)
    assert numbers[0] < numbers[-1]
    assert took_effect(found.arms) is True
