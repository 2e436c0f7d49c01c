"""List the commits between two releases, from a local clone that is only read.

A commit is a stack like others, with the package installed from the clone: ``BASE+NAME @
git+file:///CLONE@COMMIT``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from repro_matrix.environment.stacks import with_release
from repro_matrix.environment.stacks.spec import canonical
from repro_matrix.errors import ConfigError, nearest
from repro_matrix.git import run_git

# Possible folders of a package in its repository.
_LAYOUTS = ("src/{}", "{}", "python/{}", "lib/{}")
_TAGS = ("v{0}", "{0}", "release-{0}", "release/{0}", "{1}-{0}", "{1}-v{0}", "{1}/v{0}")


@dataclass(frozen=True)
class Clone:
    """Read a local clone of one package's repository; raise ConfigError if there is none."""

    path: Path
    package: str

    def __post_init__(self) -> None:
        if self.git("rev-parse", "--git-dir") is None:
            raise ConfigError(f"--repo {self.path}: not a git clone, or git cannot be run")

    def git(self, *words: str) -> str | None:
        """Return what a git command prints, or None where it fails."""
        return run_git(self.path, *words)

    def commit_of(self, release: str) -> str:
        """Return the commit of a release's tag, or raise ConfigError."""
        short = re.sub(r"\.0$", "", release) if release.count(".") == 2 else release
        for tag in (
            form.format(text, self.package)
            for text in dict.fromkeys((release, short))
            for form in _TAGS
        ):
            commit = self.git("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
            if commit:
                return commit
        tags = (self.git("tag", "--list") or "").split()
        raise ConfigError(
            f"--repo {self.path}: no tag for {self.package} {release}{nearest(f'v{release}', tags)}"
        )

    def between(self, first: str, last: str) -> list[str]:
        """Return the commits from one to the other that touch the package, both ends included.

        A release is often tagged on its own branch. The path then goes back to the fork and on from
        there, so that neighbours are always a commit and its first parent.
        """
        fork = self.git("merge-base", first, last)
        if not fork:
            raise ConfigError(
                f"--repo {self.path}: {first[:10]} and {last[:10]} have no common ancestor. Is it a"
                " shallow clone?"
            )
        module = canonical(self.package).replace("-", "_")
        folders = [layout.format(module) for layout in _LAYOUTS]
        lists = (
            self.git("rev-list", "--first-parent", f"{fork}..{tip}", "--", *folders)
            for tip in (first, last)
        )
        back, forth = ((commits or "").split() for commits in lists)
        return list(dict.fromkeys([first, *back, fork, *reversed(forth), last]))

    def stack(self, base: str, commit: str) -> str:
        """Return the specification of a stack with the package at this commit."""
        return with_release(base, self.package, f"git+{self.path.as_uri()}@{commit}")
