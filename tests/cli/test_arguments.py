"""Arguments of commands: any order, unknown ones with the nearest, the one stack of a search."""

from __future__ import annotations

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.cli import main as cli
from repro_matrix.cli import options
from repro_matrix.errors import ConfigError


def parse(command: str, words: list[str]) -> options.Arguments:
    return options.Arguments(**cli.parse(command, words).params)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["run", "ddp-ready-once", "--variant", "unfixed"], "did you mean 'variants='?"),
        (["matrix", "--repeat", "3"], "did you mean 'repeat='?"),
        (
            ["match", "--variant", "x"],
            "unknown option --variant (there are: ",
        ),  # it takes no settings
        (["list", "--jsn"], "did you mean '--json'"),
        (["run", "./x.py", "--args", "--lr", "--bug"], "unknown option --bug"),
        (["bisect", "fsdp-generate", "--goood", "1"], "did you mean '--good'"),
        (["report", "--format", "htm"], "did you mean 'html'"),
        (["stack", "lst"], "Did you mean 'list'"),
        (["stack"], "Missing command"),
        (["bisect", "a", "--good"], "'--good' requires an argument"),
        (["bisect", "a", "--good", "1", "--bad", "2", "--steps", "2"], "--steps is for a script"),
        (["reduce", "--", "python", "x.py"], "reduce varies --args"),
        (["show", "a", "case=b"], "the case is given already"),
        (["list", "--config-dir", "/no/such"], "/no/such: no such folder"),
    ],
)
def test_wrong_argument_is_named_with_the_nearest(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert part in capsys.readouterr().err


def test_every_command_has_a_help_text() -> None:
    for command in cli.COMMANDS:
        module = importlib.import_module(f"repro_matrix.cli.{command}")
        text = cli.help_of(command)
        assert text.startswith(f"Usage: repro {command} [OPTIONS]")
        assert all(line.strip() in text for line in str(module.__doc__).splitlines())


@given(
    st.permutations(
        ["--good 1", "--bad b=2", "--any-change", "stack=base", "repeat=3", "variants=[a]"]
    ),
    st.integers(min_value=0, max_value=6),
)
def test_options_and_overrides_parse_in_any_order(pieces: list[str], where: int) -> None:
    (
        pieces.insert(where, "CASE")
        if not any("=" in piece for piece in pieces[:where])
        else pieces.insert(0, "CASE")
    )
    args = parse("bisect", " ".join(pieces).split())
    assert (args.case, args.good, args.bad, args.any_change) == ("CASE", "1", "b=2", True)
    assert list(args.overrides) == [
        piece for piece in pieces if "=" in piece and not piece.startswith("--")
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--args", "--train-head"], "--train-head"),
        (
            ["--args", "--train-head", "--nproc", "2", "--args", "--lr 1e-4", "repeat=2"],
            "--train-head --lr 1e-4",
        ),
        (["--args=-v", "--args", "a=b"], "-v a=b"),
        (["--args", "--nproc"], "--nproc"),  # of the script: the next word, whatever it is
    ],
)
def test_arguments_of_a_script_may_begin_with_dashes(words: list[str], expected: str) -> None:
    args = parse("run", ["./train.py", *words])
    assert args.case == "./train.py" and args.script_args == expected


def test_one_stack_splits_the_stack_from_the_rest() -> None:
    args = options.Arguments(overrides=["case=x", "stack='a b'", "flags.y=2"])
    assert options.one_stack(args) == ("a b", ["case=x", "flags.y=2"])


@pytest.mark.parametrize(
    ("texts", "part"),
    [
        (["a"], "is not NAME=VALUE"),
        (["stack=1", "stack=2"], "given twice"),
        (["stack="], "name one stack"),
        (["stack=1,2"], "name one stack"),
        (["variants=[a]"], "not here"),
        (["+matrix=seeds"], "named matrices"),
    ],
)
def test_one_stack_refuses(texts: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        options.one_stack(options.Arguments(overrides=texts), {"variants": "not here"})
