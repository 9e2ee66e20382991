"""The checks of test_tensors.py, for each rank of a job.

Every rank runs all checks in the same order, so that their collectives match, and returns `{check: traceback, or "" if it held}`.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from syckpt.errors import StateError
from syckpt.objects.box import Box
from syckpt.reshard.layout import Layout, holders
from syckpt.reshard.tensors import is_dtensor, layout_of, local_boxes

RANK, WORLD_SIZE = dist.get_rank(), dist.get_world_size()
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def meshes(*, ndim: int) -> list[tuple[int, ...]]:
    return [shape for shape in product(range(1, WORLD_SIZE + 1), repeat=ndim) if math.prod(shape) == WORLD_SIZE]


def distributed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """Every rank cuts out its own part, with torch's arithmetic: scattering does the same, but not for all uneven strided shards."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def refusal(tensor: torch.Tensor) -> str:
    try:
        local_boxes(tensor, path="model/w")
    except StateError as error:
        return str(error)
    return ""


class Canvases:
    """Puts the ranks' boxes together again: many tensors, one exchange."""

    def __init__(self) -> None:
        self.expected: list[tuple[str, torch.Tensor]] = []
        self.mine: list[tuple[Layout | None, list[tuple[Box, Any]]]] = []

    def add(self, name: str, tensor: torch.Tensor, expected: torch.Tensor) -> None:
        self.expected.append((name, expected))
        self.mine.append((layout_of(tensor), [(box, view.numpy().copy()) for box, view in local_boxes(tensor, path=name)]))

    def verify(self) -> None:
        """Hold that boxes and values are those of the global tensors, and that all ranks agree on where what is."""
        everyone: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(everyone, self.mine)
        for index, (name, expected) in enumerate(self.expected):
            found = [rank[index] for rank in everyone]
            layout = found[0][0]
            assert all(one == layout for one, _ in found), name
            canvas, counts = torch.full(expected.shape, -1.0), torch.zeros(expected.shape)
            held: dict[Box, list[int]] = {}
            for rank, (_, parts) in enumerate(found):
                for box, values in parts:
                    region = (..., *(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))
                    if box not in held:
                        canvas[region] = torch.from_numpy(values)
                        counts[region] += 1
                    assert torch.equal(canvas[region], torch.from_numpy(values)), (name, box)
                    held.setdefault(box, []).append(rank)
            assert torch.equal(canvas, expected), (name, canvas, expected)
            assert (counts == 1).all(), (name, counts)
            assert holders(layout) == {box: tuple(ranks) for box, ranks in held.items()}, name


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


SHAPES = [(), (1,), (3,), (8,), (0, 4), (2, 3), (5, 6), (7, 1, 3)]


@check
def distribute_tensor_shards() -> None:
    """Every combination of Shard and Replicate on every mesh of one and two dimensions, uneven and tiny shapes included."""
    canvases = Canvases()
    for mesh_shape in [*meshes(ndim=1), *meshes(ndim=2)]:
        mesh = init_device_mesh("cpu", mesh_shape)
        for shape in SHAPES:
            kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            for placements in product(kinds, repeat=len(mesh_shape)):
                live = distributed(numbered(shape), mesh, placements)
                canvases.add(f"{shape} {mesh_shape} {placements}", live, numbered(shape))
    canvases.verify()


@check
def distribute_tensor_strided_shards() -> None:
    canvases = Canvases()
    for mesh_shape in [*meshes(ndim=1), *meshes(ndim=2)]:
        mesh = init_device_mesh("cpu", mesh_shape)
        for shape in [(3,), (12,), (13,), (5, 24)]:
            dims = range(len(shape))
            kinds = [Replicate(), *map(Shard, dims), *(_StridedShard(dim, split_factor=n) for dim in dims for n in (2, 3))]
            for placements in product(kinds, repeat=len(mesh_shape)):
                if any(isinstance(placement, _StridedShard) for placement in placements):
                    live = distributed(numbered(shape), mesh, placements)
                    canvases.add(f"{shape} {mesh_shape} {placements}", live, numbered(shape))
    canvases.verify()


@check
def meshes_of_some_ranks() -> None:
    canvases = Canvases()
    some = DeviceMesh("cpu", [0, WORLD_SIZE - 1])
    live = distributed(numbered((3, 2)), some, [Shard(0)])
    canvases.add("some", live, numbered((3, 2)))
    one = distributed(numbered((2,)), DeviceMesh("cpu", [1]), [Replicate()])
    canvases.add("one", one, numbered((2,)))
    canvases.verify()
    layout = layout_of(live)
    assert layout is not None
    assert layout.ranks == (0, WORLD_SIZE - 1)
    expected = {0: [(0, 2)], WORLD_SIZE - 1: [(2, 1)]}.get(RANK, [])
    assert [(box.offsets[0], box.sizes[0]) for box, _ in local_boxes(live)] == expected


def two_linears(*sizes: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2]))
    return model, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def add_parameters(canvases: Canvases, model: nn.Module, expected: dict[str, torch.Tensor], *, kind: str) -> None:
    for name, parameter in model.named_parameters():
        assert is_dtensor(parameter), name
        canvases.add(f"{kind} {name}", parameter, expected[name])


@check
def meshes_whose_ranks_do_not_ascend() -> None:
    backwards = DeviceMesh("cpu", list(reversed(range(WORLD_SIZE))))
    assert "do not ascend" in refusal(distributed(numbered((8, 2)), backwards, [Shard(0)]))
    canvases = Canvases()
    canvases.add("replicated", distributed(numbered((3,)), backwards, [Replicate()]), numbered((3,)))
    if WORLD_SIZE == 4:
        # Columns ascend, as in meshes that follow a machine's topology.
        crossed = DeviceMesh("cpu", [[0, 2], [1, 3]])
        canvases.add("crossed", distributed(numbered((5, 3)), crossed, [Shard(0), Shard(1)]), numbered((5, 3)))
    canvases.verify()


@check
def fsdp2_parameters_and_their_moments() -> None:
    canvases = Canvases()
    for sizes in ((8, 8, 8), (5, 7, 3), (2, 1, 1)):
        model, expected = two_linears(*sizes)
        fully_shard(model[0])
        fully_shard(model)
        add_parameters(canvases, model, expected, kind=f"fsdp2 {sizes}")
        for name, parameter in model.named_parameters():
            canvases.add(f"moment {name}", torch.zeros_like(parameter), torch.zeros_like(expected[name]))
    canvases.verify()


@check
def hybrid_shards() -> None:
    canvases = Canvases()
    for mesh_shape in meshes(ndim=2):
        model, expected = two_linears(5, 7, 3)
        fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")))
        add_parameters(canvases, model, expected, kind=f"hsdp {mesh_shape}")
    canvases.verify()


@check
def tensor_parallel_under_fsdp2() -> None:
    canvases = Canvases()
    strided = 0
    for mesh_shape in meshes(ndim=2):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("data", "tensor"))
        for sizes in ((8, 8, 8), (6, 9, 5), (3, 2, 1)):
            model, expected = two_linears(*sizes)
            parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            fully_shard(model, mesh=mesh["data"])
            add_parameters(canvases, model, expected, kind=f"tp x fsdp2 {mesh_shape} {sizes}")
            strided += sum(isinstance(p, _StridedShard) for parameter in model.parameters() for p in parameter.placements)
    canvases.verify()
    assert strided


@check
def views_write_to_the_parameter() -> None:
    model, _ = two_linears(4, 8, 4)
    fully_shard(model)
    for parameter in model.parameters():
        assert parameter.requires_grad
        for box, view in local_boxes(parameter):
            assert type(view) is torch.Tensor
            assert not view.requires_grad
            view.fill_(box.offsets[0] + 0.5)
        local = parameter.to_local()
        assert (local == RANK * (parameter.shape[0] // WORLD_SIZE) + 0.5).all()


@check
def locals_that_are_not_contiguous() -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    local = numbered((3, 2)).t() + 6 * RANK
    assert not local.is_contiguous()
    live = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    ((box, view),) = local_boxes(live)
    assert box == Box((2 * RANK, 0), (2, 3))
    assert view.data_ptr() == local.data_ptr()
    assert view.tolist() == local.tolist()


@check
def locals_in_flight_are_waited_for() -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    live = distributed(numbered((5, 2)), mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    with torch.no_grad():
        assert type(live.to_local()) is not torch.Tensor
    ((box, view),) = local_boxes(live)
    assert type(view) is torch.Tensor
    assert box == Box((0, 0), (5, 2))
    assert torch.equal(view, numbered((5, 2)))


@check
def splits_in_another_order_than_left_to_right() -> None:
    if "shard_order" not in DTensorSpec.__dataclass_fields__:
        return
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    canvases = Canvases()
    for mesh_shape in meshes(ndim=2):
        mesh, whole = init_device_mesh("cpu", mesh_shape), numbered((7, 2))
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        local = whole
        for axis in (1, 0):
            chunks = local.chunk(mesh_shape[axis])
            local = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else local[:0]
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=(ShardOrderEntry(0, (1, 0)),))
        canvases.add(f"{mesh_shape}", DTensor(local, spec, requires_grad=False), whole)
    canvases.verify()


@check
def what_cannot_be_carried_is_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    assert refusal(partial).startswith("model/w: a DTensor placed P"), refusal(partial)
    total = WORLD_SIZE * (WORLD_SIZE + 1) // 2
    ragged = DTensor.from_local(torch.ones(RANK + 1), mesh, [Shard(0)], run_check=False, shape=torch.Size((total,)), stride=(1,))
    answers: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(answers, refusal(ragged))
    assert any(answer.startswith("model/w: this rank's part has shape [") for answer in answers), answers


def run(rank: int) -> dict[str, str]:
    torch.set_num_threads(1)
    results = {}
    for function in CHECKS:
        results[function.__name__] = ""
        try:
            function()
        except AssertionError:
            results[function.__name__] = traceback.format_exc()
    return results
