"""Which parallel dimension a process group is, where its description is not the name of an axis."""

from __future__ import annotations

from harness.trace.classify import Groups

SECOND = "fsdp_reduce_scatter"


def info(*groups: tuple[str, str, list[int]]) -> dict[str, object]:
    return {
        "pg_config": [{"pg_name": name, "pg_desc": description, "ranks": ranks} for name, description, ranks in groups]
    }


def test_a_group_for_reduce_scatters_alone_is_of_the_axis_with_its_ranks():
    groups = Groups(
        info(
            ("0", "default_pg", [0, 1, 2, 3]),
            ("1", "mesh_dp_shard", [0, 2]),
            ("2", "mesh_tp", [0, 1]),
            ("3", SECOND, [0, 2]),
        )
    )
    assert groups.dimension("3", SECOND, None) == "mesh_dp_shard"
    assert groups.dimension(None, SECOND, "[0, 2]") == "mesh_dp_shard"
    assert groups.dimension("1", "mesh_dp_shard", None) == "mesh_dp_shard"


def test_of_an_axis_that_spans_the_world_and_uses_the_default_group():
    listed = info(("0", "default_pg", [0, 1]), ("1", SECOND, [0, 1]))
    groups = Groups(listed, {"dp_shard": [[0, 1]]})
    assert groups.dimension("1", SECOND, None) == groups.dimension("0", "default_pg", None) == "dp_shard"
    assert Groups(listed).dimension("1", SECOND, None) == SECOND, "no axis is known"
