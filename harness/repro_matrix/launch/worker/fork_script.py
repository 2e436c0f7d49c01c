"""A rank of somebody's own script, forked from a warm server: from here on what ``python script.py`` would be.

Standard library only, Python 3.9. Beside what holds for every rank (fork_rank.py), the process ends as the interpreter
ends it: excepthooks, threads, atexit and the teardown of its modules.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import traceback
import types
from typing import Any, NoReturn

OURS = ("elastic", "fork_server", "fork_attempt", "fork_script")


def run(spec: dict[str, Any], rank: int) -> NoReturn:
    """``spec["own"]``: the script's arguments, and the folder of the hooks that its processes begin with."""
    own = spec["own"]
    hooks = _hooks(own["hooks"])
    for name in OURS:  # a script may have modules of these names beside it
        sys.modules.pop(name, None)
    sys.argv = [spec["script"], *own["arguments"]]
    sys.orig_argv = [sys.executable, "-u", *sys.argv]  # type: ignore[attr-defined,unused-ignore]  # Python 3.10
    sys.modules["__main__"] = types.ModuleType("__main__")  # not the server's: it has a file
    hooks.begin()  # as from sitecustomize: before the script's folder is on the path
    sys.path.insert(0, os.path.dirname(os.path.abspath(spec["script"])))
    end(execute(spec["script"]))


def _hooks(folder: str) -> Any:
    """The hooks as a module that is in nobody's way. As the interpreter's sitecustomize it would begin at
    once, and look for the environment's own, which the server has run."""
    path = os.path.join(folder, "sitecustomize.py")
    spec = importlib.util.spec_from_file_location("repro_hooks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def execute(script: str) -> int:
    """The exit code that the interpreter would end with."""
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main.__dict__.update(
        __file__=script, __builtins__=builtins, __loader__=loader, __package__=None, __spec__=None, __cached__=None
    )
    sys.modules["__main__"] = main
    try:
        with open(script, "rb") as source:
            code = compile(source.read(), script, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as done:
        if done.code is None or isinstance(done.code, int):
            return (done.code or 0) & 0xFF
        print(done.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _uncaught(error)
        return 1
    return 0


def _uncaught(error: BaseException) -> None:
    """As the interpreter does, and without the frames of this file."""
    tb = error.__traceback__.tb_next if error.__traceback__ else None
    error = error.with_traceback(tb)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, tb)
    except BaseException as second:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(type(error), error, tb)


def end(code: int) -> NoReturn:
    """What the interpreter does at its end, all of it."""
    py_exit = ctypes.pythonapi.Py_Exit
    py_exit.argtypes = [ctypes.c_int]
    py_exit(code)
    os._exit(code)  # never reached
