"""Tables of actions from a CSV: read, written, checked, and refused with the place where they cannot run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from harness.config import Decoder, Parallelism, Pipeline, Trainer
from harness.errors import UsageError
from harness.pipeline.actions import parse_action, read_table, write_table
from harness.pipeline.plan import Plan, plan
from harness.pipeline.requirements import with_table
from harness.pipeline.schedules import SCHEDULES

TWO_STAGES = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def run_of(table: str | None = None, **pipeline) -> Trainer.Config:
    return Trainer.Config(
        world_size=2,
        model=Decoder.Config(n_layers=12),
        parallelism=Parallelism.Config(pp=2),
        pipeline=Pipeline.Config(table=table, **pipeline),
    )


def planned(schedule: str) -> Plan:
    return plan(run_of(schedule=schedule, micro_batches=4))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("lowered", [False, True])
def test_every_schedule_comes_back_from_its_csv(name, lowered):
    known = planned(name)
    text = write_table(known.actions if lowered else known.computation)
    found = plan(run_of(text))
    assert (found.computation, found.actions) == (known.computation, known.actions)
    assert (found.rank_of, found.parts, found.micro_batches) == (known.rank_of, known.parts, 4)
    assert write_table(read_table(text)) == text


def test_torch_reads_what_is_written(tmp_path: Path):
    """Both forms, through torch's own reader of files."""
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)
    known = planned("DualPipeV")
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        for actions, form in ((known.computation, "compute_only"), (known.actions, "compute_comms")):
            file = tmp_path / f"{form}.csv"
            file.write_text(write_table(actions))
            stages = [PipelineStage(torch.nn.Identity(), s, 4, torch.device("cpu")) for s in known.stages_of(0)]
            runtime = schedules._PipelineScheduleRuntime(stages, 4, loss_fn=torch.sum)
            runtime._load_csv(str(file), format=form)
            theirs = {rank: [str(a) for a in row] for rank, row in runtime.pipeline_order_with_comms.items()}
            assert theirs == {rank: [str(a) for a in row] for rank, row in enumerate(known.actions)}
    finally:
        dist.destroy_process_group()


def test_idle_cells_and_spaces_do_not_matter():
    idle = "0F0,,0F1 , , 0B0,0B1\n,1F0,1B0,,1F1,1B1\n"
    assert plan(run_of(idle)).computation == plan(run_of(TWO_STAGES)).computation


@pytest.mark.parametrize(
    "text", ["2F", "F0", "2X0", "1UNSHARD0", "2F0x", "(0F1)B", "(0F1;2UNSHARD)OVERLAP_F_B", "-1F0"]
)
def test_what_is_no_action(text):
    with pytest.raises(ValueError, match="`"):
        parse_action(text)


GATHERED = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD"
BOTH = f"{GATHERED}\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\n"

REFUSED = [
    ("0F0,0B0\n1F0,1Q0\n", "row 2 (rank 1), column 2: `1Q0` is no action"),
    ("", "holds no action"),
    ("0F0,0B0\n", "has 1 rows, parallelism.pp=2"),
    ("0F0,0B0\n0F1,1F0,1B0\n", "row 2 (rank 1), action 1 `0F1`: the stage is rank 0's"),
    ("0F0,0B0\n2F0,2B0\n", "no row computes stage 1 of 3"),
    ("0B0,0F0\n1F0,1B0\n", "row 1 (rank 0), action 1 `0B0` comes before `0F0`"),
    ("0F0,0F0,0B0\n1F0,1B0\n", "row 1 (rank 0), action 2 `0F0` is there already, as action 1"),
    ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "stage 0 makes 2 forwards and 1 whole backwards of 2"),
    ("0F0,0I0\n1F0,1B0\n", "stage 0 makes 1 forwards and 0 whole backwards of 1"),
    ("0F0,0B0,2F0,2B0\n1F0,1B0\n", "3 stages, which do not divide over 2 ranks"),
    # Each waits for what the other does later.
    ("0F0,0B0,2F0,2B0\n1F0,3F0,3B0,1B0\n", "row 1 (rank 0), action 2 `0B0` waits for `1B0` of rank 1"),
    ("0F1,0F0,0B0,0B1\n1F0,1B0,1B1,1F1\n", "action 3 `1B1` comes before `1F1`"),
    (BOTH.replace("1RECV_F0,", ""), "row 2 (rank 1), action 2 `1F0` waits for `1RECV_F0`"),
    (BOTH.replace("0RECV_B0,0B0", "0B0,0RECV_B0"), "row 1 (rank 0), action 4 `0B0` waits for `0RECV_B0`"),
    (BOTH.replace(",1SEND_B0", ""), "row 1 (rank 0), action 5 `0B0` waits for `0RECV_B0`"),
    (BOTH.replace("1UNSHARD,", ""), "row 2 (rank 1), action 2 `1F0` needs `1UNSHARD` before it"),
    (BOTH.replace("0REDUCE_GRAD,", ""), "row 1 (rank 0) lacks `0REDUCE_GRAD`"),
    (BOTH.replace(",1RESHARD", ""), "row 2 (rank 1) lacks `1RESHARD` at its end"),
    (BOTH.replace("0B0,0REDUCE_GRAD", "0REDUCE_GRAD,0B0"), "action 6 `0B0` comes after `0REDUCE_GRAD`"),
    ("(0F0;0B0)OVERLAP_F_B\n1F0,1B0\n", "dead-locks: row 1 (rank 0) at `(0F0;0B0)OVERLAP_F_B`"),
    ("0F0,0SEND_B0,0B0\n1F0,1B0\n", "row 1 (rank 0), action 2 `0SEND_B0` has no other rank"),
    ('"' + "0" * 200_000 + '"\n', "line 1: field larger than field limit"),
]


@pytest.mark.parametrize(("table", "message"), REFUSED)
def test_a_table_that_cannot_run_is_refused_with_its_place(table, message):
    with pytest.raises(UsageError) as caught:
        run_of(table).validate()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_transfers_of_a_pair_must_be_asked_for_in_one_order():
    """NCCL matches them by order alone: rank 1 asks for the second micro-batch first."""
    table = (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
    )
    with pytest.raises(UsageError, match=r"dead-locks: row 1 \(rank 0\), action 7 `0B0` waits for `0RECV_B0`"):
        run_of(table).validate()
    run_of(table.replace("1RECV_F1,1RECV_F0", "1RECV_F0,1RECV_F1")).validate()


def test_a_file_becomes_part_of_the_configuration(tmp_path: Path):
    file = tmp_path / "schedule.csv"
    file.write_text(TWO_STAGES)
    config = with_table(run_of(csv=str(file)))
    file.unlink()
    config.validate()
    assert plan(config).computation == read_table(TWO_STAGES)


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), (b"\xff\xfe0F0", "is not text")])
def test_a_file_that_cannot_be_read(tmp_path: Path, content, message):
    file = tmp_path / "schedule.csv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        with_table(run_of(csv=str(file)))


@pytest.mark.parametrize("name", ["pipe", "folder", "zero\0byte"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"is not (a file|text)"):
        with_table(run_of(csv=str(tmp_path / name)))
