"""Servers of stacks with overlays, forked from one trunk: what a rank finds there is what it finds from cold."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import Json, attempt_of, gone, launched, wait_for
from probing import World, world  # noqa: F401 (a fixture)
from repro_matrix.launch import ColdLauncher
from repro_matrix.launch import forkserver as warm
from repro_matrix.launch.attempt import Attempt
from repro_matrix.launch.forkserver import WarmLauncher
from repro_matrix.launch.trunk import common
from repro_matrix.runner import workspace as workplace
from test_warm import Cold, facts, scripted

sys.path.insert(0, str(Path(warm.__file__).resolve().parent / "worker"))
from preload_parent import Asked, Overlay, fork_server, why_apart

ranks = pytest.mark.ranks


def overlay(folder: Path, release: str, package: str = "mdurl", entry_points: str = "") -> Path:
    """A folder with another release of a package; what it brings says where it comes from."""
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(f"__version__ = RELEASE = {release!r}\n")
    info = folder / f"{package}-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {release}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)
    return folder


def laid_over(attempt: Attempt, *folders: Path, **changes: Any) -> Attempt:
    path = tuple(map(str, folders))
    env = {**attempt.env, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": ""}
    return dataclasses.replace(attempt, env=env, overlay=path, **changes)


# --- what can be shared


def asked_for(*modules: str, distributions: tuple[str, ...] = (), **more: bool) -> Asked:
    asked = Asked()
    asked.modules, asked.distributions = set(modules), set(distributions)
    for name, value in more.items():
        setattr(asked, name, value)
    return asked


@pytest.mark.parametrize(
    "asked, loaded, said",
    [
        (asked_for("numpy", "optree"), ["torch.nn", "numpy"], None),
        (asked_for("optree", "mdurl"), ["torch"], "mdurl"),  # looked for, and perhaps not found
        (asked_for("optree"), ["torch", "mdurl.ansi"], "mdurl"),  # there before anybody looked
        (asked_for(distributions=("mdurl",)), ["torch"], "whose version"),
        (asked_for(entry_points=True), ["torch"], None),
        (asked_for(everything=True), ["torch"], "all packages"),
        (asked_for(), ["torch", "pkg_resources"], "all packages"),
    ],
)
def test_an_overlay_is_laid_over_only_what_it_could_not_have_answered(
    tmp_path: Path, asked: Asked, loaded: list[str], said: str | None
) -> None:
    why = why_apart(Overlay([str(overlay(tmp_path / "o", "9.9"))]), asked, loaded)
    assert why is None if said is None else said in str(why)


def test_what_the_interpreter_looks_for_at_its_start_keeps_an_overlay_apart(tmp_path: Path) -> None:
    starts = overlay(tmp_path / "o", "9.9", "sitecustomize")
    assert "sitecustomize" in str(why_apart(Overlay([str(starts)]), asked_for(), ["torch"]))


def test_entry_points_for_what_is_shared_keep_an_overlay_apart(tmp_path: Path) -> None:
    plugin = overlay(tmp_path / "o", "9.9", entry_points="[torch.backends]\nx = y:z\n[console_scripts]\na = b:c\n")
    assert why_apart(Overlay([str(plugin)]), asked_for(), ["torch"]) is None, "nobody asked for entry points"
    assert "torch.backends" in str(why_apart(Overlay([str(plugin)]), asked_for(entry_points=True), ["torch"]))


def test_what_is_asked_for_is_written_down_and_answered_by_others() -> None:
    import importlib.metadata
    import importlib.util

    before = list(sys.meta_path)
    with Asked() as asked:
        assert importlib.util.find_spec("no_such_module_here") is None
        assert importlib.metadata.version("pytest")
        list(importlib.metadata.entry_points(group="torch.backends"))
        os.environ.get("A_VARIABLE_READ")
        "ANOTHER" in os.environ  # noqa: B015
        os.environb.get(b"AS_BYTES")
        assert not asked.everything
        list(importlib.metadata.distributions())
    os.environ.get("AFTER")
    os.environb.get(b"AFTER")
    assert "no_such_module_here" in asked.modules and "pytest" in asked.distributions
    assert asked.entry_points and asked.everything
    assert {"A_VARIABLE_READ", "ANOTHER", "AS_BYTES"} <= asked.environment and "AFTER" not in asked.environment
    assert sys.meta_path == before


def test_nothing_may_ask_for_what_the_first_overlay_brings_and_no_package_hides_that(tmp_path: Path) -> None:
    import importlib.metadata

    with Asked(Overlay([str(overlay(tmp_path / "o", "9.9", "brought"))])):
        for ask in (lambda: importlib.import_module("brought.inner"), lambda: importlib.metadata.version("brought")):
            with pytest.raises(fork_server.Unshared, match="brought"):
                try:
                    ask()
                except Exception:  # noqa: BLE001 - as packages do it where something may be missing
                    pass


def test_the_trunk_has_what_stacks_have_in_common_in_its_environment() -> None:
    env = {"PYTHONPATH": "/o/one:/o/two:/kit", "HF_MODULES_CACHE": "/of/the/stack", "OMP_NUM_THREADS": "1"}
    assert common(env, ("/o/one", "/o/two")) == {"PYTHONPATH": "/kit", "OMP_NUM_THREADS": "1"}
    assert common({**env, "PYTHONPATH": "/o/one"}, ("/o/one",)) == {"OMP_NUM_THREADS": "1"}
    assert common(env, ()) is None, "no overlay: nothing that others share"
    assert common(env, ("/o/two",)) is None, "the arm's own folder comes first"


@pytest.mark.parametrize("words", [["bisect", "--good", "4.39.3", "--bad", "4.45.0"], ["versions"]])
def test_the_probes_of_a_search_have_one_launcher_and_it_is_closed(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    did: list[str] = []
    monkeypatch.setattr(workplace, "open_launcher", lambda name: did.append(name) or world)
    monkeypatch.setattr(world, "close", lambda: did.append("closed"), raising=False)
    verb, *rest = words
    assert world.repro(verb, "qwen15-fsdp-norm-shard", *rest, "stack=base", "launcher=warm") == 0
    assert len(world.probed) > 2 and did == ["warm", "closed"]


def test_sharing_can_be_switched_off() -> None:
    from repro_matrix.launch import open_launcher

    assert open_launcher("auto")._share and not open_launcher("warm")._share  # type: ignore[attr-defined]


# --- what a rank finds

FOUND = """\
import importlib.metadata, importlib.util, os, sys
import torch, mdurl
run.fact("release", mdurl.RELEASE)
run.fact("version", importlib.metadata.version("mdurl"))
run.fact("distributions", sorted({(d.metadata["Name"], d.version) for d in importlib.metadata.distributions()}))
run.fact("spec", importlib.util.find_spec("mdurl").origin)
run.fact("path", sys.path)
run.fact("meta_path", [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path])
run.fact("env", dict(os.environ))
run.fact("writes", sys.dont_write_bytecode)
run.fact("threads", torch.get_num_threads())
run.fact("modules", {name: str(getattr(module, "__file__", None)) for name, module in sorted(sys.modules.items())
                     if name.partition(".")[0] in ("torch", "numpy", "sympy", "mdurl", "repro_kit", "yaml")})
"""
# Of each attempt, or of its server.
PRIVATE = {
    "REPRO_ATTEMPT", "TMPDIR", "HF_HOME", "HF_MODULES_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "REPRO_PARENT",
}  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Iterator[WarmLauncher]:
    launcher = WarmLauncher(share=True)
    yield launcher
    servers = [each.pid for each in (*launcher._servers.values(), *launcher._trunks.values())]
    launcher.close()
    assert servers and all(gone(pid) for pid in servers if pid)


@ranks
@pytest.mark.parametrize("last", ["own", pytest.param("cold", marks=pytest.mark.slow)])
def test_a_shared_server_is_what_a_server_of_its_own_and_a_cold_start_are(
    tmp_path: Path, shared: WarmLauncher, last: str
) -> None:
    """What a server of its own is beside a cold start: test_warm."""
    other = WarmLauncher() if last == "own" else ColdLauncher()
    seen: dict[str, list[Json]] = {}
    try:
        for way, launcher in (("shared", shared), ("again", shared), (last, other)):
            release = "9.2" if way == "again" else "9.1"
            folder = tmp_path / release
            folder = folder if folder.exists() else overlay(folder, release)
            attempt = laid_over(scripted(tmp_path / way, FOUND), folder, imports=("mdurl",))
            found = launcher.launch(attempt, threading.Event())
            assert found["attempt"].get("shared", False) == (way in ("shared", "again")), found["attempt"]
            assert found["infra"] is None and not found["attempt"].get("cold"), found["attempt"]
            records = [rank["record"] for rank in found["ranks"]]
            assert all(record["done"] for record in records), found["ranks"][0]["log_tail"]
            seen[way] = [
                {**record["facts"], "warned": [each["message"] for each in record["warnings"]]} for record in records
            ]
    finally:
        other.close()
    assert len(shared._trunks) == 1
    assert {each["release"] for each in seen["again"]} == {each["version"] for each in seen["again"]} == {"9.2"}
    for rank in (0, 1):
        one, two = seen["shared"][rank], seen[last][rank]
        # The kit pins float32 where torch is imported before it: by the script itself, in every script but this one.
        left_out = {"env"} if last == "own" else {"env", "modules", "float32"}
        for name in set(one) - left_out:
            assert one[name] == two[name], name
        ours, theirs = ({k: v for k, v in each["env"].items() if k not in PRIVATE} for each in (one, two))
        assert ours == theirs
        assert two["modules"].items() <= one["modules"].items(), "imported ahead is more, and nothing else"


@ranks
def test_an_overlay_that_brings_what_is_shared_has_a_server_of_its_own_and_that_is_said(
    tmp_path: Path, shared: WarmLauncher
) -> None:
    first = laid_over(attempt_of(tmp_path / "f", "nothing"), overlay(tmp_path / "p", "9.8"))
    assert launched(shared, first)["attempt"]["shared"]
    folder = overlay(tmp_path / "o", "9.9", "sympy")  # torch looks for it, and the first overlay does not bring it
    attempt = laid_over(attempt_of(tmp_path / "a", "nothing"), folder)
    seen = launched(shared, attempt)
    assert "sympy" in seen["attempt"].get("apart", seen["attempt"].get("cold", "")), seen["attempt"]
    assert "shared" not in seen["attempt"]


@ranks
@pytest.mark.slow
def test_a_trunk_that_is_killed_takes_its_servers_along_and_the_next_attempt_has_another(
    tmp_path: Path, shared: WarmLauncher
) -> None:
    folder = overlay(tmp_path / "o", "9.3")
    attempt = laid_over(scripted(tmp_path / "a", "run.fact('there', True)"), folder, imports=("mdurl",))
    assert facts(launched(shared, attempt))
    (trunk,) = shared._trunks.values()
    servers = [each.pid for each in shared._servers.values() if each.trunk is trunk]
    assert trunk.pid and servers
    os.kill(trunk.pid, signal.SIGKILL)
    wait_for(lambda: all(gone(pid) for pid in servers if pid))
    again = launched(shared, dataclasses.replace(attempt, id=attempt.id + "-again"))
    assert again["attempt"]["shared"] and facts(again) and next(iter(shared._trunks.values())) is not trunk


@ranks
def test_what_an_overlay_brings_may_fail_to_import_and_the_next_is_served(
    tmp_path: Path, shared: WarmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = overlay(tmp_path / "o", "9.4")
    (folder / "mdurl" / "__init__.py").write_text("raise RuntimeError('not with this torch')\n")
    attempt = laid_over(attempt_of(tmp_path / "a", "nothing"), folder, imports=("mdurl",))
    with monkeypatch.context() as patched:
        patched.setattr(shared, "_cold", Cold())
        seen = launched(shared, attempt)
    assert "not with this torch" in seen["attempt"]["cold"] and seen["attempt"]["launcher"] == "torchrun"
    good = laid_over(scripted(tmp_path / "b", "pass"), overlay(tmp_path / "p", "9.5"), imports=("mdurl",))
    assert launched(shared, good)["attempt"]["shared"]


@ranks
@pytest.mark.slow
def test_what_asks_for_the_overlay_is_left_for_its_servers(tmp_path: Path) -> None:
    launcher = WarmLauncher(share=True)
    try:
        folder = overlay(tmp_path / "o", "9.6", "xarray")  # dynamo looks for it
        attempt = laid_over(scripted(tmp_path / "a", "import xarray; run.fact('is', xarray.RELEASE)"), folder)
        seen = launched(launcher, attempt)
        (trunk,) = launcher._trunks.values()
    finally:
        launcher.close()
    assert seen["attempt"]["shared"] and facts(seen) == [{"is": "9.6"}] * 2
    assert trunk.command[2] == "--until" and trunk.command[3].startswith("torch.")
