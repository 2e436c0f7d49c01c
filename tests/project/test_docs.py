"""The README and the documentation site: commands parse, links lead somewhere, the reference is
complete.

What the commands do is shown by the tests of each command; most of docs/guides/own-catalog.md is
run by test_wheel, the nightly job by test_nightly_jobs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from click import UsageError
from repro_matrix.cli import main as cli
from repro_matrix.cli.options import Arguments
from repro_matrix.config import executors, schema
from repro_matrix.config.vocabulary import VerdictName
from repro_matrix.errors import ExitCode, ReproError
from repro_matrix.paths import ROOT
from repro_matrix.runner import session

from bench import pictures

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
TEXTS = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in PAGES
    if "examples" not in page.parts
}
SELECTS = ("run", "matrix", "list")
USERS = ("odd-batch", "my-case", "empty-list", "odd-*")  # cases that a page has its reader write


def commands(text: str) -> list[list[str]]:
    """Return the arguments of each indented command line; a line that ends with a backslash
    continues."""
    found, whole = [], re.sub(r"\\\n\s+", " ", text)
    for line in re.findall(
        r"^ {4,}(?:\$ )?((?:\.venv/bin/)?(?:repro|make|pytest) .*)$", whole, re.M
    ):
        arguments = shlex.split(line.replace("…", "x"), comments=True)
        while "&&" in arguments:
            found.append(arguments[: arguments.index("&&")])
            arguments = arguments[arguments.index("&&") + 1 :]
        found.append(arguments[: arguments.index(">")] if ">" in arguments else arguments)
    return [[Path(each[0]).name, *each[1:]] for each in found]


COMMANDS = {
    f"{name}: {shlex.join(each)}": each for name, text in TEXTS.items() for each in commands(text)
}


def test_commands_are_found_in_most_pages() -> None:
    assert len(COMMANDS) > 90 and len({name.partition(":")[0] for name in COMMANDS}) > 12


@pytest.mark.parametrize(
    "name", [name for name, arguments in COMMANDS.items() if arguments[0] == "repro"]
)
def test_command_parses(name: str) -> None:
    command, *arguments = (each.replace("CASE", "fsdp-generate") for each in COMMANDS[name][1:])
    try:
        args = Arguments(**cli.parse(command, arguments).params)
        if (
            command in SELECTS
            and "--module" not in arguments
            and "--" not in arguments
            and not name.count("./")
        ):
            case = [f"case={args.case}"] if command == "run" and args.case else []
            if not any(own in " ".join(arguments) for own in USERS):
                _, selected = executors.split(args.overrides)
                session.make_request([*case, *selected])
    except (ReproError, UsageError) as error:
        pytest.fail(f"{name}: {error}")


def test_every_command_has_an_example() -> None:
    shown = {arguments[1] for arguments in COMMANDS.values() if arguments[0] == "repro"}
    assert not cli.COMMANDS.keys() - shown


def test_make_targets_exist() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = {target for text in TEXTS.values() for target in re.findall(r"`make\s([a-z-]+)", text)}
    named |= {
        target
        for each in COMMANDS.values()
        if each[0] == "make"
        for target in each[1:]
        if target.islower()
    }
    assert len(named) > 8 and not named - known


def test_tests_that_a_page_names_exist() -> None:
    named = [each for text in TEXTS.values() for each in re.findall(r"`([\w/]+\.py)::(\w+)`", text)]
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, name)


def test_links_outside_the_site_lead_to_a_file() -> None:
    for name, text in TEXTS.items():  # also those of docs/, which are read on GitHub
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        assert not [target for target in targets if not ((ROOT / name).parent / target).exists()], (
            name
        )


def test_every_guide_and_concept_is_in_the_readme() -> None:
    pages = [name for name in TEXTS if name.startswith(("docs/guides", "docs/concepts"))]
    assert not [name for name in pages if name not in TEXTS["README.md"]]
    assert len(TEXTS["README.md"].splitlines()) <= 140


def test_log_in_the_readme_is_answered_with_these_lines(capsys: pytest.CaptureFixture) -> None:
    shown = TEXTS["README.md"].split("$ repro match train.log\n")[1].split("\n\n")[0]
    lines = [line.strip() for line in shown.splitlines()]
    log = DOCS / "examples" / "lora-dtype" / "train.log"
    assert cli.main(["match", str(log)]) == ExitCode.OK
    answer = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) > 5 and lines == [line for line in answer if line in lines]


@pytest.mark.xdist_group("baseline")
@pytest.mark.usefixtures("published_rows")
def test_answer_in_the_readme_is_what_the_published_results_show() -> None:
    shown = pictures.ANSWER.search(TEXTS["README.md"])
    assert shown and len(shown[0].splitlines()) > 8
    assert shown[0] == pictures.answer(), "the results or their lines changed: make pictures"


def test_figures_and_names_of_the_readme_are_those_of_the_code() -> None:
    readme = TEXTS["README.md"]
    verdicts = re.findall(r"`([A-Z_]{5,})`", readme.split("| verdict |")[1].split("\n\n")[0])
    assert set(verdicts) == set(get_args(VerdictName))
    codes = re.findall(r"\b(\d+) ", readme.split("Exit codes: ")[1].split("<!--")[0])
    assert set(map(int, codes)) == set(ExitCode)
    python = re.search(r"Python (3\.\d+) or newer", readme)
    assert python and f'requires-python = ">={python[1]}"' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with --strict: a dead link, a wrong anchor or a page outside the navigation
    is an error."""
    pytest.importorskip("material", reason="of the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-f",
        ROOT / "mkdocs.yml",
        "-d",
        folder,
    ]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.xdist_group("docs")
def test_site_lists_every_command_and_key(site: Path) -> None:
    pages = {
        path.parent.name: path.read_text(encoding="utf-8")
        for path in (site / "reference").rglob("index.html")
    }
    assert not [command for command in cli.COMMANDS if f"repro {command}" not in pages["commands"]]
    keys = schema.Case.model_fields.keys() - {"expect"}
    assert not [key for key in keys if f"<code>{key}</code>" not in pages["case"]]
    settings = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text(encoding="utf-8"))
    assert not [key for key in settings if key not in pages["settings"]]
    assert "Strategy" in pages["axes"] and "meaning" in pages["axes"]


@pytest.mark.xdist_group("docs")
def test_site_loads_nothing_from_another_host(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert not re.findall(
        r"<(?:script|img|link)[^>]+(?:src|href)=\"https?://[^\"]+\.(?:js|css|png|woff2?)", text
    )


def test_architecture_lists_every_module() -> None:
    text = TEXTS["docs/contributing/architecture.md"]
    package = ROOT / "harness" / "repro_matrix"
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text, re.M))
    for name in (each.name for each in package.iterdir() if (each / "__init__.py").exists()):
        modules = {each.stem for each in (package / name).glob("[a-z]*.py")}
        listed = set(re.findall(r"`(\w+)`", rows[name].partition("; `stacks/`")[0]))
        assert listed == modules or name == "cli", name
    files = re.findall(r"`([\w/]+\.(?:py|yaml))", text)
    assert len(files) > 30
    for file in files:
        assert any((root / file).exists() for root in (package, ROOT, ROOT / "repros/repro_kit")), (
            file
        )
