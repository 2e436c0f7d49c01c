"""A made-up history of releases behind the real prober, engine and store: only stacks and launches
are pretended."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.cli.main import main
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, StackError, package_index
from repro_matrix.environment.stacks.package_index import Release
from repro_matrix.environment.stacks.spec import canonical, parse_stack, short_hash
from repro_matrix.launch.attempt import Attempt
from repro_matrix.results import runs
from repro_matrix.runner import prerequisites as wanted
from repro_matrix.runner import run as workplace
from script_observations import of_attempt
from test_engine import REPRODUCED, observation

CASE = "qwen15-fsdp-norm-shard"
BASE = {
    "python": "3.11.0",
    "torch": "2.2.2",
    "transformers": "4.39.3",
    "accelerate": "0.29.2",
    "numpy": "1.26.4",
}

LAYER_NORM = {  # the same failure by another signature of the case
    **REPRODUCED,
    "message": (
        "Expected weight to be of same shape as normalized_shape, but got weight of shape [512]"
    ),
    "frames": [
        *REPRODUCED["frames"],
        {
            "file": "/site-packages/torch/nn/functional.py",
            "line": 1,
            "function": "layer_norm",
            "code": "",
            "module": "torch.nn.functional",
            "code_location": "torch.nn.functional",
        },
    ],
}

# (versions, variant) -> reproduced, layer norm, passed, hang, infra_error, anything else: an error
# that says so
History = Callable[[Mapping[str, str], str], str]


class World:
    """What the index has, what can be installed, and how each set of versions answers."""

    name = "fake"

    def __init__(self, folder: Path, history: History) -> None:
        self.folder = folder
        self.history = history
        self.listed: dict[str, list[Release]] = {}
        self.bases: dict[str, dict[str, str]] = {"base": BASE}
        self.uninstallable: set[tuple[str, str]] = set()  # releases that cannot be installed
        self.needs: Callable[[Mapping[str, str]], str] = lambda versions: (
            ""
        )  # the package that contradicts the others
        self.moves: Callable[[Mapping[str, str]], Mapping[str, str]] = (
            lambda versions: {}
        )  # packages that follow
        self.version_at: Callable[[str], str] = lambda url: ""  # of a commit in a clone
        self.launched: list[tuple[Mapping[str, str], str]] = []
        self.resolved: list[str] = []
        self.interrupt_at: int | None = None
        self._pythons: dict[str, Stack] = {}

    def releases_of(self, package: str, *versions: str) -> None:
        self.listed[package] = [Release(version) for version in versions]

    # -- what stands in for the real ones

    def resolve(self, spec: str, **_: Any) -> Stack:
        self.resolved.append(spec)
        wanted = parse_stack(spec)
        if wanted.base not in self.bases:
            raise StackError(f"no stack named {wanted.base!r}")
        base = self.bases[wanted.base]
        versions = dict(base)
        for swap in wanted.swaps:
            version = self.version_at(swap.url) if swap.url else next(iter(swap.specifier)).version
            if (canonical(swap.name), version) in self.uninstallable:
                raise StackError(f"{swap} has nothing for this Python", "unavailable")
            versions[canonical(swap.name)] = version
        moved = {name: ("1.0", version) for name, version in self.moves(versions).items()}
        versions |= {name: version for name, (_, version) in moved.items()}
        pinned = {canonical(swap.name) for swap in wanted.swaps}
        if (name := self.needs(versions)) and name in pinned:
            said = (
                f"Because transformers==4 depends on {name}>=1 and you require"
                f" {name}=={versions[name]}"
            )
            raise StackError(
                f"stack {spec}: the requirements contradict each other\n  {said}", "unavailable"
            )
        python = f"/fake/{short_hash(json.dumps(versions, sort_keys=True))}"
        self._pythons[python] = Stack(spec, python, versions, (), short_hash(python), moved)
        return self._pythons[python]

    def check(self, spec: str) -> None:
        if parse_stack(spec).base not in self.bases and not parse_stack(spec).file:
            raise StackError(f"no stack named {parse_stack(spec).base!r}")

    def releases(
        self, package: str, *, yanked: bool = False, pre: bool = False, env: Any = None
    ) -> list[Release]:
        if package not in self.listed:
            raise StackError(
                f"the index has no package {package!r}; did you mean 'transformers'?", "unavailable"
            )
        found = [
            r
            for r in self.listed[package]
            if (yanked or not r.yanked) and (pre or not r.parsed.is_prerelease)
        ]
        return sorted(found, key=lambda release: release.parsed)

    def launch(self, attempt: Attempt, stop: threading.Event) -> dict[str, Any]:
        variant = str(attempt.settings["variant"])
        versions = self._pythons[attempt.python].versions
        if self.interrupt_at is not None and len(self.launched) >= self.interrupt_at:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does; ``stop`` is this attempt's only
            return observation(attempt, None, interrupted=True)
        self.launched.append((versions, variant))
        return answered(attempt, self.history(versions, variant))

    def close(self) -> None: ...

    # -- the command line

    def repro(self, *words: str) -> int:
        return main([*words, f"results={self.folder / 'results'}", "jobs=1"])

    @property
    def probed(self) -> list[str]:
        """Releases of transformers that were launched, in order."""
        return list(dict.fromkeys(versions["transformers"] for versions, _ in self.launched))


def answered(attempt: Attempt, how: str) -> dict[str, Any]:
    errors = {"reproduced": REPRODUCED, "layer norm": LAYER_NORM, "passed": None}
    if how in errors:
        return observation(attempt, errors[how])
    if how == "hang":
        found = observation(attempt, None, timed_out=True)
        for rank in found["ranks"]:
            rank.update(exit_code=None, signal="SIGKILL", terminated_by="timeout", record=None)
        return found
    if how == "infra_error":
        return {
            **observation(attempt, None),
            "infra_error": {"kind": "memory", "message": "no memory"},
        }
    return observation(attempt, {**REPRODUCED, "type": "KeyError", "message": how})


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """transformers 4.37.0 to 4.45.0, eleven releases; 4.40.0 and later reproduce."""

    def history(versions: Mapping[str, str], variant: str) -> str:
        return "passed" if variant != "unfixed" or before(versions, "4.40") else "reproduced"

    made = World(tmp_path, history)
    minors = (
        "37.0",
        "37.2",
        "38.0",
        "39.3",
        "40.0",
        "41.0",
        "41.1",
        "42.0",
        "43.0",
        "44.0",
        "45.0",
    )
    made.releases_of("transformers", *(f"4.{minor}" for minor in minors))
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stacks, "resolve", made.resolve)
    monkeypatch.setattr(stacks, "check_stack", made.check)
    monkeypatch.setattr(wanted, "resolve", made.resolve)
    monkeypatch.setattr(workplace, "open_launcher", lambda name: made)
    monkeypatch.setattr(runs, "measured_rows", lambda *given: [])
    monkeypatch.setattr(package_index, "releases", made.releases)
    return made


class ScriptLab:
    """A user's script ./train.py on the stacks of a world; the tests' own Lab says how a launch
    ends."""

    name = "fake"

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.launched: list[Attempt] = []

    def observe(self, versions: Mapping[str, str], attempt: Attempt) -> dict[str, Any]:
        raise NotImplementedError

    def close(self) -> None: ...

    def launch(self, attempt: Attempt, stop: threading.Event) -> dict[str, Any]:
        self.launched.append(attempt)
        return of_attempt(
            self.observe(self.world._pythons[attempt.python].versions, attempt), attempt
        )

    def repro(self, *words: str) -> int:
        return main([*words, f"results={self.folder / 'results'}"])


@pytest.fixture
def lab(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> ScriptLab:
    made: ScriptLab = request.module.Lab(world, tmp_path)
    monkeypatch.setattr("repro_matrix.runner.run.open_launcher", lambda name: made)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print(1)\n")
    return made


def before(versions: Mapping[str, str], release: str, package: str = "transformers") -> bool:
    return Release(versions[package]).parsed < Release(release).parsed


def result(
    repro: Callable[..., int], capsys: pytest.CaptureFixture[str], *words: str, code: int = 0
) -> dict[str, Any]:
    """Return what a command prints with --json, or its error message as ``err``."""
    actual = repro(*words, "--json")
    out = capsys.readouterr()
    assert actual == code, out.err
    return dict(json.loads(out.out)) if out.out else {"err": out.err}
