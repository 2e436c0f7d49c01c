"""The commits between two releases, from a local clone that is only read: nothing in it is checked out.

A commit's source folder is unpacked into the user's cache and put before a stack by PYTHONPATH. This serves packages of
plain Python: compiled parts, and files that the installer generates, stay those of the stack.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from repro_matrix.environment.stacks import Stack, StackError
from repro_matrix.environment.stacks.spec import canonical, short_hash
from repro_matrix.errors import ConfigError, nearest
from repro_matrix.paths import cache_dir

# Where a package's folder may lie in its repository.
_LAYOUTS = ("src/{}", "{}", "python/{}", "lib/{}")


@dataclass(frozen=True)
class Clone:
    """A local clone of one package's repository."""

    path: Path
    package: str

    @property
    def folders(self) -> list[str]:
        module = canonical(self.package).replace("-", "_")
        return [layout.format(module) for layout in _LAYOUTS]

    def git(self, *words: str) -> str:
        done = self._run(words)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
            raise ConfigError(f"--repo {self.path}: git {words[0]}: {lines[-1]}")
        return done.stdout.decode(errors="replace").strip()

    def _run(self, words: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        # Ignore the shell's repository (GIT_DIR), and do not write the clone's index.
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        try:
            return subprocess.run(["git", "-C", str(self.path), *words], capture_output=True, env=env, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"--repo {self.path}: git does not answer: {error}") from None

    # -- which commits

    def commit_of(self, release: str) -> str:
        """Return the commit of a release's tag."""
        forms = {release, re.sub(r"\.0$", "", release) if release.count(".") == 2 else release}
        tags = [head + form for form in sorted(forms, reverse=True) for head in self._heads()]
        for tag in tags:
            done = self._run(["rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}"])
            if done.returncode == 0:
                return done.stdout.decode().strip()
        have = self.git("tag", "--list").split()
        raise ConfigError(f"--repo {self.path}: no tag for {self.package} {release}{nearest(f'v{release}', have)}")

    def _heads(self) -> tuple[str, ...]:
        return ("v", "", "release-", "release/", f"{self.package}-", f"{self.package}-v", f"{self.package}/v")

    def between(self, first: str, last: str) -> list[str]:
        """Return the commits from one to the other that touch the package, both ends included.

        A release is often tagged on its own branch. The path then goes back to the fork and on from there, so that
        neighbours are always a commit and its first parent.
        """
        done = self._run(["merge-base", first, last])
        fork = done.stdout.decode().strip()
        if done.returncode or not fork:
            raise ConfigError(
                f"--repo {self.path}: {first[:10]} and {last[:10]} have no common ancestor. Is it a shallow clone?"
            )
        path = [first, *reversed(self._leg(fork, first)), fork, *self._leg(fork, last), last]
        return list(dict.fromkeys(path))

    def _leg(self, fork: str, tip: str) -> list[str]:
        """Return the commits after the fork, the oldest first."""
        return self.git("rev-list", "--first-parent", "--reverse", f"{fork}..{tip}", "--", *self.folders).split()

    def title(self, commit: str) -> str:
        return self.git("show", "--no-patch", "--format=%h %cs %s", commit)

    def is_ancestor(self, older: str, newer: str) -> bool:
        return self._run(["merge-base", "--is-ancestor", older, newer]).returncode == 0

    def merged_commits(self, commit: str) -> int:
        """Return how many commits a merge contains; 0 for a plain commit."""
        if len(self.git("rev-list", "--parents", "--max-count=1", commit).split()) < 3:
            return 0
        return int(self.git("rev-list", "--count", f"{commit}^1..{commit}"))

    # -- what is run

    def folder_in(self, commit: str) -> str | None:
        """Return the package's folder in a commit."""
        for folder in self.folders:
            if self._run(["cat-file", "-e", f"{commit}:{folder}/__init__.py"]).returncode == 0:
                return folder
        return None

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
        """Return (root, folder) of the package's source of this commit in the user's cache."""
        folder = self.folder_in(commit)
        if folder is None:
            raise StackError(
                "unavailable", f"{self.package} at {commit[:10]}: it has none of {', '.join(self.folders)}"
            )
        root = cache_dir() / "sources" / f"{canonical(self.package)}-{commit[:16]}"
        if (root / folder).is_dir():
            return root, folder
        done = self._run(["archive", "--format=tar", commit, "--", folder])
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip()
            raise StackError("unavailable", f"{self.package} at {commit[:10]}: {reason}")
        half = root.with_name(f".{root.name}-{uuid.uuid4().hex[:8]}")
        half.mkdir(parents=True)
        try:
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                if hasattr(tarfile, "data_filter"):
                    archive.extractall(half, filter="data")
                else:
                    archive.extractall(half)
            half.rename(root)
        except (OSError, tarfile.TarError) as error:
            if not (root / folder).is_dir():  # else another run was faster
                full = isinstance(error, OSError) and error.errno == errno.ENOSPC
                raise StackError(
                    "infra" if full else "unavailable", f"{self.package} at {commit[:10]}: {error}"
                ) from None
        finally:
            shutil.rmtree(half, ignore_errors=True)
        return root, folder


def _version(folder: Path) -> str | None:
    """Return the version that a package's source declares as a literal: ranks report the same one."""
    found = re.search(r"""^__version__ = (['"])(.+?)\1""", (folder / "__init__.py").read_text(encoding="utf-8"), re.M)
    try:
        return Version(found[2]).public if found else None
    except InvalidVersion:
        return None


def open_clone(path: str, package: str) -> Clone:
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--repo {path}: no such folder")
    clone = Clone(folder, package)
    if clone._run(["rev-parse", "--git-dir"]).returncode:
        raise ConfigError(f"--repo {path}: not a git clone")
    return clone
