"""From which number of streams on work is held up to a number of queues; what the numbers of several arms mean."""

import json
from dataclasses import asdict, replace
from itertools import product

import msgspec
import pytest
import torch
from experiments import experiment
from queue_worlds import changed, controls, h200, observe

from harness import cli
from harness.doctor.modes import usable_devices
from harness.errors import EXIT_UNAVAILABLE, EXIT_USAGE, UsageError
from harness.recording import write_json
from probes import queue_arms
from probes.analysis import analyse
from probes.engine import survey
from probes.knobs.max_connections import KNOB
from probes.queue_findings import ArmQueues, counts, findings, took_effect
from probes.queues import Observations, estimate, parse

without_gpu = pytest.mark.skipif(bool(usable_devices()[0]), reason="needs a machine without a CUDA device")
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(("arm", "queues"), [("unset", 8), ("1", 1), ("2", 2), ("8", 8), ("16", 16), ("32", 32)])
def test_contexts_of_an_h200(arm, queues):
    found = estimate(h200()[arm])

    assert (found.count, found.low, found.high, found.at_least) == (queues, queues, queues, False)
    assert [(item.low, item.high) for item in found.rounds] == [(queues, queues)] * 5
    assert sum(item.contradicting for item in found.rounds) == 0
    assert [found.latency_ns[streams] > 5_000_000 for streams in (4, 12)] == [queues < 4, queues < 12]


def test_arms_of_an_h200_have_what_they_ask_for():
    arms = [ArmQueues(arm=arm, value=seen.setting, estimate=estimate(seen)) for arm, seen in h200().items()]

    assert findings(arms, "8") == [
        "each context has as many queues as asked for (unset: 8)",
        "alike in their queues, so that these make no difference between them: unset, 8 (8 queues)",
        "the setting took effect: contexts have from 1 to 32 queues",
    ]


@pytest.mark.parametrize("queues", [1, 2, 3, 4, 8, 16, 31, 32, 33, 46, 47])
@pytest.mark.parametrize("dynamic", [False, True])
def test_queues_are_counted_however_they_are_assigned(queues, dynamic):
    found = estimate(observe(queues, dynamic=dynamic))

    assert (found.count, found.low, found.high) == (queues, queues, queues)
    assert (found.at_least, found.reason, [item.contradicting for item in found.rounds]) == (False, None, [0, 0, 0])
    assert found.words() == f"{queues} queue{'s' * (queues > 1)} ({queues} in each of 3 rounds)"


@pytest.mark.parametrize(
    "noise",
    [
        {"flips": 0.003},
        {"flips": 0.03},
        {"flips": 0.1},
        {"flips": 0.3},
        {"missing": 0.1},
        {"missing": 0.3},
        {"missing": 0.7},
        {"stalled": 0.05},
        {"stalled": 0.2},
        {"stalled": 0.4},
        {"stalled": 0.1, "missing": 0.1},
    ],
    ids=str,
)
def test_noise_widens_the_interval_or_leaves_no_number(noise):
    """Up to 40 % of what is seen being late for another reason, or 30 % random."""
    wrong = 0
    for queues, dynamic, seed in product([1, 2, 3, 8, 32], [False, True], range(10)):
        found = estimate(observe(queues, rounds=5, dynamic=dynamic, seed=seed, **noise))
        if found.count is None:
            assert found.reason
            assert (found.low, found.high) == (None, None)
        else:
            assert found.low <= found.count <= (found.high or found.count)
            wrong += not found.low <= queues <= (found.high or queues)
    assert wrong <= 1, "of 100"


@pytest.mark.parametrize("noise", [{"flips": 0.005}, {"missing": 0.1}, {"stalled": 0.05}], ids=str)
@pytest.mark.parametrize("queues", [1, 2, 8, 32])
def test_little_noise_changes_no_count(noise, queues):
    for seed in range(10):
        assert estimate(observe(queues, rounds=5, seed=seed, **noise)).count == queues


def test_moments_in_which_work_was_late_are_counted():
    found = estimate(changed(observe(32), late=[5, 20]))

    assert (found.count, [item.contradicting for item in found.rounds]) == (32, [2, 2, 2])


def test_more_queues_than_streams_is_a_lower_bound():
    found = estimate(observe(200))

    assert (found.count, found.low, found.high, found.at_least) == (48, 48, None, True)
    assert found.words() == "at least 48 queues (48 streams)"


def test_numbers_of_streams_that_are_not_known_leave_an_interval():
    assert estimate(changed(observe(8), without=[9, 10])).words() == "8 queues (8 to 10 in each of 3 rounds)"
    assert estimate(changed(observe(8), without=[8])).words() == "7 queues (7 to 8 in each of 3 rounds)"
    assert estimate(changed(observe(47), without=[48])).words() == "at least 47 queues (48 streams)"
    assert estimate(changed(observe(1), without=[2, 3])).words() == "1 queue (1 in each of 3 rounds)"
    assert estimate(changed(observe(2), without=[2, 3])).words() == "2 queues (2 to 3 in each of 3 rounds)"


@pytest.mark.parametrize(
    ("queues", "change", "count"),
    [
        (1, {"early": [2]}, 1),
        (2, {"late": [2]}, 2),
        (1, {"controls": controls(47, 20, 47)}, 2),
        (2, {"controls": controls(47, 46)}, 1),
        (1, {"controls": []}, 1),
        (2, {"controls": []}, 2),
    ],
    ids=str,
)
def test_controls_tell_one_queue_from_two_and_two_streams_where_there_are_none(queues, change, count):
    """Whichever is wrong counts as a contradiction."""
    found = estimate(changed(observe(queues), **change))

    assert (found.low, found.count, found.high) == (count, count, count)
    assert {item.contradicting for item in found.rounds} == {0 if change == {"controls": []} else 1}


def test_without_controls_and_two_streams_it_is_one_or_two():
    assert estimate(changed(observe(2), without=[2], controls=[])).words() == "1 queue (1 to 2 in each of 3 rounds)"


def test_work_that_is_held_up_by_some_numbers_of_streams_only_gives_no_number():
    refused = estimate(changed(observe(8), early=range(20, 48, 2)))

    assert refused.count is None
    assert refused.reason.startswith("3 of 3 rounds cannot be used: 14 of 47 numbers of streams contradict the others")
    assert refused.words() == f"no number ({refused.reason})"


def test_work_launched_too_late_says_nothing():
    found = observe(8)
    slow = [
        replace(item, latencies=[replace(sample, in_time=False) for sample in item.latencies]) for item in found.rounds
    ]

    assert "in 47 cases launching took longer than the kernel" in estimate(replace(found, rounds=slow)).reason
    one_slow = estimate(replace(found, rounds=[slow[0], *found.rounds[1:]]))
    assert (one_slow.count, one_slow.rounds[0].low) == (8, None)
    assert one_slow.words() == "8 queues (8 in each of 2 rounds)"


def test_rounds_that_do_not_agree_give_no_number():
    def of(*queues: int) -> str | None:
        rounds = [observe(number, rounds=1).rounds[0] for number in queues]
        return estimate(Observations(streams=48, rounds=rounds)).reason

    assert of(8, 16, 8) == "the rounds do not agree: 8, 16, 8 queues"
    assert of(8, 60) == "the rounds do not agree: 8, at least 48 queues"
    assert of(8, 9, 10) is None


def test_rounds_that_know_little_do_not_contradict_those_that_know_more():
    (little,) = changed(observe(2, rounds=1), without=[3, 4]).rounds
    found = estimate(replace(seen := observe(2), rounds=[*seen.rounds, little]))

    assert found.words() == "2 queues (2 to 4 in each of 4 rounds)"


def test_rounds_that_nearly_agree_give_an_interval():
    rounds = [observe(queues, rounds=1).rounds[0] for queues in (31, 32, 32)]
    found = estimate(Observations(streams=48, rounds=rounds))

    assert found.words() == "32 queues (31 to 32 in each of 3 rounds)"


def test_measurement_that_ended_early_keeps_what_it_has():
    none = estimate(Observations(streams=48, error="importing torch: no end within 120 s"))
    assert (none.count, none.reason) == (None, "importing torch: no end within 120 s")

    some = estimate(replace(observe(8, rounds=1), phase="round 2 of 5", error="round 2 of 5: no end within 20 s"))
    assert (some.count, some.error) == (8, "round 2 of 5: no end within 20 s")
    assert some.words() == "8 queues (8 in each of 1 round)"
    assert estimate(observe(60, rounds=1)).words() == "at least 48 queues (48 streams)"


def of_arms(**queues: int) -> list[ArmQueues]:
    """`arm_16=8`: asked for 16, has 8."""
    arms = []
    for name, number in queues.items():
        value = name.removeprefix("arm_")
        given = None if value == "unset" else value
        arms.append(ArmQueues(arm=value, value=given, estimate=estimate(observe(number))))
    return arms


def test_arms_that_get_what_they_ask_for():
    arms = of_arms(arm_unset=8, arm_1=1, arm_32=32)

    assert counts(arms) == [
        "unset: 8 queues (8 in each of 3 rounds)",
        "1: 1 queue (1 in each of 3 rounds)",
        "32: 32 queues (32 in each of 3 rounds)",
    ]
    assert findings(arms, "8") == [
        "each context has as many queues as asked for (unset: 8)",
        "the setting took effect: contexts have from 1 to 32 queues",
    ]
    assert findings(of_arms(arm_16=16), "8") == ["each context has as many queues as asked for"]


def test_arms_that_do_not_are_findings():
    lines = findings(of_arms(arm_unset=32, arm_1=2, arm_2=2, arm_16=8, arm_32=4), "8")

    assert "unset: not the default of 8: 32 queues (32 in each of 3 rounds)" in lines
    assert "asked for 1, this context has 2 queues" in lines
    assert "asked for 16, this context has 8 queues" in lines
    assert not any(line.startswith("asked for 2,") for line in lines)
    assert "32 asks for more than 16 and has fewer: 4 queues against 8 queues" in lines
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
    arms = of_arms(arm_60=60, arm_200=60)

    assert took_effect(arms) is False
    assert not any("asked for" in line or "alike" in line for line in findings(arms, "8"))

    lines = findings(of_arms(arm_1=1, arm_16=60), "8")
    assert "asked for 16, this context has at least 48 queues" in lines
    assert "the setting took effect: contexts have from 1 to at least 48 queues" in lines


def test_value_that_is_no_number_is_said():
    arm = ArmQueues(arm="many", value="many", estimate=estimate(observe(8)))

    assert findings([arm], "8")[-1] == "many is no number of queues"


def write_observations(directory, arm: str, queues: int, **changed: object) -> None:
    seen = asdict(observe(queues, rounds=2))
    value = None if arm == "unset" else arm
    (directory / "queues").mkdir(exist_ok=True)
    document = {**seen, "setting": value, "arm": arm, "under_mps": False, "seconds": 5.25, **changed}
    write_json(directory / "queues" / f"{arm}.json", document)


def test_what_was_printed_is_read_as_it_is():
    seen = observe(8, rounds=1)

    assert parse(json.loads(json.dumps(asdict(seen)))) == seen
    with pytest.raises(msgspec.ValidationError, match="48 streams are not between 2 and 47"):
        parse(asdict(seen) | {"streams": 47})
    with pytest.raises(msgspec.ValidationError):
        parse({"streams": 96, "rounds": [{"rows": []}]})


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
    assert text[3].split() == ["1", "1", "1–1", "0", "of", "94", "5.524", "5.588", "5.2", "s"]
    assert "each context has as many queues as asked for (unset: 8)" in text
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


def test_unset_is_compared_with_what_it_is_under_mps(tmp_path):
    write_observations(tmp_path, "unset", 2, under_mps=True)

    found = queue_arms.read(KNOB.arms(["unset"], at_least=1), tmp_path)

    assert found.findings == ["each context has as many queues as asked for (unset: 2)"]
    assert found.to_json()["mode"] == "shared-gpu"


def test_counting_takes_a_single_arm(tmp_path):
    write_observations(tmp_path, "16", 16)

    found = queue_arms.read(KNOB.arms(["16"], at_least=1), tmp_path)

    assert (found.to_json()["arms"][0]["count"], found.to_json()["took_effect"]) == (16, None)
    with pytest.raises(UsageError, match="one arm"):
        KNOB.arms(["16"])


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
    arms, said = KNOB.arms(["1"], at_least=1), []

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
