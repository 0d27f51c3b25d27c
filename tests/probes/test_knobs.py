"""Which arms a knob makes, how knobs are named, and what is known of an arm before a trial."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from experiments import arguments

from harness.commands import probe
from harness.compilation import MOVED, Compile
from harness.config import Parallelism, Trainer
from harness.config_json import with_overrides
from harness.errors import UsageError
from harness.recording import Recording, read_recording
from harness.variables import KNOWN
from probes.experiment import Known
from probes.in_effect import uncaptured
from probes.knobs import KNOBS, UNSET, Knob, find_knob
from probes.knobs.alloc_conf import options
from probes.liveness import fsdp_method, inactions, require_taken, same_settings, without_fsdp_method
from probes.reduce import COMPARED

FSDP2_TP2 = Trainer.Config(world_size=4, parallelism=Parallelism.Config(dp_shard=2, tp=2))
SINGLE = Trainer.Config(world_size=1, parallelism=Parallelism.Config(dp_shard=1))
TP4 = Trainer.Config(world_size=4, parallelism=Parallelism.Config(dp_shard=1, tp=4))
FSDP2_PP2 = Trainer.Config(world_size=4, parallelism=Parallelism.Config(dp_shard=2, pp=2))
FSDP4 = Trainer.Config(world_size=4, parallelism=Parallelism.Config(dp_shard=4))


@pytest.mark.parametrize("knob", KNOBS.values(), ids=list(KNOBS))
def test_every_knob_says_what_it_is_and_its_arms_can_be_set(knob: Knob):
    assert knob.hypothesis
    assert knob.acts_on
    assert knob.known or knob.name == "aa"
    assert knob.metric in COMPARED
    assert knob.variable is None or knob.variable in {known.name for known in KNOWN} | {"OMP_NUM_THREADS"}
    arms = knob.arms()
    config = replace(FSDP2_TP2, compile=Compile.Config(blocks=knob.name == "cuda_graphs"))
    for arm in arms:
        with_overrides(config, list(arm.overrides.items())).validate()
    distinct = {json.dumps(arm.to_json() | {"name": ""}) for arm in arms}
    assert len(distinct) == len(arms) or not (knob.variable or knob.field)
    assert set(same_settings(arms, knob, FSDP2_TP2)) <= {str(knob.default)}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fsdp.prefetch", "fsdp.prefetch"),
        ("fsdp", "fsdp.reshard"),
        ("prefetch", "fsdp.prefetch"),
        ("reshard", "fsdp.reshard"),
        ("alloc_conf", "alloc_conf.expandable_segments"),
        ("tp", "tp.async"),
        ("nccl", "nccl.max_ctas"),
        ("NCCL_ALGO=unset,Ring", "nccl.algorithm"),
        ("PYTORCH_ALLOC_CONF=unset,max_split_size_mb:64", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_a_knob_an_aspect_or_its_variable_is_found(text: str, name: str):
    assert find_knob(text)[0].name == name


def test_an_unknown_aspect_is_answered_with_those_there_are():
    with pytest.raises(UsageError, match=re.escape("no knob 'fsdp.prefech': did you mean fsdp.prefetch?")):
        find_knob("fsdp.prefech")
    with pytest.raises(UsageError, match=r"there are tp\.async\."):
        find_knob("tp.nothing_like_it")


def test_a_knob_of_several_aspects_says_which_one_it_means(capsys):
    probe.plan(arguments("fsdp", "--config", "tiny", "--mode", "cpu"))
    said = "fsdp is fsdp.reshard; there are also fsdp.prefetch, fsdp.async_unshard, fsdp.reduce_scatter_group"
    assert said in capsys.readouterr().err


def environments(text: str, *values: str) -> list[dict[str, str | None]]:
    return [arm.environment for arm in find_knob(text)[0].arms(values or None)]


def test_a_short_value_of_an_allocator_option_is_written_out_and_a_long_one_stays():
    name = "PYTORCH_ALLOC_CONF"
    assert environments("alloc_conf.max_split_size_mb") == [
        {name: None},
        {name: "max_split_size_mb:64"},
        {name: "max_split_size_mb:256"},
    ]
    assert environments("alloc_conf.roundup_power2_divisions", "unset", "[256:1,>:4]")[1] == {
        name: "roundup_power2_divisions:[256:1,>:4]"
    }
    both = "expandable_segments:True,max_split_size_mb:64"
    assert environments("alloc_conf", "True", both) == [{name: "expandable_segments:True"}, {name: both}]


@pytest.mark.parametrize(
    ("text", "values", "same"),
    [
        ("alloc_conf", ("unset", "False", "True"), ["False"]),
        ("alloc_conf", ("max_split_size_mb:64,expandable_segments:True",
                        "expandable_segments:True,max_split_size_mb:64"),
         ["expandable_segments:True,max_split_size_mb:64"]),
        ("alloc_conf.max_split_size_mb", ("unset", "expandable_segments:False", "64"), ["expandable_segments:False"]),
        ("alloc_conf.max_split_size_mb", ("64", "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"),
         ["PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"]),
        ("alloc_conf.garbage_collection_threshold", ("0.6", "0.8"), []),
        ("nccl.algorithm", ("unset", "ring", "RING"), ["RING"]),
        ("nccl.p2p", ("unset", "0", "1"), ["0"]),
        ("nccl.high_priority", ("unset", "0", "1"), ["0"]),
        ("nccl.cta_policy", ("unset", "0", "1"), ["0"]),
        ("nccl.max_ctas", ("unset", "4", "8"), []),
        ("fsdp.prefetch", ("default", "1", "0"), []),
        ("fsdp.async_unshard", ("false", "False", "true"), ["False"]),
        ("tp.async", ("false", "0", "true"), ["0"]),
    ],
)  # fmt: skip
def test_the_same_setting_is_recognised_aspect_by_aspect(text: str, values: Sequence[str], same: list[str]):
    knob, _ = find_knob(text)
    found = same_settings(knob.arms(values), knob, FSDP2_TP2)
    assert list(found) == same
    assert all(known.verdict == "no difference" for known in found.values())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("nccl.max_ctas", "0"),
        ("nccl.max_ctas", "65"),
        ("nccl.cta_policy", "4"),
        ("nccl.algorithm", "Rings"),
        ("nccl.algorithm", "allreduce:"),
        ("nccl.protocol", "LL256"),
        ("nccl.p2p", "true"),
    ],
)
def test_a_value_that_nccl_would_drop_without_a_word_is_refused(text: str, value: str):
    with pytest.raises(UsageError, match=rf"{re.escape(repr(value))} is not .*, or {UNSET}"):
        find_knob(text)[0].arms(["unset", value])


@pytest.mark.parametrize("value", ["Ring", "^tree", "ring,tree", "allreduce:tree;allgather:ring", "NVLS"])
def test_what_nccl_reads_as_algorithms_is_taken(value: str):
    assert environments("nccl.algorithm", "unset", value)[1] == {"NCCL_ALGO": value}


def known_of(text: str, config: Trainer.Config, mode: str = "real", *values: str) -> list[Known]:
    knob, _ = find_knob(text)
    return list(inactions(knob.arms(values or None), knob, config, mode).values())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "acts_on", "idle_on", "verdict"),
    [
        ("fsdp.reshard", SINGLE, FSDP2_PP2, "unavailable in this build"),
        ("fsdp.prefetch", FSDP4, FSDP2_PP2, "unavailable in this build"),
        ("fsdp.prefetch", FSDP4, SINGLE, "unavailable in this build"),
        ("fsdp.async_unshard", FSDP4, TP4, "unavailable in this build"),
        ("fsdp.reduce_scatter_group", FSDP4, TP4, "unavailable in this build"),
        ("tp.async", TP4, FSDP4, "unavailable in this build"),
        ("nccl.max_ctas", FSDP4, SINGLE, "unavailable in this build"),
        ("nccl.high_priority", TP4, FSDP4, "ignored by this build"),
    ],
)
def test_an_arm_that_nothing_in_the_run_acts_on_is_known_before(text, acts_on, idle_on, verdict):
    assert known_of(text, acts_on) == []
    found = known_of(text, idle_on)
    assert found
    assert {known.verdict for known in found} == {verdict}


def test_high_priority_acts_on_asynchronous_all_gathers():
    layout = replace(FSDP4.parallelism, fsdp_async_unshard=True)
    assert known_of("nccl.high_priority", replace(FSDP4, parallelism=layout)) == []


def test_nccl_is_not_what_a_rehearsal_sends_with():
    assert {known.verdict for known in known_of("nccl.protocol", FSDP4, "rehearsal")} == {"unavailable in this build"}


def test_a_threshold_without_a_memory_limit_is_said_to_be_ignored():
    whole = "garbage_collection_threshold:0.6"
    (known,) = known_of("alloc_conf", FSDP4, "real", "unset", whole)
    assert known.verdict == "ignored by this build"
    assert "add per_process_memory_fraction" in known.reason
    assert known_of("alloc_conf.garbage_collection_threshold", FSDP4) == []


COMPILED = replace(SINGLE, compile=Compile.Config(blocks=True))


@pytest.mark.parametrize(
    ("config", "mode", "why"),
    [
        (COMPILED, "cpu", "CUDA graphs need CUDA"),
        (SINGLE, "real", "add --compile.blocks true"),
        (replace(SINGLE, compile=Compile.Config(blocks=True, backend="aot_eager")), "real", "leave it at inductor"),
        (FSDP2_PP2, "real", "set pp to 1"),
    ],
)
def test_cuda_graphs_are_unavailable_for_a_reason(config: Trainer.Config, mode: str, why: str):
    (known,) = known_of("cuda_graphs", config, mode)
    assert known.verdict == "unavailable in this build"
    assert why in known.reason


def test_cuda_graphs_act_on_compiled_layers():
    assert known_of("cuda_graphs", COMPILED) == []


def test_cuda_graphs_that_were_not_captured_are_told_with_the_reason(tmp_path):
    def trial(captured: int, skips: int, **more: int) -> Recording:
        reasons = ["skipping cudagraphs due to cpu device"]
        graphs = {"captured": captured, "skips": skips, "skip_reasons": reasons, **more}
        recording = tmp_path / f"{captured}_{skips}"
        (recording / "ranks").mkdir(parents=True)
        parts = dict.fromkeys(("layers", "layer_kinds", "layer_graphs", "loss_graphs", "graph_breaks"), 0)
        found = {"backend": "inductor", **parts, "recompile_reasons": [], "ran_eagerly": {}}
        found["cuda_graphs"] = graphs if captured >= 0 else None
        document = {"rank": 0, "schema_version": 1, "compile": found}
        (recording / "ranks" / "rank0.json").write_text(json.dumps(document))
        (recording / "manifest.json").write_text("{}")
        return read_recording(recording)

    without, all_captured, some, none = trial(-1, 0), trial(8, 0), trial(8, 3), trial(0, 2)
    assert uncaptured([without, all_captured]) is None
    assert uncaptured([all_captured, some]) == (
        False,
        "CUDA graphs were left out 3 times, 8 captured at least: skipping cudagraphs due to cpu device",
    )
    again = trial(33, 0, graphs=16)
    assert uncaptured([trial(32, 0, graphs=16)]) is None
    assert uncaptured([again]) == (False, f"16 CUDA graphs were captured 33 times: {MOVED}")
    assert uncaptured([none]) == (True, "no CUDA graph was captured: skipping cudagraphs due to cpu device")


def test_the_method_of_torch_that_does_it_is_named():
    knob = KNOBS["fsdp.reduce_scatter_group"]
    assert fsdp_method(knob) in knob.fsdp_methods
    assert without_fsdp_method(knob) is None
    nowhere = replace(knob, fsdp_methods=("set_what_no_torch_has",))
    known = without_fsdp_method(nowhere)
    assert known == Known(
        "unavailable in this build",
        "fsdp.reduce_scatter_group: this torch's FSDPModule has no set_what_no_torch_has",
    )


def test_allocator_options_are_put_to_torch_before_a_trial():
    knob = KNOBS["alloc_conf.max_split_size_mb"]
    with pytest.raises(
        UsageError, match=r"^arm 10: torch refuses 'max_split_size_mb:10': .*max_split_size_mb too small"
    ):
        require_taken(knob.arms(["64", "10"]))


def test_options_of_a_value_are_told_apart_from_the_commas_of_a_list():
    assert options("roundup_power2_divisions:[256:1,>:4], expandable_segments:False,max_split_size_mb:64") == [
        "max_split_size_mb:64",
        "roundup_power2_divisions:[256:1,>:4]",
    ]


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("tp", "--config", "single"), 5, "nothing is redistributed with parallelism.tp=1"),
        (("prefetch", "--config", "single"), 5, "parallelism.dp_shard=1"),
        (("cuda_graphs", "--config", "single"), 5, "CUDA graphs need CUDA"),
    ],
)
def test_the_command_gives_the_verdict_without_a_trial(tmp_path, capsys, words, code, reason):
    assert probe.run(arguments(*words, "--mode", "cpu", "--json", "--out", str(tmp_path / "x"))) == code
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "unavailable in this build"
    assert any(reason in note for note in found["notes"]), found["notes"]
    assert not (tmp_path / "x").exists()


def test_reserved_bytes_decide_nothing_on_cpus():
    with pytest.raises(UsageError, match="mode cpu has no reserved bytes and peak_reserved_bytes decides"):
        probe.plan(arguments("fsdp.async_unshard", "--config", "tiny", "--mode", "cpu"))
