"""Named matrices: presets of conf/matrix, the command line over them, folders of the user's own, what --cfg prints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ConfigError
from repro_matrix.paths import CONF, CONFIG_PATH
from repro_matrix.planning import cells as matrix
from repro_matrix.results import runs
from repro_matrix.runner import session

PRESETS = sorted(path.stem for path in (CONF / "matrix").glob("*.yaml"))


def cells(*texts: str) -> list[matrix.Cell]:
    return session.ask(texts).cells


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_has_a_comment_and_cells(preset: str) -> None:
    assert cells(f"+matrix={preset}")
    head = (CONF / "matrix" / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
    assert head[0] == "# @package _global_" and head[1].startswith("# ")


def test_seeds_are_every_failure_that_a_write_up_claims_something_of() -> None:
    from test_write_ups import CLAIMS

    ids = {f"{case}-{name}" for case, names in CLAIMS.items() for name in names.split()}
    known = catalogue.load().cases
    claimed = {slug for slug, case in known.items() if case.kind == "failure" and ids & {c.id for c in case.claims}}
    seeds = {cell.case for cell in cells("+matrix=seeds")}
    # What needs GPUs is there a second time, simulated.
    assert seeds == claimed | {"qwen-device-map-devices-simulated"}


def test_reproducing_stacks_are_those_of_stored_measurements() -> None:
    found = session.reproduces_on(catalogue.load(), {"qwen15-fsdp-kv-cache", "fsdp-tied-embeddings", "train-step"})
    assert found["qwen15-fsdp-kv-cache"] == ["torch2.2-tf4.39"]  # nowhere else but in version maps of it
    assert {"current", "torch2.2-tf4.39"} == set(found["fsdp-tied-embeddings"])
    assert found["train-step"] == ["current"]  # never reproduces: where its file says
    by_case = {(cell.case, cell.stack) for cell in cells("case=qwen15-fsdp-kv-cache,fsdp-tied-*", "stack=reproducing")}
    assert by_case == {
        ("qwen15-fsdp-kv-cache", "torch2.2-tf4.39"),
        ("fsdp-tied-embeddings", "current"),
        ("fsdp-tied-embeddings", "torch2.2-tf4.39"),
    }


def test_case_that_reproduced_in_a_version_map_alone_is_measured_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A floating stack is no place where anything is known to reproduce: it is whatever the index holds today."""

    def row(stack: str) -> Any:
        return SimpleNamespace(
            case="train-step", first=True, counts={"reproduced": 1}, stack=SimpleNamespace(name=stack)
        )

    known = catalogue.load()
    for stored, wanted in (
        (["current+peft@0.1"], ["current+peft@0.1"]),
        (["current+peft@0.1", "torch2.6-tf4.51"], ["torch2.6-tf4.51"]),
        (["newest", "current"], ["current"]),
    ):
        monkeypatch.setattr(runs, "measured_rows", lambda found=stored: map(row, found))
        assert session.reproduces_on(known, {"train-step"}) == {"train-step": wanted}


def test_the_command_line_wins_over_a_preset() -> None:
    assert compose_run(["+matrix=nightly"]).repeat == 3
    assert compose_run(["repeat=1", "+matrix=nightly"]).repeat == 1
    assert {cell.stack for cell in cells("+matrix=seeds", "stack=current")} == {"current"}
    assert {cell.case for cell in cells("+matrix=seeds", "case=train-step", "model=qwen-7b")} == {"train-step"}
    # A model of the line narrows what a preset's cases list; it does not put every case on that model.
    narrowed = cells("+matrix=seeds", "model=qwen-7b")
    assert {cell.model for cell in narrowed} == {"qwen-7b"}
    assert all("qwen-7b" in catalogue.load().cases[cell.case].axes.model for cell in narrowed)


def test_presets_add_up_and_a_cell_is_measured_once() -> None:
    both = cells("+matrix=[smoke,nightly]")
    assert len(both) == len(set(both)) == len(set(cells("+matrix=smoke")) | set(cells("+matrix=nightly")))


@pytest.mark.parametrize(
    "texts", [["case=*"], ["case=fsdp-*", "model=qwen*", "ranks=2,4"], ["case=train-step,zero-*", "steps=5", "seed=7"]]
)
def test_cfg_prints_a_matrix_of_the_same_cells(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = session.ask(texts)
    (tmp_path / "matrix").mkdir()
    composed = overrides.composed(asked.settings, asked.selections)
    (tmp_path / "matrix" / "mine.yaml").write_text(composed, encoding="utf-8")
    monkeypatch.setenv(CONFIG_PATH, str(tmp_path))
    again = session.ask(["+matrix=mine"])
    assert again.cells == asked.cells
    assert {**vars(again.settings), "matrix": {}} == {**vars(asked.settings), "matrix": {}}


def test_cfg_prints_yaml_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("matrix", "list"):
        code, out, _ = said(capsys, verb, "+matrix=seeds", "--cfg", "repeat=2", "model.config.num_hidden_layers=4")
        found = yaml.safe_load(out)
        assert code == 0 and found["repeat"] == 2
        assert found["matrix"]["seeds"]["stack"] == ["reproducing"] and "model" not in found["matrix"]["seeds"]
        assert out.endswith("# and from the command line: model.config.num_hidden_layers=4\n")


HEAD = "# @package _global_\n"


@pytest.mark.parametrize(
    ("words", "preset", "told"),
    [
        (["list", "+matrix=sedes"], None, "unknown matrix 'sedes'; did you mean 'seeds'?"),
        (["matrix", "matrix=seeds"], None, "+matrix=seeds"),
        (["list", "+matrix=seeds", "matrix.seeds.stak=x"], None, "'stak' is not in"),
        (["list", "+matrix=seeds", "matrix.seds.case=x"], None, "'seds' is not in"),
        (["list", "+matrix=seeds", "+matrix.seeds.model=qwen-7"], None, "seeds.yaml: matrix.seeds: unknown model"),
        (["list", "hydra.verbose=true"], None, "unknown key 'hydra.verbose'"),
        (["bisect", "fsdp-generate", "+matrix=seeds", "--good", "a", "--bad", "b"], None, "+matrix=seeds"),
        (["list", "+matrix=bad"], HEAD + "matrix: {b: {modle: x}}", "bad.yaml: matrix.b: unknown key 'modle'"),
        (["list", "+matrix=bad"], HEAD + "matrix: {b: {ranks: two}}", "bad.yaml: matrix.b: ranks"),
        (["list", "+matrix=bad"], HEAD + "matrix: {b: {case: [unknwon]}}", "matrix.b: unknown case 'unknwon'"),
        (["list", "+matrix=bad"], HEAD + "matrix: {b: {case: [train-step}}", "bad.yaml:2: not valid YAML"),
        (["list", "+matrix=bad"], HEAD + "matrix: {b: {hardware: cpu}, c: {hardware: gpu8}}", "different hardware"),
        (["list", "+matrix=bad"], HEAD + "repaet: 3", "repaet"),
        (["list", "+matrix=bad"], HEAD, "+matrix=bad: it has no block"),  # it stood for the whole catalogue
        (["list", "+matrix=bad"], "matrix: {b: {case: train-step}}", "begins with the line '# @package _global_'"),
    ],
)  # fmt: skip
def test_wrong_named_matrix_exits_with_2_and_one_line(
    words: list[str], preset: str | None, told: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if preset is not None:
        monkeypatch.setenv(CONFIG_PATH, str(tmp_path))
        (tmp_path / "matrix").mkdir()
        (tmp_path / "matrix" / "bad.yaml").write_text(f"{preset}\n", encoding="utf-8")
    code, _, err = said(capsys, *words)
    assert code == 2 and told in err, err


def test_a_flag_of_the_line_is_for_the_blocks_that_have_it() -> None:
    found = cells("+matrix=smoke", "flags.lora=true")
    assert {cell.case for cell in found} == {"train-step"}
    with pytest.raises(ConfigError, match="unknown flag 'loar'"):
        cells("+matrix=smoke", "flags.loar=true")


def test_the_line_alone_is_one_selection() -> None:
    line = overrides.parse(["case=fsdp-*"])
    assert overrides.blocks({}, line) == [line]
