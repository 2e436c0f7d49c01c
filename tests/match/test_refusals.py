"""`repro match` on wrong uses that a library refuses: advice, numbers, other forms of a log, no
false advice."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from repro_matrix.config import catalog
from repro_matrix.config.failure_rules import rules
from repro_matrix.match.answer import log_json, log_lines
from repro_matrix.match.keywords import SignatureIndex
from repro_matrix.match.known_failures import recognize
from repro_matrix.match.log_failure import LogAnswer, LogFailure
from repro_matrix.match.scan import scan

CASES = catalog.load().cases
CATALOGUE = SignatureIndex(CASES, catalog.load().strategies)
LOGS: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "logs" / "refusals.yaml").read_text(encoding="utf-8")
)
REFUSALS = {name: rule for name, rule in rules().items() if rule.library}
by_name = pytest.mark.parametrize("entry", LOGS, ids=[entry["about"] for entry in LOGS])


def answer(text: str) -> LogAnswer:
    return recognize(scan(text.splitlines(keepends=True), CATALOGUE), CATALOGUE)


def refused(found: LogAnswer) -> list[str]:
    return [each.kind for each in found.leading if each.kind in REFUSALS]


def printed(text: str) -> str:
    seen = scan(text.splitlines(keepends=True), CATALOGUE)
    return " ".join(" ".join(log_lines("a.log", seen, recognize(seen, CATALOGUE), CASES)).split())


@by_name
def test_a_refusal_is_explained_and_is_no_known_failure(entry: dict[str, Any]) -> None:
    found = answer(entry["log"])
    assert refused(found)[:1] == [entry["want"]] * bool(entry["want"])
    assert found.names == [] and found.exit_code == 1
    assert found.leading and found.leading[0].kind == (entry["want"] or "")


def test_most_refusals_are_explained() -> None:
    assert sum(bool(entry["want"]) for entry in LOGS) >= 0.95 * len(LOGS) > 0.95 * 150
    assert {entry["want"] for entry in LOGS} - {None} == set(REFUSALS), "each rule has a log"


@by_name
def test_the_answer_has_the_message_and_a_command_and_no_names_of_rules(
    entry: dict[str, Any],
) -> None:
    out = printed(entry["log"])
    assert "repro new MY-CASE --from-log a.log" in out
    if entry["want"]:
        rule = rules()[entry["want"]]
        for part in (f"{rule.library} refused", *rule.actions({})):
            assert " ".join(part.split()) in out
        assert "reproduces" not in out.lower()
    shown = re.sub(r"\S*/\S*", "", out)
    assert not [
        name for name in rules() if "-" in name and re.search(rf"(?<![\w-]){name}(?![\w-])", shown)
    ]


LAST = re.compile(r"^(?:\[\w+\]: ?)?(?=[\w.]*(?:Error|Exception): )", re.MULTILINE)
FORMS: dict[str, Callable[[str], str]] = {
    "rank": lambda line: f"[rank0]: {line}",
    "lightning": lambda line: f"[rank: 1] {line}",
    "tee": lambda line: f"[default0]:{line}",
    "pdsh": lambda line: f"node1: {line}",
    "deepspeed": lambda line: f"worker-0: [rank3]: {line}",
    "kubernetes": lambda line: f"2026-01-02T03:04:05.678901234Z stderr F {line}",
    "windows": lambda line: f"{line}\r",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_is_explained_in_other_forms_of_a_log(form: str) -> None:
    plain = [entry for entry in LOGS if entry["want"] and not re.search(r"(?m)^\[", entry["log"])]
    assert len(plain) > 60
    wrong = {}
    for entry in plain:
        found = answer("\n".join(["step 1 loss 2.0", *map(FORMS[form], entry["log"].split("\n"))]))
        if refused(found)[:1] != [entry["want"]]:
            wrong[entry["about"]] = found.kinds
    assert wrong == {}


def test_a_refusal_is_explained_by_its_last_lines_alone() -> None:
    wrong = {}
    for entry in LOGS:
        starts = [found.start() for found in LAST.finditer(entry["log"])]
        ends = [entry["log"][start:] for start in starts]
        if (
            entry["want"]
            and ends
            and entry["want"] not in {kind for end in ends for kind in refused(answer(end))}
        ):
            wrong[entry["about"]] = ends
    assert wrong == {}


@pytest.mark.parametrize(
    ("name", "message", "parts"),
    [
        ("deepspeed-batch-sizes", "128 != 4 * 4 * 1", ["one process", "needs 8:"]),
        ("deepspeed-batch-sizes", "128 != 4 * 6 * 1", ["one process"]),
        ("deepspeed-batch-sizes", "64 != 4 * 4 * 2", ["gradient_accumulation_steps 8, or 4 ranks"]),
        ("deepspeed-batch-sizes", "24 != 4 * 4 * 2", ["gradient_accumulation_steps would be 3"]),
        ("deepspeed-batch-sizes", "30 != 4 * 4 * 2", ["30 is not a multiple"]),
        (
            "deepspeed-other-world-size",
            "of 16 but the current world size is 1",
            ["16 ranks", "launched"],
        ),
        (
            "deepspeed-other-world-size",
            "of 16 but the current world size is 8",
            ["16 ranks", "has 8"],
        ),
        ("peft-rank", "lora_A.w: torch.Size([8, 32]) torch.Size([16, 32])", ["r=8", "r=16"]),
        ("peft-rank", "lora_B.w: torch.Size([32, 8]) torch.Size([32, 16])", ["r=8", "r=16"]),
        ("peft-rank", "lora_A.w: torch.Size([8, 32]) torch.Size([8, 64])", ["another base model"]),
        (
            "checkpoint-other-metadata",
            "[2, 512, 8] bfloat16 [2, 1024, 8] bfloat16",
            ["twice 512", "use_cache"],
        ),
        (
            "checkpoint-other-metadata",
            "[2, 512, 8] bfloat16 [2, 600, 8] bfloat16",
            ["became [2, 600, 8]"],
        ),
        (
            "checkpoint-other-metadata",
            "[2, 512, 8] bfloat16 [2, 512, 8] float32",
            ["bfloat16", "float32", "autocast"],
        ),
        ("checkpoint-other-metadata", "", []),
    ],
)
def test_the_numbers_of_a_message_are_explained(name: str, message: str, parts: list[str]) -> None:
    texts = {
        "deepspeed-batch-sizes": (
            "Check batch related parameters. train_batch_size is not equal to "
            "micro_batch_per_gpu * gradient_acc_step * world_size "
        ),
        "deepspeed-other-world-size": "The checkpoint being loaded used a DP world size ",
        "peft-rank": "size mismatch for ",
    }
    if name == "peft-rank":
        start, saved, now = re.split(r" (?=torch)", message)
        message = (
            f"{start} copying a param with shape {saved} from checkpoint, the shape in current"
            f" model is {now}."
        )
    if name == "checkpoint-other-metadata":
        first = (
            "Recomputed values for the following tensors have different metadata than during the"
            " forward pass."
        )
        pairs = re.findall(r"(\[.*?\]) (\w+)", message)
        tensors = [
            f"{{'shape': torch.Size({shape}), 'dtype': torch.{dtype}, 'device': 0}}"
            for shape, dtype in pairs
        ]
        lines = [f"{what} metadata: {each}" for what, each in zip(("saved", "recomputed"), tensors)]
        message = "\n".join([first, "tensor at position 3:", *lines])
    text = rules()[name].explain(texts.get(name, "") + message)
    assert all(part in text for part in parts) and bool(text) == bool(parts)


@pytest.mark.parametrize(
    ("before", "label", "one"),
    [
        ("", "", True),
        ("WORLD_SIZE=1", "", True),
        ("", "[rank0]: ", True),
        ("", "[rank3]: ", False),
        ("WORLD_SIZE=8 RANK=3", "", False),
        ("  global_world_sizes=[4, 4, 4, 4]", "", False),
        (
            "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
            "",
            False,
        ),
    ],
)
def test_a_log_of_several_ranks_was_not_launched_as_one_process(
    before: str, label: str, one: bool
) -> None:
    log = next(entry["log"] for entry in LOGS if entry["about"] == "raised_ds_batch_one")
    out = printed("\n".join([before, *(label + line for line in log.split("\n"))]))
    assert "DeepSpeed refused" in out and ("launched as one process" in out) == one


@pytest.mark.parametrize(
    ("version", "has"), [("peft==0.7.1", False), ("peft==0.8.0", True), ("", True)]
)
def test_advice_that_needs_a_newer_release_is_left_out(version: str, has: bool) -> None:
    log = next(entry["log"] for entry in LOGS if entry["about"] == "raised_peft_targets_old")
    out = printed(f"{version}\n{log}")
    assert "Take names from print(model)" in out and ("all-linear" in out) == has


def test_hints_use_groups_of_their_rules() -> None:
    for rule in rules().values():
        groups = set(re.compile(rule.text).groupindex)
        for hint in rule.says:
            fields = [
                field
                for text in (hint.text, *map(str, hint.when.values()))
                for _, field, *_ in string.Formatter().parse(text)
                if field
            ]
            assert {
                name for field in (*fields, *hint.when) for name in field.split("/")
            } <= groups, rule.name


@pytest.mark.parametrize(
    "before", ["train.py:7: UserWarning: ", "[WARNING] ", "INFO - to avoid this: ", ""]
)
@pytest.mark.parametrize("end", ["Training completed.", "step 10 loss 2.0"])
def test_a_line_with_the_words_of_a_refusal_that_steps_follow_is_no_failure(
    before: str, end: str
) -> None:
    steps = [f"step {number} loss 2.{number}" for number in range(9)]
    for rule in REFUSALS.values():
        message = re.sub(r"^[\w.]*(?:Error|Exception): ", "", rule.examples[0])
        found = answer("\n".join([*steps, before + message.split("\n")[0], *steps, end]))
        assert found.exit_code == 3, rule.name


def test_a_known_failure_beside_a_refusal_is_named() -> None:
    frame = (
        '  File "/v/lib/python3.11/site-packages/torch/distributed/fsdp/_flat_param.py", line 7, in'
        " _validate"
    )
    error = (
        "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and"
        " torch.float32"
    )
    known = ["Traceback (most recent call last):", frame, "    raise ValueError(", error]
    for entry in LOGS[:20]:
        found = answer("\n".join([entry["log"], *known]))
        assert found.names == ["fsdp-uniform-dtype"] and found.exit_code == 0


@pytest.mark.parametrize(
    ("file", "message", "want"),
    [
        (
            "/v/site-packages/deepspeed/comm/comm.py",
            "No module named 'mpi4py'",
            ["deepspeed-no-launcher"],
        ),
        (
            "/srv/DeepSpeed/deepspeed/comm/comm.py",
            "No module named 'mpi4py'",
            ["deepspeed-no-launcher"],
        ),
        ("/v/site-packages/horovod/mpi.py", "No module named 'mpi4py'", []),
        ("/srv/eval.py", "No module named 'mpi4py'", []),
        ("<stdin>", "No module named 'mpi4py'", []),
        (
            "/v/site-packages/torch/nn/functional.py",
            "index out of range in self",
            ["embedding-index"],
        ),
        ("/v/site-packages/numba/core/x.py", "index out of range in self", []),
        ("/v/site-packages/torch/x.py", "Bad: if you saw 'index out of range in self', set lr", []),
    ],
)
def test_only_what_the_library_raises_is_its_refusal(
    file: str, message: str, want: list[str]
) -> None:
    python = '  File "/usr/lib/python3.11/importlib/__init__.py", line 5, in import_module'
    frames = ['  File "/srv/run.py", line 3, in <module>', f'  File "{file}", line 3, in f', python]
    found = answer(
        "\n".join(["Traceback (most recent call last):", *frames, f"RuntimeError: {message}"])
    )
    assert refused(found) == want and found.exit_code == 1


@pytest.mark.parametrize("label", ["", "[rank0]: "])
@pytest.mark.parametrize("file", ["/v/site-packages/transformers/modeling_utils.py", "/srv/run.py"])
@pytest.mark.parametrize("after", [0, 8])
def test_a_refusal_after_which_training_went_on_is_not_the_first_answer(
    label: str, file: str, after: int
) -> None:
    steps = [f"{{'loss': 2.{number}}}" for number in range(8)]
    flash = (
        "FlashAttention2 has been toggled on, but it cannot be used due to the following error: no"
        " package."
    )
    errors = [
        ["Traceback (most recent call last):", f'  File "{place}", line 3, in f', "    f()", text]
        for place, text in ((file, f"ValueError: {flash}"), ("/srv/run.py", "KeyError: 'labels'"))
    ]
    lines = [*steps, *errors[0], *steps[:after], *errors[1]]
    found = answer("\n".join(label + line for line in lines))
    leading = [each.error.type for each in found.leading if isinstance(each, LogFailure)]
    assert leading == (["KeyError"] if after else ["ValueError", "KeyError"])
    assert len(found.recovered) == bool(after)


def test_steps_of_another_rank_do_not_show_that_a_refusal_was_caught() -> None:
    log = next(entry["log"] for entry in LOGS if entry["about"] == "ds_batch_one").split("\n")
    steps = [f"[rank1]: {{'loss': 2.{number}}}" for number in range(8)]
    end = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/srv/run.py", line 3, in f',
        "[rank1]: KeyError: 'labels'",
    ]
    found = answer("\n".join([*steps, *(f"[rank0]: {line}" for line in log), *steps, *end]))
    assert refused(found)[:1] == ["deepspeed-batch-sizes"]


def test_the_same_failure_of_two_ranks_is_one_entry() -> None:
    log = next(entry["log"] for entry in LOGS if entry["about"] == "ds_batch_two")
    found = answer(log)
    assert len(found.causes) == 1 and found.causes[0].error.ranks == (0, 1)
    assert "ranks 0 and 1" in printed(log)


def test_mixed_tracebacks_of_one_failure_are_one_entry_with_its_gpus() -> None:
    frame = '  File "/v/lib/python3.11/site-packages/torch/utils/checkpoint.py", line 850, in check'
    lines = [
        "Traceback (most recent call last):",
        '  File "/srv/run.py", line 3, in <module>',
        "    main()",
        frame,
        "    raise CheckpointError(",
    ]
    first = (
        "torch.utils.checkpoint.CheckpointError: Recomputed values for the following tensors have"
        " different "
    )
    ends = [
        [
            f"{first}metadata than during the forward pass.",
            f"saved metadata: {{'device': 'cuda:{gpu}'}}",
        ]
        for gpu in range(2)
    ]
    mixed = [line for line in lines[:-1] for _ in range(2)]
    log = "\n".join([*mixed, lines[-1], *ends[0], lines[-1], *ends[1]])
    found = answer(log)
    assert [each.error.count for each in found.causes] == [2] and found.causes[0].error.gpus == (
        "0",
        "1",
    )
    out = printed(log)
    assert "2 processes (GPUs 0 and 1)" in out and "raise CheckpointError" not in out


def test_the_ends_of_a_long_message_and_the_callers_are_shown() -> None:
    where = [
        ("/srv/run.py", "main"),
        ("/v/site-packages/transformers/trainer.py", "train"),
        ("/v/site-packages/torch/nn/modules/module.py", "_call_impl"),
        ("/srv/model.py", "forward"),
        ("/usr/lib/python3.11/contextlib.py", "inner"),
        ("/v/site-packages/torch/x.py", "f"),
    ]
    frames = [f'  File "{file}", line 3, in {function}' for file, function in where]
    long = "x" * 400 + "middle" + "y" * 400
    log = "\n".join(
        ["Traceback (most recent call last):", *frames, f"ValueError: begins {long} ends"]
    )
    out = printed(log)
    assert "begins" in out and out.count(" ends ") == 1 and "middle" not in out
    seen = scan(log.splitlines(), CATALOGUE)
    (failure,) = log_json("a.log", seen, recognize(seen, CATALOGUE), CASES)["failures"]
    assert [each.split(" ")[0] for each in failure["called_from"]] == [
        "main",
        "transformers.trainer.train",
        "forward",
    ]
    assert failure["refusal"] is None


def test_json_has_the_refusal() -> None:
    entry = next(entry for entry in LOGS if entry["about"] == "ds_batch_one")
    seen = scan(entry["log"].splitlines(), CATALOGUE)
    (failure,) = log_json("a.log", seen, recognize(seen, CATALOGUE), CASES)["failures"]
    assert (
        failure["refusal"]["library"] == "DeepSpeed"
        and "one process" in failure["refusal"]["numbers"]
    )
    assert failure["refusal"]["change"] == rules()["deepspeed-batch-sizes"].actions({})
