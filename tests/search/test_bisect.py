"""`repro bisect` and `repro versions` over invented histories: few probes, resumed, honest about
unknowns."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from observations import failed, observation
from probing import BASE, CASE, World, before, result, world
from repro_matrix.cli.main import main
from repro_matrix.environment import stacks
from repro_matrix.runner.session import make_request
from repro_matrix.search.prober import Prober, answer_of

__all__ = ["world"]
Capsys = pytest.CaptureFixture[str]
UPWARD, DOWNWARD = ("--good", "4.37.0", "--bad", "4.45.0"), ("--good", "4.45.0", "--bad", "4.37.0")
NO_SUCH_KEY = "other_failure: KeyError in transformers.models.qwen2.modeling_qwen2.forward"


def bisect(world: World, capsys: Capsys, *words: str, code: int = 0) -> dict[str, Any]:
    return result(world.repro, capsys, "bisect", CASE, *words, code=code)


def releases(world: World, capsys: Capsys, *words: str, code: int = 0) -> dict[str, Any]:
    return bisect(world, capsys, "stack=base", *UPWARD, *words, code=code)


def ends(data: dict[str, Any], stage: int = 0) -> tuple[str, ...]:
    """Return the last good and the first bad release."""
    return tuple(data["stages"][stage][side]["name"].rpartition(" ")[2] for side in ("good", "bad"))


# -- releases


def test_bisect_first_bad_release_is_found_and_reported(world: World, capsys: Capsys) -> None:
    data = releases(world, capsys)
    assert ends(data) == ("4.39.3", "4.40.0") and data["stages"][0]["exact"]
    assert (
        len(world.launched) == data["probes"] <= math.ceil(math.log2(11)) + 2
    )  # only the unfixed variant, each once
    assert "transformers 4.40.0 is the first bad release" in data["report"]
    assert "RuntimeError: The size of tensor a (512) must match" in data["report"]
    assert (
        "stack=base+transformers@4.40.0" in data["report"]
        and f"repro bisect {CASE}" in data["report"]
    )


def test_bisect_newer_good_end_searches_the_fix(world: World, capsys: Capsys) -> None:
    world.history = lambda versions, variant: "reproduced" if before(versions, "4.42") else "passed"
    data = bisect(world, capsys, "stack=base", *DOWNWARD)
    assert (
        ends(data) == ("4.42.0", "4.41.1") and "first good release" in data["stages"][0]["sentence"]
    )
    assert "Swap them" in releases(world, capsys, code=2)["err"]


@pytest.mark.parametrize(
    ("answers", "code", "message"),
    [
        (("passed", "passed"), 2, "the same result"),
        (("passed", "no such key"), 2, "--any-change"),
        (
            ("hang", "reproduced"),
            3,
            "on transformers 4.37.0 (good), variant unfixed has no result: hang",
        ),
    ],
)
def test_bisect_wrong_ends_are_refused(
    world: World, capsys: Capsys, answers: tuple[str, str], code: int, message: str
) -> None:
    world.history = lambda versions, variant: answers[versions["transformers"] != "4.37.0"]
    assert message in releases(world, capsys, code=code)["err"]
    assert world.probed == ["4.45.0", "4.37.0"]


def test_bisect_ends_that_agree_offer_commands_that_run(world: World, capsys: Capsys) -> None:
    world.releases_of("torch", "2.2.2", "2.4.1")
    world.history = lambda versions, variant: "reproduced"
    err = releases(world, capsys, "--variant", "root-call", code=2)["err"]
    offered = [
        shlex.split(line[line.index("repro ") :]) for line in err.splitlines() if ": repro " in line
    ]
    assert [each[1] for each in offered] == ["versions", "bisect"] and offered[0][-2:] == [
        "--package",
        "torch",
    ]
    assert offered[1][-1] == "ranks=4"
    for each in offered:
        world.launched.clear()
        assert main(each[1:]) in (0, 2)
        assert "root-call" in {variant for _, variant in world.launched}


def test_bisect_ends_that_cannot_run_have_the_reason(world: World, capsys: Capsys) -> None:
    assert "needs torch>=2.4" in releases(world, capsys, "--variant", "fsdp2", code=3)["err"]
    world.uninstallable = {("transformers", "4.45.0")}
    assert "cannot be installed" in releases(world, capsys, code=3)["err"]


def test_bisect_unknown_releases_give_a_range(world: World, capsys: Capsys) -> None:
    world.uninstallable = {("transformers", "4.40.0")}
    world.history = lambda versions, variant: (
        "infra_error"
        if versions["transformers"] == "4.39.3"
        else "passed"
        if before(versions, "4.40")
        else "reproduced"
    )
    data = releases(world, capsys)
    (stage,) = data["stages"]
    assert ends(data) == ("4.38.0", "4.41.0") and not stage["exact"]
    assert {item["name"].split()[1] for item in stage["unknown"]} == {"4.39.3", "4.40.0"}
    assert "unknown: transformers 4.40.0: cannot be installed" in data["report"]


def test_bisect_another_error_is_unknown_unless_the_good_end_shows_it(
    world: World, capsys: Capsys
) -> None:
    world.history = lambda versions, variant: (
        "no such key"
        if before(versions, "4.42") and not before(versions, "4.41")
        else "passed"
        if before(versions, "4.40")
        else "reproduced"
    )
    assert ends(releases(world, capsys)) == ("4.39.3", "4.40.0")
    world.folder /= "anew"
    world.history = lambda versions, variant: (
        "reproduced" if before(versions, "4.42") else "no such key"
    )
    data = bisect(world, capsys, "stack=base", *DOWNWARD)
    assert ends(data)[0] == "4.42.0" and data["stages"][0]["good"]["answer"] == NO_SUCH_KEY
    sentence = data["stages"][0]["sentence"]
    assert (
        "4.41.1 is the last release with this failure" in sentence
        and "4.42.0 fails differently: Key" in sentence
    )


def test_bisect_any_change_takes_two_answers_and_escapes_their_text(
    world: World, capsys: Capsys
) -> None:
    world.history = lambda versions, variant: (
        "passed" if before(versions, "4.43") else "<img src=x> @ada \x1b[1m | x"
    )
    data = releases(world, capsys, "--any-change")
    assert ends(data) == ("4.42.0", "4.43.0")
    assert "\\<img src=x> \\@ada  \\| x" in data["report"] and "\x1b" not in data["report"]


def test_bisect_flaky_failure_is_repeated_by_its_rate(world: World, capsys: Capsys) -> None:
    counts: dict[str, int] = {}

    def one_in_three(versions: Mapping[str, str], variant: str) -> str:
        release = versions["transformers"]
        counts[release] = counts.get(release, 0) + 1
        return (
            "reproduced" if not before(versions, "4.40") and counts[release] % 3 == 0 else "passed"
        )

    world.history = one_in_three
    data = releases(world, capsys, "repeat=6")
    assert ends(data) == ("4.39.3", "4.40.0") and data["stages"][0]["bad"]["times"] == "2 of 6"
    attempts = {
        probe["name"].split()[1]: probe["attempts"] for probe in data["stages"][0]["probes"]
    }
    assert attempts["4.45.0"] == 6 and attempts["4.39.3"] > 10


def test_bisect_interrupted_search_continues_without_repetition(
    world: World, capsys: Capsys
) -> None:
    (stage,) = releases(world, capsys, "--max-probes", "3")["stages"]
    assert len(world.launched) == 3 and stage["unprobed"] and not stage["exact"]
    world.interrupt_at = 4
    data = releases(world, capsys, code=130)
    assert data["stopped"] == "interrupted" and not data["stages"][0]["exact"]
    world.interrupt_at = None
    whole = releases(world, capsys)
    assert whole["stages"][0]["exact"] and len(world.launched) == whole["probes"] <= 6
    assert releases(world, capsys)["launched"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--good", "4.37.0", "--bad", "4.37"), "the same release"),
        (("--good", "4.37.0", "--bad", "base"), "two releases of a package, or two stacks"),
        (("--good", "base", "--bad", "bse"), "--bad bse: no stack named 'bse'"),
        ((*UPWARD, "--variant", "rot-call"), "'root-call'"),
        ((*UPWARD, "--repo", "/nowhere"), "not a git clone"),
        ((*UPWARD, "variants=[unfixed]"), "--variant NAME"),
    ],
)
def test_bisect_bad_input_is_refused(
    world: World, capsys: Capsys, words: tuple[str, ...], message: str
) -> None:
    assert message in bisect(world, capsys, *words, code=2)["err"]
    assert world.launched == []


# -- two stacks


def two_stacks(world: World, **other: str) -> None:
    world.bases["newer"] = {
        **BASE,
        "torch": "2.6.0",
        "transformers": "4.44.0",
        "accelerate": "1.0.0",
        **other,
    }
    world.releases_of("accelerate", "0.29.2", "0.30.0", "0.31.0", "0.34.0", "1.0.0")
    world.releases_of("torch", "2.2.2", "2.4.1", "2.6.0")


def test_bisect_two_stacks_give_the_packages_and_their_releases(
    world: World, capsys: Capsys
) -> None:
    two_stacks(world)
    world.history = lambda versions, variant: (
        "passed"
        if before(versions, "4.41.1") or before(versions, "0.31.0", "accelerate")
        else "reproduced"
    )
    data = bisect(world, capsys, "--good", "base", "--bad", "newer")
    expected = {"transformers": "4.41.1", "accelerate": "0.31.0"}
    assert {stage["what"]: ends(data, at)[1] for at, stage in enumerate(data["stages"])} == expected
    assert (
        sorted(data["packages"]["members"]) == sorted(expected)
        and data["packages"]["unproven"] == []
    )
    assert "**transformers** 4.39.3 (good) → 4.44.0 (bad)" in data["report"]


def test_bisect_other_python_alone_names_no_package(world: World, capsys: Capsys) -> None:
    two_stacks(world, python="3.12.0")
    world.history = lambda versions, variant: (
        "reproduced" if versions["python"] == "3.12.0" else "passed"
    )
    data = bisect(world, capsys, "--good", "base", "--bad", "newer", code=3)
    assert data["packages"]["members"] is None and "Python differs" in data["report"]


# -- commits


def git(repo: Path, *words: str) -> str:
    who = [
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b.c",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "tag.gpgsign=false",
    ]
    return subprocess.run(
        ["git", "-C", str(repo), *who, *words], check=True, capture_output=True, text=True
    ).stdout


def commit(repo: Path, text: str, file: str = "src/transformers/__init__.py") -> None:
    (repo / file).write_text(text, encoding="utf-8")
    git(repo, "add", "."), git(repo, "commit", "-m", text.splitlines()[0])


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Releases tagged on branches of their own; the failure comes with the third of five commits
    between them."""
    repo = tmp_path / "clone"
    (repo / "src" / "transformers").mkdir(parents=True)
    git(repo, "init", "--initial-branch=main")
    commit(repo, "state = 0")
    git(repo, "checkout", "-b", "v4.39")
    commit(repo, "state = 0  # release")
    git(repo, "tag", "v4.39.3"), git(repo, "checkout", "main")
    for number in (1, 2):
        commit(repo, f"state = {number}")
    commit(repo, "only words", "README.md")
    for number in (3, 4, 5):
        commit(repo, f"state = {number}")
    git(repo, "tag", "v4.40.0")
    commit(repo, "state = 6")
    return repo


def test_bisect_clone_gives_the_commit_and_is_only_read(
    world: World, clone: Path, capsys: Capsys
) -> None:
    def version_at(url: str) -> str:
        state = int(
            git(clone, "show", f"{url.rpartition('@')[2]}:src/transformers/__init__.py").split()[2]
        )
        return f"4.{38 + 4 * (state >= 3)}.0.dev{state}"

    world.version_at = version_at
    (clone / "untracked.txt").write_text("mine", encoding="utf-8")
    states = [(git(clone, "status"), git(clone, "reflog"))]
    _, found = releases(world, capsys, "--repo", str(clone))["stages"]
    assert found["exact"] and "state = 3" in found["title"]
    assert f"base+transformers @ git+file://{clone}@" in found["bad"]["run"]
    assert found["candidates"] == 7  # the release's own, the fork, five that touch the package
    assert len(found["probes"]) <= math.ceil(math.log2(7)) + 2
    assert states == [(git(clone, "status"), git(clone, "reflog"))]


# -- version maps


def mapped(world: World, capsys: Capsys, *words: str, code: int = 0) -> dict[str, Any]:
    words = ("stack=base", "variants=[root-call]", "--range", "..", *words)
    return result(world.repro, capsys, "versions", CASE, *words, code=code)


def test_versions_boundary_has_a_stored_probe_on_each_side(world: World, capsys: Capsys) -> None:
    data = mapped(world, capsys, "--samples", "4")
    (edge,) = data["variants"]["unfixed"]["boundaries"]
    documents = {probe["release"]: probe["document"] for probe in data["probes"]}
    for side, answer in (("before", "passed"), ("after", "reproduced")):
        document = json.loads(Path(documents[edge[side]]).read_text(encoding="utf-8"))
        assert document["stack"]["versions"]["transformers"] == edge[side]
        assert document["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome"] == answer
    assert data["variants"]["root-call"]["boundaries"] == []
    words = ("stack=base", "variants=[root-call]", "--range", "4.37..4.45", "--samples", "4")
    assert world.repro("versions", CASE, *words) == 0
    out = capsys.readouterr().out
    assert "| unfixed | 4.37.0–4.39.3 |" in out and "| unfixed | 4.40.0–4.45.0 |" in out
    assert "| root-call | 4.37.0–4.45.0 |" in out and "not probed: " in out


def answers(data: dict[str, Any]) -> list[str]:
    return [segment["answer"] for segment in data["variants"]["unfixed"]["segments"]]


def test_versions_another_error_of_the_failure_is_another_range(
    world: World, capsys: Capsys
) -> None:
    world.history = lambda versions, variant: (
        "reproduced" if before(versions, "4.41") else "layer norm"
    )
    data = mapped(world, capsys, "--samples", "3")
    assert answers(data) == [
        f"reproduced: {CASE}/sharded-norm",
        f"reproduced: {CASE}/sharded-layer-norm",
    ]
    (edge,) = data["variants"]["unfixed"]["boundaries"]
    assert (edge["before"], edge["after"]) == ("4.40.0", "4.41.0")


def test_versions_unknown_releases_widen_the_boundary(world: World, capsys: Capsys) -> None:
    world.uninstallable = {("transformers", "4.40.0")}
    world.history = lambda versions, variant: (
        "hang"
        if versions["transformers"] == "4.41.0"
        else "passed"
        if before(versions, "4.40")
        else "reproduced"
    )
    data = mapped(world, capsys, "--samples", "99")
    (edge,) = data["variants"]["unfixed"]["boundaries"]
    assert (edge["before"], edge["after"]) == ("4.39.3", "4.41.1")
    assert edge["unknown"] == ["4.40.0", "4.41.0"] and not edge["adjacent"]
    reasons = {item["release"]: item["reason"] for item in data["variants"]["unfixed"]["unknown"]}
    assert reasons["4.40.0"].startswith("cannot be installed") and reasons["4.41.0"].startswith(
        "hang"
    )


def test_versions_without_the_index_keeps_known_answers(
    world: World, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(spec: str, **_: Any) -> Any:
        if "4.41.1" in spec:
            raise stacks.StackError("no connection to the index", "infra")
        return world.resolve(spec)

    monkeypatch.setattr(stacks, "resolve", resolve)
    data = mapped(world, capsys, "--samples", "99", code=3)
    assert data["stopped"] == "no connection to the index" and "4.41.1" in data["unprobed"]
    assert answers(data) == ["passed", f"reproduced: {CASE}/sharded-norm"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--package", "transformes"), "'transformers'"),
        (("--range", "4.36"), "FIRST..LAST"),
        (("--range", "6..7"), "no release between"),
        (("model=*",), "Choose one by model="),
    ],
)
def test_versions_bad_input_is_refused(
    world: World, capsys: Capsys, words: tuple[str, ...], message: str
) -> None:
    assert world.repro("versions", CASE, "stack=base", *words) == 2
    assert message in capsys.readouterr().err and world.launched == []


# -- answers of stored variants


def attempt(
    name: str, message: str = "", kind: str = "exception", type: str = "ValueError", **more: Any
) -> Any:
    primary = (
        {"rank": 0, "type": type, "message": message, "location": "", "kind": kind}
        if message
        else None
    )
    outcome = {
        "outcome": name,
        "reason": f"reason {message}",
        "primary": primary,
        "recognized": [],
        **more,
    }
    return {"outcome": outcome, "observation": observation(failed(0))}


def variant(*attempts: dict[str, Any], skipped: str | None = None, kind: str = "gpus") -> Any:
    skip = {"kind": kind, "requires": ["torch>=2.6", "y>=1"]} if skipped else None
    return {"skipped": skipped, "skip": skip, "attempts": list(attempts)}


def known(case: str, kind: str = "exception", message: str = "m") -> dict[str, Any]:
    return {"case": case, "signature": "s", "ranks": [0, 1, 2], "kind": kind, "message": message}


PASSED, FAILED, INFRA = attempt("passed"), attempt("reproduced", "x"), attempt("infra_error", "x")
KEY_ERROR = attempt("other_failure", "b", type="KeyError")
CHECK = {"ranks": [0], "check": "logits", "failed": ["logits"]}


@pytest.mark.parametrize(
    ("attempts", "label"),
    [
        ([FAILED], "reproduced"),
        ([PASSED, FAILED, INFRA], "reproduced"),  # one failure is proof
        ([PASSED, PASSED], "passed"),
        ([PASSED, attempt("hang")], None),
        ([PASSED, INFRA], None),
        ([PASSED, attempt("other_failure", "odd")], "other_failure: ValueError"),
        ([attempt("other_failure", "a"), *[KEY_ERROR] * 2], "other_failure: KeyError"),
        ([attempt("other_failure", **CHECK)], "other_failure: check logits"),
        ([attempt("other_failure", "a warning", "signal", "SIGSEGV")], "other_failure: SIGSEGV"),
        (
            [attempt("other_failure", "m", recognized=[known("other"), known("x", "log")])],
            "other_failure: other/s",
        ),
        ([], None),
    ],
)
def test_answer_of_attempts(attempts: list[dict[str, Any]], label: str | None) -> None:
    found = answer_of("a", variant(*attempts))
    assert found.label == label
    assert bool(found.error_at) == (label not in (None, "passed", "other_failure: check logits"))


def test_answer_of_a_variant_that_was_not_launched_has_the_reason() -> None:
    text = "stack x{n}: needs torch>=2.6, and it has 2.{n}; needs stack other (why not)"
    details = {
        answer_of("a", variant(skipped=text.format(n=n), kind="packages")).detail for n in (1, 2)
    }
    assert details == {"skipped: needs torch>=2.6, y>=1"}  # the same on every stack
    assert answer_of("a", variant(skipped="needs 2 GPUs")).detail == "skipped: needs 2 GPUs"
    assert answer_of("a", None).label is None


def test_prober_leaves_out_variants_with_a_stack_of_their_own(world: World) -> None:
    search = Prober(make_request(["case=qwen15-fsdp-kv-cache"]))
    assert search.own_stack == {"newer-transformers": "current"}
    assert "newer-transformers" not in search.variants and search.variants[0] == "unfixed"
