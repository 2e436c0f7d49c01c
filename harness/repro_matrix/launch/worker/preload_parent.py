"""The trunk of a tree of warm servers: imports what stacks with different overlays have in common, and forks a server
for each of them, which lays its overlay over and imports the rest.

    python preload_parent.py [--until MODULE] FOLDER ...

Requests come on stdin, a socket of whole messages (SOCK_SEQPACKET); replies go to stdout, one JSON object a line:

    <- {"event": "ready", ...} | {"event": "refused", ...}   as of fork_server.py
    -> {"id": ID, "packages": [...], "late": [...], "env": {...}, "overlay": [FOLDER, ...], "cwd": FOLDER},
       and with it the read end of the server's requests, the write end of its replies, and its log
    <- {"event": "started", "id": ID, "pid": ...}, and when it is gone {"event": "ended", "id": ID, ...}
    -> {"end": ID}   kills a server

A server that was forked here is what it would have been from its own start: nothing is imported here that its overlay
could have answered otherwise. What the imports asked for is written down (``Asked``), not listed in advance; a server
whose overlay answers to any of it refuses (kind ``apart``) and is started by itself. A module that asks for what the
first overlay (the FOLDERs) brings is left for the servers (torch 2.2's FSDP leads to transformers): the trunk refuses
(kind ``asked``) and is started again, to import what comes before that module.
"""

from __future__ import annotations

import array
import configparser
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from typing import Any, Iterable, NoReturn, Optional

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)
import fork_attempt  # noqa: E402
import fork_rank  # noqa: E402
import fork_server  # noqa: E402

sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != FOLDER]

MESSAGE = 1 << 20  # bytes; an environment and a few names
FDS = 3
OWN = {"TMPDIR"}  # a server's folder, whichever: attempts have their own
AT_START = {"sitecustomize", "usercustomize"}  # what the interpreter looks for before anybody writes down what is asked
END_S = 10.0  # for servers to end by themselves when the controller is gone: their requests have ended too


class Asked:
    """The first of the finders: finds nothing, and keeps what was looked for while the trunk imported."""

    def __init__(self, without: Optional[Overlay] = None) -> None:
        """``without``: an overlay for which nothing may ask."""
        self.without = without
        self.modules: set[str] = set()  # top-level names
        self.distributions: set[str] = set()
        self.entry_points = False  # those of all distributions
        self.everything = False  # all distributions, for whatever purpose
        self.environment: set[str] = set()  # variables

    def __enter__(self) -> Asked:
        sys.meta_path.insert(0, self)
        # os.environ encodes a name whenever it is asked for one: the one place where every way of asking passes.
        self._encode = os.environ.encodekey, os.environb.encodekey
        os.environ.encodekey, os.environb.encodekey = self._name, self._bytes
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)
        os.environ.encodekey, os.environb.encodekey = self._encode

    def _name(self, name: Any) -> Any:
        self.environment.add(str(name))
        return self._encode[0](name)

    def _bytes(self, name: Any) -> Any:
        self.environment.add(os.fsdecode(name))
        return self._encode[1](name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        top = name.partition(".")[0]
        self.modules.add(top)
        if self.without and top in self.without.modules:
            raise fork_server.Unshared(top)

    def find_distributions(self, context: Any = None) -> Iterable[Any]:
        name = getattr(context, "name", None)
        if name is not None:
            self.distributions.add(canonical(name))
            if self.without and canonical(name) in self.without.distributions:
                raise fork_server.Unshared(f"the version of {name}")
        elif called_from("entry_points"):
            self.entry_points = True
        else:
            self.everything = True
        return ()

    def invalidate_caches(self) -> None:
        """Finders have this."""


def called_from(function: str) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and "metadata" in str(frame.f_globals.get("__name__")):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


class Overlay:
    """What the folders laid over an environment bring: importable names, distributions, groups of entry points."""

    def __init__(self, folders: list[str]) -> None:
        self.modules: set[str] = set()
        self.distributions: set[str] = set()
        self.groups: set[str] = set()
        for folder in folders:
            for name in os.listdir(folder):
                stem, end = os.path.splitext(name)
                if end in (".dist-info", ".egg-info"):
                    self.distributions.add(canonical(stem.partition("-")[0]))
                    self.groups |= groups_of(os.path.join(folder, name, "entry_points.txt"))
                else:
                    self.modules.add(name.partition(".")[0])


def groups_of(file: str) -> set[str]:
    parser = configparser.ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    try:
        parser.read(file, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {""}
    return set(parser.sections())


def why_apart(overlay: Overlay, asked: Asked, loaded: Iterable[str]) -> Optional[str]:
    """Why what the trunk has imported is not what a process that began with the overlay would have, if so."""
    tops = {name.partition(".")[0] for name in loaded} | AT_START
    replaced = sorted(overlay.modules & (tops | asked.modules))
    if replaced:
        return f"the overlay brings {', '.join(replaced)}, which what servers share looks for"
    replaced = sorted(overlay.distributions & asked.distributions)
    if replaced:
        return f"the overlay brings {', '.join(replaced)}, whose version what servers share asks for"
    if asked.everything or "pkg_resources" in tops:
        return "what servers share asks for all packages that are installed"
    groups = sorted(group for group in overlay.groups if group.partition(".")[0] in tops | {""})
    if asked.entry_points and groups:
        return f"the overlay brings entry points ({', '.join(groups)}) for what servers share"
    return None


class Trunk(fork_server.Server):
    """The same loop as a server's; what it forks are servers."""

    def __init__(self, channel: socket.socket, replies: int, asked: Asked) -> None:
        super().__init__(channel.fileno(), replies, fork_attempt.Mark())
        self.channel, self.asked = channel, asked
        self.began = dict(os.environ)  # imports may set some more, and a server would have those too

    def read(self) -> bool:
        fds = array.array("i")
        data, ancillary, _, _ = self.channel.recvmsg(MESSAGE, socket.CMSG_LEN(FDS * fds.itemsize))
        for level, kind, more in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(more[: len(more) - len(more) % fds.itemsize])
        if not data:
            return False
        request = json.loads(data)
        if "end" in request:
            self.end(request["end"], signal.SIGKILL)
        else:
            self.grow(request, list(fds))
        return True

    def grow(self, request: dict[str, Any], fds: list[int]) -> None:
        receive, send = os.pipe()
        own_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self.reply(event="failed", id=request["id"], kind="memory", message=f"no process: {error}")
            pid = -1
        if pid == 0:
            try:
                self.become(request, fds, own_pid, send, [receive, *self.running])
            finally:
                os._exit(70)  # nothing of the server may return into the trunk's loop
        for fd in (*fds, send):
            os.close(fd)
        if pid < 0:
            os.close(receive)
            return
        self.running[receive] = {"id": request["id"], "pid": pid}
        self.reply(event="started", id=request["id"], pid=pid)

    def become(self, request: dict[str, Any], fds: list[int], trunk: int, life: int, others: list[int]) -> NoReturn:
        """A server, from the fork to its end."""
        fork_attempt.prctl(fork_attempt.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != trunk:
            os._exit(1)
        os.setsid()
        fork_attempt.close([*others, self.replies])
        self.channel.close()
        requests, replies, log = fds
        for target in (1, 2):
            os.dup2(log, target)
        os.close(log)
        for fd in (requests, replies):
            os.set_inheritable(fd, False)
        os.chdir(request["cwd"])
        server = fork_server.Server(requests, replies, self.mark, [life])
        env, overlay = request["env"], request["overlay"]
        changed = {name for name in {*self.began, *env} if self.began.get(name) != env.get(name)}
        read = sorted(changed & self.asked.environment - OWN)
        why = f"what servers share reads {', '.join(read)}" if read else None
        why = why or why_apart(Overlay(overlay), self.asked, sys.modules)
        if why:
            server.reply(event="refused", kind="apart", module="", message=why)
            os._exit(1)
        begin({name: env.get(name) for name in changed}, overlay)
        code = 1
        try:
            if fork_server.bring_up(server, request["packages"], request["late"], collapsed=True):
                fork_server.stay(server)
                code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)

    def close(self) -> None:
        """The controller is gone or done. Servers see that themselves, and end their attempts in order."""
        limit = time.monotonic() + END_S
        while self.running and time.monotonic() < limit:
            ready, _, _ = select.select(list(self.running), [], [], 0.2)
            for fd in ready:
                self.ended(fd)
        super().close()


def begin(changed: dict[str, Optional[str]], overlay: list[str]) -> None:
    """What the interpreter makes of its environment when it starts."""
    fork_rank.environment(changed)
    folders = [os.path.abspath(folder) for folder in overlay]
    sys.path[:] = [*folders, *(path for path in sys.path if path not in folders)]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    tempfile.tempdir = None
    importlib.invalidate_caches()


def main(arguments: list[str]) -> int:
    until = arguments[1] if arguments[:1] == ["--until"] else ""
    requests, replies = fork_server.streams()
    asked = Asked(Overlay(arguments[2:] if until else arguments))
    trunk = Trunk(socket.socket(fileno=requests), replies, asked)
    with asked:
        up = fork_server.bring_up(trunk, [], [], until)
    if not up:
        return 1
    fork_server.stay(trunk)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
