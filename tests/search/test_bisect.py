"""`repro bisect` over made-up histories: within its probes, from stored probes only, honest about what is not known."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from probing import BASE, CASE, World, before, world
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError
from repro_matrix.search.commits import open_clone

__all__ = ["world"]


def found(world: World, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    actual = world.repro("bisect", CASE, *words, "--json")
    out = capsys.readouterr()
    assert actual == code, out.err
    return dict(json.loads(out.out)) if out.out else {"err": out.err}


def of_releases(world: World, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    return found(world, capsys, "stack=base", "--good", "4.37.0", "--bad", "4.45.0", *words, code=code)


# -- releases


def test_the_release_that_broke_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    data = of_releases(world, capsys)
    (stage,) = data["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.39.3", "transformers 4.40.0")
    assert stage["exact"] and data["probes"] <= math.ceil(math.log2(11)) + 2
    assert len(world.launched) == data["probes"]  # only the unfixed variant, each once
    report = data["report"]
    assert "transformers 4.40.0 is the first bad release" in report.replace("Transformers", "transformers")
    assert "RuntimeError: The size of tensor a (512) must match" in report
    assert "repro run qwen15-fsdp-norm-shard" in report and "stack=base+transformers@4.40.0" in report
    assert "repro bisect qwen15-fsdp-norm-shard" in report


def test_where_good_is_newer_the_search_is_for_the_fix(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.history = lambda versions, variant: "reproduced" if before(versions, "4.42") else "passed"
    data = found(world, capsys, "stack=base", "--good", "4.45.0", "--bad", "4.37.0")
    (stage,) = data["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.42.0", "transformers 4.41.1")
    assert "first good release" in stage["sentence"]


def test_bisect_swapped_ends_are_refused(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.history = lambda versions, variant: "reproduced" if before(versions, "4.42") else "passed"
    assert "Swap them" in of_releases(world, capsys, code=2)["err"]
    assert world.probed == ["4.45.0", "4.37.0"]


def test_endpoints_that_answer_alike(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.history = lambda versions, variant: "passed"
    err = of_releases(world, capsys, code=2)["err"]
    assert "the same result" in err and len(world.launched) == 2


def test_a_stack_that_is_none_is_said_before_the_other_is_built(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A missing lock was found out only when the first end stood."""
    err = found(world, capsys, "--good", "base", "--bad", str(tmp_path / "no.lock"), code=2)["err"]
    assert "no.lock: there is no such file" in err
    assert "no stack named 'nobase'" in found(world, capsys, "--good", "base", "--bad", "nobase", code=2)["err"]
    assert not world.resolved and not world.launched


def test_an_endpoint_that_gives_no_answer(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.history = lambda versions, variant: "hang" if before(versions, "4.38") else "reproduced"
    err = of_releases(world, capsys, code=3)["err"]
    assert "on transformers 4.37.0 (good), variant unfixed has no result: hang" in err
    world.uninstallable = {("transformers", "4.45.0")}
    assert "cannot be installed" in of_releases(world, capsys, code=3)["err"]


def test_a_case_that_cannot_run_there_says_why(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    err = found(world, capsys, "stack=base", "--variant", "fsdp2", "--good", "4.37.0", "--bad", "4.45.0", code=3)["err"]
    assert "needs torch>=2.4" in err


def test_unknown_releases_are_skipped_and_the_range_is_said(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.uninstallable = {("transformers", "4.40.0")}

    def history(versions: Mapping[str, str], variant: str) -> str:
        if versions["transformers"] == "4.39.3":
            return "infra_error"
        return "passed" if before(versions, "4.40") else "reproduced"

    world.history = history
    (stage,) = (data := of_releases(world, capsys))["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.38.0", "transformers 4.41.0")
    assert not stage["exact"] and {item["name"] for item in stage["unknown"]} == {
        "transformers 4.39.3", "transformers 4.40.0",
    }  # fmt: skip
    assert "2 releases between them are unknown" in stage["sentence"]
    assert "unknown: transformers 4.40.0: cannot be installed" in data["report"]


def test_another_error_is_unknown_unless_it_is_the_good_end(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"4.41.0", "4.41.1"}
    world.history = lambda versions, variant: (
        "no such key" if versions["transformers"] in other else "passed" if before(versions, "4.40") else "reproduced"
    )
    (stage,) = of_releases(world, capsys)["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.39.3", "transformers 4.40.0")
    world.folder /= "anew"
    world.history = lambda versions, variant: "reproduced" if before(versions, "4.42") else "no such key"
    (stage,) = found(world, capsys, "stack=base", "--good", "4.45.0", "--bad", "4.37.0")["stages"]
    assert stage["good"]["name"] == "transformers 4.42.0"
    assert stage["good"]["answer"] == "other_failure: KeyError in transformers.models.qwen2.modeling_qwen2.forward"


def test_bisect_report_is_harmless_to_paste(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.history = lambda versions, variant: "passed" if before(versions, "4.43") else "<img src=x> @ada \x1b[1m | x"
    report = of_releases(world, capsys, "--any-change")["report"]
    assert "\\<img src=x> \\@ada  \\| x" in report and "\x1b" not in report


def test_find_change_takes_any_two_answers(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.history = lambda versions, variant: "passed" if before(versions, "4.43") else "no such key"
    assert "occurs at neither end" in of_releases(world, capsys, code=2)["err"]
    (stage,) = of_releases(world, capsys, "--any-change")["stages"]
    told = "the result changes with transformers 4.43.0; transformers 4.42.0 is the last with the earlier result"
    assert stage["sentence"] == told, "neither is the bad one"
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.42.0", "transformers 4.43.0")


def test_a_flaky_failure_is_repeated_by_its_rate(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, int] = {}

    def one_in_three(versions: Mapping[str, str], variant: str) -> str:
        release = versions["transformers"]
        seen[release] = seen.get(release, 0) + 1
        return "reproduced" if not before(versions, "4.40") and seen[release] % 3 == 0 else "passed"

    world.history = one_in_three
    data = of_releases(world, capsys, "repeat=6")
    (stage,) = data["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.39.3", "transformers 4.40.0")
    attempts = {probe["name"]: probe["attempts"] for probe in stage["probes"]}
    assert attempts["transformers 4.45.0"] == 6 and attempts["transformers 4.39.3"] > 10
    assert stage["bad"]["times"] == "2 of 6"


def test_the_budget_and_an_interruption_leave_a_range_that_can_be_gone_on_with(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (stage,) = of_releases(world, capsys, "--max-probes", "3")["stages"]
    assert len(world.launched) == 3 and stage["unprobed"] and not stage["exact"]
    world.interrupt_at = 4
    data = of_releases(world, capsys, code=130)
    assert data["stopped"] == "interrupted" and not data["stages"][0]["exact"]
    world.interrupt_at = None
    whole = of_releases(world, capsys)
    assert whole["stages"][0]["exact"] and len(world.launched) == whole["probes"] <= 6
    assert of_releases(world, capsys)["launched"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--good", "4.37.0"), "required: --bad"),
        (("--good", "4.37.0", "--bad", "4.37"), "the same release"),
        (("--good", "4.37.0", "--bad", "4.40.9"), "has no release 4.40.9; the nearest are"),
        (("--good", "4.37.0", "--bad", "base"), "two releases of a package, or two stacks"),
        (("--good", "base", "--bad", "base"), "the same stack"),
        (("--good", "base", "--bad", "bse"), "no stack named 'bse'"),
        (("--good", "4.37.0", "--bad", "4.45.0", "--package", "transformes"), "did you mean 'transformers'"),
        (("--good", "4.37.0", "--bad", "4.45.0", "--variant", "rot-call"), "did you mean 'root-call'"),
        (("--good", "abc", "--bad", "def"), "--good abc: no stack named 'abc'"),
        (("--good", "base", "--bad", "bse"), "--bad takes a release (4.45.2), a stack, an interpreter"),
        (("--good", "4.37.0", "--bad", "4.45.0", "god=4.37.0"), "did you mean '--good'"),
        (("--good", "4.37.0", "--bad", "4.45.0", "--repo", "/nowhere"), "not a git clone"),
        (("--good", "4.37.0", "--bad", "4.45.0", "variants=[unfixed]"), "--variant NAME"),
    ],
)
def test_bad_input(world: World, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert said in found(world, capsys, *words, code=2)["err"]
    assert world.launched == []


# -- two stacks


def two_stacks(world: World, **other: str) -> None:
    world.bases["newer"] = {**BASE, "torch": "2.6.0", "transformers": "4.44.0", "accelerate": "1.0.0", **other}
    world.releases_of("accelerate", "0.29.2", "0.30.0", "0.31.0", "0.34.0", "1.0.0")
    world.releases_of("torch", "2.2.2", "2.4.1", "2.6.0")


def test_two_stacks_give_the_package_and_its_release(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    two_stacks(world)
    data = found(world, capsys, "--good", "base", "--bad", "newer")
    assert data["packages"]["members"] == ["transformers"] and data["packages"]["unproven"] == []
    (stage,) = data["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.39.3", "transformers 4.40.0")
    assert "**transformers** 4.39.3 (good) → 4.44.0 (bad)" in data["report"]


def test_two_packages_that_fail_only_together(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    two_stacks(world)
    world.history = lambda versions, variant: (
        "passed" if before(versions, "4.41.1") or before(versions, "0.31", "accelerate") else "reproduced"
    )
    data = found(world, capsys, "--good", "base", "--bad", "newer")
    assert sorted(data["packages"]["members"]) == ["accelerate", "transformers"]
    firsts = {stage["what"]: stage["bad"]["name"] for stage in data["stages"]}
    assert firsts == {"transformers": "transformers 4.41.1", "accelerate": "accelerate 0.31.0"}


def test_packages_that_cannot_be_told_apart_are_said(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    two_stacks(world, python="3.12.0")
    world.history = lambda versions, variant: "reproduced" if versions["python"] == "3.12.0" else "passed"
    data = found(world, capsys, "--good", "base", "--bad", "newer", code=3)
    assert data["packages"]["members"] is None
    assert "Python differs" in data["report"] and "could not be narrowed to a package" in data["report"]


# -- commits


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Releases tagged on branches of their own; the fault comes with the third of five commits between them."""
    repo = tmp_path / "clone"
    source = repo / "src" / "transformers"
    source.mkdir(parents=True)

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
        subprocess.run(["git", "-C", str(repo), *who, *words], check=True, capture_output=True)

    def commit(text: str, file: str = "src/transformers/__init__.py") -> None:
        (repo / file).write_text(text, encoding="utf-8")
        git("add", "."), git("commit", "-m", text)

    git("init", "--initial-branch=main")
    commit("state = 0")
    git("checkout", "-b", "v4.39")
    commit("state = 0  # release")
    git("tag", "v4.39.3"), git("checkout", "main")
    for number in (1, 2):
        commit(f"state = {number}")
    commit("only words", "README.md")
    for number in (3, 4, 5):
        commit(f"state = {number}")
    git("tag", "v4.40.0")
    commit("state = 6")
    return repo


def commits_fire(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit's own source says whether it reproduces."""

    def overlay(self: Any, stack: Stack, commit: str, name: str) -> Stack:
        root, folder = self.unpack(commit)
        state = (root / folder / "__init__.py").read_text(encoding="utf-8").split()[2]
        other = world.resolve(f"base+transformers==4.{38 + 4 * (int(state) >= 3)}.0+g{commit[:10]}")
        return other

    monkeypatch.setattr("repro_matrix.search.commits.Clone.overlay", overlay)


def test_a_clone_gives_the_commit(
    world: World, clone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commits_fire(world, monkeypatch)
    (clone / "untracked.txt").write_text("mine", encoding="utf-8")
    git = ["git", "-C", str(clone)]
    looked = [subprocess.run([*git, *w], capture_output=True, check=True).stdout for w in (["status"], ["reflog"])]
    data = of_releases(world, capsys, "--repo", str(clone))
    release, commit = data["stages"]
    assert release["bad"]["name"] == "transformers 4.40.0"
    assert commit["exact"] and "state = 3" in commit["title"]
    assert commit["candidates"] == 7  # the release's own, the fork, five that touch the package
    after = [subprocess.run([*git, *w], capture_output=True, check=True).stdout for w in (["status"], ["reflog"])]
    assert after == looked
    assert len(commit["probes"]) <= math.ceil(math.log2(7)) + 2


def test_a_commit_is_overlay_a_stack(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    opened = open_clone(str(clone), "transformers")
    commit = opened.commit_of("4.40.0")
    stack = Stack("base", "/python", dict(BASE), ("/overlay",), "k" * 16)
    laid = opened.overlay(replace(stack, content="c"), commit, "name")
    assert laid.label_key == laid.key != stack.key
    assert laid.versions["transformers"] == f"4.39.3+g{commit[:10]}" and laid.key != stack.key
    folder = Path(laid.path[0])
    assert laid.path[1:] == ("/overlay",)
    assert (folder / "transformers" / "__init__.py").read_text(encoding="utf-8") == "state = 5"
    assert laid.extensions_dir == stack.extensions_dir


def test_a_commit_is_of_the_version_that_its_source_says(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks say it, and differed from a plan that had the release's that it is laid over: no commit gave an answer."""
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    stack = Stack("base", "/python", dict(BASE), (), "k" * 16)
    for source, said in (('__version__ = "4.40.0.dev0"', "4.40.0.dev0"), ("__version__ = 'of today'", "4.39.3")):
        (clone / "src" / "transformers" / "__init__.py").write_text(f"state = 5\n{source}\n", encoding="utf-8")
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(clone), *who, "commit", "-qam", said], check=True)
        head = subprocess.run(
            ["git", "-C", str(clone), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        )
        commit = head.stdout.strip()
        laid = open_clone(str(clone), "transformers").overlay(stack, commit, "name")
        assert laid.versions["transformers"] == f"{said}+g{commit[:10]}"


def test_a_repository_that_does_not_serve(clone: Path, tmp_path: Path) -> None:
    opened = open_clone(str(clone), "transformers")
    with pytest.raises(ConfigError, match=r"no tag for transformers 4\.40\.1.*did you mean 'v4\.40\.0'"):
        opened.commit_of("4.40.1")
    with pytest.raises(ConfigError, match="not a git clone"):
        open_clone(str(tmp_path), "transformers")
    with pytest.raises(stacks.StackError, match="none of src/accelerate"):
        open_clone(str(clone), "accelerate").unpack("HEAD")
