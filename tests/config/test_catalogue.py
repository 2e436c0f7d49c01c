"""conf/ is read and validated; errors name the file, the key and the nearest valid choice."""

from __future__ import annotations

from pathlib import Path

import pytest
from repro_matrix.config import catalog
from repro_matrix.config.settings import RunSettings, compose_run
from repro_matrix.errors import ConfigError

RESUME = "case/accelerate-resume-mid-epoch.yaml"
NORM = "case/qwen15-fsdp-norm-shard.yaml"
DDP = "case/ddp-unfinished-reduction.yaml"
DDP_INVARIANTS = (
    "invariants: {parameters: whole, gradients: whole, updates: whole, collectives: [reduce]}"
)


def edit(conf: Path, name: str, old: str, new: str) -> None:
    path = conf / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_load_of_the_shipped_catalogue_has_all_options_and_no_error() -> None:
    found = catalog.load()
    assert not found.left_out
    assert set(found.strategies) == {"ddp", "fsdp", "fsdp2", "zero2", "zero3", "tp"}
    assert set(found.hardware) == {
        "auto",
        "cpu",
        "gpu1-shared",
        "gpu1-nccl",
        "a100x8",
        *(f"gpu{n}" for n in range(1, 9)),
    }
    for case in found.cases.values():
        assert case.kind == "control" or case.references, case.slug
        first, *others = [variant.role for variant in case.variants.values()]
        assert first == "unfixed" and "unfixed" not in others, case.slug
        assert case.kind == "control" or "fix" in others, (
            f"{case.slug}: a failure without a known fix"
        )
    needs = found.strategies["fsdp2"].needs_on
    assert needs("cuda") == ["torch>=2.4"] and needs("cpu") == ["torch>=2.4", "torch>=2.7"]


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (NORM, "signatures:", "signaturs:", ["'signaturs'", "did you mean 'signatures'"]),
        (
            NORM,
            "    package: transformers",
            "    pakage: transformers",
            ["signatures.0.pakage", "'package'"],
        ),
        (NORM, "kind: failure", "kind: failur", ["did you mean 'failure'"]),
        (NORM, "slug: ", "slug: [unclosed\nslug: ", [f"{NORM}:", "not valid YAML"]),
        (NORM, "slug: ", "title: first\nslug: ", ["'title' given twice"]),
        (NORM, "kind: failure", "kind: control", ["exactly one variant"]),
        (NORM, "The size of tensor a", "(The size of tensor a", ["not a regular expression"]),
        (
            NORM,
            "axes: {model: [",
            "axes: {model: [qwen1.5-05b, ",
            ["qwen1.5-05b", "did you mean 'qwen1.5-0.5b'"],
        ),
        (NORM, "strategy: [", "strategy: [fspd, ", ["fspd", "did you mean 'fsdp'"]),
        (
            NORM,
            "preserve_config: [hidden_size]",
            "preserve_config: [hiden_size]",
            ["preserve_config", "'hidden_size'"],
        ),
        (NORM, "slug: ", "script: no.py\nslug: ", ["unknown script 'no.py'"]),
        # variants: a mistyped option, a value that an option does not take, an undeclared flag
        (
            NORM,
            "{use_orig_params: false}",
            "{use_orig_param: false}",
            ["variants.no-orig-params", "'use_orig_params'"],
        ),
        (
            NORM,
            "options: {wrap: layer}, help",
            "options: {wrap: layers}, help",
            ["did you mean 'layer'"],
        ),
        (NORM, "min_num_params: 2000}", "min_params: 2000}", ["did you mean 'min_num_params'"]),
        (NORM, "min_num_params: 2000}", "min_num_params: two}", ["not of type int"]),
        (
            DDP,
            "\nclaims:",
            "\n  lie: {role: probe, help: a lie, flags: {tuch: true}}\nclaims:",
            ["'tuch'"],
        ),
        (
            DDP,
            "\nclaims:",
            "\n  lie: {role: probe, help: a lie, flags: {touch: 'yes'}}\nclaims:",
            ["flag touch takes"],
        ),
        # roles: missing, wrong, a second unfixed, an unfixed that is something else
        (
            DDP,
            "freeze: {role: fix, ",
            "freeze: {",
            ["variants.freeze.role", "is missing", "fix, non_fix, probe"],
        ),
        (
            DDP,
            "freeze: {role: fix",
            "freeze: {role: nonfix",
            ["variants.freeze.role", "did you mean 'non_fix'"],
        ),
        (
            DDP,
            "freeze: {role: fix",
            "freeze: {role: unfixed",
            ["variants: freeze: ", "(there are: fix, non_fix, probe)"],
        ),
        (DDP, "unfixed: {", "unfixed: {role: probe, ", ["variants: unfixed: ", "not probe"]),
        # variants that would measure nothing
        (
            DDP,
            "\nclaims:",
            "\n  lie: {role: probe, help: a lie, flags: {touch: false}}\nclaims:",
            ["changes nothing"],
        ),
        (
            NORM,
            "\nclaims:",
            "\n  twin: {role: probe}\nclaims:",
            ["variants.twin", "'unfixed'", "changes nothing"],
        ),
        (
            NORM,
            "\nclaims:",
            "\n  twin: {role: fix, help: other words, flags: {call: root}}\nclaims:",
            ["changes nothing"],
        ),
        # claims and pass criteria
        (
            DDP,
            "variant: find-unused",
            "variant: find-unsed",
            ["claims.", "did you mean 'find-unused'"],
        ),
        (NORM, "[logits]", "[logit]", ["pass_criteria.checks", "did you mean 'logits'"]),
        (
            RESUME,
            "checks: [rest-of-epoch",
            "checks: [rest-of-epoc",
            ["pass_criteria.checks", "did you mean 'rest-of-epoch'"],
        ),
        (
            RESUME,
            "check: rest-of-epoch",
            "check: rest-of-epoc",
            ["signatures.other-order-resumed", "did you mean 'rest-of-epoch'"],
        ),
        (
            "case/train-step.yaml",
            "checks:",
            "check:",
            ["pass_criteria.check", "did you mean 'checks'"],
        ),
        # strategies
        (
            "strategy/fsdp.yaml",
            "sharding: FULL_SHARD",
            "sharding: FULL",
            ["option sharding", "FULL_SHARD"],
        ),
        ("strategy/ddp.yaml", DDP_INVARIANTS, "", ["key 'invariants' is missing"]),
        ("strategy/ddp.yaml", DDP_INVARIANTS, "invariants: {}", ["invariants: none"]),
    ],
)
def test_load_with_an_invalid_file_names_file_and_key(
    conf: Path, repros: Path, file: str, old: str, new: str, expected: list[str]
) -> None:
    edit(conf, file, old, new)
    errors = "\n".join(catalog.load(conf, repros).left_out)
    assert file in errors and all(text in errors for text in expected), errors


def test_load_with_a_folder_that_is_not_conf_is_refused(tmp_path: Path, repros: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*.yaml"):
        catalog.load(tmp_path, repros)


def test_load_after_a_file_changed_reads_it_again(conf: Path, repros: Path) -> None:
    assert not catalog.load(conf, repros).left_out
    edit(conf, NORM, "slug: qwen15", "slug: qwen16")  # of the same size
    assert "slug must be the file's name" in catalog.load(conf, repros).left_out[0]


def test_load_with_patches_applies_and_validates_them(conf: Path, repros: Path) -> None:
    with pytest.raises(ConfigError, match="deadline"):
        catalog.load(patches={"case": [(["launch", "deadline"], "soon")]})
    patched = catalog.load(patches={"case": [(["launch", "deadline"], 7)]})
    assert all(case.launch.deadline == 7 for case in patched.cases.values())
    with pytest.raises(ConfigError, match="did you mean 'sharding'"):
        catalog.load(patches={"strategy": [(["options", "shardng"], "NO_SHARD")]})
    patched = catalog.load(conf, repros, {"strategy": [(["options", "sharding"], "NO_SHARD")]})
    assert patched.raw["strategy"]["fsdp"]["options"]["sharding"] == "NO_SHARD"
    assert "sharding" not in patched.raw["strategy"]["ddp"]["options"]  # it has no such option
    assert catalog.load(conf, repros).raw["strategy"]["fsdp"]["options"]["sharding"] == "FULL_SHARD"


def test_compose_run_after_config_yaml_changed_reads_it_again(conf: Path) -> None:
    assert compose_run(["variants=[unfixed]"], conf) == RunSettings(variants=["unfixed"])
    edit(conf, "config.yaml", "seed: 0", "seed: 1")
    assert compose_run(["variants=[unfixed]"], conf).seed == 1


def test_wrong_setting_names_the_file_that_has_it(conf: Path) -> None:
    (conf / "matrix" / "mine.yaml").write_text(
        "# @package _global_\nrepeat: 0\nmatrix: {mine: {case: [a]}}\n"
    )
    edit(conf, "config.yaml", "seed: 0", "seed: high")
    for overrides, where in (
        (["+matrix=mine", "seed=1"], "matrix/mine.yaml: repeat: "),
        (["seed=low"], "run settings"),
        (["jobs=1"], "conf/config.yaml: seed: "),
    ):
        with pytest.raises(ConfigError, match=where):
            compose_run(overrides, conf)
