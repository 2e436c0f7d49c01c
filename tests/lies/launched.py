"""Lies told by real ranks: cases of their own in a copy of the checkout, all measured by one `repro matrix` there."""

from __future__ import annotations

import copy as copies
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .copies import Copy
from .lie import Bench, Lie

Json = dict[str, Any]
CELL = {"model": ["llama-3.2-1b"], "strategy": ["fsdp"]}
AFTER_WRAP = "    reference.begin(trained.each())\n"
STEP = "            trained.step(loss)\n"
CHECKS = "    reference.check(run, losses=losses, last=trained.each())\n"
CHECKPOINT = "    check_checkpoint(run,"
WRAP = "    trained = wrap(run, model, RATES[dtype], weights)"


@dataclass(frozen=True)
class Training:
    """train_step.py with a text replaced by another, or put before it."""

    where: str
    code: str = ""
    instead: str | None = None
    strategy: str = "fsdp"

    def changes(self) -> tuple[tuple[str, str], ...]:
        lines = "".join(f"    {line}\n" for line in self.code.splitlines())
        return ((self.where, self.instead if self.instead is not None else lines + self.where),)


@dataclass(frozen=True)
class Forged:
    """ddp_unfinished_reduction.py, mended, with code after the training that pretends to be the known failure."""

    code: str


@dataclass(frozen=True)
class Declared:
    """ddp-unfinished-reduction with keys of its file, or texts of its script, changed."""

    changes: tuple[tuple[str, Any], ...] = ()
    script: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Resumed:
    """A training that was measured; then its document is edited (or its script), and the run goes on."""

    first: Training | None
    edit: Callable[[Json, Json], None] = lambda document, honest: None  # the document, and the honest training's
    then: Training | None = None  # what its script becomes


SAID = "Expected to have finished reduction in the prior iteration before starting a new one."
FORGE = (
    '''
def forge(run: Run) -> None:
    said = "'''
    + SAID
    + """"
    how = run.flags["forge"]
"""
)


def _plant(copy: Copy, plants: Sequence[Any]) -> list[tuple[str, str]]:
    """Cases into the copy; of each plant the (case, arm) whose verdict is asked for."""
    where: list[tuple[str, str]] = []
    forged: list[str] = []
    for number, plant in enumerate(plants):
        slug = f"lie-{number}"
        if isinstance(plant, Forged):
            forged.append(plant.code)
            where.append(("lie-forged", f"forged-{len(forged)}"))
        elif isinstance(plant, Declared):
            copy.case(slug, "ddp-unfinished-reduction", plant.script, arms=BOTH, **dict(plant.changes))
            where.append((slug, "find-unused"))
        else:
            _train(copy, slug, plant.first if isinstance(plant, Resumed) else plant)
            where.append((slug, "control"))
    if forged:
        _forge(copy, forged)
    return where


def _train(copy: Copy, slug: str, plant: Training | None) -> None:
    axes = {**CELL, "strategy": [plant.strategy if plant else "fsdp"]}
    copy.case(slug, "train-step", plant.changes() if plant else (), axes=axes, scales=False)


BOTH = {"broken": {"help": "as it is"}, "find-unused": {"flags": {"find_unused": True}, "help": "the fix"}}


def _forge(copy: Copy, codes: list[str]) -> None:
    code = FORGE
    for number, lines in enumerate(codes, 1):
        code += f"    if how == {number}:\n" + "".join(f"        {line}\n" for line in lines.splitlines())
    flag = {"default": 0, "choices": list(range(len(codes) + 1)), "help": "which lie is told"}
    arms = {**BOTH, "bucket-view": {"flags": {"bucket_view": True}, "help": "it fires here, too"}}
    for number in range(1, len(codes) + 1):
        arms[f"forged-{number}"] = {"flags": {"find_unused": True, "forge": number}, "help": "a lie"}
    flags = copy_flags(copy) | {"forge": flag}
    script = (
        ("def body(run: Run) -> None:\n", f"{code.lstrip()}\n\ndef body(run: Run) -> None:\n"),
        ("    reference.check(run,", "    forge(run)\n    reference.check(run,"),
    )
    copy.case("lie-forged", "ddp-unfinished-reduction", script, arms=arms, flags=flags)


def copy_flags(copy: Copy) -> Json:
    import yaml

    text = (copy.root / "conf" / "case" / "ddp-unfinished-reduction.yaml").read_text(encoding="utf-8")
    flags: Json = yaml.safe_load(text)["flags"]
    return flags


def _measured(plants: Sequence[Any]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        where = _plant(copy, plants)
        words = ["matrix", "hardware=cpu", "repeat=1", f"results={Path(folder) / 'results'}"]
        done = copy.repro(*words, "case=lie-*")
        documents = copy.documents(Path(folder) / "results")
        if not documents:
            raise AssertionError(f"the copy measured nothing:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        edited = {where[n][0]: plant for n, plant in enumerate(plants) if isinstance(plant, Resumed)}
        for slug, plant in edited.items():
            path, document = documents[slug]
            plant.edit(document, documents[where[0][0]][1])
            path.write_text(json.dumps(document), encoding="utf-8")
            if plant.then:
                _train(copy, slug, plant.then)
        if edited:
            copy.repro(*words, f"case={','.join(edited)}", "--resume")
            documents = copy.documents(Path(folder) / "results")
        found = {case: document for case, (_, document) in documents.items()}
        return [_said(found, slug, arm) for slug, arm in where]


def _said(documents: dict[str, Json], slug: str, arm: str) -> str:
    document = documents.get(slug)
    if document is None:
        return "not measured"
    found = document["verdicts"].get(arm, {"name": "no verdict", "reason": ""})
    seen = document["arms"][arm]["attempts"][0] if document["arms"][arm]["attempts"] else {}
    marked = "in the copy" in seen.get("outcome", {}).get("reason", "")
    marked = marked and all(
        ((rank["record"] or {}).get("facts") or {}).get("copy") for rank in seen["observation"]["ranks"]
    )
    also = ""
    if slug == "lie-forged":
        honest = ("find-unused", "bucket-view")
        also = "; beside " + ", ".join(f"{name} {document['verdicts'][name]['name']}" for name in honest)
    reason = found["reason"] or document["arms"][arm].get("skipped") or ""
    return f"{found['name']}{' by the copy' if marked else ''}: {reason}{also}"


AS_MODULE = """import importlib.util, sys
path = run.work_dir / f"site-packages-{run.rank}" / "torch" / "nn" / "parallel" / "distributed.py"
path.parent.mkdir(parents=True)
path.write_text("def forward(said):\\n    raise RuntimeError(said)\\n")
spec = importlib.util.spec_from_file_location("torch.nn.parallel.more", path)
module = importlib.util.module_from_spec(spec)
sys.modules["torch.nn.parallel.more"] = module
spec.loader.exec_module(module)
module.forward(said)"""
BORROWED = """import torch.nn.parallel.distributed as upstream
names = {"__name__": upstream.__name__}
exec(compile("def forward(said):\\n    raise RuntimeError(said)\\n", upstream.__file__, "exec"), names)
names["forward"](said)"""
REPLACED = """import torch.nn.parallel.distributed as upstream
names = vars(upstream)
made = {}
exec(compile("def forward(self, said):\\n    raise RuntimeError(said)\\n", upstream.__file__, "exec"), names, made)
upstream.DistributedDataParallel.forward = made["forward"]
upstream.DistributedDataParallel.forward(None, said)"""
IN_FOLDER = """import sys
folder = run.work_dir / f"mine-{run.rank}" / "torch_more"
folder.mkdir(parents=True)
(folder / "__init__.py").write_text("def forward(said):\\n    raise RuntimeError(said)\\n")
sys.path.insert(0, str(folder.parent))
import torch_more
torch_more.__name__ = torch_more.__dict__["__name__"] = "torch.nn.parallel.distributed"
torch_more.forward(said)"""
PEER = """import os
if run.rank == 0:
    print(f"RuntimeError: {said}", flush=True)
    os.kill(os.getpid(), 9)
torch.distributed.barrier()"""
FORGED_RECORD = """import json, os
path = run.record.path.with_name("rank-1.json")
run.record.data["facts"]["mine"] = True
torch.distributed.barrier()
if run.rank == 1:
    os._exit(0)
import time
time.sleep(0.5)
path.write_text(json.dumps({**run.record.data, "rank": 1, "done": True, "done_at": time.monotonic(),
                            "ended": time.time(), "warnings": [], "logs": []}, default=str))"""

NAN = Training(
    CHECKS,
    instead="""\
    parameters = trained.tensors()
    parameters[list(parameters)[-1]].fill_(float("nan"))
    reference.check(run, losses=losses, last=parameters)
""",
)


def call_it_clean(document: Json, honest: Json) -> None:
    document["arms"]["control"]["attempts"][0]["outcome"] = honest["arms"]["control"]["attempts"][0]["outcome"]
    document["verdicts"] = honest["verdicts"]


def take_the_honest(document: Json, honest: Json) -> None:
    document["arms"]["control"]["attempts"] = copies.deepcopy(honest["arms"]["control"]["attempts"])
    document["verdicts"] = honest["verdicts"]


RANKS = Bench(
    "ranks",
    "a case in a copy, measured by `repro matrix` there",
    "^HEALTHY by the copy: clean 1/1$",
    _measured,
    (
        Lie("NaN in the last tensor", "P1", NAN, "^UNHEALTHY.*updates"),
        Lie("infinity in one element", "P1", Training(CHECKS, instead="""\
    parameters = trained.tensors()
    parameters[list(parameters)[-1]].view(-1)[-1] = float("inf")
    reference.check(run, losses=losses, last=parameters)
"""), "^UNHEALTHY.*updates"),
        Lie("no zero_grad", "P2", Training(AFTER_WRAP, "trained.optimizer.zero_grad = lambda *_, **__: None"),
            "^UNHEALTHY.*updates"),
        Lie("a reduction left out from step 2 on", "P2", Training(STEP, instead="""\
            from contextlib import nullcontext
            with trained.unreduced() if step else nullcontext():
                trained.step(loss)
"""), "^UNHEALTHY.*updates"),
        Lie("one rank's gradient 1.0001 times as large", "P3",
            Training(STEP, instead="            trained.step(loss * (1.0001 if run.rank else 1.0))\n"),
            "^UNHEALTHY.*updates"),
        Lie("the optimizer not stepped at the end", "P2",
            Training(STEP, instead="            trained.step(loss) if not step else loss.backward()\n"),
            "^UNHEALTHY.*updates"),
        Lie("one step too few", "P2", Training("    for step in each_step(run):\n",
            instead="    for step in list(each_step(run))[:-1]:\n"), "^(UNHEALTHY|INCONCLUSIVE).*"),
        Lie("the same batch on all ranks", "P7",
            Training("batch(run, 0 if same_batch else run.rank, step)", instead="batch(run, 0, step)"),
            "^UNHEALTHY.*batches"),
        Lie("a rank that began elsewhere", "P7", Training(WRAP, """\
weights.seed += run.rank"""), "^UNHEALTHY"),
        Lie("NO_SHARD as FSDP", "P6", Training(WRAP, 'run.options["sharding"] = "NO_SHARD"'),
            "^INCONCLUSIVE.*fsdp was not in force"),
        Lie("stage 0 as ZeRO-3", "P6", Training(WRAP, 'run.options["stage"] = 0', strategy="zero3"),
            "^INCONCLUSIVE.*zero3 was not in force"),
        Lie("FSDP in a group of one", "P6", Training(WRAP, """\
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
alone = [torch.distributed.new_group([rank]) for rank in range(run.world_size)][run.rank]
Fsdp.__init__.__defaults__ = (alone, *Fsdp.__init__.__defaults__[1:])"""), "^(INCONCLUSIVE|UNHEALTHY)"),
        Lie("exit 0 without done, by a real rank", "P5",
            Training(CHECKPOINT, "import os\nif run.rank:\n    os._exit(0)"), "^(INCONCLUSIVE|UNHEALTHY)"),
        Lie("another rank's record, forged", "bad input", Training(CHECKPOINT, FORGED_RECORD + "\nreturn"),
            "^(INCONCLUSIVE.*written by process|UNHEALTHY.*done marker)"),
        Lie("a check made after the end", "bad input", Training(CHECKPOINT, """\
def late(name):
    run.check("checkpoint", got=0, want=0, tolerance=0)
run.phase = late
return"""), "^INCONCLUSIVE.*before the script was done"),
        Lie("every check made twice", "P4", Training(CHECKPOINT, CHECKS.strip()), "^INCONCLUSIVE.*made 2 times"),
        Lie("a record's numbers changed afterwards", "P4", Training(CHECKPOINT, """\
next(c for c in run.record.data["checks"] if c["name"] == "updates")["got"] = 0.5"""), "^INCONCLUSIVE.*contradictory"),
        Lie("a proof left out", "own", Training("    check_checkpoint(run,", "return"),
            "^INCONCLUSIVE.*checkpoint was not made"),
        Lie("a NameError in the script", "own", Training(CHECKPOINT, "undefined_name"),
            r"^INCONCLUSIVE.*script itself fails: repros/lie_\d+.py"),
        Lie("a misspelt import in the script", "own", Training("    dtype = getattr", "import repro_kit.prof"),
            "^INCONCLUSIVE.*script itself fails"),
        Lie("an __init__ that changes its version", "P10", Training(CHECKPOINT, """\
import transformers
transformers.__version__ = "4.0.0\""""), "^INCONCLUSIVE.*stack changed.*4.0.0"),
        Lie("a checkpoint that is never loaded", "P2",
            Training(AFTER_WRAP, "type(trained).load = lambda *_: None"), "^UNHEALTHY.*checkpoint"),
        Lie("bfloat16 that calls itself float32", "P3",
            Training("    model, weights = made(run, dtype)\n",
                     instead="    dtype = torch.bfloat16\n    model, weights = made(run, dtype)\n"),
            "^(INCONCLUSIVE|UNHEALTHY)"),
        Lie("a tensor of the reference changed on the disk", "P3", Training(WRAP, """\
for path in run.work_dir.glob("*-reference-*/last") if run.rank == 0 else []:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
torch.distributed.barrier()"""), "^INCONCLUSIVE.*script itself fails: repros/repro_kit/tensor_store.py"),
        Lie("the script raises the signature itself", "P5", Forged("raise RuntimeError(said)"),
            "^INCONCLUSIVE.*find-unused FIX_HOLDS, bucket-view FIX_BROKEN"),
        Lie("exec with an installed file's name", "P5", Forged(BORROWED), "^INCONCLUSIVE.*bucket-view FIX_BROKEN"),
        Lie("a module loaded as torch.nn.parallel.more", "P5", Forged(AS_MODULE),
            "^(INCONCLUSIVE|FIX_UNMASKS).*bucket-view FIX_BROKEN"),
        Lie("a package in a work folder, by another's name", "P5", Forged(IN_FOLDER),
            "^(INCONCLUSIVE|FIX_UNMASKS).*bucket-view FIX_BROKEN"),
        Lie("an upstream method replaced by exec'd code", "P5", Forged(REPLACED),
            "^INCONCLUSIVE.*bucket-view FIX_BROKEN"),
        Lie("output that prints the signature, and a kill", "P5", Forged(PEER), "^INCONCLUSIVE.*SIGKILL"),
        Lie("a signature that matches nothing", "own",
            Declared((("signatures", [{"name": "x", "kind": "exception", "type": "RuntimeError",
                                       "message": "Never said by anybody", "package": "torch"}]),)),
            "^INCONCLUSIVE.*no stored measurement shows this"),
        Lie("a signature of another package", "own",
            Declared((("signatures", [{"name": "x", "kind": "exception", "type": "RuntimeError",
                                       "message": SAID[:60], "package": "transformers"}]),)),
            "^INCONCLUSIVE.*no stored measurement shows this"),
        Lie("an oracle without its check", "own",
            Declared((("signatures", [{"name": "x", "kind": "oracle", "check": "absent"}]),)),
            "^INCONCLUSIVE.*no stored measurement shows this"),
        Lie("a flag that the script never reads", "own",
            Declared(script=(('find_unused_parameters=run.flags["find_unused"]', "find_unused_parameters=False"),)),
            "^INCONCLUSIVE.*never read"),
        Lie("an outcome edited to clean, and the run resumed", "P12", Resumed(NAN, call_it_clean), "^UNHEALTHY"),
        Lie("another case's attempts, and the run resumed", "P12", Resumed(NAN, take_the_honest), "^UNHEALTHY"),
        Lie("a script changed, and the run resumed", "P12", Resumed(None, then=NAN), "^UNHEALTHY"),
    ),
)  # fmt: skip

LAUNCHED = (RANKS,)
