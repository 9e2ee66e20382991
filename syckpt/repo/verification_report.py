"""What a verification found."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["VerifyReport"]


@dataclass
class VerifyReport:
    """What was found. Truthy when nothing is wrong."""

    findings: dict[str, list[str]] = field(default_factory=dict)
    """What is wrong, beginning with the key of the damaged file, and the ids of the commits that it hits."""
    commits: int = 0
    tensors: int = 0
    nbytes: int = 0
    """Raw bytes that were decoded and checked; a tensor that several commits share counts once."""
    damaged: list[str] = field(default_factory=list)
    """Ids of the commits that cannot be loaded whole."""
    marked: list[str] = field(default_factory=list)
    """Ids of the commits that got the mark `damaged` by this run."""
    cleared: list[str] = field(default_factory=list)
    """Ids of the commits whose mark `damaged` was removed: they are whole."""
    resumed: int = 0
    """Commits whose bytes an interrupted run had found whole, so that they were not read again."""

    @property
    def errors(self) -> list[str]:
        """One text a finding, which begins with the key of the damaged file and ends with the commits that it hits."""
        return [text + _hits(commits) for text, commits in self.findings.items()]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def add(self, text: str, commit: str | None = None) -> None:
        """Note a finding, and a commit that it hits."""
        # Without what an error tells whoever loads.
        hit = self.findings.setdefault(text.removesuffix("; run `syckpt verify`"), [])
        if commit is not None and commit not in hit:
            hit.append(commit)


def _hits(commits: list[str]) -> str:
    if not commits:
        return ""
    more = f" and {len(commits) - 8} more" if len(commits) > 8 else ""
    return f"; hits commit{'s' if len(commits) > 1 else ''} {', '.join(commits[:8])}{more}"
