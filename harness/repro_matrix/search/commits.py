"""From two releases to the commits between them, in a local clone that is only read: nothing in it is checked out.

A commit's source folder is unpacked into the user's cache and laid over a stack by PYTHONPATH, so that this is for
packages of plain Python (its compiled parts, and what its installer generates, stay those of the stack).
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
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
            raise ConfigError(f"--repo {self.path}: git {words[0]}: {said[-1]}")
        return done.stdout.decode(errors="replace").strip()

    def _run(self, words: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        # Whatever repository the shell points at is not meant; and a look may not touch the clone's index.
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        try:
            return subprocess.run(["git", "-C", str(self.path), *words], capture_output=True, env=env, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"--repo {self.path}: git does not answer: {error}") from None

    # -- which commits

    def commit_of(self, release: str) -> str:
        """The commit that a release's tag names."""
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
        """The commits from one to the other that touch the package, both ends included.

        A release is often tagged on a branch of its own: then the way leads back to where the branches part and from
        there on, so that neighbours on it are always a commit and its (first) parent.
        """
        done = self._run(["merge-base", first, last])
        fork = done.stdout.decode().strip()
        if done.returncode or not fork:
            raise ConfigError(
                f"--repo {self.path}: {first[:10]} and {last[:10]} have no common past (a shallow clone?)"
            )
        way = [first, *reversed(self._leg(fork, first)), fork, *self._leg(fork, last), last]
        return [c for index, c in enumerate(way) if c not in way[:index]]

    def _leg(self, fork: str, tip: str) -> list[str]:
        """Oldest first, without the fork itself."""
        return self.git(
            "rev-list", "--first-parent", "--reverse", f"{fork}..{tip}", "--", *self.folders
        ).split()  # fmt: skip

    def title(self, commit: str) -> str:
        return self.git("show", "--no-patch", "--format=%h %cs %s", commit)

    def is_ancestor(self, older: str, newer: str) -> bool:
        return self._run(["merge-base", "--is-ancestor", older, newer]).returncode == 0

    def merged(self, commit: str) -> int:
        """How many commits a merge brought in; 0 for a plain commit."""
        if len(self.git("rev-list", "--parents", "--max-count=1", commit).split()) < 3:
            return 0
        return int(self.git("rev-list", "--count", f"{commit}^1..{commit}"))

    # -- what is run

    def folder_in(self, commit: str) -> str | None:
        """Where the package's folder lies in a commit."""
        for folder in self.folders:
            if self._run(["cat-file", "-e", f"{commit}:{folder}/__init__.py"]).returncode == 0:
                return folder
        return None

    def laid_over(self, stack: Stack, commit: str, name: str) -> Stack:
        """The stack with the package as it is in this commit."""
        root, folder = self.unpacked(commit)
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

    def unpacked(self, commit: str) -> tuple[Path, str]:
        """(root, folder): the package's source of this commit in the user's cache, whole or not at all."""
        folder = self.folder_in(commit)
        if folder is None:
            raise StackError("build", f"{self.package} at {commit[:10]}: none of {', '.join(self.folders)} is there")
        root = cache_dir() / "sources" / f"{canonical(self.package)}-{commit[:16]}"
        if (root / folder).is_dir():
            return root, folder
        done = self._run(["archive", "--format=tar", commit, "--", folder])
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise StackError("build", f"{self.package} at {commit[:10]}: {said}")
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
                raise StackError("disk" if full else "build", f"{self.package} at {commit[:10]}: {error}") from None
        finally:
            shutil.rmtree(half, ignore_errors=True)
        return root, folder


def _version(folder: Path) -> str | None:
    """What a package's source says of its own version, where that stands there plainly: ranks say the same."""
    found = re.search(r"""^__version__ = (['"])(.+?)\1""", (folder / "__init__.py").read_text(encoding="utf-8"), re.M)
    try:
        return Version(found[2]).public if found else None
    except InvalidVersion:
        return None


def open_clone(path: str, package: str) -> Clone:
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--repo {path}: there is no such folder")
    clone = Clone(folder, package)
    if clone._run(["rev-parse", "--git-dir"]).returncode:
        raise ConfigError(f"--repo {path}: not a git clone")
    return clone
