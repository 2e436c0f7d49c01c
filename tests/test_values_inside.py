"""Values inside, text at the door: what a command line says is read once, and what is asked after that is a Request of
which fields are replaced. Only printed commands are text."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from repro_matrix import stacks
from repro_matrix.conf import overrides
from repro_matrix.conf.config import LauncherName
from repro_matrix.paths import PACKAGE
from repro_matrix.running.request import Request, ask
from repro_matrix.shrink import case as cases
from repro_matrix.verbs import gpu_proof, upgrade

CASE = "ddp-ready-once"
READS = {"ask", "prepare", "parse", "compose_run"}  # what takes a command line's overrides
DOORS = {  # what reads overrides outside conf/ and the verbs, and from where
    "running/request.py",  # `ask` itself
    "running/session.py",  # what verbs and pytest give `prepare`
    "running/going_on.py",  # the stored command line of the run that goes on
    "script/options.py",  # a script's command line
    "authoring/shrunk.py",  # a stored document's command
}
WRITTEN = re.compile(r"[+~]?[a-z_]+(\.[\w.]*)?=")


def _written(node: ast.AST) -> Iterator[str]:
    """Overrides that an expression writes."""
    for each in ast.walk(node):
        first = each.values[0] if isinstance(each, ast.JoinedStr) and each.values else each
        text = first.value if isinstance(first, ast.Constant) else ""
        if isinstance(text, str) and (WRITTEN.match(text) or (each is not first and text == "flags.")):
            yield text


def composed(source: str) -> list[str]:
    """Overrides that are written into what a call reads: in the call, or in a name that it is given."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.Module)):
            continue
        body = list(ast.walk(function))
        names = {
            target.id: each.value
            for each in body
            if isinstance(each, ast.Assign)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        for call in body:
            if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] not in READS:
                continue
            for argument in call.args:
                given = [
                    names[each.id] for each in ast.walk(argument) if isinstance(each, ast.Name) and each.id in names
                ]
                found |= {f"{call.lineno}: {text}" for each in [argument, *given] for text in _written(each)}
    return sorted(found)


def _modules() -> list[tuple[str, str]]:
    found = [(str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    return [(name, text) for name, text in found if not name.startswith(("conf/", "worker/"))]


def test_no_module_writes_overrides_to_be_read_again() -> None:
    """But for a verb's first word, CASE, which is the override case=CASE."""
    wrong = [f"{name}:{each}" for name, text in _modules() for each in composed(text)]
    assert not [each for each in wrong if not (each.startswith("verbs/") and each.endswith(": case="))]


@pytest.mark.parametrize(
    "code",
    [
        "session.prepare([*texts, f'stack={name}'])",
        "own = [f'repeat={n}']\nsession.prepare([*texts, *own], given=x)",
        "def f():\n    texts = ['hardware=cpu', *more]\n    return ask(texts)",
        "overrides.parse([f'flags.{name}={value}'])",
    ],
)
def test_such_a_module_is_seen(code: str) -> None:
    assert composed(code)


def test_what_reads_overrides_is_a_door() -> None:
    found = {
        name
        for name, text in _modules()
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.Call)
        and ast.unparse(each.func) in ("ask", "overrides.parse", "compose_run")
        and re.search(r"import .*\bask\b|compose_run|\boverrides\b", text)
    }
    assert {name for name in found if not name.startswith("verbs/")} == DOORS


# -- nor takes one apart

TAKEN = {  # NAME=VALUE that is no override
    "judge/expect.py",  # a cell of results/expected: model/strategy/flag=value
    "shrink/words.py",  # the arguments of somebody's own script
    "stacks/changed.py",  # a hash as RECORD has it: sha256=digest
}


def taken_apart(source: str) -> list[str]:
    """Where a text is split at its ``=``, or asked which key it begins with."""
    found = []
    for each in ast.walk(ast.parse(source)):
        if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Attribute) or not each.args:
            continue
        first = each.args[0].value if isinstance(each.args[0], ast.Constant) else None
        splits = each.func.attr in ("partition", "rpartition", "split", "rsplit") and first == "="
        begins = (
            each.func.attr in ("startswith", "removeprefix") and isinstance(first, str) and WRITTEN.fullmatch(first)
        )
        if splits or begins:
            found.append(f"{each.lineno}: {ast.unparse(each)}")
    return found


def test_no_module_takes_an_override_apart() -> None:
    """But for the verbs, whose words they are, and what reads the files and options of conf/."""
    found = {name for name, text in _modules() if not name.startswith("verbs/") and taken_apart(text)}
    assert found == TAKEN


@pytest.mark.parametrize("code", ["text.partition('=')[2]", "t.startswith('repeat=')", "x.split('=', 1)"])
def test_such_a_module_is_seen_too(code: str) -> None:
    assert taken_apart(code)


# -- those that ask again


@pytest.fixture
def nothing_is_parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called."""
    return lambda: monkeypatch.setattr(overrides, "parse", lambda texts: pytest.fail(f"parsed again: {texts}"))


def test_what_is_asked_by_key_is_what_its_text_asks() -> None:
    first = ask([f"case={CASE}", "jobs=2"])
    values = {
        "model": "qwen2.5-0.5b", "ranks": 3, "flags.find_unused": False, "model.config.num_hidden_layers": 2,
        "env.A": "b", "steps": 1, "stack": ["current", "torch@2"], "launcher": LauncherName.torchrun,
    }  # fmt: skip
    asked = first.having(values)
    again = ask(asked.said(without=()))
    assert asked.settings == again.settings and asked.cells == again.cells and len(asked.cells) == 2
    assert asked.catalogue.models["qwen2.5-0.5b"].config["num_hidden_layers"] == 2
    assert (first.settings.steps, first.settings.env, first.selections[0].ranks) == (None, {}, None), "it stays"
    less = asked.less(lambda key: key in values)
    assert less.settings == first.settings and less.cells == first.cells
    assert less.said(without=()) == [f"case={CASE}", "jobs=2"]


@pytest.mark.parametrize("value", ["bf16", "1.5", "1e5", "true", "it's", "a,b", "", "null", None, True, 3, 0.5])
def test_a_printed_value_is_read_as_it_is(value: Any) -> None:
    assert overrides.parse([overrides.said("flags.mixed", value)]).flags["mixed"] == [value]


def test_shrink_asks_without_text(nothing_is_parsed: Callable[[], None]) -> None:
    asked = ask([f"case={CASE}", "model.config.num_hidden_layers=4", "steps=3"])
    nothing_is_parsed()
    asker = cases.open_case(None, asked, stacks.resolve("current"), print, threading.Event())
    simplest = tuple(each.knob.simplest for each in asker.varied)
    request = asker._request(simplest)
    assert request.settings.steps == 1 and request.selections[0].flags["find_unused"] == [False]
    assert request.catalogue.models[request.cells[0].model].config["num_hidden_layers"] == 1
    assert "model.config.num_hidden_layers=1" in asker.overrides(simplest)


def test_upgrade_asks_for_one_cell_of_those_that_it_measured(nothing_is_parsed: Callable[[], None]) -> None:
    asked = ask(["case=ddp-*", "model=qwen1.5-0.5b,qwen2.5-0.5b", "ranks=2,4", "arms=[broken]", "jobs=1"])
    nothing_is_parsed()
    document = {"case": CASE, "model": "qwen2.5-0.5b", "strategy": "ddp", "ranks": 4, "flags": {"find_unused": True}}
    only = upgrade._only(document, asked)
    (cell,) = only.cells
    assert (cell.case, cell.model, cell.ranks, dict(cell.flags)) == (CASE, "qwen2.5-0.5b", 4, {"find_unused": True})
    assert only.settings.jobs == 1 and not only.settings.arms


def test_gpu_proof_asks_for_its_steps_without_text(
    nothing_is_parsed: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ask(["case=ddp-*", "repeat=5", "jobs=1"])
    nothing_is_parsed()
    seen: list[Request] = []

    def prepare(asked: Request, memory: bool) -> Any:
        seen.append(asked)
        raise InterruptedError

    monkeypatch.setattr(gpu_proof, "prepare", prepare)
    for more in (gpu_proof.COLD, *gpu_proof.HANGS):
        with pytest.raises(InterruptedError):
            gpu_proof.Proof(asked, 0.0, Path()).prepare(more)
    cold, *hangs = seen
    assert (cold.settings.launcher, cold.settings.repeat, cold.settings.jobs) == (LauncherName.torchrun, 1, 1)
    assert {cell.case for cell in cold.cells} == {"train-step"}
    assert [hang.settings.arms for hang in hangs] == [["broken"]] * 2
