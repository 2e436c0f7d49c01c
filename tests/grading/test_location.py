"""Code locations: code that only pretends to be an installed package's does not count as that package's.

A small installed package has upstream's role (``packaging`` raises by itself); the kit records, the grader matches.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from observations import SITE, ended, failed, matches, observation, ok, record
from packaging import version
from repro_matrix.config.schema import Signature
from repro_matrix.grading.observation import (
    CodeLocation,
    is_project_code,
    module_names,
    origin_of,
    parse_threads,
)
from repro_matrix.paths import REPROS

sys.path.insert(0, str(REPROS))
from repro_kit import code_location as code_location
from repro_kit.record import Capture, describe_exception

FILE = str(version.__file__)
LINE = version.Version.__init__.__code__.co_firstlineno
TEXT = "Invalid version: 'no version'"
RAISES = {"name": "known", "kind": "exception", "type": "ValueError", "message": "Invalid version",
          "package": "packaging"}  # fmt: skip
FRAMED = {**RAISES, "frames": [{"module": r"packaging\.version", "function": "__init__"}]}
BODY = f"def __init__(self, *rest):\n    raise ValueError({TEXT!r})\n"


def described(call: Callable[[], Any]) -> dict[str, Any]:
    with pytest.raises(Exception) as caught:
        call()
    return describe_exception(caught.value)


def reproduced(error: dict[str, Any], wanted: dict[str, Any] = RAISES) -> bool:
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


def borrowed_place() -> Any:
    """exec with the name of an installed module and file, at the very line of a function of that name."""
    return lambda: run_with("\n" * (LINE - 1) + BODY, FILE, {"__name__": "packaging.version"})(None)


def replaced_code_object() -> Any:
    like = version.Version.__init__.__code__
    code = run_with(BODY, FILE, dict(vars(version))).__code__
    names = {"co_name": like.co_name, "co_firstlineno": like.co_firstlineno, "co_filename": like.co_filename}
    version.Version.__init__.__code__ = code.replace(**names)
    return lambda: version.parse("1.0")


def loaded_under_its_name(folder: Path) -> Any:
    """A file of the script's, loaded as a module of the package."""
    path = folder / "site-packages" / "packaging" / "version.py"
    path.parent.mkdir(parents=True)
    path.write_text(BODY)
    spec = importlib.util.spec_from_file_location("packaging.version_two", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["packaging.version_two"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda: module.__init__(None)


IMITATIONS = [borrowed_place, replaced_code_object, loaded_under_its_name]


def test_error_of_the_package_matches() -> None:
    error = described(lambda: version.Version("no version"))
    assert error["frames"][-1]["code_location"] == "packaging.version"
    assert reproduced(error) and reproduced(error, FRAMED)


@pytest.mark.parametrize("imitate", IMITATIONS, ids=[each.__name__ for each in IMITATIONS])
def test_imitated_package_does_not_match(imitate: Any, tmp_path: Path, restored: None) -> None:
    error = described(imitate(tmp_path) if imitate.__code__.co_argcount else imitate())
    assert error["message"] == TEXT, "the imitation must get as far as raising the known text"
    assert not error["frames"][-1]["code_location"].startswith("packaging")
    assert not reproduced(error) and not reproduced(error, FRAMED)


def test_frame_of_a_compiled_module_has_its_origin() -> None:
    frames = described(lambda: yaml.load("a: [", Loader=yaml.CSafeLoader))["frames"]
    assert frames[-1]["file"].endswith(".pyx") and frames[-1]["code_location"] == "yaml._yaml"
    fake = compile("raise ValueError('x')", "yaml/_yaml.pyx", "exec")
    assert code_location.of_code(fake, vars(sys.modules["yaml._yaml"])) == "", "code that runs was not compiled"


def test_overlay_and_remote_code_are_located(tmp_path: Path) -> None:
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
        out.append([frame["code_location"] for frame in describe_exception(error)["frames"]])
print(json.dumps(out))
"""
    env = {**os.environ, "PYTHONPATH": str(over.parent), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    words = [sys.executable, "-c", code, str(REPROS), str(remote / "modeling_qwen.py")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True, cwd=tmp_path)
    root, *frames = json.loads(done.stdout)
    assert root == str(remote.parent)
    assert frames[0][-2:] == ["packaging", "packaging.other"]
    assert frames[1][-1] == "transformers_modules.qwen.modeling_qwen"


def test_project_code_has_a_location_of_its_own() -> None:
    assert code_location.dotted(str(REPROS / "repro_kit" / "run.py")) == "repros.repro_kit.run"
    assert code_location.dotted("/somewhere/else.py") == code_location.dotted("<string>") == ""


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
def test_log_in_the_name_of_the_package_does_not_match(capture: Capture, how: str) -> None:
    names = {"__name__": "packaging.version"}
    run_with(says(how), FILE, names)()
    exec(compile(how, "<string>", "exec"), {"logging": logging, "warnings": warnings, "__name__": "packaging"})
    logging.getLogger("packaging.version").handle(
        logging.LogRecord("packaging.version", logging.WARNING, FILE, LINE, "old format", (), None, "__init__")
    )
    assert len(capture.warnings) + len(capture.logs) == 3 and not seen(capture)


def test_log_of_the_package_matches(capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "packaging" / "speaks.py"
    path.parent.mkdir()
    (path.parent / "__init__.py").touch()
    path.write_text(says("logging.getLogger('any').warning('old format')"))
    monkeypatch.setattr(code_location, "_ENTRIES", (str(tmp_path) + "/",))
    code_location._roots.cache_clear()
    code_location.dotted.cache_clear()
    try:
        run_with(path.read_text(), str(path), {"__name__": "x"})()
        assert capture.logs[0]["code_location"] == "packaging.speaks" and seen(capture)
    finally:
        code_location._roots.cache_clear()
        code_location.dotted.cache_clear()


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
        ("/attempt/files/site-packages/torch/nn/functional.py", ""), ("<string>", ""),
        ("/checkout/repros/x.py", None),
    ],
)  # fmt: skip
def test_origin_of_a_stacks_file(file: str, where: str | None) -> None:
    assert origin_of(file, PACKAGES) == where
    (thread,) = parse_threads(f'Thread 1 (idle): "MainThread"\n    wait ({file}:3)\n', PACKAGES)
    assert [frame.origin for frame in thread.frames] == [where]


@pytest.mark.parametrize(("root", "is_torch"), [("/venv/lib/python3.11/site-packages", True), ("/attempt/work", False)])
def test_hang_in_a_folder_named_torch_does_not_match(root: str, is_torch: bool) -> None:
    frames = [{"module": r"torch\..*", "function": "wait"}]
    known = Signature.model_validate({"name": "stuck", "kind": "hang", "frames": frames})
    stack = f'Thread 1 (idle): "MainThread"\n    wait ({root}/torch/distributed/x.py:3)\n'
    ranks = [ended(n, by="timeout", signal="SIGKILL", stack=stack) for n in (0, 1)]
    for each in ranks:
        each["record"]["packages"] = PACKAGES
    assert (matches(known, observation(*ranks, timed_out=True)) is not None) is is_torch


# -- names


@pytest.mark.parametrize(
    ("file", "names"),
    [
        (f"{SITE}/torch/nn/modules/__init__.py", ("torch.nn.modules",)),
        ("C:\\env\\Lib\\site-packages\\torch\\nn\\functional.py", ("torch.nn.functional",)),
        ("/usr/lib/python3.11/json/decoder.py", ("json.decoder",)),
        ("/opt/over/torch/x.py", ("opt.over.torch.x", "over.torch.x", "torch.x", "x")),
        ("torch/x.py", ("torch.x", "x")),
    ],
)
def test_module_names_of_a_file(file: str, names: tuple[str, ...]) -> None:
    assert module_names(file) == names


@pytest.mark.parametrize(
    ("module", "file", "project"),
    [
        ("__main__", "", True), ("repro_kit.run", "/elsewhere/x.py", True), ("repros.x", "/elsewhere/x.py", True),
        ("", "/home/me/repros/repro_kit/run.py", True), ("torch.nn", "/home/me/repros/x.py", True),
        ("reprosx", "/elsewhere/x.py", False), ("kitchen", "", False), ("", "/x/repros.py", False),
        ("", "/x/repros/x.so", False), ("x", "/me/repros/.venv/lib/python3.11/site-packages/torch/x.py", False),
        ("x", "/me/repros/cache/transformers_modules/qwen/modeling_qwen.py", False),
        ("x", "/usr/lib/python3.11/json/decoder.py", False),
    ],
)  # fmt: skip
def test_project_code_by_module_and_file(module: str, file: str, project: bool) -> None:
    assert is_project_code(module, file) is project


@pytest.mark.parametrize(
    ("location", "modules", "project", "known", "text"),
    [
        (CodeLocation("torch.x", "", "f", origin=""), (), False, True, "?.f"),
        (CodeLocation("", "/w/x.py", "f", origin=""), (), False, True, "/w/x.py.f"),
        (CodeLocation("", "", "f", origin="repros.x"), (), True, True, "repros.x.f"),
        (CodeLocation("a", "", "f", origin="torch.nn"), ("torch.nn",), False, True, "torch.nn.f"),
        (CodeLocation("torch.x", "", "f"), ("torch.x",), False, True, "torch.x.f"),
        (CodeLocation("builtins", "<string>", "f"), (), False, False, "builtins.f"),
        (CodeLocation("", "<string>", "f"), (), False, False, "?.f"),
        (CodeLocation("__main__", "/x.py", "f"), ("__main__",), True, True, "__main__.f"),
    ],
)
def test_code_location(location: CodeLocation, modules: Any, project: bool, known: bool, text: str) -> None:
    assert (location.modules, location.is_project, location.is_known) == (modules, project, known)
    assert str(location) == text


PY_SPY = f"""# py-spy
Thread 15849 (idle): "Thread-1"
    wait (/usr/lib/python3.11/threading.py:324)
Thread 15841 (idle): "MainThread"
    barrier ({SITE}/torch/distributed/distributed_c10d.py:5356)
    _exception_logger.<locals>.wrapper ({SITE}/torch/distributed/c10d_logger.py:83)
"""
FAULTHANDLER = f"""Thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
Current thread 0x00007f9bfc5e4b80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
"""


@pytest.mark.parametrize("dump", [PY_SPY, FAULTHANDLER])
def test_parse_threads_puts_the_main_thread_first(dump: str) -> None:
    main, other = parse_threads(dump)
    assert main.main and [frame.function for frame in main.frames] == ["barrier", "wrapper"] and len(main.lines) == 2
    assert not other.main and [frame.function for frame in other.frames] == ["wait"]
    assert parse_threads("") == []
