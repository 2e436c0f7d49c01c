"""Searches with a script instead of a case: invented histories, no process is started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from probing import ScriptLab, before, lab, result, world
from repro_matrix.cli.main import main
from repro_matrix.environment.lockfiles import endpoints
from repro_matrix.environment.stacks.package_index import Release
from repro_matrix.launch.attempt import Attempt
from script_observations import FINE, UPSTREAM, raised, rank, seen

__all__ = ["lab", "world"]
Capsys = pytest.CaptureFixture[str]
Json = dict[str, Any]


def error(kind: str, message: str) -> Json:
    return seen(rank(0, 1, raised(kind, message, UPSTREAM)), rank(1), command_exit=1)


def number(value: float | None) -> Json:
    lines = [] if value is None else [{"rank": 0, "value": value, "line": ""}]
    return {**FINE, "printed": {"log": [], "metric": lines, "cut": False}}


class Lab(ScriptLab):
    """``history``: what each set of versions shows."""

    failed = error("IndexError", "list index 3")
    history: Callable[[Mapping[str, str]], Json] = staticmethod(
        lambda versions: FINE if before(versions, "4.40") else Lab.failed
    )

    def observe(self, versions: Mapping[str, str], attempt: Attempt) -> Json:
        return self.history(versions)


BISECT = ("bisect", "./train.py", "stack=base", "--good", "4.37.0", "--bad", "4.45.0")
NAMED = (*BISECT, "--error", "IndexError: list index")
LOCKS = ("bisect", "./train.py", "--good", "good.txt", "--bad", "bad.txt")


def ends(data: Json) -> tuple[str, str]:
    (stage,) = data["stages"]
    return stage["good"]["name"].split()[-1], stage["bad"]["name"].split()[-1]


def old_error_then(release: str) -> Callable[[Mapping[str, str]], Json]:
    """Return a history: it passes before 4.39, then another error, and the failure from this
    release on."""

    def observe(versions: Mapping[str, str]) -> Json:
        if before(versions, "4.39"):
            return FINE
        return (
            error("TypeError", "old")
            if before(versions, release)
            else error("IndexError", "list index 3")
        )

    return observe


def test_bisect_named_error_finds_release_and_stores_probes(lab: Lab, capsys: Capsys) -> None:
    lab.world.listed["transformers"].append(Release("4.39.9", yanked=True))
    data = result(lab.repro, capsys, *NAMED)
    (stage,) = data["stages"]
    assert ends(data) == ("4.39.3", "4.40.0") and stage["exact"] and data["probes"] <= 6
    assert stage["yanked"] == ["4.39.9"] and "4.39.9" in data["report"]
    assert "repro run stack=base+transformers@4.40.0 -- torchrun" in data["report"]
    launched = len(lab.launched)
    assert result(lab.repro, capsys, *NAMED)["launched"] == 0 and len(lab.launched) == launched


def test_bisect_unnamed_failure_is_that_of_the_bad_end(lab: Lab, capsys: Capsys) -> None:
    lab.history = old_error_then("4.41.1")
    data = result(lab.repro, capsys, *BISECT)
    assert (
        ends(data) == ("4.38.0", "4.41.1") and not data["stages"][0]["exact"]
    )  # another error is unknown
    assert {item["name"].split()[-1] for item in data["stages"][0]["unknown"]} <= {
        "4.39.3",
        "4.40.0",
        "4.41.0",
    }
    assert "IndexError: list index #" in data["report"]


def test_versions_of_a_script_keep_its_errors_apart(lab: Lab, capsys: Capsys) -> None:
    lab.history = old_error_then("4.42")
    data = result(
        lab.repro, capsys, "versions", "./train.py", "stack=base", "--range", "4.37..4.45"
    )
    parts = [(part["first"], part["answer"]) for part in data["variants"]["unfixed"]["segments"]]
    assert [first for first, _ in parts] == ["4.37.0", "4.39.3", "4.42.0"]
    assert "TypeError" in parts[1][1] and "IndexError" in parts[2][1]


def test_bisect_metric_limit_lies_between_the_noisy_ends(lab: Lab, capsys: Capsys) -> None:
    noise = iter([0.0, 0.01, 0.02] * 100)
    lab.history = lambda versions: number((2.0 if before(versions, "4.42") else 2.5) + next(noise))
    data = result(lab.repro, capsys, *BISECT, "--metric", "loss")
    assert ends(data) == ("4.41.1", "4.42.0") and data["stages"][0]["probes"][0]["attempts"] == 3
    assert "Bad is loss > 2.26" in data["report"] and "noise 0.02" in data["report"]


@pytest.mark.parametrize(
    ("values", "words", "code", "message"),
    [
        ([0.0, 0.3, 0.6], "loss", 2, "its noise (0.6)"),
        (None, "loss > 3", 3, "no rank printed a number"),
    ],
)
def test_bisect_metric_without_difference_is_refused(
    lab: Lab, capsys: Capsys, values: list[float] | None, words: str, code: int, message: str
) -> None:
    noise = iter((values or [0.0]) * 100)
    lab.history = lambda v: number(
        None if values is None else (2.0 if before(v, "4.42") else 2.5) + next(noise)
    )
    assert message in result(lab.repro, capsys, *BISECT, "--metric", words, code=code)["err"]


# -- lock files


def write_locks(good: str, bad: str) -> None:
    for name, text in (("good", good), ("bad", bad)):
        Path(f"{name}.txt").write_text(text.replace(" ", "\n") + "\n")


def test_bisect_two_lockfiles_names_package_and_release(lab: Lab, capsys: Capsys) -> None:
    lab.world.bases["current"] = {**lab.world.bases["base"], "python": "3.11.7"}
    write_locks("transformers==4.38.0 peft==0.9.0", "transformers==4.44.0 peft==0.9.0")
    data = result(lab.repro, capsys, *LOCKS)
    assert data["packages"]["members"] == ["transformers"] and ends(data)[1] == "4.40.0"
    assert "differ in 1 package: transformers 4.38.0 -> 4.44.0" in data["report"]


def test_bisect_companion_packages_move_with_the_culprit(lab: Lab, capsys: Capsys) -> None:
    """A lock file pins tokenizers, which no other transformers takes."""

    def needs(versions: Mapping[str, str]) -> str:
        fits = ("0.15" if before(versions, "4.40") else "0.21") == versions.get("tokenizers", "")[
            :4
        ]
        return "" if fits else "tokenizers"

    lab.world.bases["current"] = {
        **lab.world.bases["base"],
        "python": "3.11.7",
        "tokenizers": "0.20.9",
    }
    lab.world.needs = needs
    old, new = "tokenizers==0.15.2 peft==0.9.0", "tokenizers==0.21.0 peft==0.10.0"
    write_locks(f"transformers==4.37.0 {old}", f"transformers==4.44.0 {new}")
    data = result(lab.repro, capsys, *LOCKS)
    assert data["packages"]["members"] == ["transformers"] and ends(data) == ("4.39.3", "4.40.0")
    assert (
        data["stages"][0]["bad"]["stack"] == "current+peft@0.9.0+transformers@4.40.0"
    )  # peft never moves


def test_endpoints_package_in_one_lockfile_only_builds_both_whole(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("repro_matrix.environment.stacks.defined_stacks", list)
    lab.world.bases["current"] = {"python": "3.11.7", "torch": "2.13.0+cpu", "einops": "0.8.2"}
    write_locks("torch==2.13.0 einops==0.7.0", "torch==2.13.0")
    good, bad, _ = endpoints("good.txt", "bad.txt", tmp_path)
    assert (
        Path(good).read_text() == "einops==0.7.0\ntorch==2.13.0\n"
        and Path(bad).read_text() == "torch==2.13.0\n"
    )


# -- a command after --


COMMAND = ("--", "torchrun", "--nproc-per-node", "2", "train.py")


def search(lab: Lab, capsys: Capsys, *words: str, code: int = 0) -> Json:
    """Return the answer of a search with a command after --; its results folder is named before
    that."""
    assert main([*words, f"results={lab.folder / 'results'}", "--json", *COMMAND]) == code
    out = capsys.readouterr()
    return dict(json.loads(out.out)) if out.out else {"err": out.err}


def test_searches_take_a_command_after_two_dashes(lab: Lab, capsys: Capsys) -> None:
    words = ("stack=base", "--error", "IndexError: list index")
    found = search(lab, capsys, "bisect", *words, "--good", "4.37.0", "--bad", "4.45.0")
    assert ends(found) == ("4.39.3", "4.40.0") and shlex.join(COMMAND) in found["report"]
    parts = search(lab, capsys, "versions", *words, "--range", "4.37..4.45")["variants"]["unfixed"][
        "segments"
    ]
    assert [part["first"] for part in parts] == ["4.37.0", "4.40.0"]
    assert (
        main(["versions", "--range", "4.37..4.45"]) == 2
        and "Nothing to run" in capsys.readouterr().err
    )


def test_both_ends_changed_packages_are_not_listed(lab: Lab, capsys: Capsys) -> None:
    """Only what differs between the two ends: not what both changed in the base."""
    lab.world.moves = lambda versions: {
        "tokenizers": "0.15" if before(versions, "4.40") else "0.19",
        "rich": "13",
    }
    (stage,) = result(lab.repro, capsys, *NAMED)["stages"]
    assert stage["also_changed"] == {"tokenizers": ["0.15", "0.19"]}


# -- no change found: what else it may depend on


def commands(lines: Iterable[str]) -> list[list[str]]:
    return [shlex.split(line[line.index("repro ") :]) for line in lines if ": repro " in line]


@pytest.mark.parametrize("command", [(), COMMAND])
@pytest.mark.parametrize("name", ["bisect", "versions"])
def test_where_nothing_changes_the_commands_that_vary_the_rest_run(
    lab: Lab, capsys: Capsys, name: str, command: tuple[str, ...]
) -> None:
    lab.world.releases_of("torch", "2.2.2", "2.4.1")
    lab.world.releases_of("numpy", "1.26.4", "2.0.0")
    lab.world.bases["base"] = {**lab.world.bases["base"], "numpy": "1.26.4"}
    fine = rank(0, log_tail="UserWarning: compiled with NumPy 1.x cannot be run in torch")
    lab.history = lambda v: seen(fine, rank(1)) if before(v, "2.0", "numpy") else Lab.failed
    span = (
        ("--good", "4.37.0", "--bad", "4.45.0") if name == "bisect" else ("--range", "4.37..4.45")
    )
    words = [name, *(() if command else ("./train.py",)), "--nproc", "2", "stack=base", *span]
    words += ["--error", "IndexError: list index", f"results={lab.folder / 'results'}", *command]
    assert main(words) == (2 if name == "bisect" else 0)
    out = capsys.readouterr()
    offered = commands((out.err if name == "bisect" else out.out).splitlines())
    assert len(offered) == 3 and {each[each.index("--package") + 1] for each in offered[:2]} == {
        "numpy",
        "torch",
    }
    for each in offered:
        assert main(each[1:]) in (0, 2)
    assert {attempt.world_size for attempt in lab.launched} == {1, 2}
    assert "IndexError" in capsys.readouterr().out  # numpy 2.0.0 has the failure
