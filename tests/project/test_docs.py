"""README and docs: each command is one that `repro`, `make` or `pytest` takes as it stands, each link leads somewhere.

That is looked at here without launching anything: verbs, options, cases, axes and names. What the commands do is shown
by the tests of each verb; docs/own-catalogue.md is executed line by line by test_wheel, the nightly job by
test_nightly_jobs.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from repro_matrix.cli import main as cli
from repro_matrix.errors import ReproError
from repro_matrix.paths import ROOT
from repro_matrix.runner import session

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SELECTS = ("run", "matrix", "list")
SOMEBODYS = ("odd-batch", "my-case", "empty-list", "odd-*")  # cases that a page has its reader write


def commands(page: Path) -> list[list[str]]:
    """Of indented lines, as a shell takes them apart; a line that ends with a backslash goes on."""
    found = []
    text = re.sub(r"\\\n\s+", " ", page.read_text(encoding="utf-8"))
    for line in re.findall(r"^ {4}(?:\$ )?((?:\.venv/bin/)?(?:repro|make|pytest) .*)$", text, re.M):
        words = shlex.split(line.replace("…", "x"), comments=True)
        while "&&" in words:
            found.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        found.append(words[: words.index(">")] if ">" in words else words)
    return [[Path(words[0]).name, *words[1:]] for words in found]


COMMANDS = {f"{page.name}: {shlex.join(words)}": words for page in PAGES for words in commands(page)}


def test_they_are_found() -> None:
    assert len(COMMANDS) > 90 and len({name.partition(":")[0] for name in COMMANDS}) > 12


@pytest.mark.parametrize("name", [name for name, words in COMMANDS.items() if words[0] == "repro"])
def test_a_command_is_taken_as_it_stands(name: str) -> None:
    verb, *words = (word.replace("CASE", "fsdp-generate") for word in COMMANDS[name][1:])
    try:
        _, args = cli.parsed(verb, words)
        if verb in SELECTS and "--module" not in words and "--" not in words and not name.count("./"):
            case = [f"case={args.case}"] if verb == "run" and args.case else []
            if not any(own in " ".join(words) for own in SOMEBODYS):
                session.ask([*case, *args.overrides])
    except (ReproError, SystemExit) as error:
        pytest.fail(f"{name}: {error}")


def test_every_verb_has_a_command_line_that_can_be_copied() -> None:
    shown = {words[1] for words in COMMANDS.values() if words[0] == "repro"}
    assert not cli.VERBS.keys() - shown, "in the README or a page of docs/"


def test_a_make_target_is_there() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    asked = {(name, target) for name, text in texts.items() for target in re.findall(r"`make\s([a-z-]+)", text)}
    asked |= {(name, words[1]) for name, words in COMMANDS.items() if words[0] == "make"}
    assert len(asked) > 10 and not {one for one in asked if one[1] not in known}


def test_every_link_leads_to_a_file_and_every_page_is_on_the_map() -> None:
    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert not dead
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in PAGES[2:] if page.name not in readme]
