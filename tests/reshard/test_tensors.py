"""What torch puts on each rank is where layout_of and local_boxes say it is: real gloo ranks, every kind of DTensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from syckpt.objects.box import Box
from syckpt.reshard.tensors import is_dtensor, layout_of, local_boxes
from syckpt.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("tensors")

SCRIPT = Path(__file__).parent / "tensors_ranks.py"

Results = list[dict[str, str]]


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"{size}-ranks")
def results(request: pytest.FixtureRequest) -> Results:
    """Run all checks on ranks of one job: starting them takes longer than most of the checks."""
    return [rank.value for rank in run_ranks(SCRIPT, "run", world_size=request.param, timeout_s=300)]


def held(results: Results, check: str) -> None:
    failures = [f"rank {rank}: {answers[check]}" for rank, answers in enumerate(results) if answers[check]]
    assert not failures, "\n".join(failures)


def test_boxes_of_any_shards_of_distribute_tensor_make_up_the_tensor(results: Results) -> None:
    held(results, "distribute_tensor_shards")


def test_boxes_of_strided_shards_make_up_the_tensor(results: Results) -> None:
    held(results, "distribute_tensor_strided_shards")


def test_a_rank_outside_the_mesh_holds_nothing_and_global_ranks_are_named(results: Results) -> None:
    held(results, "meshes_of_some_ranks")


def test_shards_over_ranks_that_do_not_ascend_are_refused_and_replicas_are_not(results: Results) -> None:
    held(results, "meshes_whose_ranks_do_not_ascend")


def test_fsdp2_parameters_and_moments_make_up_the_tensor(results: Results) -> None:
    held(results, "fsdp2_parameters_and_their_moments")


def test_hybrid_shards_make_up_the_tensor(results: Results) -> None:
    held(results, "hybrid_shards")


def test_tensor_parallel_under_fsdp2_makes_up_the_tensor(results: Results) -> None:
    held(results, "tensor_parallel_under_fsdp2")


def test_writing_to_a_view_writes_to_the_parameter(results: Results) -> None:
    held(results, "views_write_to_the_parameter")


def test_a_local_tensor_that_is_not_contiguous_is_viewed_not_copied(results: Results) -> None:
    held(results, "locals_that_are_not_contiguous")


def test_a_local_tensor_in_flight_is_waited_for(results: Results) -> None:
    held(results, "locals_in_flight_are_waited_for")


def test_an_explicit_order_of_shards_is_followed(results: Results) -> None:
    held(results, "splits_in_another_order_than_left_to_right")


def test_partial_values_and_shards_of_unknown_sizes_are_refused_by_name(results: Results) -> None:
    held(results, "what_cannot_be_carried_is_refused_by_name")


def test_a_plain_tensor_is_one_whole_box_that_shares_its_memory() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert layout_of(parameter) is None
    ((box, view),) = local_boxes(parameter)
    view.fill_(1.0)
    assert box == Box((0, 0), (2, 3))
    assert not view.requires_grad
    assert parameter.sum().item() == 6.0


def test_asking_for_a_dtensor_does_not_import_them() -> None:
    code = """
import sys, torch
from syckpt.reshard.tensors import is_dtensor, local_boxes
assert not is_dtensor(torch.ones(2)) and not is_dtensor(None)
assert len(local_boxes(torch.ones(2))) == 1
assert "torch.distributed.tensor" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not is_dtensor(torch.ones(2))


def test_the_arithmetic_imports_no_torch() -> None:
    code = "import sys, syckpt.reshard.layout, syckpt.reshard.owners, syckpt.reshard.plan; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
