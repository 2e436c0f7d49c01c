"""conf/ is read and validated; what is wrong is named with file, key and nearest valid choice."""

from __future__ import annotations

from pathlib import Path

import pytest
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.settings import RunSettings, compose_run
from repro_matrix.errors import ConfigError

NORM = "case/qwen15-fsdp-norm-shard.yaml"


def edit(conf: Path, name: str, old: str, new: str) -> None:
    path = conf / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def complaint(conf: Path, repros: Path) -> str:
    with pytest.raises(ConfigError) as error:
        catalogue.load(conf, repros, strict=True)
    return str(error.value)


def test_the_shipped_catalogue_is_valid_and_complete() -> None:
    found = catalogue.load()
    assert set(found.models) >= {
        "qwen1.5-0.5b", "qwen1.5-1.8b", "qwen-7b", "qwen-14b", "llama-2-7b", "qwen2.5-0.5b", "llama-3.2-1b",
    }  # fmt: skip
    assert set(found.strategies) == {"ddp", "fsdp", "fsdp2", "zero2", "zero3", "tp"}
    assert set(found.hardware) == {"auto", "cpu", "gpu1-shared", "a100x8", *(f"gpu{n}" for n in range(1, 9))}


def test_every_case_cites_where_its_failure_is_known_from() -> None:
    for case in catalogue.load().cases.values():
        assert case.kind == "control" or case.references, case.slug


def test_unknown_key_names_file_key_and_nearest(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "signatures:", "signaturs:")
    text = complaint(conf, repros)
    assert NORM in text and "'signaturs'" in text and "did you mean 'signatures'" in text


def test_unknown_key_deep_inside(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "    package: transformers", "    pakage: transformers")
    text = complaint(conf, repros)
    assert "signatures.0.pakage" in text and "did you mean 'package'" in text


def test_bad_choice_names_the_nearest(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "kind: failure", "kind: failur")
    assert "did you mean 'failure'" in complaint(conf, repros)


def test_yaml_syntax_error_names_file_and_line(conf: Path, repros: Path) -> None:
    path = conf / NORM
    path.write_text("slug: [unclosed\n" + path.read_text())
    text = complaint(conf, repros)
    assert f"{NORM}:" in text and "not valid YAML" in text


def test_key_given_twice_is_refused(conf: Path, repros: Path) -> None:
    path = conf / NORM
    path.write_text("title: first\n" + path.read_text())
    assert "'title' given twice" in complaint(conf, repros)


def test_case_without_signature(conf: Path, repros: Path) -> None:
    import yaml

    path = conf / NORM
    raw = yaml.safe_load(path.read_text())
    del raw["signatures"]
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    assert "at least one signature" in complaint(conf, repros)


def test_case_without_script(conf: Path, tmp_path: Path) -> None:
    text = complaint(conf, tmp_path / "conf")
    assert "unknown script" in text


def test_bad_regular_expression_is_found_on_loading(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "The size of tensor a", "(The size of tensor a")
    assert "not a regular expression" in complaint(conf, repros)


@pytest.mark.parametrize("axis, wrong, right", [("model", "qwen1.5-05b", "qwen1.5-0.5b"), ("strategy", "fspd", "fsdp")])
def test_axis_that_does_not_exist(conf: Path, repros: Path, axis: str, wrong: str, right: str) -> None:
    import yaml

    path = conf / NORM
    raw = yaml.safe_load(path.read_text())
    raw["axes"][axis] = [wrong]
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    text = complaint(conf, repros)
    assert wrong in text and f"did you mean {right!r}" in text


def test_kept_key_that_the_model_does_not_have(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "preserve_config: [hidden_size]", "preserve_config: [hiden_size]")
    text = complaint(conf, repros)
    assert "qwen15-fsdp-norm-shard.yaml: preserve_config" in text and "did you mean 'hidden_size'" in text


def test_claim_about_an_variant_that_does_not_exist(conf: Path, repros: Path) -> None:
    import yaml

    path = conf / NORM
    raw = yaml.safe_load(path.read_text())
    raw["claims"] = [{"id": "x", "text": "t", "predictions": [{"variant": "root-cal", "outcome": "passed"}]}]
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    assert "did you mean 'root-call'" in complaint(conf, repros)


def test_variant_that_sets_an_undeclared_flag(conf: Path, repros: Path) -> None:
    import yaml

    path = conf / NORM
    raw = yaml.safe_load(path.read_text())
    raw["variants"]["unfixed"] = {"flags": {"no_such_flag": 1}}
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    assert "no_such_flag" in complaint(conf, repros)


def test_patches_are_validated_too() -> None:
    with pytest.raises(ConfigError, match="deadline"):
        catalogue.load(patches={"case": [(["launch", "deadline"], "soon")]})
    patched = catalogue.load(patches={"case": [(["launch", "deadline"], 7)]})
    assert all(case.launch.deadline == 7 for case in patched.cases.values())


def test_folder_that_is_not_conf(tmp_path: Path, repros: Path) -> None:
    assert "no *.yaml" in complaint(tmp_path, repros)


def test_an_unchanged_file_is_parsed_once_and_a_changed_one_again(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    load = catalogue.yaml.load
    monkeypatch.setattr(catalogue.yaml, "load", lambda text, **more: (parsed.append(text), load(text, **more))[1])
    first = catalogue.read_yaml(conf / NORM)
    assert catalogue.read_yaml(conf / NORM) == first and len(parsed) == 1
    first["variants"].clear()  # the caller's own
    assert catalogue.read_yaml(conf / NORM)["variants"]
    edit(conf, NORM, "slug: qwen15", "slug: qwen16")  # of the same size
    assert catalogue.read_yaml(conf / NORM)["slug"] == "qwen16-fsdp-norm-shard" and len(parsed) == 2


def test_settings_are_composed_anew_when_their_file_changed(conf: Path) -> None:
    first = compose_run(["variants=[unfixed]"], conf)
    assert first.seed == 0 and first.variants is not None
    first.variants.append("another")  # the caller's own
    first.env["X"] = "y"
    assert compose_run(["variants=[unfixed]"], conf) == RunSettings(variants=["unfixed"])
    edit(conf, "config.yaml", "seed: 0", "seed: 1")
    assert compose_run(["variants=[unfixed]"], conf).seed == 1
