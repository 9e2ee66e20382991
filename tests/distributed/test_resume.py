"""Jobs that are killed, and go on on the same or another number of ranks."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import syckpt
from syckpt.testing.ranks import run_ranks

RANKS = Path(__file__).parent / "resume_ranks.py"
TIMEOUT_S = 240


def job(function: str, *args: Any, world_size: int) -> list[Any]:
    return [result.value for result in run_ranks(RANKS, function, *args, world_size=world_size, timeout_s=TIMEOUT_S)]


def here(function: str, *args: Any) -> Any:
    """Call a rank's function in this process, which is in no process group."""
    spec = importlib.util.spec_from_file_location(RANKS.stem, RANKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[RANKS.stem] = module
    spec.loader.exec_module(module)
    return json.loads(json.dumps(getattr(module, function)(0, *args)))  # as from a rank


def losses(record: Path, rank: int) -> dict[int, set[str]]:
    """Return every loss that was ever computed for each step."""
    found: dict[int, set[str]] = {}
    for line in Path(f"{record}.{rank}").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def test_a_job_of_two_ranks_killed_three_times_has_the_losses_of_one_that_never_was(tmp_path: Path) -> None:
    record, reference = tmp_path / "losses", tmp_path / "reference"
    # Right behind a save, which the writer finishes; behind steps that no save has; in the second epoch (13 steps each).
    for seed, kill_at in ((3, 4), (7, 9), (8, 17)):
        killed = run_ranks(RANKS, "train", str(tmp_path / "a"), str(record), seed, kill_at, world_size=2, timeout_s=TIMEOUT_S)
        assert [each.exit_status for each in killed] == [-signal.SIGKILL] * 2, [each.raised or each.output for each in killed]
    args = (str(tmp_path / "a"), str(record), str(tmp_path / "b"), str(reference))
    assert job("train_to_the_end_and_again", *args, world_size=2) == [[26, 26], [26, 26]]

    for rank in (0, 1):
        assert sorted(losses(reference, rank)) == list(range(1, 27))
        assert losses(record, rank) == losses(reference, rank)
    assert losses(reference, 0) != losses(reference, 1)
    steps = [int(line.split()[0]) for line in Path(f"{record}.0").read_text().splitlines()]
    assert steps.count(9) == 2  # made, lost, made again


def test_an_epoch_begun_on_four_ranks_goes_on_on_two_on_three_and_on_one(tmp_path: Path) -> None:
    root = str(tmp_path / "main")
    four = job("stretch", root, 2, world_size=4)
    both = job("on_two", str(tmp_path), world_size=2)
    all_three = job("on_three", str(tmp_path), world_size=3)
    two, three = [each["stretch"] for each in both], [each["stretch"] for each in all_three]
    one = [here("stretch", root, 0)]

    jobs = (four, two, three, one)
    for before, after in pairwise(jobs):
        assert all(each["found"] == before[0]["left"] for each in after)
    for ranks in jobs:
        assert all(each["left"] == ranks[0]["left"] for each in ranks)
    assert [ranks[0]["left"]["step"] for ranks in jobs] == [2, 6, 8, 11]
    assert len(one[0]["found"]["state"]) == 16  # four parameters, and step and two moments of each
    assert one[0]["found"]["settings"][0][0]["betas"] == [0.8, 0.99]

    seen = [[index for each in ranks for index in each["seen"]] for ranks in jobs]
    assert [len(part) for part in seen] == [32, 32, 24, 9]
    assert sorted(index for part in seen for index in part) == list(range(97))
    assert one[0]["done"]

    # New streams, of each rank its own; the report and the commit say so, and the commit made before the first step has them too.
    for ranks in (two, three, one):
        assert len({each["drawn"] for each in ranks}) == len(ranks)
        assert not any(each["exact"] or each["commit_exact"] for each in ranks)
        assert all("ranks, resumed on" in each["notes"][0] for each in ranks)
        assert all("model/0.weight" in each["resharded"] and each["read"] > 0 for each in ranks)
        assert len({each["early"] for each in ranks}) == 1
    saved = {commit.id: commit for commit in syckpt.CheckpointManager(root).log()}
    assert not any(saved[ranks[0]["early"]].rng_exact for ranks in (two, three, one))

    # What `batches()` counted on two ranks, on three.
    done, cut = [[each[name] for each in both] for name in ("done", "cut")]
    assert [each["done"] for each in done] == [True, True]
    # The last global batch is one sample, which both ranks take: they make as many steps.
    assert len(done[0]["seen"] + done[1]["seen"]) == 98
    assert sorted({index for each in done for index in each["seen"]}) == list(range(97))
    assert [[each["epoch"], each["done"]] for each in cut] == [[0, False]] * 2
    next_epoch, rest = [[each[name] for each in all_three] for name in ("done", "cut")]
    assert [[each["epoch"], each["done"]] for each in next_epoch] == [[1, True]] * 3
    assert sorted({index for each in next_epoch for index in each["seen"]}) == list(range(97))
    assert [[each["epoch"], each["done"]] for each in rest] == [[0, True]] * 3
    assert sorted(index for each in cut + rest for index in each["seen"]) == list(range(97))

    # What is wrong on one rank is raised on all, and nothing was touched.
    loads = [each["loads"] for each in all_three]
    for name, kind in (("mismatch", "StateError"), ("dry", "StateError"), ("damage", "IntegrityError")):
        assert [each[name][0] for each in loads] == [kind] * 3, loads
        assert all("rank(s) 1" in each[name][1] for each in (loads[0], loads[2])), loads
    assert all("model/0.bias: expected float32 [5], found float32 [33]" in each["mismatch"][1] for each in loads)
    assert [each["missing"][0] for each in loads] == ["NotFoundError"] * 3
    for each in loads:
        assert each["untouched"]
        assert each["in_place"]
        assert each["filled"] == each["full"] == {name: three[0]["left"]["state"][name] for name in each["full"]}
