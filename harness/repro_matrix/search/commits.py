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
    """A local clone of one package's repository."""

    path: Path
    package: str

    @property
    def folders(self) -> list[str]:
        module = canonical(self.package).replace("-", "_")
        return [layout.format(module) for layout in _LAYOUTS]

    def git(self, *words: str) -> str:
        """Return what a git command prints. Raises ConfigError where it fails."""
        done = self._run(*words)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
            raise ConfigError(f"--repo {self.path}: git {words[0]}: {lines[-1]}")
        return done.stdout.decode(errors="replace").strip()

    def _run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        # Ignore the shell's repository (GIT_DIR), and do not write the clone's index.
        env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        env |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        try:
            return subprocess.run(["git", "-C", str(self.path), *words], capture_output=True, env=env, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"--repo {self.path}: git does not answer: {error}") from None

    # -- which commits

    def commit_of(self, release: str) -> str:
        """Return the commit of a release's tag. Raises ConfigError."""
        short = re.sub(r"\.0$", "", release) if release.count(".") == 2 else release
        for tag in (form.format(text, self.package) for text in dict.fromkeys((release, short)) for form in _TAGS):
            done = self._run("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
            if done.returncode == 0:
                return done.stdout.decode().strip()
        tags = self.git("tag", "--list").split()
        raise ConfigError(f"--repo {self.path}: no tag for {self.package} {release}{nearest(f'v{release}', tags)}")

    def between(self, first: str, last: str) -> list[str]:
        """Return the commits from one to the other that touch the package, both ends included.

        A release is often tagged on its own branch. The path then goes back to the fork and on from there, so that
        neighbours are always a commit and its first parent.
        """
        fork = self._run("merge-base", first, last).stdout.decode().strip()
        if not fork:
            raise ConfigError(
                f"--repo {self.path}: {first[:10]} and {last[:10]} have no common ancestor. Is it a shallow clone?"
            )
        back, forth = (
            self.git("rev-list", "--first-parent", f"{fork}..{tip}", "--", *self.folders).split()
            for tip in (first, last)
        )
        return list(dict.fromkeys([first, *back, fork, *reversed(forth), last]))

    def title(self, commit: str) -> str:
        return self.git("show", "--no-patch", "--format=%h %cs %s", commit)

    def is_ancestor(self, older: str, newer: str) -> bool:
        return self._run("merge-base", "--is-ancestor", older, newer).returncode == 0

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
        existing = (
            each for each in self.folders if not self._run("cat-file", "-e", f"{commit}:{each}/__init__.py").returncode
        )
        folder = next(existing, None)
        what = f"{self.package} at {commit[:10]}"
        if folder is None:
            raise StackError("unavailable", f"{what}: it has none of {', '.join(self.folders)}")
        root = cache_dir() / "sources" / f"{canonical(self.package)}-{commit[:16]}"
        if (root / folder).is_dir():
            return root, folder
        half = root.with_name(f".{root.name}-{uuid.uuid4().hex[:8]}")
        try:
            half.mkdir(parents=True)
            with tarfile.open(
                fileobj=io.BytesIO(self._run("archive", "--format=tar", commit, "--", folder).stdout)
            ) as tar:
                if hasattr(tarfile, "data_filter"):
                    tar.extraction_filter = tarfile.data_filter
                tar.extractall(half)
            half.rename(root)
        except (OSError, tarfile.TarError) as error:
            if not (root / folder).is_dir():  # else another run was faster
                full = isinstance(error, OSError) and error.errno == errno.ENOSPC
                raise StackError("infra" if full else "unavailable", f"{what}: {error}") from None
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
    """Return the clone in a folder. Raises ConfigError."""
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--repo {path}: no such folder")
    clone = Clone(folder, package)
    if clone._run("rev-parse", "--git-dir").returncode:
        raise ConfigError(f"--repo {path}: not a git clone")
    return clone
