"""Retention on several ranks: all ranks' files go, what stays is exact, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

from syckpt.repo import history
from syckpt.repo.repository import Repository
from syckpt.repo.verify import verify
from syckpt.stores.base import parse_root
from syckpt.testing.ranks import run_ranks

SOURCE = Path(__file__).with_name("retention_ranks.py")
SAVES = 6


def test_all_ranks_files_of_dropped_commits_go_and_the_others_resume_exactly(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    first, second = (result.value for result in run_ranks(SOURCE, "train", root, SAVES, world_size=2))
    assert first["saved"] == second["saved"]
    assert first["states"] == second["states"]
    saved = first["saved"]
    # The parent of the last save was dropped while both ranks' writers had the tip as theirs.
    assert first["back"] == first["states"][1]
    repository = Repository.open(parse_root(root))
    dropped = {commit for commit in saved if repository.read_commit(commit).dropped}
    assert dropped == set(saved[:-1])
    assert [commit.id for commit in history.log(repository)] == [first["last"], saved[1], saved[0]]
    # Of a dropped commit both ranks' manifests are gone; of commits that are there, both are there.
    after = first["files"][-1]
    for commit in saved[:-2]:
        manifests = [name for name in after if name.startswith(commit) and name.endswith(".manifest")]
        assert len(manifests) == (2 if commit == saved[1] else 0)
    # The backbone lies on the disk once, whoever wrote it, and old heads go: from the fourth save on nothing more comes together.
    sizes = [sum(files.values()) for files in first["files"]]
    assert max(sizes[3:]) < 1.3 * sizes[2]
    assert verify(repository).errors == []

    (alone,) = (result.value for result in run_ranks(SOURCE, "resume", root, world_size=1))
    assert (alone["found"], alone["step"]) == (first["left"], 3)
    both = [result.value for result in run_ranks(SOURCE, "resume", root, world_size=2)]
    assert [(rank["found"], rank["step"]) for rank in both] == [(alone["left"], 4)] * 2
    assert verify(repository).errors == []
    assert [commit.dropped for commit in history.log(repository)] == [False, True, True, True, True]
