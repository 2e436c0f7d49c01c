"""Verbs own their arguments: each has its own, old words are answered with the new command, overrides stay Hydra's."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.cli import main as cli
from repro_matrix.cli import options as arguments
from repro_matrix.errors import ConfigError


def parser(command: str) -> arguments.Parser:
    built: arguments.Parser = cli.command_parser(command)[1]
    return built


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["run", "ddp-ready-once", "--variant", "unfixed"],
            "unknown option --variant: that is a setting, variants=[NAME]",
        ),
        (["matrix", "--repeat", "3"], "unknown option --repeat: that is a setting, repeat=VALUE"),
        (["match", "--variant", "x"], "unknown option --variant (there are: "),  # it takes no settings
        (["report", "--armm"], "unknown option --armm (there are: "),
        (["claims", "no-such"], "repro: unknown claim 'no-such'"),
    ],
)
def test_what_is_no_option_is_told_what_it_may_be_and_nothing_far_fetched(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_every_command_has_its_arguments_in_its_module() -> None:
    for command in cli.COMMANDS:
        assert parser(command).format_help()


def test_help_imports_no_command() -> None:
    import subprocess
    import sys

    program = (
        "import sys; from repro_matrix.cli import main as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "ours = {n for n in sys.modules if n.startswith('repro_matrix.cli.') or n == 'pydantic'}\n"
        "sys.exit(str(sorted(ours - {'repro_matrix.cli.main'})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip() == "[]"


def test_the_value_of_an_option_is_no_old_word() -> None:
    args = arguments.parse(parser("bisect"), ["CASE", "--good", "bad=1", "--bad", "2"])
    assert (args.good, args.bad) == ("bad=1", "2")


@given(
    st.permutations(["--good 1", "--bad 2", "--yanked", "stack=base", "repeat=3", "variants=[a]"]),
    st.integers(min_value=0, max_value=6),
)
def test_options_and_overrides_stand_in_any_order(pieces: list[str], where: int) -> None:
    pieces.insert(where, "CASE") if not any("=" in piece for piece in pieces[:where]) else pieces.insert(0, "CASE")
    args = arguments.parse(parser("bisect"), " ".join(pieces).split())
    assert (args.case, args.good, args.bad, args.yanked) == ("CASE", "1", "2", True)
    assert args.overrides == [piece for piece in pieces if "=" in piece]


def given_overrides(*texts: str) -> argparse.Namespace:
    return argparse.Namespace(overrides=list(texts), options=["--between", "--budget"])


def test_a_search_takes_its_one_stack_and_leaves_the_rest() -> None:
    texts = ("case=x", "stack='a b'", "flags.y=2", "model.config.z=3")
    assert arguments.one_stack(given_overrides(*texts)) == ("a b", ["case=x", "flags.y=2", "model.config.z=3"])
    assert arguments.one_stack(given_overrides()) == (None, [])


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a"], "is not NAME=VALUE"),
        (["stack=1", "stack=2"], "given twice"),
        (["stack="], "a value is missing"),
        (["betwen=1"], "did you mean '--between'"),
        (["repat=1"], "did you mean 'repeat'"),
        (["variants=[a]"], "variants.*not here"),
        (["budget=3"], "here it is an option: --budget 3"),
    ],
)
def test_what_a_search_cannot_take(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        arguments.one_stack(given_overrides(*texts), {"variants": "not here"})


def test_a_value_that_begins_with_a_dash_is_told_how_to_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "./x.py", "--args", "--bug"]) == 2
    assert "a value that begins with a dash is written --args=-VALUE" in capsys.readouterr().err
    assert arguments.parse(parser("run"), ["./x.py", "--args=--bug"]).script_args == "--bug"


def test_too_many_words_and_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--jsn"]) == 2 and "did you mean '--json'" in capsys.readouterr().err
    assert cli.main(["stack", "list", "--older-than", "3"]) == 2
    assert cli.main(["run", "--bisect-exit"]) == 130  # `git bisect run` takes 2 for "bad"
