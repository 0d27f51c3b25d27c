"""Which stages a configuration has, and which it cannot have."""

from __future__ import annotations

from itertools import pairwise

import pytest

from harness.config import Decoder, Parallelism, Pipeline, Trainer
from harness.config_json import from_json, to_json, with_overrides
from harness.errors import UsageError
from harness.pipeline.grid import IDLE, grid
from harness.pipeline.plan import plan
from harness.pipeline.split import even_parts, parts_of, placed, whole
from harness.pipeline.timeline import bubbles, planned


def run_of(*, pp: int = 2, layers: int = 8, parallelism: dict | None = None, **pipeline):
    return Trainer.Config(
        world_size=pp,
        model=Decoder.Config(n_layers=layers),
        parallelism=Parallelism.Config(pp=pp, **(parallelism or {})),
        pipeline=Pipeline.Config(**pipeline),
    )


@pytest.mark.parametrize("layers", [1, 3, 8, 33])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("less", [(0, 0), (1, 1), (0, 2)])
def test_even_stages_are_the_model_in_order(layers, stages, less):
    try:
        parts = even_parts(layers, stages, first_less=less[0], last_less=less[1])
    except UsageError:
        assert layers + sum(less) < 2 * stages or min(less) == 0
        return
    assert [name for part in parts for name in part.names] == whole(layers).names
    for earlier, later in pairwise(parts[1:-1]):
        assert 0 <= len(earlier.layers) - len(later.layers) <= 1


def test_first_and_last_stage_get_fewer_layers():
    """torchtitan's split of 16 layers over 4 stages, with one layer less at both ends."""
    assert [len(part.layers) for part in even_parts(16, 4, first_less=1, last_less=1)] == [4, 5, 4, 3]
    assert [len(part.layers) for part in even_parts(16, 4, first_less=0, last_less=0)] == [4, 4, 4, 4]
    assert [len(part.layers) for part in even_parts(16, 4, first_less=4, last_less=0)] == [1, 5, 5, 5]


def test_a_list_of_names_cuts_anywhere():
    parts = parts_of([["tok_embeddings"], ["layers.0", "layers.1"], ["norm"], ["lm_head"]], 2)
    assert [(list(p.layers), p.embedding, p.norm, p.head) for p in parts] == [
        ([], True, False, False),
        ([0, 1], False, False, False),
        ([], False, True, False),
        ([], False, False, True),
    ]


def test_placements():
    assert placed("loop", 2, 6) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    assert placed("v", 3, 6) == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}


SPLIT = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]

REFUSED = [
    ({"parallelism": {"reshard_after_forward": "always"}}, "set it to default"),
    ({"micro_batches": 0}, "pipeline.micro_batches=0 must be at least 1"),
    ({"micro_batches": 20_000}, "must be at most 10,000"),
    ({"stages_per_rank": 2}, "1F1B takes 1"),
    ({"pp": 64, "layers": 64, "micro_batches": 4000}, "64 stages are 256,000 forwards: use at most 2,048"),
    ({"micro_batches": 1}, "1F1B needs at least as many as there are stages, 2"),
    ({"schedule": "DualPipeV", "micro_batches": 3}, "DualPipeV needs at least as many as there are stages, 4"),
    ({"schedule": "Interleaved1F1B", "micro_batches": 5}, "equal rounds of at least 2 (parallelism.pp): use 4 or 6"),
    ({"schedule": "ZBVZeroBubble", "stages_per_rank": 3}, "ZBVZeroBubble takes 2"),
    ({"layers": 1, "pp": 4}, "model.n_layers=1 does not fill 4 pipeline stages"),
    ({"layers": 2, "split": SPLIT[:1]}, "pipeline.split has 1 stages, the schedule has 2"),
    ({"layers": 3, "split": SPLIT}, "pipeline.split: norm comes where layers.2 should after layers.1"),
    ({"layers": 2, "split": [SPLIT[0], ["layers.1", "norm"]]}, "no stage has lm_head"),
    ({"layers": 2, "split": [SPLIT[0], ["layers.9"]]}, "the model has no module layers.9"),
    ({"layers": 2, "split": [[], [*SPLIT[0], *SPLIT[1]]]}, "stage 0 is empty"),
    ({"pp": 1, "schedule": "GPipe"}, "pipeline.schedule=GPipe has no effect with parallelism.pp=1"),
    ({"pp": 1, "split": SPLIT}, "pipeline.split="),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_pipeline_that_cannot_be_is_refused_in_one_line(fields, message):
    with pytest.raises(UsageError) as caught:
        run_of(**fields).validate()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_micro_batches_follow_from_the_stages_unless_they_are_given():
    assert run_of().pipeline_micro_batches == 2
    assert run_of(schedule="Interleaved1F1B", stages_per_rank=4).pipeline_micro_batches == 8
    assert run_of(micro_batches=7).pipeline_micro_batches == 7
    assert run_of(pp=1).pipeline_micro_batches == 1
    config = run_of(micro_batches=7)
    config.training.micro_batch_size, config.training.accumulation_steps, config.training.seq_len = 2, 3, 16
    assert config.tokens_per_step == 7 * 2 * 3 * 16


def test_a_split_comes_from_a_command_line_and_back_from_json():
    written = '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]'
    config = with_overrides(run_of(layers=2), [("pipeline.split", written)])
    assert config.pipeline.split == SPLIT
    assert from_json(to_json(config)) == config
    assert [part.names for part in plan(config).parts] == SPLIT


def test_the_grid_shows_every_unit():
    assert grid(planned(plan(run_of(micro_batches=2)))) == {
        0: "000111······aaaaaa···bbbbbb",
        1: "···000aaaaaa111bbbbbb······",
    }


def test_a_long_schedule_is_sampled():
    timeline = planned(plan(run_of(pp=4, micro_batches=60)))
    lines = grid(timeline, width=50)
    assert {len(line) for line in lines.values()} == {50}
    for bubble in bubbles(timeline):
        assert 100 * lines[bubble.rank].count(IDLE) / 50 == pytest.approx(bubble.pct, abs=4)
