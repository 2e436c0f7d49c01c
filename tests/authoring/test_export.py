"""`repro export`: one file about one variant without the kit, in which every name that is used is there."""

from __future__ import annotations

import ast
import functools
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro_kit.settings import resolve, variant_axis

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.authoring.export.bundle import Bundle, bundle
from repro_matrix.authoring.export.layout import unfixed
from repro_matrix.authoring.export.script import values, written
from repro_matrix.authoring.export.source import ExportError
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError
from repro_matrix.paths import REPROS
from repro_matrix.runner import prerequisites as wanted
from repro_matrix.runner import session
from repro_matrix.runner.request import Request
from ruff import __main__ as ruff

CATALOGUE = catalogue.load()
KIT = {f"repro_kit.{p.stem}": p.read_text() for p in sorted((REPROS / "repro_kit").glob("*.py"))}


def settings_of(case: Case, variant: str) -> dict[str, Any]:
    raw = CATALOGUE.raw["case"][case.slug]
    axes = {axis: variant_axis(raw, variant, axis, getattr(case.axes, axis)[0]) for axis in ("model", "strategy")}
    chosen = {axis: CATALOGUE.raw[axis][name] for axis, name in axes.items()}
    return resolve(raw, variant, device="cpu", backend="gloo", **chosen)


@functools.cache
def variants_text(slug: str, variant: str, proven: bool) -> str:
    return file_of(CATALOGUE.cases[slug], variant, proven)


def file_of(case: Case, variant: str, proven: bool) -> str:
    settings = settings_of(case, variant)
    made = bundle(CATALOGUE.script(case).read_text(), KIT, values(settings), case.slug, proven)
    return written(["What \\ it is", 'a """quote"""'], settings, {"X": "1"}, made, {"qwen_v1/a.py": 'x = "\\n"\n'})


@pytest.mark.parametrize(
    "proven", [pytest.param(True, marks=pytest.mark.slow, id="with its checks"), pytest.param(False, id="without")]
)
def test_every_case_stands_alone_with_every_name_that_it_uses(proven: bool, tmp_path: Path) -> None:
    for case in CATALOGUE.cases.values():
        text = variants_text(case.slug, next(iter(case.variants)), proven)
        (tmp_path / f"{case.slug}.py").write_text(text)
        tree = ast.parse(text)
        taken = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name for name in taken if name.partition(".")[0] in ("repro_kit", "repro_matrix")}
        run = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run")
        has = {name.id for node in run.body if isinstance(node, ast.Assign) for name in node.targets}  # type: ignore[attr-defined]
        has |= {node.name for node in run.body if isinstance(node, ast.FunctionDef)}
        asked = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "run"}
        assert asked <= has, f"{case.slug}: run has no {asked - has}"
    found = subprocess.run(
        [ruff.find_ruff_bin(), "check", "--isolated", "--select", "E9,F821,F811", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout


def test_a_failure_by_itself_is_short_enough_to_paste() -> None:
    lines = {
        case.slug: variants_text(case.slug, "unfixed", False).count("\n")
        for case in CATALOGUE.cases.values()
        if case.kind == "failure" and {s.kind for s in case.signatures} == {"exception"}
        and not CATALOGUE.raw["model"][case.axes.model[0]].get("remote_code") and "colossalai" not in case.slug
    }  # fmt: skip
    assert len(lines) > 12 and sorted(lines.values())[len(lines) // 2] < 200, lines
    assert max(lines.values()) < 420, lines


SCRIPT = '''
"""Doc."""
from repro_kit import Run, three
from repro_kit.one import make
from repro_kit.two import both

TABLE = {"a": make, "b": both}


def chosen(run):
    if run.flags["x"] == 1:
        return None
    return 7


def body(run: Run) -> int:
    # about the number
    number: int = run.flags["x"]
    run.fact("number", number)
    total = []
    how = run.flags.get("how", "plain")
    if how == "plain" and number in (0, 1):
        total.append(make())  # <- here
    elif not run.flags["on"]:
        with run.around:
            total.append(both())
    else:
        total.append(three.three() if run.flags["on"] else -1)
    total.append(chosen(run))
    total.append(TABLE[run.flags["which"]]())
    return f"{run.case}-{number}", total, {"u": 1, "v": 2}[run.flags["key"]], run.seed is None
'''
PARTS = {
    "repro_kit.one": "def make():\n    return 1\n\n\ndef unused():\n    return missing\n",
    "repro_kit.two": "def make():\n    return 2\n\n\ndef both():\n    from repro_kit.one import make as other\n"
    "    return make() + other()\n",
    "repro_kit.three": "from repro_kit.run import Run\n\n\ndef three():\n    return 3\n",
    "repro_kit.run": "",
}  # fmt: skip
RUN = {"repro_kit.run": "class Run:\n    rank = 0\n\n\ndef main(body):\n    body(Run())\n"}


def text_of(made: Bundle) -> str:
    return "\n".join([*(text for _, text in made.kit), *made.case])


class Around:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@given(
    x=st.integers(0, 2), on=st.booleans(), how=st.sampled_from([None, "plain", "other"]),
    which=st.sampled_from("ab"), key=st.sampled_from("uv"),
)  # fmt: skip
def test_what_the_settings_decide_changes_nothing_of_what_is_done(**flags: Any) -> None:
    flags = {name: value for name, value in flags.items() if value is not None}
    folded: dict[str, Any] = {}
    made = bundle(SCRIPT, PARTS, {"flags": flags, "case": "c", "seed": 0}, "it", plain=RUN)
    exec(text_of(made), folded)
    two = PARTS["repro_kit.two"].replace("def make", "def second").replace("return make", "return second")
    two = two.replace("from repro_kit.one import make as other", "other = make")
    three = PARTS["repro_kit.three"].partition("\n")[2]
    whole = "\n".join([PARTS["repro_kit.one"], two, three, SCRIPT.partition("repro_kit.two import both")[2]])
    plain: dict[str, Any] = {"Run": object}
    exec(whole.replace("three.three()", "three()"), plain)

    class Asked:
        case, seed, around = "c", 0, Around()
        fact = staticmethod(lambda *_: None)

    run = Asked()
    run.flags = flags  # type: ignore[attr-defined]
    assert folded["body"](run) == plain["body"](run)
    assert "flags" not in text_of(made) and "unused" not in text_of(made) and "fact" not in text_of(made)


def test_comments_stay_with_what_they_are_about_and_long_lines_are_unfixed() -> None:
    made = bundle(SCRIPT, PARTS, {"flags": dict(x=0, on=False, which="a", key="u"), "case": "c", "seed": 0}, "it",
                  plain=RUN)  # fmt: skip
    assert "# --> here\n    total.append(1)" in text_of(made)
    lines = unfixed("    wrapped = call(" + ", ".join(f"argument_{n}=[value, 'a, b']" for n in range(9)) + ")")
    assert len(lines) == 11 and ast.parse("\n".join(["if 1:", *lines]))


def test_what_cannot_stand_alone_is_said() -> None:
    with pytest.raises(ExportError, match="no function body"):
        bundle("x = 1\n", {}, {}, "it")
    with pytest.raises(ExportError, match=r"repro_kit\.rank_monitor"):
        bundle("from repro_kit.rank_monitor import Witness\n\n\ndef body(run):\n    Witness()\n", KIT, {}, "it")
    with pytest.raises(ExportError, match="lie beside it"):
        bundle("X = __file__\n\n\ndef body(run):\n    return X\n", {}, {}, "it")


def test_a_stack_that_is_not_built_is_no_unknown_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    assert cli.main(["export", "fsdp-uniform-dtype", "--stack", "colossalai"]) == 2
    said = capsys.readouterr().err
    assert "it is not built here: `repro stack build colossalai`; nor is fsdp-uniform-dtype/unfixed stored" in said
    assert "unknown" not in said and "did you mean" not in said


def test_an_variant_case_or_stack_that_is_not_there_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there = tmp_path / "there.py"
    there.write_text("mine")
    for words, said in (
        (["fsdp-uniform-dtyp"], "did you mean 'fsdp-uniform-dtype'"),
        (["fsdp-uniform-dtype", "--variant", "brokn"], "unknown variant 'brokn'"),
        (["fsdp-uniform-dtype", "--stack", "curent"], "did you mean 'current'"),
        (["fsdp-uniform-dtype", "--out", str(there)], "nothing is overwritten"),
        (["fsdp-uniform-dtype", "--out", str(there / "x.py")], "cannot be written"),
        (["fsdp-uniform-dtype", "--out", str(tmp_path / "none" / "x.py")], "cannot be written"),
    ):
        assert cli.main(["export", *words]) == 2
        assert said in capsys.readouterr().err
    assert there.read_text() == "mine"


def test_a_stack_that_is_not_here_is_taken_from_what_is_stored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = session.prepare

    def absent(asked: Request, **options: Any) -> Any:
        if "stack" in asked.selections[0].given:
            raise ConfigError("no index to build it from")
        return prepare(asked, **options)

    monkeypatch.setattr(session, "prepare", absent)
    assert cli.main(["export", "qwen15-fsdp-kv-cache", "--stack", "torch2.2-tf4.39+transformers@4.43.4"]) == 0
    text = capsys.readouterr().out
    assert "torch==2.2.2 transformers==4.43.4" in text and "Expected (3 of 3" in text
    assert "Not run where this was written: no index" in text


@pytest.mark.ranks
@pytest.mark.parametrize(
    "slug",
    [
        pytest.param("fsdp-uniform-dtype", marks=pytest.mark.slow),
        pytest.param("qwen-remote-code-load", marks=pytest.mark.slow),
        pytest.param("fsdp-generate-uneven", marks=pytest.mark.slow),
    ],
)
def test_an_exported_script_shows_the_recorded_outcome_under_plain_torchrun(slug: str, tmp_path: Path) -> None:
    """An exception; numbers that are wrong without one, by a model that brings its own code; a hang. All of the
    catalogue: `make exports`."""
    from exports import tried

    case = CATALOGUE.cases[slug]
    stacks.resolve(case.requires.stack or "current")  # built where it is not: an export takes what is there
    result, why = tried(case, next(iter(case.variants)), tmp_path)
    assert result == "shown", why


def test_what_is_not_the_recorded_outcome_is_not_taken_for_it() -> None:
    from exports import Ran, wrong
    from repro_matrix.authoring.export.stored import Measured

    case = CATALOGUE.cases["fsdp-uniform-dtype"]
    reproduced = Measured(
        {},
        [
            {
                "outcome": "reproduced",
                "recognized": [{"case": "fsdp-uniform-dtype", "signature": "uniform-dtype"}],
                "primary": {},
            }
        ],
    )
    passed = Measured({}, [{"outcome": "passed", "recognized": []}])
    other = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: another\n'
    assert wrong(case, reproduced, 2, Ran(other, 1)) and wrong(case, reproduced, 2, Ran("finished without an error", 0))
    assert wrong(case, passed, 2, Ran("[rank 0] every check is right\n", 0))
    assert wrong(case, passed, 2, Ran("[rank 0] every check is right\n[rank 1] every check is right\n", 0)) is None
    hang = CATALOGUE.cases["fsdp-generate-uneven"]
    hangs = Measured(
        {},
        [
            {
                "outcome": "reproduced",
                "recognized": [{"case": "fsdp-generate-uneven", "signature": "left-behind", "kind": "hang"}],
            }
        ],
    )
    assert wrong(hang, hangs, 2, Ran("", None, "sleep\nbody")) and wrong(hang, hangs, 2, Ran("", 0))


def test_nothing_is_built_for_a_stack_that_is_laid_over_one_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two gigabytes and five minutes, for a header that says versions."""
    there = [replace(each, state="locked") if each.state == "built" else each for each in stacks.defined_stacks()]
    monkeypatch.setattr(wanted, "defined_stacks", lambda: there)
    found = wanted.resolve
    monkeypatch.setattr(wanted, "resolve", lambda name: pytest.fail(name) if "+" in name else found(name))
    assert cli.main(["export", "fsdp-uniform-dtype", "--stack", "torch2.2-tf4.36+transformers@4.37.0"]) == 2
    assert "its base is not built here" in capsys.readouterr().err
