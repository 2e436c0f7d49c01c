"""A reference that one attempt leaves for others: taken only where everything it depends on is the same."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from repro_kit import cache_key as depends
from repro_kit import reference
from repro_kit import reference_cache as common
from repro_kit import reference_checks as pass_criteria
from repro_kit.reference_cache import MADE, Common
from repro_kit.run import Run
from repro_kit.single_process import train_alone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reference_checks import Tiny, a_run, trained_against

torch = pytest.importorskip("torch", reason="needs the stack `current`")


class Counted(Tiny):
    """Says how often it computed."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "calls", calls)

    def forward(self, *args: Any, **named: Any) -> Any:
        calls.append(1)
        return super().forward(*args, **named)


calls: list[int] = []


def a_rank(tmp_path: Path, attempt: str, **changes: Any) -> Run:
    """The one rank of an attempt of the run in ``tmp_path``."""
    work = tmp_path / attempt
    work.mkdir(parents=True, exist_ok=True)
    shared = {"folder": str(tmp_path / "references"), "attempt": attempt}
    flags = {"dtype": "float32", "sabotage": "none"}
    return a_run(work_dir=str(work), references=shared, flags=flags, **changes)


def made_by(run: Run) -> str:
    return str(run.record.data["facts"]["reference"]["made_by"])


def trained(run: Run, model: Any, **more: Any) -> Any:
    """A reference and an honest training; the states of its checks."""
    found = trained_against(pass_criteria.Reference(run, model, **more), run, model)
    return {name: check.state for name, check in found.items()}


def test_second_attempt_reuses_the_reference(tmp_path: Path) -> None:
    one, other = a_rank(tmp_path, "one"), a_rank(tmp_path, "other")
    calls.clear()
    first = pass_criteria.Reference(one, Counted())
    assert made_by(one) == "one" and len(calls) == 2 * one.steps  # plain and perturbed
    calls.clear()
    second = pass_criteria.Reference(other, Counted())
    assert made_by(other) == "one" and not calls
    assert second.truth() == first.truth() and second.noise() == first.noise()
    assert all(torch.equal(first.after(w)[n], second.after(w)[n]) for w in ("first", "last") for n in first.after(w))
    assert set(trained(a_rank(tmp_path, "third"), Tiny()).values()) == {"passed"}


@pytest.mark.parametrize("name", ["truth", "noise"])
def test_changed_reference_file_is_refused(tmp_path: Path, name: str) -> None:
    pass_criteria.Reference(a_rank(tmp_path, "one"), Tiny())
    [written] = [path for path in (tmp_path / "one").rglob(name)]
    assert reference.verified(written)["losses"]
    found = json.loads(written.read_text(encoding="utf-8"))
    found["what"]["losses"] = [30 * loss for loss in found["what"]["losses"]]
    found["what"]["losses"][0] += 1.0
    written.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name} of the reference is not what was written"):
        reference.verified(written)


def test_rank_with_a_changed_reference_has_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Common.leave

    def late(self: Any, key: str, made: Path) -> bool:
        found = json.loads((made / "noise").read_text(encoding="utf-8"))
        found["what"]["losses"] = [loss + 30.0 for loss in found["what"]["losses"]]
        (made / "noise").write_text(json.dumps(found), encoding="utf-8")
        return leave(self, key, made)

    monkeypatch.setattr(Common, "leave", late)
    pass_criteria.Reference(a_rank(tmp_path, "one"), Tiny())
    taking = a_rank(tmp_path, "other")
    with pytest.raises(ValueError, match="noise of the reference is not what was written"):
        trained(taking, Tiny())
    assert made_by(taking) == "one"


def test_script_run_by_hand_shares_no_reference(tmp_path: Path) -> None:
    for number in "12":
        run = a_run(work_dir=str(tmp_path / number))
        calls.clear()
        pass_criteria.Reference(run, Counted())
        assert len(calls) == 2 * run.steps and "reference" not in run.record.data["facts"]


def other_weights(run: Run, model: Any) -> Any:
    with torch.no_grad():
        model.head.bias[0] += 1e-6


def frozen(run: Run, model: Any) -> Any:
    model.inner.bias.requires_grad_(False)


def with_buffer(run: Run, model: Any) -> Any:
    model.register_buffer("more", torch.ones(2))


def hooked(run: Run, model: Any) -> Any:
    model.inner.register_forward_hook(lambda *_: None)


def replaced(run: Run, model: Any) -> Any:
    model.forward = model.forward


def scaled(run: Run, model: Any) -> Any:
    model.scale = 2.0


def evaluated(run: Run, model: Any) -> Any:
    model.inner.eval()


def half(run: Run, model: Any) -> Any:
    model.to(torch.bfloat16)


def read_flag(run: Run, model: Any) -> Any:
    assert run.flags["dtype"]


CHANGES: dict[str, Callable[[Run, Any], Any]] = {
    change.__name__: change
    for change in (other_weights, frozen, with_buffer, hooked, replaced, scaled, evaluated, half, read_flag)
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_key_differs_by_model(tmp_path: Path, change: Callable[[Run, Any], Any]) -> None:
    pass_criteria.Reference(a_rank(tmp_path, "one"), Tiny())
    for attempt, whose in (("other", "other"), ("again", "other")):
        run, model = a_rank(tmp_path, attempt), Tiny()
        change(run, model)
        pass_criteria.Reference(run, model)
        assert made_by(run) == whose


@pytest.mark.parametrize(
    "changes", [{"steps": 3}, {"seed": 1}, {"case": "d"}, {"model": {"config": {"vocab_size": 29}}}], ids=str
)
def test_key_differs_by_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    pass_criteria.Reference(a_rank(tmp_path, "one"), Tiny())
    run = a_rank(tmp_path, "other", **changes)
    pass_criteria.Reference(run, Tiny())
    assert made_by(run) == "other"


@pytest.mark.parametrize("more", [{"ranks": 3}, {"computes_in": torch.bfloat16}], ids=str)
def test_key_differs_by_training_code(tmp_path: Path, more: dict[str, Any]) -> None:
    pass_criteria.Reference(a_rank(tmp_path, "one"), Tiny())
    run = a_rank(tmp_path, "other")
    pass_criteria.Reference(run, Tiny(), **more)
    assert made_by(run) == "other"


def test_key_differs_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pass_criteria.Reference(a_rank(tmp_path, "0"), Tiny())
    changes: list[Callable[[], None]] = [
        lambda: monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default"),
        lambda: monkeypatch.setitem(pass_criteria.RATES, torch.float32, 0.2),
        lambda: monkeypatch.setattr(depends, "sources", lambda: "another kit"),
        lambda: monkeypatch.setattr(depends, "installed", lambda: {"torch": "0.1"}),
        lambda: monkeypatch.setattr(depends, "machine_facts", lambda: {"cpu_capability": "other"}),
        lambda: monkeypatch.setattr(sys, "executable", "/another/python"),
        lambda: monkeypatch.setattr(torch, "get_num_threads", lambda: 77),
        lambda: monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "yes"),
        lambda: monkeypatch.setattr(
            pass_criteria, "batch", None
        ),  # nothing: what it was made with is an argument's default
    ]
    for number, change in enumerate(changes, 1):
        change()
        run = a_rank(tmp_path, str(number))
        pass_criteria.Reference(run, Tiny())
        assert made_by(run) == str(min(number, len(changes) - 1))


def test_key_ignores_flags_that_are_read_later(tmp_path: Path) -> None:
    one = a_rank(tmp_path, "one")
    pass_criteria.Reference(one, Tiny())
    other = a_rank(tmp_path, "other")
    other.settings["flags"]["sabotage"] = other.flags.__class__(other.flags)["sabotage"]
    dict.__setitem__(other.flags, "sabotage", "no_reduction")  # as train_step.py reads it: after the reference
    pass_criteria.Reference(other, Tiny())
    assert made_by(other) == "one" and other.flags["sabotage"] == "no_reduction"


def test_reference_that_reads_unkeyed_settings_is_not_shared(tmp_path: Path) -> None:

    class Asking(Tiny):
        def forward(self, *args: Any, **named: Any) -> Any:
            assert asked.flags["sabotage"]
            return super().forward(*args, **named)

    for attempt in ("one", "other"):
        asked = a_rank(tmp_path, attempt)
        pass_criteria.Reference(asked, Asking())
        assert made_by(asked) == attempt


def test_failed_reference_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(start: Any, *rest: Any) -> Any:
        if isinstance(start, reference.Perturbed):
            raise RuntimeError("no memory")
        return train_alone(start, *rest)

    monkeypatch.setattr(reference, "train_alone", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        pass_criteria.Reference(a_rank(tmp_path, "one"), Tiny())
    monkeypatch.undo()
    other = a_rank(tmp_path, "other")
    pass_criteria.Reference(other, Tiny())
    assert made_by(other) == "other"


# --- wrong ones


def place(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "references").iterdir()
    return found


def test_edited_tensor_is_computed_again(tmp_path: Path) -> None:
    pass_criteria.Reference(a_rank(tmp_path, "one"), Tiny())
    shelf = place(tmp_path) / "last"
    data = bytearray(shelf.read_bytes())
    data[2] ^= 1
    shelf.unlink()  # the maker's own is another name of the same file
    shelf.write_bytes(data)
    other = a_rank(tmp_path, "other")
    assert set(trained(other, Tiny()).values()) == {"passed"} and made_by(other) == "other"
    third = a_rank(tmp_path, "third")
    pass_criteria.Reference(third, Tiny())
    assert made_by(third) == "other"  # it is whole again


def test_tensor_edited_after_lookup_is_refused(tmp_path: Path) -> None:
    pass_criteria.Reference(a_rank(tmp_path, "one"), Tiny())
    other = a_rank(tmp_path, "other")
    found = pass_criteria.Reference(other, Tiny())
    assert made_by(other) == "one"
    with open(place(tmp_path) / "last", "r+b") as file:
        file.write(b"xx")
    with pytest.raises(ValueError, match="is not what was put there"):
        found.check(other, last=dict(Tiny().named_parameters()))


FILES = {"first": b"weights" * 100, "truth": b"{}"}


def folder_with(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def left_by_one(tmp_path: Path, key: str = "the key", **limits: int) -> Common:
    one = Common(tmp_path / "run", "one", **limits)
    assert one.leave(key, folder_with(tmp_path / "one" / key))
    return one


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_cached_reference_is_reused_and_names_its_origin(tmp_path: Path) -> None:
    left_by_one(tmp_path)
    shutil.rmtree(tmp_path / "one")  # the attempt has ended
    other = Common(tmp_path / "run", "other")
    assert other.take("the key", tmp_path / "other") == "one"
    assert contents(tmp_path / "other") == FILES
    assert other.take("another key", tmp_path / "more") is None and not (tmp_path / "more").exists()
    assert not other.leave("the key", folder_with(tmp_path / "late")), "the first that is complete stays"


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(max_size=50), min_size=1), st.text(), st.text()
)
def test_cache_returns_files_of_the_same_key_only(
    tmp_path_factory: Any, files: dict[str, bytes], key: str, other: str
) -> None:
    folder = tmp_path_factory.mktemp("common")
    one = Common(folder / "run", "one")
    assert one.leave(key, folder_with(folder / "made", files))
    taken = one.take(other, folder / "taken")
    assert (taken is not None) == (key == other)
    assert taken is None or contents(folder / "taken") == files


def test_cache_separates_keys_with_equal_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "short", lambda key: "same")
    one = left_by_one(tmp_path)
    assert one.take("another key", tmp_path / "taken") is None


def test_cache_ignores_a_killed_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException): ...

    def killed(path: Path, target: Path) -> Path:
        raise Killed

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Killed):
        left_by_one(tmp_path)
    monkeypatch.undo()
    other = Common(tmp_path / "run", "other")
    assert other.take("the key", tmp_path / "taken") is None
    assert (
        other.leave("the key", folder_with(tmp_path / "other")) and other.take("the key", tmp_path / "taken") == "other"
    )


def test_concurrent_writers_keep_one_entry_without_waiting(tmp_path: Path) -> None:
    folders = {str(number): folder_with(tmp_path / f"folder_with-{number}") for number in range(8)}
    results: dict[str, bool] = {}

    def leave(name: str) -> None:
        results[name] = Common(tmp_path / "run", name).leave("the key", folders[name])

    threads = [threading.Thread(target=leave, args=(name,)) for name in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = (name for name, stayed in results.items() if stayed)
    assert Common(tmp_path / "run", "late").take("the key", tmp_path / "taken") == winner
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_cache_evicts_the_oldest_unused_entries(tmp_path: Path) -> None:
    size = sum(map(len, FILES.values()))
    one = left_by_one(tmp_path, "a", limit=2 * size)
    os.utime(tmp_path / "run" / common.short("a") / MADE, (1, 1))
    assert one.take("a", tmp_path / "used") == "one"
    for key in "bc":
        assert one.leave(key, folder_with(tmp_path / f"folder_with-{key}"))
    assert [one.take(key, tmp_path / f"taken-{key}") for key in "abc"] == [None, "one", "one"]
    assert contents(tmp_path / "used") == FILES
    large = folder_with(tmp_path / "large", {"first": b"x" * 5 * size})
    assert one.leave("large", large)  # it stays alone
    assert [one.take(key, tmp_path / f"then-{key}") for key in ("b", "c", "large")] == [None, None, "one"]


def test_cache_on_a_full_disk_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert not Common(tmp_path / "run", "one").leave("the key", folder_with(tmp_path / "made"))
    assert not (tmp_path / "run").exists()
