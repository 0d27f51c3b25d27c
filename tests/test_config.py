"""The configuration tree: JSON and back, overrides, and every layout that cannot be."""

import re

import pytest

from harness import recipes
from harness.compilation import Compile
from harness.config import (
    ActivationCheckpoint,
    Data,
    Decoder,
    Parallelism,
    Pipeline,
    Recorder,
    Trainer,
    Training,
    Window,
)
from harness.config_json import field_names, from_dict, from_json, to_dict, to_json, with_overrides
from harness.errors import UnavailableError, UsageError
from harness.validation import validate_device

BUILT_IN = [
    (module, name)
    for module in recipes.BUILT_IN
    for name in recipes.recipes_of(__import__(f"harness.recipes.{module}", fromlist=["_"]))
]


@pytest.mark.parametrize(("module", "name"), BUILT_IN)
def test_built_in_runs_are_valid_and_survive_json(module, name):
    config = recipes.load_config(module, name)

    config.validate()
    assert config.name == name
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "compile.backend",
            "nvfuser",
            "compile.backend: Invalid enum value 'nvfuser'; it is one of aot_eager, inductor",
        ),
        ("parallelism.fsdp_prefetch", "all", "Invalid enum value 'all'; it is a number, or one of default"),
        ("float8.linears", "wq,wk", 'Expected `array`, got `str`; a list is written as JSON, such as ["…", "…"]'),
        ("pipeline.split", "[1]", "pipeline.split[0]: Expected `array`, got `int`; a list is written as JSON, such as"),
        ("activation_checkpoint.memory_budget", "half", "memory_budget: Expected `float`, got `str`"),
    ],
)
def test_a_value_that_a_field_does_not_take_is_told_what_it_does(name, value, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        with_overrides(Trainer.Config(), [(name, value)])


def test_built_in_modules_offer_these_runs():
    assert BUILT_IN == [
        ("debug", "tiny"),
        ("debug", "tiny_fsdp4"),
        ("debug", "single"),
        ("debug", "text"),
        ("llama3", "llama3_1b"),
        ("llama3", "llama3_1b_fsdp4_tp2"),
        ("llama3", "llama3_1b_untied_fsdp4_tp2"),
        ("llama3", "llama3_1b_hsdp"),
        ("llama3", "llama3_3b"),
        ("llama3", "llama3_8b"),
        ("llama3", "llama3_70b"),
        ("llama3", "llama3_405b"),
        ("workloads", "collectives"),
        ("workloads", "point_to_point"),
    ]


def test_parameters_of_llama():
    # 1B and 3B are tied; an untied 1B has a head of 128,256 × 2,048 more. The sums of the published checkpoints.
    assert recipes.load_config("llama3", "llama3_1b").model.params == 1_235_814_400
    untied = recipes.load_config("llama3", "llama3_1b_untied_fsdp4_tp2")
    assert untied.model.params == 1_235_814_400 + 128_256 * 2_048
    assert recipes.load_config("llama3", "llama3_3b").model.params == 3_212_749_824
    assert recipes.load_config("llama3", "llama3_8b").model.params == 8_030_261_248
    assert recipes.load_config("llama3", "llama3_70b").model.params == 70_553_706_496
    assert recipes.load_config("llama3", "llama3_405b").model.params == 405_853_388_800


def test_overrides_replace_fields_and_the_last_one_wins():
    config = with_overrides(
        Trainer.Config(),
        [
            ("training.steps", "3"),
            ("training.steps", "5"),
            ("parallelism.sequence_parallel", "false"),
            ("recorder.trace.steps", "0"),
            ("optimizer.lr", "1e-2"),
            ("recorder.peak_tflops", "null"),
        ],
    )

    assert config.training.steps == 5
    assert config.parallelism.sequence_parallel is False
    assert config.recorder.trace == Window(start=4, steps=0)
    assert config.optimizer.lr == 0.01
    assert config.recorder.peak_tflops is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.dimm", "3", "no field --model.dimm; did you mean --model.dim"),
        ("steps", "3", "no field --steps; did you mean"),
        ("training.steps", "many", "training.steps"),
        ("training.device", "tpu", "training.device"),
        ("model", "3", "no field --model"),
        ("checkpoint.load", "caf\udce9", "'caf\\udce9' is not UTF-8"),
        ("pipeline.split", "[" * 5000, "pipeline.split"),
    ],
)
def test_override_that_cannot_be(name, value, message):
    with pytest.raises(UsageError) as caught:
        with_overrides(Trainer.Config(), [(name, value)])

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_listed_field_can_be_read_from_the_tree():
    tree = to_dict(Trainer.Config())

    for dotted in field_names():
        node = tree
        for part in dotted.split("."):
            node = node[part]
        assert not isinstance(node, dict)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a JSON object"),
        ('{"world_size": ', "not a JSON object"),
        ('{"world": 2}', "no field world"),
        ('{"model": {"heads": 2}}', "no field model.heads"),
        ('{"world_size": "2"}', "world_size"),
    ],
)
def test_json_that_is_no_configuration(text, message):
    with pytest.raises(UsageError) as caught:
        from_json(text)

    assert message in str(caught.value)


def test_fields_left_out_of_json_keep_their_defaults():
    assert from_dict({"model": {"n_layers": 7}}) == Trainer.Config(model=Decoder.Config(n_layers=7))


IMPOSSIBLE = [
    ({"world_size": 3, "parallelism": Parallelism.Config(tp=2)}, "a multiple of 2 processes"),
    ({"world_size": 8, "parallelism": Parallelism.Config(dp_shard=2, tp=2)}, "set world_size (--nproc) to 4"),
    ({"parallelism": Parallelism.Config(tp=0)}, "parallelism.tp=0 must be at least 1"),
    ({"parallelism": Parallelism.Config(dp_shard=0)}, "parallelism.dp_shard=0 must be at least 1, or -1"),
    ({"world_size": 0}, "world_size=0 must be at least 1"),
    ({"world_size": 3, "parallelism": Parallelism.Config(cp=2)}, "a multiple of 2 processes"),
    (
        {"world_size": 2, "parallelism": Parallelism.Config(cp=2), "training": Training.Config(seq_len=250)},
        "training.seq_len=250 is not divisible by parallelism.cp=2 × 2 chunks: use a multiple of 4",
    ),
    (
        {"world_size": 4, "parallelism": Parallelism.Config(cp=2, tp=2), "training": Training.Config(seq_len=252)},
        "is not divisible by parallelism.cp=2 × 2 chunks × parallelism.tp=2 (sequence parallel): use a multiple of 8",
    ),
    (
        {"world_size": 2, "parallelism": Parallelism.Config(dp_shard=2, fsdp_prefetch=-1)},
        "parallelism.fsdp_prefetch=-1 must be a number of units, 0 or above, or default",
    ),
    *(
        (
            {"world_size": 2, "parallelism": Parallelism.Config(**{axis: 2, name: value})},
            f"parallelism.{name}={value} has",
        )
        for axis, name, value in (
            ("tp", "fsdp_prefetch", 0),
            ("tp", "fsdp_async_unshard", True),
            ("tp", "fsdp_reduce_scatter_group", "separate"),
            ("dp_shard", "tp_async", True),
            ("dp_shard", "cp_attention", "ring"),
            ("dp_shard", "cp_load_balance", "none"),
        )
    ),
    *(
        (
            {"world_size": 4, "parallelism": Parallelism.Config(dp_shard=2, pp=2, **{name: value})},
            f"parallelism.{name}={value} has no effect with parallelism.pp=2",
        )
        for name, value in (("fsdp_prefetch", 2), ("fsdp_async_unshard", True))
    ),
    (
        {"world_size": 3, "parallelism": Parallelism.Config(tp=3)},
        "model.n_heads=8 is not divisible by parallelism.tp=3",
    ),
    *(
        ({"activation_checkpoint": ActivationCheckpoint.Config(mode=mode, every=every)}, message)
        for mode, every, message in (
            ("memory_budget", 1, "layers are not compiled; set compile.blocks to true"),
            ("full", 0, "activation_checkpoint.every=0 must be at least 1"),
            ("none", 2, "activation_checkpoint.every=2 has no effect with activation_checkpoint.mode=none"),
            ("selective", 5, "none of model.n_layers=4 layers would be the last of so many; use at most 4"),
        )
    ),
    (
        {
            "world_size": 2,
            "model": Decoder.Config(n_layers=6),
            "parallelism": Parallelism.Config(pp=2),
            "pipeline": Pipeline.Config(schedule="ZBVZeroBubble"),
            "activation_checkpoint": ActivationCheckpoint.Config(mode="full"),
        },
        "activation_checkpoint.mode=full: the schedule has backward in two parts",
    ),
    *(
        ({"compile": Compile.Config(**fields)}, message)
        for fields, message in (
            ({"cuda_graphs": True}, "compile.cuda_graphs=true has no effect with compile.blocks=false"),
            ({"backend": "aot_eager"}, "compile.backend=aot_eager has no effect with compile.blocks=false"),
            ({"blocks": True, "cuda_graphs": True, "backend": "aot_eager"}, "inductor captures them"),
        )
    ),
    *(
        (
            {"compile": Compile.Config(blocks=True), "activation_checkpoint": ActivationCheckpoint.Config(**fields)},
            message,
        )
        for fields, message in (
            ({"mode": "memory_budget", "memory_budget": 1.5}, "memory_budget=1.5 must be in [0, 1]"),
            ({"mode": "memory_budget", "every": 2}, "all layers are compiled with one budget"),
            ({"mode": "full", "memory_budget": 0.1}, "has no effect with activation_checkpoint.mode=full"),
        )
    ),
    *(
        ({"world_size": 2, "compile": Compile.Config(blocks=True, **compiled), **fields}, message)
        for compiled, fields, message in (
            ({}, {"parallelism": Parallelism.Config(cp=2)}, "attention over several ranks sends while it computes"),
            ({}, {"parallelism": Parallelism.Config(tp=2, tp_async=True)}, "takes no tensor that is still on its way"),
            (
                {},
                {
                    "model": Decoder.Config(n_layers=6),
                    "parallelism": Parallelism.Config(pp=2),
                    "pipeline": Pipeline.Config(schedule="ZBVZeroBubble"),
                },
                "the backward of a compiled layer is one",
            ),
            (
                {"cuda_graphs": True},
                {"parallelism": Parallelism.Config(pp=2)},
                "activations of several micro-batches live at once",
            ),
        )
    ),
    ({"training": Training.Config(loss_chunks=0)}, "training.loss_chunks=0 must be at least 1"),
    (
        {"training": Training.Config(accumulation_steps=10**9)},
        "training.accumulation_steps=1000000000 must be at most 10,000",
    ),
    ({"training": Training.Config(loss_chunks=3)}, "1/1, is not divisible by training.loss_chunks=3"),
    (
        {"world_size": 2, "parallelism": Parallelism.Config(tp=2), "training": Training.Config(loss_chunks=256)},
        "1/2, is not divisible by training.loss_chunks=256: use a multiple of 512",
    ),
    (
        {"world_size": 2, "parallelism": Parallelism.Config(pp=2), "training": Training.Config(loss_chunks=2)},
        "training.loss_chunks=2: a pipeline (parallelism.pp=2) has its last stage compute the loss",
    ),
    (
        {
            "world_size": 8,
            "model": Decoder.Config(vocab_size=258, tied_embeddings=True),
            "parallelism": Parallelism.Config(dp_shard=4, pp=2),
        },
        "model.vocab_size=258 with model.tied_embeddings and parallelism.pp=2: the first and the last stage exchange "
        "gradients of equal parts of the matrix; use a multiple of 4 (tp × dp_shard)",
    ),
    *(
        (
            {
                "world_size": 2,
                "parallelism": Parallelism.Config(**layout),
                "training": Training.Config(accumulation_steps=steps, reduce_every_micro_batch=False),
            },
            "training.reduce_every_micro_batch=false has no effect",
        )
        for steps, layout in ((1, {"dp_shard": 2}), (2, {"tp": 2}), (2, {"pp": 2}))
    ),
    (
        {"world_size": 8, "parallelism": Parallelism.Config(tp=8)},
        "model.n_kv_heads=4 is not divisible by parallelism.tp=8",
    ),
    (
        {"world_size": 4, "parallelism": Parallelism.Config(tp=4), "training": Training.Config(seq_len=254)},
        "training.seq_len=254 is not divisible by parallelism.tp=4",
    ),
    ({"model": Decoder.Config(dim=250)}, "model.dim=250 is not divisible by model.n_heads=8"),
    ({"model": Decoder.Config(n_kv_heads=3)}, "model.n_heads=8 is not divisible by model.n_kv_heads=3"),
    ({"data": Data.Config(ignored_share=1.0)}, "data.ignored_share=1.0 must be in [0, 1)"),
    ({"training": Training.Config(steps=0)}, "training.steps=0 must be at least 1"),
    ({"recorder": Recorder.Config(trace=Window(start=-1, steps=1))}, "recorder.trace"),
]


@pytest.mark.parametrize(("fields", "message"), IMPOSSIBLE)
def test_run_that_cannot_be_is_refused_in_one_line(fields, message):
    with pytest.raises(UsageError) as caught:
        Trainer.Config(**fields).validate()

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("compiled", "fields", "message"),
    [
        ({"cuda_graphs": True}, {}, "compile.cuda_graphs=true needs CUDA"),
        (
            {"backend": "aot_eager"},
            {
                "parallelism": Parallelism.Config(tp=2),
                "activation_checkpoint": ActivationCheckpoint.Config(mode="full"),
            },
            "on CPUs torch keeps a random state",
        ),
    ],
)
def test_what_cannot_be_compiled_on_cpus_can_be_on_gpus(compiled, fields, message):
    config = Trainer.Config(world_size=2, compile=Compile.Config(blocks=True, **compiled), **fields)
    config.validate()
    validate_device(config, "cuda")
    with pytest.raises(UsageError, match=message):
        validate_device(config, "cpu")


def test_a_machine_without_a_compiler_is_told_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnavailableError, match=r"needs a C\+\+ compiler .* or set compile.backend to aot_eager"):
        validate_device(Trainer.Config(compile=Compile.Config(loss=True)), "cpu")
    validate_device(Trainer.Config(compile=Compile.Config(loss=True, backend="aot_eager")), "cpu")


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_variable_that_turns_compilation_off_is_told_before_anything_starts(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    for part in ("blocks", "loss"):
        compiled = Compile.Config(backend="aot_eager", **{part: True})
        with pytest.raises(UsageError, match=f"compile.{part}=true: {name}=1 turns torch.compile off; unset it"):
            validate_device(Trainer.Config(compile=compiled), "cuda")
    validate_device(Trainer.Config(), "cuda")
    monkeypatch.setenv(name, "0")
    validate_device(Trainer.Config(compile=compiled), "cuda")


def test_sequence_of_any_length_without_sequence_parallel():
    parallelism = Parallelism.Config(tp=4, sequence_parallel=False)

    Trainer.Config(world_size=4, parallelism=parallelism, training=Training.Config(seq_len=254)).validate()


def test_a_text_that_would_not_be_read_is_refused():
    config = with_overrides(recipes.load_config("debug", "tiny"), [("data.path", "notes.jsonl")])
    with pytest.raises(UsageError, match=r"data\.path=notes\.jsonl is read with data\.dataset=text only"):
        config.validate()
