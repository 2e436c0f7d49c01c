"""A reference that one attempt leaves for others: taken only where everything it depends on is the
same."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from repro_kit import cache_key as depends
from repro_kit import reference
from repro_kit import reference_cache as common
from repro_kit import reference_checks as pass_criteria
from repro_kit.reference_cache import MADE, Common
from repro_kit.run import Run

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reference_checks import Tiny, a_run, trained_against

torch = pytest.importorskip("torch", reason="needs the stack `current`")


calls: list[int] = []


class Counted(Tiny):
    """Counts its computations in ``calls``."""

    def forward(self, *args: Any, **named: Any) -> Any:
        calls.append(1)
        return super().forward(*args, **named)


def a_rank(tmp_path: Path, attempt: str, **changes: Any) -> Run:
    """The one rank of an attempt of the run in ``tmp_path``."""
    work = tmp_path / attempt
    work.mkdir(parents=True, exist_ok=True)
    shared = {"folder": str(tmp_path / "references"), "attempt": attempt}
    flags = {"dtype": "float32", "sabotage": "none"}
    return a_run(work_dir=str(work), references=shared, flags=flags, **changes)


def referenced(run: Run, model: Any = None, **more: Any) -> str:
    """Compute the run's reference, or take one; return which attempt computed it."""
    pass_criteria.Reference(run, model or Tiny(), **more)
    return str(run.record.data["facts"]["reference"]["made_by"])


def test_second_attempt_reuses_the_reference(tmp_path: Path) -> None:
    one, other, third = (a_rank(tmp_path, name) for name in ("one", "other", "third"))
    calls.clear()
    assert (
        referenced(one, Counted()) == "one" and len(calls) == 2 * one.steps
    )  # plain and perturbed
    calls.clear()
    assert referenced(other, Counted()) == "one" and not calls
    first, second = (
        pass_criteria.Reference(a_rank(tmp_path / place, "a"), Counted())
        for place in ("", "elsewhere")
    )
    assert second.truth() == first.truth() and second.noise() == first.noise()
    assert all(
        torch.equal(first.after(w)[n], second.after(w)[n])
        for w in ("first", "last")
        for n in first.after(w)
    )
    found = trained_against(pass_criteria.Reference(third, model := Tiny()), third, model)
    assert {check.state for check in found.values()} == {"passed"}


def test_rank_with_a_changed_reference_has_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = Common.leave

    def late(self: Any, key: str, made: Path) -> bool:
        found = json.loads((made / "truth").read_text(encoding="utf-8"))
        found["what"]["losses"] = [loss + 30.0 for loss in found["what"]["losses"]]
        (made / "truth").write_text(json.dumps(found), encoding="utf-8")
        return leave(self, key, made)

    monkeypatch.setattr(Common, "leave", late)
    referenced(a_rank(tmp_path, "one"))
    run = a_rank(tmp_path, "other")
    with pytest.raises(ValueError, match="truth of the reference is not what was written"):
        trained_against(pass_criteria.Reference(run, model := Tiny()), run, model)


MODELS: dict[str, Callable[[Any], Any]] = {
    "weights": lambda model: model.head.bias.data.add_(1e-6),
    "frozen": lambda model: model.inner.bias.requires_grad_(False),
    "buffer": lambda model: model.register_buffer("more", torch.ones(2)),
    "hook": lambda model: model.inner.register_forward_hook(lambda *_: None),
    "replaced": lambda model: setattr(model, "forward", model.forward),
    "attribute": lambda model: setattr(model, "scale", 2.0),
    "evaluated": lambda model: model.inner.eval(),
    "dtype": lambda model: model.to(torch.bfloat16),
}
DIFFERENT: dict[
    str, dict[str, Any]
] = {  # name -> settings of the run, a change of the model, arguments
    **{name: {"change": change} for name, change in MODELS.items()},
    "flag that was read": {"read": "dtype"},
    **{
        str(each): {"settings": each}
        for each in (
            {"steps": 3},
            {"seed": 1},
            {"case": "d"},
            {"model": {"config": {"vocab_size": 29}}},
        )
    },
    "ranks": {"more": {"ranks": 3}},
    "mixed precision": {"more": {"computes_in": torch.bfloat16}},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_key_differs_by_model_settings_and_arguments(tmp_path: Path, name: str) -> None:
    referenced(a_rank(tmp_path, "one"))
    what = DIFFERENT[name]
    for attempt in ("other", "again"):
        run, model = a_rank(tmp_path, attempt, **what.get("settings", {})), Tiny()
        what.get("change", lambda model: None)(model)
        assert "read" not in what or run.flags[what["read"]]
        assert referenced(run, model, **what.get("more", {})) == "other"


def test_key_differs_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    referenced(a_rank(tmp_path, "0"))
    changes: list[Callable[[], None]] = [
        lambda: monkeypatch.setenv("ATEN_CPU_CAPABILITY", "another"),
        lambda: monkeypatch.setitem(pass_criteria.RATES, torch.float32, 0.2),
        lambda: monkeypatch.setattr(depends, "sources", lambda: "another kit"),
        lambda: monkeypatch.setattr(depends, "installed", lambda: {"torch": "0.1"}),
        lambda: monkeypatch.setattr(depends, "machine_facts", lambda: {"cpu_capability": "other"}),
        lambda: monkeypatch.setattr(sys, "executable", "/another/python"),
        lambda: monkeypatch.setattr(torch, "get_num_threads", lambda: 77),
        lambda: monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "yes"),
        lambda: monkeypatch.setattr(
            pass_criteria, "batch", None
        ),  # nothing: the default argument is bound already
    ]
    for number, change in enumerate(changes, 1):
        change()
        assert referenced(a_rank(tmp_path, str(number))) == str(min(number, len(changes) - 1))


def test_key_ignores_flags_that_are_read_later(tmp_path: Path) -> None:
    referenced(a_rank(tmp_path, "one"))
    other = a_rank(tmp_path, "other")
    dict.__setitem__(
        other.flags, "sabotage", "no_reduction"
    )  # as train_step.py reads it: after the reference
    assert referenced(other) == "one" and other.flags["sabotage"] == "no_reduction"


def test_reference_that_reads_unkeyed_settings_is_not_shared(tmp_path: Path) -> None:
    class Asking(Tiny):
        def forward(self, *args: Any, **named: Any) -> Any:
            assert asked.flags["sabotage"]
            return super().forward(*args, **named)

    for attempt in ("one", "other"):
        asked = a_rank(tmp_path, attempt)
        assert referenced(asked, Asking()) == attempt


def test_failed_reference_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(reference, "Perturbed", lambda *_: 1 / 0)  # after the plain run
        referenced(a_rank(tmp_path, "one"))
    assert referenced(a_rank(tmp_path, "other")) == "other"


# --- files of the cache


FILES = {"first": b"weights" * 100, "truth": b"{}"}


def folder_with(folder: Path, scale: int = 1) -> Path:
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data * scale)
    return folder


def left_by_one(tmp_path: Path, key: str = "the key", **limits: int) -> Common:
    one = Common(tmp_path / "run", "one", **limits)
    assert one.leave(key, folder_with(tmp_path / "one" / key))
    return one


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@given(st.text(), st.text())
def test_cache_returns_files_of_the_same_key_only(
    tmp_path_factory: Any, key: str, other: str
) -> None:
    folder = tmp_path_factory.mktemp("common")
    one = Common(folder / "run", "one")
    assert one.leave(key, folder_with(folder / "made"))
    assert (one.take(other, folder / "taken") is not None) == (key == other)
    assert one.take(key, folder / "then") and contents(folder / "then") == FILES


def entry(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Change what the cache recorded of the files."""

    def edit(place: Path) -> None:
        data = json.loads((place / MADE).read_text())
        change(data)
        (place / MADE).write_text(json.dumps(data))

    return edit


CHANGES: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda place: None,
    "a tensor edited": lambda place: (place / "first").write_bytes(b"w" * 700),
    "cut short": lambda place: os.truncate(place / "first", 3),
    "without its losses": lambda place: (place / "truth").unlink(),
    "another model's reference": entry(lambda data: data.update(key="the kez")),
    "no key": entry(lambda data: data.pop("key")),
    "no checksums": entry(lambda data: data.update(sums=None)),
    "not finished": lambda place: os.truncate(place / MADE, 20),
    "no entry": lambda place: (place / MADE).unlink(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_entry_is_not_reused(name: str, tmp_path: Path) -> None:
    left_by_one(tmp_path)
    shutil.rmtree(tmp_path / "one")  # the attempt has ended
    (place,) = (tmp_path / "run").iterdir()
    CHANGES[name](place)
    other = Common(tmp_path / "run", "other")
    whole = name == "nothing"
    assert other.take("the key", tmp_path / "taken") == ("one" if whole else None)
    assert (tmp_path / "taken").exists() is whole
    assert (
        other.leave("the key", folder_with(tmp_path / "again")) is not whole
    )  # the first that is complete stays
    assert other.take("the key", tmp_path / "then") and contents(tmp_path / "then") == FILES


def test_cache_ignores_a_killed_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", Mock(side_effect=KeyboardInterrupt))
        left_by_one(tmp_path)
    other = Common(tmp_path / "run", "other")
    assert other.take("the key", tmp_path / "taken") is None
    assert other.leave("the key", folder_with(tmp_path / "other"))
    assert other.take("the key", tmp_path / "taken") == "other"


def test_cache_evicts_the_oldest_unused_entries(tmp_path: Path) -> None:
    size = sum(map(len, FILES.values()))
    one = left_by_one(tmp_path, "a", limit=2 * size)
    os.utime(tmp_path / "run" / common.short("a") / MADE, (1, 1))
    assert one.take("a", tmp_path / "used") == "one"
    for key in "bc":
        assert one.leave(key, folder_with(tmp_path / f"folder_with-{key}"))
    assert [one.take(key, tmp_path / f"taken-{key}") for key in "abc"] == [None, "one", "one"]
    assert contents(tmp_path / "used") == FILES
    assert one.leave("large", folder_with(tmp_path / "large", scale=5))  # it stays alone
    assert [one.take(key, tmp_path / f"then-{key}") for key in ("b", "c", "large")] == [
        None,
        None,
        "one",
    ]


def test_cache_on_a_full_disk_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert not Common(tmp_path / "run", "one").leave("the key", folder_with(tmp_path / "made"))
    assert not (tmp_path / "run").exists()
