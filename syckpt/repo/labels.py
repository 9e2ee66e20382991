"""The names that lead to commits: branches and tags, read once."""

from __future__ import annotations

from collections import defaultdict

from syckpt.errors import IntegrityError
from syckpt.objects.commit import Commit
from syckpt.objects.text import printable
from syckpt.repo.repository import Repository

__all__ = ["Labels"]


class Labels:
    """The branches and tags of a repository, by commit. What cannot be read is left out and kept in `problems`.

    `head` is the branch to call HEAD; default: the one that the file HEAD names.
    """

    def __init__(self, repository: Repository, *, head: str | None = None) -> None:
        self.problems: list[IntegrityError] = []
        self.tips: dict[str, str | None] = {}
        """The commits that refs name, with the seal that the ref binds."""
        self.head: str | None = head
        self._refs: defaultdict[str, list[str]] = defaultdict(list)
        if head is None:
            try:
                self.head = repository.head_branch()
            except IntegrityError as exc:
                self.problems.append(exc)
        for kind in ("heads", "tags"):
            for name, record in repository.refs.heads(kind, problems=self.problems).items():
                if record.commit is not None:
                    self.tips.setdefault(record.commit, record.commit_seal)
                    self._refs[record.commit].append(f"{kind}/{name}")

    def refs(self, commit: Commit) -> list[str]:
        """Return the full names of the refs at a commit: `heads/main`, `tags/v1`."""
        return self._refs.get(commit.id, [])

    def tags(self, commit: Commit) -> list[str]:
        """Return the tags that are at a commit now."""
        return [ref.removeprefix("tags/") for ref in self.refs(commit) if ref.startswith("tags/")]

    def text(self, commit: Commit) -> str:
        """Return `(HEAD -> main, other, tag: v1, name: x)`, or nothing."""
        branches = [ref.removeprefix("heads/") for ref in self.refs(commit) if ref.startswith("heads/")]
        names = [f"HEAD -> {branch}" if branch == self.head else branch for branch in sorted(branches, key=lambda b: (b != self.head, b))]
        names += [f"tag: {tag}" for tag in self.tags(commit)]
        # The name of a dropped commit is free again.
        names += [f"name: {commit.name}"] if commit.name is not None and not commit.dropped else []
        return f"({', '.join(map(printable, names))})" if names else ""
