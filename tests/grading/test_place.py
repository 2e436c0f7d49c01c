"""Signatures by place: what calls itself an installed package and is none of its files does not fire.

Made with small installed packages in upstream's role (``packaging`` raises by itself); what a rank records is judged.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from judging import case, ended, failed, observation, ok, record
from packaging import version
from repro_matrix.config.signatures import Signature
from repro_matrix.grading.grade import grade
from repro_matrix.grading.observation import lies_in, stack_places
from repro_matrix.grading.signature import matches
from repro_matrix.paths import REPROS

sys.path.insert(0, str(REPROS))
from repro_kit import code_location as place
from repro_kit.record import Capture, describe_exception

FILE = str(version.__file__)
LINE = version.Version.__init__.__code__.co_firstlineno
TEXT = "Invalid version: 'no version'"
RAISES = {
    "name": "known",
    "kind": "exception",
    "type": "ValueError",
    "message": "Invalid version",
    "package": "packaging",
}
FRAMED = {**RAISES, "frames": [{"module": r"packaging\.version", "function": "__init__"}]}
BODY = f"def __init__(self, *rest):\n    raise ValueError({TEXT!r})\n"


def described(call: Callable[[], Any]) -> dict[str, Any]:
    with pytest.raises(Exception) as caught:
        call()
    return describe_exception(caught.value)


def fires(error: dict[str, Any], wanted: dict[str, Any] = RAISES) -> bool:
    return matches(Signature.model_validate(wanted), observation(failed(0, error), failed(1, error))) is not None


def run_with(text: str, file: str, names: dict[str, Any]) -> Any:
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return names["__init__"]


@pytest.fixture
def restored() -> Iterator[None]:
    before, code = version.Version.__init__, version.Version.__init__.__code__
    modules = dict(sys.modules)
    yield
    version.Version.__init__ = before  # type: ignore[method-assign]
    before.__code__ = code
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


def test_what_the_package_itself_raises_is_the_packages() -> None:
    error = described(lambda: version.Version("no version"))
    assert error["frames"][-1]["place"] == "packaging.version"
    assert fires(error) and fires(error, FRAMED)


def borrowed_name() -> Any:
    """exec with the filename of an installed file, and its module's name."""
    return lambda: run_with(BODY, FILE, {"__name__": "packaging.version"})(None)


def borrowed_place() -> Any:
    """The same, at the very line where the file has a function of that name."""
    return lambda: run_with("\n" * (LINE - 1) + BODY, FILE, {"__name__": "packaging.version"})(None)


def in_its_own_namespace() -> Any:
    return lambda: run_with("\n" * (LINE - 1) + BODY, FILE, vars(version))(None)


def replaced_by_generated_code() -> Any:
    made = run_with(BODY, "<string>", dict(vars(version)))
    version.Version.__init__ = made
    return lambda: version.parse("1.0")


def replaced_code_object() -> Any:
    like = version.Version.__init__.__code__
    made = run_with(BODY, FILE, dict(vars(version))).__code__
    code = made.replace(co_name=like.co_name, co_firstlineno=like.co_firstlineno, co_filename=like.co_filename)
    version.Version.__init__.__code__ = code
    return lambda: version.parse("1.0")


def loaded_under_its_name(folder: Path) -> Any:
    """A file of the script's, loaded as a module of the package."""
    (folder / "site-packages" / "packaging").mkdir(parents=True)
    path = folder / "site-packages" / "packaging" / "version.py"
    path.write_text(BODY)
    spec = importlib.util.spec_from_file_location("packaging.version_two", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["packaging.version_two"] = module
    spec.loader.exec_module(module)
    return lambda: module.__init__(None)


def found_first(folder: Path) -> Any:
    """A package of that name in a folder that the script put on the search path."""
    (folder / "packaging_work").mkdir()
    (folder / "packaging_work" / "__init__.py").write_text(BODY)
    sys.path.insert(0, str(folder))
    try:
        module = __import__("packaging_work")
    finally:
        sys.path.remove(str(folder))
    module.__name__ = module.__dict__["__name__"] = "packaging.version"
    return lambda: vars(module)["__init__"](None)


def the_scripts_own() -> Any:
    return lambda: (_ for _ in ()).throw(ValueError(TEXT))


LIES = [
    borrowed_name, borrowed_place, in_its_own_namespace, replaced_by_generated_code, replaced_code_object,
    loaded_under_its_name, found_first, the_scripts_own,
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=[lie.__name__ for lie in LIES])
def test_what_only_looks_like_the_package_does_not_fire(lie: Any, tmp_path: Path, restored: None) -> None:
    call = lie(tmp_path) if lie.__code__.co_argcount else lie()
    error = described(call)
    assert error["message"] == TEXT, "the lie must get as far as raising the known text"
    assert not error["frames"][-1]["place"].startswith("packaging")
    assert not fires(error) and not fires(error, FRAMED)


def test_the_lies_fire_when_names_are_believed(tmp_path: Path, restored: None) -> None:
    """What the place is for: the same records without it fire, as they did before it was recorded."""
    fired = []
    for lie in LIES[:-1]:
        error = described(lie(tmp_path) if lie.__code__.co_argcount else lie())
        for frame in error["frames"]:
            del frame["place"]
        fired.append(fires(error))
    assert sum(fired) >= 5


def test_generated_code_between_frames_of_the_package_is_passed_over() -> None:
    """A dataclass's own __init__ (``<string>``) lies nowhere, and the frames behind it are judged as they are."""
    made = run_with("def __init__(f):\n    f('no version')\n", "<string>", {"__name__": "packaging.version"})
    error = described(lambda: made(version.Version))
    assert [frame["place"] for frame in error["frames"][-2:]] == ["", "packaging.version"] and fires(error)


def test_a_decorated_function_and_a_nested_one_are_the_files() -> None:
    @functools.wraps(version.Version)
    def around(text: str) -> Any:
        return version.Version(text)

    assert fires(described(lambda: around("no version")))
    for module in (json.decoder, logging, functools):
        found = (value for value in vars(module).values() if isinstance(value, types.FunctionType))
        held = [value for value in found if value.__module__ == module.__name__]
        assert held and {place.of_code(f.__code__, f.__globals__) for f in held} == {module.__name__}


def test_a_compiled_modules_frames_are_its_packages() -> None:
    frames = described(lambda: yaml.load("a: [", Loader=yaml.CSafeLoader))["frames"]
    assert frames[-1]["file"].endswith(".pyx") and frames[-1]["place"] == "yaml._yaml"
    fake = compile("raise ValueError('x')", "yaml/_yaml.pyx", "exec")
    assert place.of_code(fake, vars(sys.modules["yaml._yaml"])) == "", "code that does something was not compiled"


def test_an_overlay_on_the_search_path_is_an_installation_and_comes_first(tmp_path: Path) -> None:
    """As a stack lays a release over an environment; and a package imported late, and remote code."""
    over, remote = tmp_path / "over" / "packaging", tmp_path / "modules" / "transformers_modules" / "qwen"
    for folder in (over, remote):
        folder.mkdir(parents=True)
    (over / "__init__.py").write_text("def late():\n    import packaging.other\n    packaging.other.fails()\n")
    (over / "other.py").write_text("def fails():\n    raise ValueError('there')\n")
    (remote / "modeling_qwen.py").write_text("def fails():\n    raise ValueError('remote')\n")
    code = """
import json, runpy, sys
sys.path.insert(0, sys.argv[1])
from repro_kit import code_location as place
from repro_kit.record import describe_exception
import packaging
out = [place.packages()["transformers_modules"]]
remote = runpy.run_path(sys.argv[2])["fails"]
for call in (packaging.late, remote):
    try:
        call()
    except ValueError as error:
        out.append([frame["place"] for frame in describe_exception(error)["frames"]])
print(json.dumps(out))
"""
    env = {**os.environ, "PYTHONPATH": str(over.parent), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    words = [sys.executable, "-c", code, str(REPROS), str(remote / "modeling_qwen.py")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True, cwd=tmp_path)
    root, *frames = json.loads(done.stdout)
    assert root == str(remote.parent)
    assert frames[0][-2:] == ["packaging", "packaging.other"]
    assert frames[1][-1] == "transformers_modules.qwen.modeling_qwen"


def test_the_projects_own_code_is_its_own() -> None:
    frames = described(lambda: place.of_code.__wrapped__())["frames"]  # type: ignore[attr-defined]
    assert frames
    assert place.dotted(str(REPROS / "repro_kit" / "run.py")) == "repros.repro_kit.run"
    assert place.dotted("/somewhere/else.py") == place.dotted("<string>") == ""


# --- warnings and log records


@pytest.fixture
def capture() -> Iterator[Capture]:
    handlers, show, filters = logging.Logger.callHandlers, warnings.showwarning, warnings.filters[:]
    made = Capture()
    made.install()
    yield made
    logging.Logger.callHandlers = handlers  # type: ignore[method-assign]
    warnings.showwarning, warnings.filters[:] = show, filters


LOG = Signature.model_validate({"name": "said", "kind": "log", "message": "old format", "package": "packaging"})


def seen(capture: Capture) -> bool:
    wrote = record(0, warnings=capture.warnings, logs=capture.logs)
    return matches(LOG, observation(ok(0, record=wrote), ok(1))) is not None


def says(how: str) -> str:
    return f"import logging, warnings\ndef __init__():\n    {how}\n"


@pytest.mark.parametrize(
    "how", ["logging.getLogger('packaging.version').warning('old format')", "warnings.warn('old format')"]
)
def test_what_speaks_in_the_packages_name_is_not_the_package(capture: Capture, how: str) -> None:
    names = {"__name__": "packaging.version"}
    run_with(says(how), FILE, names)()
    exec(compile(how, "<string>", "exec"), {"logging": logging, "warnings": warnings, "__name__": "packaging"})
    logging.getLogger("packaging.version").handle(
        logging.LogRecord("packaging.version", logging.WARNING, FILE, LINE, "old format", (), None, "__init__")
    )
    assert len(capture.warnings) + len(capture.logs) == 3 and not seen(capture)


def test_what_the_package_says_is_the_packages(
    capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "packaging" / "speaks.py"
    path.parent.mkdir()
    (path.parent / "__init__.py").touch()
    path.write_text(says("logging.getLogger('any').warning('old format')"))
    monkeypatch.setattr(place, "_ENTRIES", (str(tmp_path) + "/",))
    place._roots.cache_clear()
    place.dotted.cache_clear()
    try:
        run_with(path.read_text(), str(path), {"__name__": "x"})()
        assert capture.logs[0]["place"] == "packaging.speaks" and seen(capture)
    finally:
        place._roots.cache_clear()
        place.dotted.cache_clear()


# --- stacks, of which only the files are known

PACKAGES = {"torch": "/venv/lib/python3.11/site-packages/torch", "transformers": "/over/transformers"}


@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("/venv/lib/python3.11/site-packages/torch/nn/functional.py", "torch.nn.functional"),
        ("/venv/lib/python3.11/site-packages/torch/__init__.py", "torch"),
        ("/over/transformers/cache_utils.py", "transformers.cache_utils"),
        ("/venv/lib/python3.11/site-packages/vllm/engine.py", "vllm.engine"),
        ("/usr/lib/python3.11/threading.py", "threading"),
        ("/venv/lib/python3.11/site-packages/transformers/cache_utils.py", ""),
        ("/attempt/files/transformers/cache_utils.py", ""),
        ("/attempt/files/site-packages/torch/nn/functional.py", ""),
        ("<string>", ""),
        ("/checkout/repros/x.py", None),
    ],
)
def test_a_file_of_a_stack_is_placed_by_where_packages_are_installed(file: str, where: str | None) -> None:
    assert lies_in(file, PACKAGES) == where
    found = stack_places(f'Thread 1 (idle): "MainThread"\n    wait ({file}:3)\n', PACKAGES)
    assert [item.place for item in found] == [where]


def test_a_hang_in_a_folder_that_is_called_torch_is_not_torchs() -> None:
    known = Signature.model_validate(
        {"name": "stuck", "kind": "hang", "frames": [{"module": r"torch\..*", "function": "wait"}]}
    )
    for root, is_known in (("/venv/lib/python3.11/site-packages", True), ("/attempt/work", False)):
        stack = f'Thread 1 (idle): "MainThread"\n    wait ({root}/torch/distributed/x.py:3)\n'
        ranks = [ended(n, by="deadline", signal="SIGKILL", stack=stack) for n in (0, 1)]
        for each in ranks:
            each["record"]["packages"] = PACKAGES
        assert (matches(known, observation(*ranks, timed_out=True)) is not None) == is_known


def test_the_outcome_says_where_it_was_when_a_known_text_comes_from_nowhere(restored: None) -> None:
    error = described(borrowed_place())
    known = case(signatures=[RAISES])
    outcome = grade(known, "broken", observation(failed(0, error), failed(1, error)), [known])
    assert outcome.outcome == "infra" and f"packaging/version.py:{LINE + 1}" in outcome.reason
