"""The commits between two releases, from a local clone that is only read: nothing in it is checked out.

A commit's source folder is unpacked into the user's cache and put before a stack by PYTHONPATH. This serves packages of
plain Python: compiled parts, and files that the installer generates, stay those of the stack.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from repro_matrix.environment.stacks import Stack, StackError
from repro_matrix.environment.stacks.spec import canonical, short_hash
from repro_matrix.errors import ConfigError, nearest
from repro_matrix.paths import cache_dir

_LAYOUTS = ("src/{}", "{}", "python/{}", "lib/{}")  # where a package's folder may lie in its repository
_TAGS = ("v{0}", "{0}", "release-{0}", "release/{0}", "{1}-{0}", "{1}-v{0}", "{1}/v{0}")


@dataclass(frozen=True)
class Clone:
    """A local clone of one package's repository. Raises ConfigError where there is none."""

    path: Path
    package: str

    def __post_init__(self) -> None:
        if self.git("rev-parse", "--git-dir") is None:
            raise ConfigError(f"--repo {self.path}: not a git clone")

    @property
    def folders(self) -> list[str]:
        module = canonical(self.package).replace("-", "_")
        return [layout.format(module) for layout in _LAYOUTS]

    def git(self, *words: str) -> str | None:
        """Return what a git command prints, or None where it fails."""
        # Ignore the shell's repository (GIT_DIR), and do not write the clone's index.
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        try:
            command = ["git", "-C", str(self.path), *words]
            done = subprocess.run(
                command, capture_output=True, env=env, timeout=600, encoding="utf-8", errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"--repo {self.path}: git does not answer: {error}") from None
        return None if done.returncode else done.stdout.strip()

    # -- which commits

    def commit_of(self, release: str) -> str:
        """Return the commit of a release's tag. Raises ConfigError."""
        short = re.sub(r"\.0$", "", release) if release.count(".") == 2 else release
        for tag in (form.format(text, self.package) for text in dict.fromkeys((release, short)) for form in _TAGS):
            commit = self.git("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
            if commit:
                return commit
        tags = (self.git("tag", "--list") or "").split()
        raise ConfigError(f"--repo {self.path}: no tag for {self.package} {release}{nearest(f'v{release}', tags)}")

    def between(self, first: str, last: str) -> list[str]:
        """Return the commits from one to the other that touch the package, both ends included.

        A release is often tagged on its own branch. The path then goes back to the fork and on from there, so that
        neighbours are always a commit and its first parent.
        """
        fork = self.git("merge-base", first, last)
        if not fork:
            raise ConfigError(
                f"--repo {self.path}: {first[:10]} and {last[:10]} have no common ancestor. Is it a shallow clone?"
            )
        lists = (self.git("rev-list", "--first-parent", f"{fork}..{tip}", "--", *self.folders) for tip in (first, last))
        back, forth = ((commits or "").split() for commits in lists)
        return list(dict.fromkeys([first, *back, fork, *reversed(forth), last]))

    def is_ancestor(self, older: str, newer: str) -> bool:
        return self.git("merge-base", "--is-ancestor", older, newer) is not None

    # -- what is run

    def overlay(self, stack: Stack, commit: str, name: str) -> Stack:
        """Return the stack with the package at this commit."""
        root, folder = self.unpack(commit)
        package = canonical(self.package)
        version = _version(root / folder) or stack.versions.get(package)
        local = f"{Version(version).public}+g{commit[:10]}" if version else f"0+g{commit[:10]}"
        return replace(
            stack,
            name=name,
            versions={**stack.versions, package: local},
            path=(str((root / folder).parent), *stack.path),
            key=short_hash("commit", stack.key, package, commit),
            compiled=stack.compiled or stack.key,
            content="",
        )

    def unpack(self, commit: str) -> tuple[Path, str]:
        """Return (root, folder) of the package's source of this commit in the user's cache. Raises StackError."""
        existing = (each for each in self.folders if self.git("cat-file", "-e", f"{commit}:{each}/__init__.py") == "")
        folder = next(existing, None)
        if folder is None:
            raise StackError("unavailable", f"{self.package} at {commit[:10]}: none of {', '.join(self.folders)}")
        root = cache_dir() / "sources" / f"{canonical(self.package)}-{commit[:16]}"
        if (root / folder).is_dir():
            return root, folder
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root.parent) as half:
                archive = Path(half, "archive.tar")
                if self.git("archive", "--format=tar", f"--output={archive}", commit, "--", folder) is None:
                    raise StackError("unavailable", f"{self.package} at {commit[:10]}: `git archive` failed")
                shutil.unpack_archive(archive, Path(half, "tree"))
                Path(half, "tree").rename(root)
        except OSError as error:
            if not (root / folder).is_dir():  # else another run was faster
                raise StackError("infra", f"{self.package} at {commit[:10]}: {error}") from None
        return root, folder


def _version(folder: Path) -> str | None:
    """Return the version that a package's source declares as a literal: ranks report the same one."""
    found = re.search(r"""^__version__ = (['"])(.+?)\1""", (folder / "__init__.py").read_text(encoding="utf-8"), re.M)
    try:
        return Version(found[2]).public if found else None
    except InvalidVersion:
        return None
