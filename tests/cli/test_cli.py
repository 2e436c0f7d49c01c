"""The command line without launching: help, lists, errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.cli import main as cli
from repro_matrix.environment.stacks import resolve
from repro_matrix.paths import ROOT
from repro_matrix.runner.session import prepare


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], {"pydantic", "repro_matrix.cli.options"}),
        (["list"], {"hydra", "transformers", "psutil"}),
        (
            ["show", "fsdp-generate", "--json"],
            {"hydra", "repro_matrix.runner.engine", "rich.console"},
        ),
    ],
)
def test_quick_commands_import_nothing_heavy(words: list[str], heavy: set[str]) -> None:
    program = f"import sys; from repro_matrix.cli import main as cli; code = cli.main({words}); "
    program += (
        f"bad = {heavy | {'torch'}} & set(sys.modules); sys.exit(f'imported {{bad}}' if bad else"
        " code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_help_names_every_command_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    lines = out.splitlines()
    assert code == 0 and len(lines) <= 24 and max(map(len, lines)) <= 100
    assert all(any(f" {command} " in line for line in lines) for command in cli.COMMANDS)


@pytest.mark.parametrize("words", [["--help"], ["list", "--help"], ["show", "fsdp-uniform-dtype"]])
def test_output_that_cannot_be_written_is_an_error(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-u", "-m", "repro_matrix", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 2 and done.stderr.startswith(
        "repro: the standard output: cannot be written"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["match", "/no/such.log"], 2),
        (["match", "-"], 2),
        (["run", "no-such-case", "--bisect-exit"], 130),
    ],
)
def test_error_keeps_its_exit_code_without_standard_streams(words: list[str], code: int) -> None:
    """Its message cannot be written: 1 would be an answer."""
    command = [sys.executable, "-m", "repro_matrix", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" <&-', "sh", *command], stderr=full, timeout=600
        )
    assert done.returncode == code


def test_module_that_replaces_a_needed_one_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "typing.py").touch()
    command = [sys.executable, "-m", "repro_matrix", "list"]
    path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 198 and "PYTHONPATH" in done.stderr


def test_version_names_release_commit_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--version")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert code == 0 and not err and out.startswith("repro-matrix 0.")
    assert f"commit {commit[:12]}" in out and f"in {ROOT};" in out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ("list", "case=fsdp-silently-untied", "flags.use_cache=null"),
            "'null' (there are: false, true)",
        ),
        (("show", "nothing"), "unknown case 'nothing'"),
        (("matrix", "model=qwen-7"), "did you mean 'qwen-7b'"),
        (("matrix", "hardware=gpu2"), "hardware=gpu2: needs 2 GPUs"),
        (("matrix", "jobs=0"), "run settings: jobs: "),
        (("matrix", "repeat=three"), "(given: 'three')"),
        (("matrix", "stack=current,torhc2.2-tf4.39"), "did you mean 'torch2.2-tf4.39'"),
        (("matrix", "stack=python:/no/such/python"), "/no/such/python"),
        (("matrix", "variants=[no-such-variant]"), "unknown variant 'no-such-variant'"),
        (("matrix", "world_size=4"), "unknown key 'world_size'"),
        (("run", "flags.x=1"), "the first argument of `repro run` is a case"),
        (("matrix", "model.config.hidden_size=1,2"), "sweep a group or a flag"),
        (("list", "model=qwen-7b", "model=qwen-14b"), "model= is given twice"),
        (("matrx",), "did you mean 'matrix'"),
        (("compare", "ddp-ready-once"), "`repro run ddp-ready-once` measures it"),
        (("compare", __file__, "ddp-ready-once"), "is a case, not a script"),
        (("--verson",), "unknown option '--verson'; did you mean '--version'?"),
        (("--version", "torch"), "--version takes no arguments"),
        (("diff", "/no/such/folder", "current"), "/no/such/folder: no such folder of results"),
        (
            ("accept", "--from", "/no/such/folder", "--reason", "x"),
            "/no/such/folder: no such folder of results",
        ),
    ],
)
def test_bad_input_is_exit_2_with_a_clear_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    part: str,
) -> None:
    from repro_matrix.environment import machine as hardware

    machine = hardware.Machine((), None, "cpu", 2, 24.0, "linux")
    monkeypatch.setattr(hardware, "detect", lambda: machine)
    code, _, err = call(capsys, *words)
    assert code == 2 and part in err and "Traceback" not in err


def test_dry_run_plans_patterns_of_variants_on_a_stack_that_is_not_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    words = [
        "run",
        "qwen15-fsdp-norm-shard",
        "variants=layer-wrap*",
        "hardware=cpu",
        "stack=torch2.2-tf4.39",
    ]
    assert call(capsys, *words, "--dry-run")[1].endswith(
        "stack torch2.2-tf4.39 would be built first\n"
    )
    rows = json.loads(call(capsys, *words, "--dry-run", "--json")[1])
    assert [row["variant"] for row in rows] == ["unfixed", "layer-wrap", "layer-wrap-root-call"]
    assert rows[0]["skipped"] is None and rows[0]["world_size"] == 2


def test_run_and_doctor_name_the_python_of_the_measured_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["case=ddp-ready-once", "hardware=cpu"]
    assert f"stack current at {sys.executable} (python " in prepare(words).headline()
    assert f"stackcurrentat{sys.executable}(" in "".join(call(capsys, "doctor", *words)[1].split())
    assert (
        json.loads(call(capsys, "doctor", *words, "--json")[1])["stack"]["python"] == sys.executable
    )


def test_doctor_says_that_an_op_will_be_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    for compiled in (False, True):
        words = ("doctor", "case=train-step", "model=qwen1.5-0.5b", "hardware=cpu", "--json")
        notes = json.loads(call(capsys, *words)[1])["notes"]
        assert any("DeepSpeed's CPU op is not compiled" in note for note in notes) != compiled
        # `prepare` would compile it.
        done = Path(resolve("current").extensions_dir) / "deepspeed-cpu.done"
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def test_show_has_the_role_and_the_command_of_each_variant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, "show", "qwen15-fsdp-norm-shard", "--json")
    shown: dict[str, Any] = json.loads(out)
    assert code == 0 and shown["case"] == "qwen15-fsdp-norm-shard"
    assert all("--nproc-per-node" in variant["torchrun"] for variant in shown["variants"])
    roles = {variant["variant"]: variant["role"] for variant in shown["variants"]}
    assert (roles["unfixed"], roles["summon"], roles["no-cache"]) == ("unfixed", "fix", "non_fix")
    assert (
        json.loads(call(capsys, "list", "case=qwen15-fsdp-norm-shard", "--json")[1])[0]["variants"]
        == roles
    )
    assert all(
        variant["expected"] and variant["last"]
        for variant in shown["variants"]
        if variant["role"] == "fix"
    )
    first = shown["variants"][0]
    assert first["expected"] == "reproduced" and first["last"].startswith("reproduced 20"), (
        "it has no verdict"
    )
    assert shown["symptom"].startswith("RuntimeError: ") and "reproduces in " in shown["releases"]
    assert "supported" in {claim["status"] for claim in shown["claims"]}


def test_show_expects_what_the_nearest_releases_show(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("show", "ddp-ready-once", "stack=current+transformers@5.17.0")
    shown = {
        each["variant"]: each for each in json.loads(call(capsys, *words, "--json")[1])["variants"]
    }
    assert (shown["non-reentrant"]["expected"], shown["bucket-view"]["expected"]) == (
        "FIXED",
        "NOT_FIXED",
    )
    nearest = shown["non-reentrant"]["nearest"]
    assert len(nearest) > 1 and nearest[0] in call(capsys, *words)[1].replace("\n  ", " ")
    here = json.loads(call(capsys, *words[:2], "hardware=cpu", "--json")[1])["variants"]
    assert not any(each["nearest"] for each in here)


def test_show_prints_commands_on_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "show", "qwen15-fsdp-norm-shard")
    assert code == 0 and "QwenLM/Qwen3#306" in out and "torchrun" not in out
    assert (
        out.index("Symptom: ")
        < out.index("layer-wrap ")
        < out.index("What to do:")
        < out.index("supported  ")
        < out.index("Cause: ")
    )
    code, out, _ = call(capsys, "show", "qwen15-fsdp-norm-shard", "summon")
    assert (
        code == 0 and call(capsys, "show", "qwen15-fsdp-norm-shard", "variants=[summon]")[1] == out
    )
    assert "--variant unfixed" in out and "--variant summon" in out and "--variant ddp" not in out
    assert "--variant ddp" in call(capsys, "show", "qwen15-fsdp-norm-shard", "--commands")[1]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (
            "zero3-load-state-dict",
            [
                "load before deepspeed.initialize",
                "repro export zero3-load-state-dict",
                "size mismatch for model.embed_tokens",
            ],
        ),
        ("qwen15-fsdp-kv-cache", ["repro show qwen15-fsdp-norm-shard", "layer-wrap-root-call"]),
        ("train-step", []),  # a control
    ],
)
def test_show_begins_with_the_symptom_and_has_what_to_do_below_the_table(
    capsys: pytest.CaptureFixture[str], case: str, parts: list[str]
) -> None:
    out = call(capsys, "show", case)[1]
    lines = out.splitlines()
    end = next(
        (number for number, line in enumerate(lines) if line.startswith("Claims")), len(lines)
    )
    text = " ".join(" ".join(lines[:end]).split())
    symptom = [number for number, line in enumerate(lines) if line.startswith("Symptom: ")]
    assert not parts or symptom in ([1], [2])  # below the title, which may be two lines
    assert out.startswith(f"{case}: ") and ("What to do: " in text) == bool(parts)
    assert not [part for part in parts if part not in text]


def test_show_of_a_word_lists_the_cases_that_have_it_one_per_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, error = call(capsys, "show", "uniform")
    assert (code, out) == (2, "") and [line.split()[0] for line in error.splitlines()[1:]] == [
        "fsdp-uniform-dtype",
        "fsdp-uniform-requires-grad",
    ]


def test_code_to_copy_stays_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(
        "repro_matrix.results.runs.scratch", lambda: tmp_path
    )  # no result of a developer
    fix = 'TrainingArguments(gradient_checkpointing_kwargs={"use_reentrant": False});'
    for color in ("", "1"):  # a pipe and a terminal
        monkeypatch.setenv("FORCE_COLOR", color)
        below = call(capsys, "show", "ddp-ready-once")[1].partition("What to do:")[2]
        assert fix in [line.strip() for line in below.splitlines()]


def test_claims_that_are_piped_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "show", "fsdp-generate")
    claims = json.loads(call(capsys, "show", "fsdp-generate", "--json")[1])["claims"]
    lines = [
        line
        for line in out.splitlines()
        if line.endswith((" ...", "…")) and not line.startswith("Symptom")
    ]
    assert claims and not lines and all(f"{claim['id']}: " in out for claim in claims)
    assert any(claim["evidence"] for claim in claims)


def test_accept_of_an_empty_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = call(capsys, "accept", "--reason", "x", "--from", str(tmp_path))
    assert code == 2 and "no complete measurement" in err


def test_table_without_a_terminal_has_no_color_and_a_row_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = call(capsys, "list", "case=qwen15-fsdp-norm-shard")
    (row,) = [line for line in out.splitlines() if line.startswith("qwen15-fsdp-norm-shard ")]
    assert "\x1b" not in out and row.endswith(
        "RMSNorm finds a sharded weight when the root FSDP forward is bypassed"
    )


def test_error_with_bisect_exit_is_no_answer_for_git(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "run", "no-such-case", "--bisect-exit")[0] == 130
    assert call(capsys, "run", "no-such-case")[0] == 2


def test_defect_exits_with_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python exits with 1 then, which means here that something differs from its expectation."""
    monkeypatch.setattr("repro_matrix.cli.list.main.callback", lambda args: {}["x"])
    code, _, err = call(capsys, "list")
    assert code == 70 and "a defect of repro-matrix" in err and "KeyError" in err
    monkeypatch.setattr("repro_matrix.cli.run.main.callback", lambda args: {}["x"])
    assert call(capsys, "run", "fsdp-generate", "--bisect-exit")[0] >= 128
