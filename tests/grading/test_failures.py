"""Where code lies, which rank failed first and why, and the failure's id.

Code that only pretends to be an installed package's does not count as that package's. A small
installed package has upstream's role (``packaging`` raises by itself); the kit records, the grader
matches.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import (
    PEER,
    SITE,
    case,
    check,
    control,
    ended,
    exception,
    failed,
    frame,
    matches,
    observation,
    ok,
    peer_failed,
    record,
)
from packaging import version
from repro_matrix.config.schema import Signature
from repro_matrix.grading import root_cause
from repro_matrix.grading.grade import grade
from repro_matrix.grading.observation import CodeLocation, Evidence, RaisedException, parse_threads
from repro_matrix.grading.root_cause import all_failure_ids, failure_ids, find_failures
from repro_matrix.grading.verdict import judge
from repro_matrix.paths import REPROS
from repro_matrix.records.outcome import FailureId, Outcome, Primary, Recognized

sys.path.insert(0, str(REPROS))
from repro_kit import code_location as code_location
from repro_kit.record import Capture, describe_exception

# -- lost peers


@pytest.mark.parametrize(
    ("kind", "message", "lost"),
    [
        *(
            (kind, "anything", True)
            for kind in ("DistStoreError", "DistNetworkError", "EOFError", "BrokenPipeError")
        ),
        ("RuntimeError", PEER, True),
        ("OSError", "Broken pipe", True),
        ("ConnectionError", "Connection refused", True),
        (
            "DistBackendError",
            "NCCL error: remote process exited or there was a network error, NCCL 2.21.5",
            True,
        ),
        ("DistBackendError", "[3] is setting up NCCL communicator: Socket Timeout", True),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", True),
        ("TimeoutError", "wait timeout after 10 ms", True),
        ("ValueError", PEER, False),
        ("RuntimeError", "size mismatch", False),
        ("DistBackendError", "invalid", False),
    ],
)
def test_peer_error_by_type_and_message(kind: str, message: str, lost: bool) -> None:
    assert root_cause.is_peer_error(RaisedException(kind, frozenset({kind}), message, ())) is lost
    there = Evidence(
        observation(failed(0, exception(kind, message), at=101.0), failed(1, at=102.0))
    )
    assert find_failures(there).ranks == ({1} if lost else {0, 1}), (
        "it came first, and still is not the failure"
    )


def test_first_failure_is_the_earliest_primary_one() -> None:
    ranks = [peer_failed(0, 101.0), failed(1, at=109.0), failed(2, at=108.0), ended(3)]
    found = find_failures(Evidence(observation(*ranks)))
    assert [failure.rank for failure in found.primary] == [2, 1] and found.first is found.primary[0]
    assert found.ranks == {1, 2} and found.excused == {0, 3}
    alone = find_failures(Evidence(observation(peer_failed(0), ok(1))))
    assert alone.ranks == {0} and not alone.excused, (
        "a lost peer is the failure where it is the only one"
    )


# -- how one rank failed

UNDONE = record(0, done=False, phase="body")
IN_NORM = "transformers.models.qwen2.modeling_qwen2.forward"
EXIT_15 = record(0, done=False, exception=exception("SystemExit", "15"))


@pytest.mark.parametrize(
    ("changes", "kind", "type_", "where", "secondary"),
    [
        ({}, None, "", "", False),
        ({"record": UNDONE}, "left", "exit code 0", "", False),
        (
            {"exit_code": -11, "record": UNDONE, "stack": "    f (/x/y.py:1)"},
            "signal",
            "SIGSEGV",
            "x.y.f",
            False,
        ),
        ({"exit_code": -6}, "signal", "SIGABRT", "teardown, after its done marker", False),
        (
            {"exit_code": -6, "record": UNDONE, "log_tail": f"{PEER}\nAborted\n"},
            "signal",
            "SIGABRT",
            "",
            True,
        ),
        ({"exit_code": -11, "record": UNDONE, "log_tail": PEER}, "signal", "SIGSEGV", "", False),
        (
            {"exit_code": 3, "record": UNDONE, "log_tail": f"{PEER}\n\n"},
            "exit",
            "exit code 3",
            "",
            True,
        ),
        (
            {"exit_code": 3, "record": UNDONE, "log_tail": f"{PEER}\nbad"},
            "exit",
            "exit code 3",
            "",
            False,
        ),
        (
            {"terminated_by": "launcher", "exit_code": None, "signal": "SIGTERM", "record": UNDONE},
            None,
            "",
            "",
            False,
        ),
        *(
            (
                {"terminated_by": by, "exit_code": 1, "record": EXIT_15},
                "exception",
                "SystemExit",
                IN_NORM,
                other,
            )
            for by, other in (("launcher", True), ("self", False))
        ),
    ],
)
def test_how_a_rank_failed(
    changes: Any, kind: str | None, type_: str, where: str, secondary: bool
) -> None:
    failure = root_cause.failure_of(Evidence(observation(ok(0, **changes))).ranks[0])
    found = failure and (failure.kind, failure.type, failure.location, failure.secondary)
    assert found == (None if kind is None else (kind, type_, where, secondary))


# -- reading records


def test_cause_counts_where_the_wrapper_repeats_its_message() -> None:
    for wrapper, cause, length in (
        ("it is the size", "the size", 2),
        ("so", "the size", 1),
        ("so sad!", "sad", 1),
    ):
        error = exception("RuntimeError", wrapper, cause=exception("ValueError", cause))
        assert len(Evidence(observation(failed(0, error))).ranks[0].chain) == length


# -- errors of the script


def placed(origin: str, file: str = "", line: int = 31) -> dict[str, Any]:
    return {**frame(origin, "forward", file or None), "code_location": origin, "line": line}


OWN = placed("repros.some_case", "/home/me/project/repros/some_case.py")
KIT = placed("repros.kit.models", "/home/me/project/repros/repro_kit/models.py", 7)
NORM, TORCH = placed("transformers.models.qwen2.modeling_qwen2"), placed("torch.nn.functional")
CHECK = {**placed("torch"), "function": "_check_with"}
STANDARD, GENERATED = placed("json.decoder"), placed("", "<string>", 1)
IMITATED = placed("", "/venv/lib/python3.11/site-packages/transformers/models/x.py", 12)


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ([OWN], "repros/some_case.py:31"),
        ([OWN, NORM, OWN], "repros/some_case.py:31"),  # a hook of the script's
        ([OWN, KIT], "repros/repro_kit/models.py:7"),
        ([OWN, STANDARD], "repros/some_case.py:31"),
        ([OWN, GENERATED, STANDARD], "repros/some_case.py:31"),
        ([OWN, CHECK, CHECK], "repros/some_case.py:31"),
        ([OWN, TORCH, IMITATED], "transformers/models/x.py:12"),
        *(
            ([OWN, *frames], None)
            for frames in (
                [NORM],
                [NORM, GENERATED],
                [TORCH, STANDARD],
                [KIT, TORCH],
                [TORCH, CHECK],
            )
        ),
    ],
)
@pytest.mark.parametrize("kind", ["NameError", "ImportError"])
def test_script_error_by_its_innermost_frame(
    frames: list[dict[str, Any]], where: str | None, kind: str
) -> None:
    error = exception(kind, "name 'x' is not defined", frames)
    for known in (case(), control()):
        outcome = grade(
            known,
            next(iter(known.variants)),
            observation(failed(0, error), failed(1, error)),
            [known],
        )
        assert outcome.infra_error == ("script_error" if where else None)
        assert where is None or where in outcome.reason


def test_script_error_counts_only_where_it_came_first() -> None:
    late, early = (
        exception("TimeoutError", "rank 0 did not write", [OWN]),
        exception(frames=[OWN, NORM]),
    )
    for at, infra_error in ((1.0, None), (9.0, "script_error")):
        seen = observation(failed(0, early, at), failed(1, late, 5.0))
        assert grade(case(), "unfixed", seen, []).infra_error == infra_error
    lost = Evidence(observation(failed(0, exception("RuntimeError", PEER, [OWN])), ended(1)))
    assert root_cause.script_error(find_failures(lost)) is None, (
        "a lost peer is no mistake of the script"
    )


# -- failure ids

CASE = case()
REFUSED = exception(
    "ValueError", "Type fp16 is not supported", [frame("deepspeed.runtime.engine", "_check")]
)
REFUSED_ID = "ValueError in deepspeed.runtime.engine._check"


def ids_of(found: Iterable[FailureId]) -> list[str]:
    return [str(item) for item in found]


def graded(*ranks: dict[str, Any]) -> Outcome:
    return grade(CASE, "fix", observation(*ranks), [CASE])


WRONG = [check("updates", False), check("losses", False)]


@pytest.mark.parametrize(
    ("ranks", "ids"),
    [
        ([ok(0), ok(1)], []),
        ([failed(0), failed(1)], ["some-case/norm"]),
        ([failed(0, REFUSED), ok(1)], [REFUSED_ID]),
        (
            [ok(0, record=record(0, checks=WRONG)), ok(1)],
            ["check logits", "check updates", "check losses"],
        ),
        (
            [ok(0, exit_code=None, signal="SIGSEGV", stack="    f (/a/torch/x.py:1)"), ok(1)],
            ["SIGSEGV"],
        ),
        ([ok(0, exit_code=7), ok(1)], ["exit code 7"]),
        ([ok(0), ok(1, terminated_by="launcher")], ["unfinished"]),
    ],
)
def test_failure_ids_of_one_attempt(ranks: Any, ids: list[str]) -> None:
    assert ids_of(failure_ids(CASE.slug, graded(*ranks))) == ids


def test_failure_of_another_case_is_identified_by_its_signature() -> None:
    tied, warns = (
        Recognized("tied", "lm-head", (0,), "exception", "x"),
        Recognized("old", "warns", (0,), "log", "y"),
    )
    other = Outcome(
        "other_failure", "x", (tied, warns), Primary(0, "RuntimeError", "m", "torch.nn.linear")
    )
    assert ids_of(failure_ids("some-case", other)) == ["tied/lm-head"]
    assert ids_of(failure_ids("some-case", replace(other, recognized=(warns,)))) == [
        "RuntimeError in torch.nn.linear"
    ]


def test_verdict_carries_the_ids_of_the_failing_variant() -> None:
    reproduced, refused = graded(failed(0), failed(1)), graded(failed(0, REFUSED), ok(1))
    for unfixed, fix in (
        (reproduced, refused),
        (refused, reproduced),
    ):  # of SIGNATURE_MISMATCH: the unfixed variant's
        assert ids_of(judge(CASE, {"unfixed": [unfixed], "fix": [fix]})["fix"].failure_ids) == [
            REFUSED_ID
        ]


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=3).map(tuple), max_size=4),
    st.randoms(use_true_random=False),
)
def test_failure_ids_do_not_depend_on_the_order_of_attempts(
    attempts: list[Any], random: Any
) -> None:
    outcomes = [Outcome("other_failure", "x", failed=names) for names in attempts if names]
    before = all_failure_ids("some-case", outcomes)
    random.shuffle(outcomes)
    assert all_failure_ids("some-case", outcomes) == before
    assert {item.check for item in before} == {name for names in attempts for name in names}


def test_remote_code_has_the_same_location_in_every_process() -> None:
    """transformers names its module by the folder that it was read from."""
    portable = "transformers_modules.*.modeling_qwen.generate"
    for location in (
        portable,
        *(portable.replace("*", folder) for folder in ("qwen_4711", "Qwen.7B.ef3")),
    ):
        assert FailureId(type="E", code_location=location).code_location == portable


# -- code locations

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


def reproduced(error: dict[str, Any], wanted: dict[str, Any] = RAISES) -> bool:
    return (
        matches(Signature.model_validate(wanted), observation(failed(0, error), failed(1, error)))
        is not None
    )


def run_with(text: str, file: str, names: dict[str, Any]) -> Any:
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return names["__init__"]


@pytest.fixture
def restored() -> Iterator[None]:
    code, modules = version.Version.__init__.__code__, dict(sys.modules)
    yield
    version.Version.__init__.__code__ = code
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


def borrowed_place(folder: Path) -> Any:
    """exec with the name of an installed module and file, at the very line of a function of that
    name."""
    return lambda: run_with("\n" * (LINE - 1) + BODY, FILE, {"__name__": "packaging.version"})(None)


def replaced_code_object(folder: Path) -> Any:
    like = version.Version.__init__.__code__
    code = run_with(BODY, FILE, dict(vars(version))).__code__
    names = {
        "co_name": like.co_name,
        "co_firstlineno": like.co_firstlineno,
        "co_filename": like.co_filename,
    }
    version.Version.__init__.__code__ = code.replace(**names)
    return lambda: version.parse("1.0")


def loaded_under_its_name(folder: Path) -> Any:
    """A file of the script's, loaded as a module of the package."""
    path = folder / "site-packages" / "packaging" / "version.py"
    path.parent.mkdir(parents=True)
    path.write_text(BODY)
    spec: Any = importlib.util.spec_from_file_location("packaging.version_two", path)
    module = sys.modules["packaging.version_two"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda: module.__init__(None)


@pytest.mark.parametrize("imitate", [borrowed_place, replaced_code_object, loaded_under_its_name])
def test_imitated_package_does_not_match(imitate: Any, tmp_path: Path, restored: None) -> None:
    honest = described(lambda: version.Version("no version"))
    assert reproduced(honest) and reproduced(honest, FRAMED)
    error = described(imitate(tmp_path))
    assert error["message"] == TEXT, "the imitation must get as far as raising the known text"
    assert not error["frames"][-1]["code_location"].startswith("packaging")
    assert not reproduced(error) and not reproduced(error, FRAMED)


def test_overlay_and_remote_code_are_located(tmp_path: Path) -> None:
    """As a stack lays a release over an environment; and a package imported late, and remote
    code."""
    over, remote = (
        tmp_path / "over" / "packaging",
        tmp_path / "modules" / "transformers_modules" / "qwen",
    )
    for folder, name in ((over, "other.py"), (remote, "modeling_qwen.py")):
        folder.mkdir(parents=True)
        (folder / name).write_text("def fails():\n    raise ValueError('there')\n")
    (over / "__init__.py").write_text(
        "def late():\n    import packaging.other\n    packaging.other.fails()\n"
    )
    code = """
import json, runpy, sys
sys.path.insert(0, sys.argv[1])
from repro_kit.record import describe_exception
import packaging
for call in (packaging.late, runpy.run_path(sys.argv[2])["fails"]):
    try:
        call()
    except ValueError as error:
        print(*(frame["code_location"] for frame in describe_exception(error)["frames"]))
"""
    env = {
        **os.environ,
        "PYTHONPATH": str(over.parent),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    words = [sys.executable, "-c", code, str(REPROS), str(remote / "modeling_qwen.py")]
    overlaid, cached = subprocess.check_output(words, env=env, text=True, cwd=tmp_path).splitlines()
    assert overlaid.split()[-2:] == ["packaging", "packaging.other"]
    assert cached.split()[-1] == "transformers_modules.qwen.modeling_qwen"


# --- warnings and log records


@pytest.fixture
def capture() -> Iterator[Capture]:
    handlers, show, filters = logging.Logger.callHandlers, warnings.showwarning, warnings.filters[:]
    made = Capture()
    made.install()
    yield made
    logging.Logger.callHandlers = handlers  # type: ignore[method-assign]
    warnings.showwarning, warnings.filters[:] = show, filters


def seen(capture: Capture, package: str = "packaging", message: str = "old format") -> bool:
    known = {"name": "said", "kind": "log", "message": message, "package": package}
    wrote = record(0, warnings=capture.warnings, logs=capture.logs)
    return (
        matches(Signature.model_validate(known), observation(ok(0, record=wrote), ok(1)))
        is not None
    )


@pytest.mark.parametrize(
    "how", ["logging.getLogger('packaging').warning('old format')", "warnings.warn('old format')"]
)
def test_log_in_the_name_of_the_package_does_not_match(capture: Capture, how: str) -> None:
    run_with(
        f"import logging, warnings\ndef __init__(): {how}", FILE, {"__name__": "packaging.version"}
    )()
    exec(
        compile(how, "<string>", "exec"),
        {"logging": logging, "warnings": warnings, "__name__": "packaging"},
    )
    logging.getLogger("packaging.version").handle(
        logging.LogRecord(
            "packaging.version", logging.WARNING, FILE, LINE, "old format", (), None, "__init__"
        )
    )
    assert len(capture.warnings) + len(capture.logs) == 3 and not seen(capture)


def test_warning_of_the_package_matches(capture: Capture) -> None:
    assert jsonschema.__version__
    assert capture.warnings[0]["code_location"] == "jsonschema" and seen(
        capture, "jsonschema", "is deprecated"
    )


# -- stacks, of which only the files are known

VENV = "/venv/lib/python3.11/site-packages"
PACKAGES = {"torch": f"{VENV}/torch", "transformers": "/over/transformers"}


@pytest.mark.parametrize(
    ("file", "where"),
    [
        (f"{VENV}/torch/nn/functional.py", "torch.nn.functional"),
        (f"{VENV}/torch/__init__.py", "torch"),
        ("/over/transformers/cache_utils.py", "transformers.cache_utils"),
        (f"{VENV}/vllm/engine.py", "vllm.engine"),
        ("/usr/lib/python3.11/threading.py", "threading"),
        (f"{VENV}/transformers/cache_utils.py", ""),
        ("/attempt/files/transformers/cache_utils.py", ""),
        ("/attempt/site-packages/torch/nn/functional.py", ""),
        ("<string>", ""),
        ("/checkout/repros/x.py", None),
    ],
)
def test_origin_of_a_stacks_file(file: str, where: str | None) -> None:
    (thread,) = parse_threads(f'Thread 1 (idle): "MainThread"\n    wait ({file}:3)\n', PACKAGES)
    assert [frame.origin for frame in thread.frames] == [where]


@pytest.mark.parametrize(
    ("location", "modules", "project", "known", "text"),
    [
        (CodeLocation("torch.x", "", "f", origin=""), (), False, True, "?.f"),
        (CodeLocation("", "/w/x.py", "f", origin=""), (), False, True, "/w/x.py.f"),
        (CodeLocation("", "", "f", origin="repros.x"), (), True, True, "repros.x.f"),
        (CodeLocation("a", "", "f", origin="torch.nn"), ("torch.nn",), False, True, "torch.nn.f"),
        (CodeLocation("torch.x", "", "f"), ("torch.x",), False, True, "torch.x.f"),
        (CodeLocation("builtins", "<string>", "f"), (), False, False, "builtins.f"),
        *(
            (CodeLocation("", file, "f"), None, project, True, None)
            for file, project in (
                ("C:\\me\\repros\\repro_kit\\run.py", True),
                ("/x/repros.py", False),
                ("/x/repros/x.so", False),
                ("/me/repros/.venv/lib/python3.11/site-packages/torch/x.py", False),
                ("/me/repros/cache/transformers_modules/qwen/modeling_qwen.py", False),
            )
        ),
        (
            CodeLocation("repro_kit.run", "/x.py", "f"),
            ("repro_kit.run",),
            True,
            True,
            "repro_kit.run.f",
        ),
        *(
            (CodeLocation("", file, "f"), names, False, True, f"{names[0]}.f")
            for file, names in (
                (f"{SITE}/torch/./x/../y.py", ("torch.x.y",)),
                (f"{SITE}/torch/nn/__init__.py", ("torch.nn",)),
                ("C:\\env\\Lib\\site-packages\\torch\\nn.py", ("torch.nn",)),
                ("over/x.py", ("over.x", "x")),
            )
        ),
        (CodeLocation("reprosx", "/x.py", "f"), ("reprosx",), False, True, "reprosx.f"),
    ],
)
def test_code_location(
    location: CodeLocation, modules: Any, project: bool, known: bool, text: str | None
) -> None:
    assert (location.is_project, location.is_known) == (project, known)
    assert text is None or (str(location), location.modules) == (text, modules)


PY_SPY = f"""# py-spy
Thread 15849 (idle): "Thread-1"
    wait (/usr/lib/python3.11/threading.py:324)
Thread 15841 (idle): "MainThread"
    barrier ({SITE}/torch/distributed/x.py:5356)
    _logger.<locals>.wrapper ({SITE}/torch/distributed/y.py:83)
"""
FAULTHANDLER = f"""Thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
Current thread 0x00007f9bfc5e4b80 (most recent call first):
  File "{SITE}/torch/distributed/x.py", line 5356 in barrier
  File "{SITE}/torch/distributed/y.py", line 83 in wrapper
"""


@pytest.mark.parametrize("dump", [PY_SPY, FAULTHANDLER])
def test_parse_threads_puts_the_main_thread_first(dump: str) -> None:
    main, other = parse_threads(dump)
    assert (
        main.main
        and [frame.function for frame in main.frames] == ["barrier", "wrapper"]
        and len(main.lines) == 2
    )
    assert not other.main and [frame.function for frame in other.frames] == ["wait"]
    assert parse_threads("") == []
