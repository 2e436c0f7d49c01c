"""Searches over releases with a script instead of a case: made-up histories, no process is started."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from probing import World, before, world
from repro_matrix.cli.main import main
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, StackError
from repro_matrix.environment.stacks.index import Release
from repro_matrix.environment.stacks.lock import Lock
from repro_matrix.errors import ConfigError
from repro_matrix.external.scripts.endpoints import ends_of
from repro_matrix.external.scripts.failure import judge
from repro_matrix.external.scripts.measure import Script
from test_script import FINE, UPSTREAM, raised, rank, seen

__all__ = ["world"]
Observe = Callable[[Any], dict[str, Any]]


def error(kind: str, message: str) -> dict[str, Any]:
    return seen(rank(0, 1, raised(kind, message, UPSTREAM)), command_exit=1)


def number(value: float | None) -> dict[str, Any]:
    lines = [] if value is None else [{"rank": 0, "value": value, "line": ""}]
    return {**FINE, "printed": {"log": [], "metric": lines, "cut": False}}


class Lab:
    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder, self.launched = world, folder, 0
        self.observe: Observe = lambda v: FINE if before(v, "4.40") else error("IndexError", "list index 3")

    def measure(
        self, script: Script, stack: Stack, repeat: int, stop: threading.Event, forked: Any = None
    ) -> tuple[dict[str, Any], int]:
        seen_ = [self.observe(stack.versions) for _ in range(repeat)]
        self.launched += repeat
        made = [{"observation": o, "outcome": judge(script.failure, o, "train").to_json()} for o in seen_]
        return {"attempts": made}, repeat

    def repro(self, *words: str) -> int:
        return main([*words, f"results={self.folder / 'results'}"])


@pytest.fixture
def lab(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(world, tmp_path)
    monkeypatch.setattr("repro_matrix.external.scripts.prober.measure", made.measure)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print(1)\n")
    return made


BISECT = ("bisect", "./train.py", "stack=base", "--good", "4.37.0", "--bad", "4.45.0")


def found(lab: Lab, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    got = lab.repro(*words, "--json")
    out = capsys.readouterr()
    assert got == code, out.err
    return dict(json.loads(out.out)) if out.out else {"err": out.err}


def test_the_release_that_broke_a_script(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    data = found(lab, capsys, *BISECT, "--error", "IndexError: list index")
    (stage,) = data["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.39.3", "transformers 4.40.0")
    assert stage["exact"] and data["probes"] <= 6
    report = data["report"]
    assert "repro run stack=base+transformers@4.40.0 -- torchrun" in report and "./train.py" not in report[:2]
    assert "the script itself, launched as it is" in report


def test_a_yanked_release_between_the_two_is_said(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """ "4.40.0 is the first bad release" left out that nobody had asked the one before it."""
    lab.world.listed["transformers"].append(Release("4.39.9", yanked=True))
    data = found(lab, capsys, *BISECT, "--error", "IndexError: list index")
    assert data["stages"][0]["withdrawn"] == ["4.39.9"]
    assert "yanked and so not asked: 4.39.9 (`--yanked` asks them, too)" in data["report"]
    data = found(lab, capsys, *BISECT, "--error", "IndexError: list index", "--yanked")
    assert data["stages"][0]["withdrawn"] == [] and "yanked" not in data["report"].partition("### To")[0]


def test_another_error_on_an_old_release_is_never_this_one(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody names the failure: it is the bad end's. What fails otherwise in between is unknown."""

    def observe(versions: Any) -> dict[str, Any]:
        if before(versions, "4.39"):
            return FINE
        return error("TypeError", "old") if before(versions, "4.41.1") else error("IndexError", "list index 3")

    lab.observe = observe
    data = found(lab, capsys, *BISECT)
    (stage,) = data["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.38.0", "transformers 4.41.1")
    assert not stage["exact"] and {item["name"] for item in stage["unknown"]} <= {
        "transformers 4.39.3", "transformers 4.40.0", "transformers 4.41.0",
    }  # fmt: skip
    assert "IndexError: list index #" in data["report"]


def test_a_definition_that_matches_both_ends_or_neither(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.observe = lambda versions: error("IndexError", "list index 3")
    assert "answer alike (fires" in found(lab, capsys, *BISECT, "--error", "IndexError", code=2)["err"]
    lab.observe = lambda versions: FINE
    assert "answer alike (clean)" in found(lab, capsys, *BISECT, "--error", "IndexError", code=2)["err"]


def test_a_metric_that_drifts(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    noise = iter([0.0, 0.01, 0.02] * 100)
    lab.observe = lambda versions: number((2.0 if before(versions, "4.42") else 2.5) + next(noise))
    data = found(lab, capsys, *BISECT, "--metric", "loss")
    (stage,) = data["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.41.1", "transformers 4.42.0")
    assert "Bad is loss > 2.26" in data["report"] and "noise 0.02" in data["report"]
    assert stage["probes"][0]["attempts"] == 3


def test_a_metric_within_its_noise_or_never_printed(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    noise = iter([0.0, 0.3, 0.6] * 100)
    lab.observe = lambda versions: number((2.0 if before(versions, "4.42") else 2.5) + next(noise))
    assert "more than its noise (0.6)" in found(lab, capsys, *BISECT, "--metric", "loss", code=2)["err"]
    lab.observe = lambda versions: number(None)
    assert "no line of any rank" in found(lab, capsys, *BISECT, "--metric", "loss", code=3)["err"]
    assert "no line of any rank" in found(lab, capsys, *BISECT, "--metric", "loss > 3", code=3)["err"]


def test_two_freezes_end_at_a_release(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.world.bases["current"] = {**lab.world.bases["base"], "python": "3.11.7"}
    Path("old.lock").write_text("transformers==4.38.0\npeft==0.9.0\n")
    Path("new.lock").write_text("transformers==4.44.0\npeft==0.9.0\n")
    data = found(lab, capsys, "bisect", "./train.py", "--good", "old.lock", "--bad", "new.lock")
    assert data["packages"]["members"] == ["transformers"]
    assert data["stages"][0]["bad"]["name"] == "transformers 4.40.0"
    assert "differ in 1 package: transformers 4.38.0 -> 4.44.0" in data["report"]


def test_two_freezes_of_an_older_torch_are_laid_over_the_stack_that_has_it(
    lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were built whole, gigabytes each, while a stack of that very torch stood built."""
    lab.world.bases |= {"current": {"python": "3.11.7", "torch": "2.13.0+cpu"}, "march": lab.world.bases["base"]}
    listed = [
        stacks.DefinedStack("march", "", "3.11", (), "built"),
        stacks.DefinedStack("gone", "", "3.11", (), "built"),
    ]
    monkeypatch.setattr("repro_matrix.environment.stacks.defined_stacks", lambda: listed)
    Path("old.lock").write_text("torch==2.2.2\ntransformers==4.38.0\n")
    Path("new.lock").write_text("torch==2.2.2\ntransformers==4.44.0\nnvidia-nccl-cu12==2.19.3\n")
    data = found(lab, capsys, "bisect", "./train.py", "--good", "old.lock", "--bad", "new.lock")
    assert data["stages"][0]["bad"]["name"] == "transformers 4.40.0"
    assert data["stages"][0]["bad"]["stack"] == "march+transformers@4.40.0"
    assert "Both were laid over the stack march" in data["report"]


def test_what_a_freeze_pins_beside_the_guilty_package_moves_with_it(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole freezes pin tokenizers, which no other transformers takes: every probe between them was a conflict."""

    def needs(versions: Any) -> str:
        fits = ("0.15" if before(versions, "4.40") else "0.21") == versions.get("tokenizers", "")[:4]
        return "" if fits else "tokenizers"

    lab.world.bases["current"] = {**lab.world.bases["base"], "python": "3.11.7", "tokenizers": "0.20.9"}
    lab.world.needs = needs
    Path("old.lock").write_text("transformers==4.37.0\ntokenizers==0.15.2\npeft==0.9.0\n")
    Path("new.lock").write_text("transformers==4.44.0\ntokenizers==0.21.0\npeft==0.10.0\n")
    data = found(lab, capsys, "bisect", "./train.py", "--good", "old.lock", "--bad", "new.lock")
    assert data["packages"]["members"] == ["transformers"]
    (stage,) = data["stages"]
    assert (stage["good"]["name"], stage["bad"]["name"]) == ("transformers 4.39.3", "transformers 4.40.0")
    assert stage["good"]["stack"] == "current+peft@0.9.0+tokenizers@0.15.2+transformers@4.39.3"
    assert stage["bad"]["stack"] == "current+peft@0.9.0+transformers@4.40.0"  # peft is asked about: it never moves


VERBS = {
    "bisect": ("bisect", "./train.py", "--good", "good.txt", "--bad"),
    "upgrade": ("upgrade", "--script", "./train.py", "--from", "good.txt", "--to"),
}
REFUSED = {  # what bad.txt has (None: it is not there) -> what is said
    "gone": (
        "peft==0.9.0\n",
        "einops is in good.txt and not in bad.txt, and the project's own environment has einops 0.8.2",
    ),
    "marker": ('peft==0.9.0\neinops==0.8.1; python_version < "3.8"\n', "einops is in good.txt and not in bad.txt"),
    "platform": ('peft==0.9.0\neinops==0.8.1; sys_platform == "win32"\n', "einops is in good.txt and not in bad.txt"),
    "missing": (None, "bad.txt: there is no such file"),
    "twice": ("einops==0.8.1\neinops==0.8.0\n", "bad.txt:2: 'einops==0.8.0' and bad.txt:1: 'einops==0.8.1'"),
    "python": ("# python: 3.9\npeft==0.9.0\neinops==0.8.1\n", "bad.txt is for Python ==3.9.*, and this is 3.11.7"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("how", REFUSED)
def test_freezes_that_no_stack_here_can_be(lab: Lab, capsys: pytest.CaptureFixture[str], verb: str, how: str) -> None:
    """The environment's own einops stood in for the one that is gone: a release that neither freeze has was blamed."""
    lab.world.bases["current"] = {**lab.world.bases["base"], "python": "3.11.7", "einops": "0.8.2"}
    Path("good.txt").write_text("peft==0.9.0\neinops==0.7.0\n")
    text, said = REFUSED[how]
    if text is not None:
        Path("bad.txt").write_text(text)
    assert said in found(lab, capsys, *VERBS[verb], "bad.txt", code=2)["err"]
    assert lab.launched == 0 and set(lab.world.resolved) <= {"current"}


def test_a_stack_that_is_none_is_said_before_a_freeze_is_built(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    Path("good.txt").write_text("einops==0.7.0\n")
    assert "no stack named 'nonexist'" in found(lab, capsys, *VERBS["bisect"], "nonexist", code=2)["err"]
    assert not lab.world.resolved


def test_freezes_of_which_one_lacks_a_package_are_built_whole(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("repro_matrix.environment.stacks.defined_stacks", list)
    brings = [""]  # what a package of both requires
    monkeypatch.setattr(
        "repro_matrix.environment.stacks.lock.lock_file", lambda path: Lock(path.read_text() + brings[0], "3.11", {})
    )
    lab.world.bases["current"] = {"python": "3.11.7", "torch": "2.13.0+cpu", "einops": "0.8.2"}
    Path("good.txt").write_text("torch==2.13.0\neinops==0.7.0\n")
    Path("bad.txt").write_text("torch==2.13.0\n")
    good, bad, notes = ends_of("good.txt", "bad.txt", tmp_path)
    assert Path(good).read_text() == "einops==0.7.0\ntorch==2.13.0\n" and Path(bad).read_text() == "torch==2.13.0\n"
    assert notes[-1] == "Both were built whole: an overlay takes no package away (einops)."
    brings[0] = "packaging==24.0\neinops==0.8.1\n"
    with pytest.raises(ConfigError, match=r"not in bad\.txt, of which another .* requires it: .* has einops 0\.8\.1"):
        ends_of("good.txt", "bad.txt", tmp_path)

    def none(path: Path) -> Lock:
        raise StackError("version", "no version of torch==2.13.0+cpu")

    monkeypatch.setattr("repro_matrix.environment.stacks.lock.lock_file", none)
    with pytest.raises(ConfigError, match=r"good\.txt cannot be built whole, and .* \(einops\): no version of torch"):
        ends_of("good.txt", "bad.txt", tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--good", "old.lock", "--bad", "old.lock"), "name the same versions"),
        (("--good", "old.lock", "--bad", "./no.lock"), "./no.lock: there is no such file"),
        (("--good", "old.lock", "--bad", "4.45.0"), "two releases of a package, or two stacks"),
        (("--good", "base", "--bad", "nobase"), "no stack named 'nobase'"),
        (("--good", "4.37.0", "--bad", "4.45.0", "--arm", "broken"), "a script has no arms"),
        (("--good", "4.37.0", "--bad", "4.45.0", "model=a"), "says nothing of a script"),
        (("--good", "4.37.0", "--bad", "4.45.0", "--package", "transformes"), "did you mean 'transformers'"),
    ],
)
def test_bad_input(lab: Lab, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    Path("old.lock").write_text("transformers==4.38.0\n")
    assert said in found(lab, capsys, "bisect", "./train.py", *words, code=2)["err"]
    assert lab.launched == 0


def test_a_map_of_a_script_keeps_its_errors_apart(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    def observe(versions: Any) -> dict[str, Any]:
        if before(versions, "4.39"):
            return FINE
        return error("TypeError", "old") if before(versions, "4.42") else error("IndexError", "list index 3")

    lab.observe = observe
    data = found(lab, capsys, "versions", "./train.py", "stack=base", "--between", "4.37..4.45")
    parts = [(part["first"], part["answer"]) for part in data["arms"]["script"]["segments"]]
    assert [first for first, _ in parts] == ["4.37.0", "4.39.3", "4.42.0"]
    assert "TypeError" in parts[1][1] and "IndexError" in parts[2][1]


def test_an_upgrade_of_a_script_names_package_and_release(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.world.bases["newer"] = {**lab.world.bases["base"], "transformers": "4.44.0"}
    words = ("upgrade", "--from", "base", "--to", "newer", "--script", "./train.py")
    data = found(lab, capsys, *words, "--releases", code=1)
    (change,) = data["changes"]
    assert change["change"] == "reproduces_now" and change["cause"]["packages"] == ["transformers"]
    assert change["cause"]["releases"]["transformers"]["first"] == "transformers 4.40.0"
    lab.observe = lambda versions: FINE
    assert found(lab, capsys, *words)["same"] == 1
    said = found(lab, capsys, "upgrade", "--from", "base", "--to", "newer", "--error", "A: b", code=2)["err"]
    assert "--script ./train.py" in said


def test_a_package_that_no_index_has_is_said_of_the_end_that_names_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("repro_matrix.environment.stacks.defined_stacks", list)
    lab.world.bases["current"] = {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "4.40.0"}
    lab.world.broken.add(("of-ours", "1.0"))
    Path("good.txt").write_text("transformers==4.37.0\n")
    Path("bad.txt").write_text("transformers==4.45.0\nof-ours==1.0\n")
    said = found(lab, capsys, "bisect", "./train.py", "--good", "good.txt", "--bad", "bad.txt", code=2)["err"]
    assert "of-ours@1.0" in said or "of-ours==1.0" in said, said
    assert lab.launched == 0


def test_a_build_that_no_ordinary_index_has_says_where_it_is(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`pip freeze` of a CPU environment says torch==2.6.0+cpu: "no such package or version" was all that was said."""

    def none(path: Path) -> Lock:
        raise StackError("version", "there is no version of torch==2.6.0+cpu")

    for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("repro_matrix.environment.stacks.defined_stacks", list)
    monkeypatch.setattr("repro_matrix.environment.stacks.lock.lock_file", none)
    lab.world.bases["current"] = {"python": "3.11.7", "torch": "2.13.0+cpu"}
    Path("good.txt").write_text("torch==2.6.0+cpu\ntransformers==4.37.0\n")
    Path("bad.txt").write_text("torch==2.6.0+cpu\ntransformers==4.45.0\n")
    with pytest.raises(ConfigError, match=r"UV_INDEX=https://download\.pytorch\.org/whl/cpu.*torch==2\.6\.0 in both"):
        ends_of("good.txt", "bad.txt", tmp_path)
    monkeypatch.setenv("UV_INDEX", "https://a.mirror/whl")
    with pytest.raises(StackError, match=r"there is no version"):
        ends_of("good.txt", "bad.txt", tmp_path)
