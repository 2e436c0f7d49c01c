"""A rank whose device cannot be used is no evidence; an error that a training can cause itself is
evidence.

Every row of config/device_errors.yaml goes through the observation and the grader.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import find
from hypothesis import strategies as st
from launching import attempt_of
from repro_matrix.config import catalog
from repro_matrix.config.failure_rules import DeviceError, device_errors, rules
from repro_matrix.grading import grade
from repro_matrix.grading.root_cause import failure_ids
from repro_matrix.launch.observe import classify_device_error
from test_attempt import entry, observed, raised

INIT, BODY = "init_process_group", "body"
SET, LAZY, TRAIN = (
    ("torch.cuda", "set_device"),
    ("torch.cuda", "_lazy_init"),
    ("torch.nn.modules.linear", "forward"),
)
BUSY = (
    "CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be ..."
)


def error(kind: str, message: str, where: tuple[str, str], **more: Any) -> dict[str, Any]:
    frames = [
        {"module": "__main__", "function": "body"},
        {"module": where[0], "function": where[1]},
    ]
    return {"type": kind, "message": message, "frames": frames, "cause": None, **more}


ECC = "uncorrectable ECC error encountered"
NCCL = ("torch.distributed", "all_reduce")
SYSTEM_ERROR = (
    "unhandled system error (run with NCCL_DEBUG=INFO), NCCL version 2.29.3\nncclSystemError:"
    " System call failed"
)


@pytest.mark.parametrize(
    ("kind", "raised", "phase"),
    [
        ("device", error("RuntimeError", "CUDA error: invalid device ordinal", SET), INIT),
        (
            "device",
            error(
                "RuntimeError", "The NVIDIA driver on your system is too old (found 12020)", LAZY
            ),
            BODY,
        ),
        ("device", error("RuntimeError", BUSY, TRAIN), BODY),
        ("device", error("AcceleratorError", "some other words", TRAIN, error_code=46), BODY),
        (
            "device",
            error(
                "RuntimeError",
                "CUDA error: no kernel image is available for execution on the device",
                TRAIN,
            ),
            BODY,
        ),
        (
            "device",
            error("DistBackendError", f"NCCL error in: NCCLUtils.cpp:94, {SYSTEM_ERROR}", NCCL),
            BODY,
        ),
        ("device", error("DistBackendError", "NCCL error: remote process exited", NCCL), INIT),
        (
            "device",
            error("OutOfMemoryError", "CUDA out of memory. 2 MiB", ("torch.cuda", "x")),
            INIT,
        ),
        ("gpu_failure", error("AcceleratorError", "some other words", TRAIN, error_code=214), BODY),
        ("gpu_failure", error("RuntimeError", f"CUDA error: {ECC}\nCUDA", TRAIN), BODY),
        (
            "gpu_failure",
            error(
                "DistBackendError",
                f"NCCL error: unhandled cuda error\nCuda failure 214 '{ECC}'",
                NCCL,
            ),
            BODY,
        ),
        (
            "gpu_or_program",
            error("AcceleratorError", "some other words", TRAIN, error_code=719),
            BODY,
        ),
        (
            "gpu_or_program",
            error("RuntimeError", "CUDA error: unspecified launch failure\nx", TRAIN),
            BODY,
        ),
        # The case's own:
        (None, error("OutOfMemoryError", "CUDA out of memory. 2 GiB", TRAIN), BODY),
        (
            "gpu_or_program",
            error("AcceleratorError", "CUDA error: illegal address", TRAIN, error_code=700),
            BODY,
        ),
        (None, error("RuntimeError", "CUDA error: bad ordinal", TRAIN, error_code=101), BODY),
        (None, error("ValueError", BUSY, TRAIN), BODY),
        (
            None,
            error("RuntimeError", "in the middle: CUDA error: initialization error", TRAIN),
            BODY,
        ),
        (None, error("DistBackendError", "NCCL error: remote process exited", TRAIN), BODY),
    ],
)
def test_classify_device_error(kind: str | None, raised: dict[str, Any], phase: str) -> None:
    assert classify_device_error(raised, phase) == kind


CASES = catalog.load().cases
CASE = CASES["train-step"]
SCRIPT_LINE = "/w/repros/train_step.py"
OUTCOMES = {  # kind -> the infrastructure error in the script's body, and before it
    "memory": ("memory", "device"),
    "hardware": ("gpu_failure", "gpu_failure"),
    "device": ("device", "device"),
    "asynchronous": ("gpu_or_program", "gpu_or_program"),
    "starting": (None, "device"),
    "program": (None, None),
    "peer": (None, None),
}


def on_gpus(folder: Path, *ranks: dict[str, Any], log: str = "", **ends: Any) -> dict[str, Any]:
    """The observation of ranks on GPUs that wrote these records; ``ends``: how rank 0 ended."""
    attempt = attempt_of(folder, "x", world_size=len(ranks))
    attempt.settings["device"] = "cuda"
    entries = [{**entry(rank), **(ends if rank == 0 else {})} for rank in range(len(ranks))]
    about = {"world_size": len(ranks), "device": "cuda:0"}
    written = [{**record, **about, "rank": rank} for rank, record in enumerate(ranks)]
    return observed(attempt, entries, *written, log=log)


def forms(row: DeviceError) -> list[dict[str, Any]]:
    """The exceptions in which torch shows an error: by number, by text, and from NCCL."""
    text = find(
        st.from_regex(
            row.text.replace("\\b", ""), fullmatch=True, alphabet=st.characters(max_codepoint=126)
        ),
        str.isprintable,
    )
    if row.code is None:
        return [
            {"type": "RuntimeError", "message": text},
            {"type": "DistBackendError", "message": text},
        ]
    return [
        {"type": "AcceleratorError", "message": "in other words", "error_code": row.code},
        {"type": "RuntimeError", "message": f"CUDA error: {text}\nFor debugging ..."},
        {"type": "RuntimeError", "message": f"Triton Error [CUDA]: {text}"},
        {
            "type": "DistBackendError",
            "message": (
                "NCCL error\nncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure"
                f" {row.code} '{text}'"
            ),
        },
    ]


@pytest.mark.parametrize("row", device_errors(), ids=lambda row: row.name)
def test_error_of_the_table_is_graded_by_its_kind(row: DeviceError, tmp_path: Path) -> None:
    for form in forms(row):
        for phase, kind in zip((BODY, INIT), OUTCOMES[row.kind]):
            if phase == INIT and form["type"] == "DistBackendError" and kind is None:
                kind = "device"  # NCCL itself cannot start
            if phase == INIT and form["type"] == "DistBackendError" and kind == "gpu_or_program":
                kind = "device"
            record = raised(form["type"], form["message"], phase)
            record["exception"].update(form)
            record["exception"]["frames"][-1].update(
                file=SCRIPT_LINE, module="torch.nn", code_location="torch.nn"
            )
            seen = on_gpus(tmp_path / "a", record)
            assert (seen["infra_error"] or {}).get("kind") == kind, (form, phase)
            outcome = grade.grade(CASE, "unfixed", seen, CASES)
            assert (outcome.outcome, outcome.infra_error) == (
                ("infra_error", kind) if kind else ("other_failure", None)
            )
    assert not row.rule or row.rule in rules()


def test_table_has_sources_and_no_error_twice() -> None:
    rows = device_errors()
    codes = [row.code for row in rows if row.code is not None]
    assert len(rows) >= 100 and all(row.source for row in rows)
    names = {row.name.partition("_")[0].partition("-")[0] for row in rows}
    assert {"CUBLAS", "CUDNN", "CUSOLVER", "CUFFT", "CUSPARSE", "triton"} <= names
    assert len({row.name for row in rows}) == len(rows) and len(set(codes)) == len(codes)


ASSERT = "CUDA error: device-side assert triggered"
ENDED = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with"
    f" exception: {ASSERT}"
)
WATCHDOG = f"""\
[rank0]:[E1124 ProcessGroupNCCL.cpp:2068] {ENDED}
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {ENDED}
"""


def asserted(file: str, location: str) -> dict[str, Any]:
    record = raised("AcceleratorError", ASSERT)
    record["exception"]["error_code"] = 710
    record["exception"]["frames"][-1].update(file=file, module=location, code_location=location)
    return record


def test_asynchronous_error_is_one_failure_wherever_it_is_noticed(tmp_path: Path) -> None:
    running = {**raised("x", "x"), "exception": None, "ended": None}
    seen = [
        on_gpus(
            tmp_path / "a", asserted(SCRIPT_LINE, "repros.train_step")
        ),  # loss.item() of the script
        on_gpus(tmp_path / "b", asserted("/v/site-packages/torch/x.py", "torch.x")),
        on_gpus(tmp_path / "c", running, log=WATCHDOG, exit_code=-6, signal="SIGABRT"),
        on_gpus(
            tmp_path / "d",
            running,
            log=WATCHDOG.replace("default_pg", "mesh_tp"),
            exit_code=-6,
            signal=None,
        ),
    ]
    assert [each["infra_error"]["kind"] for each in seen] == ["gpu_or_program"] * 4
    ids = set()
    for each in seen:  # as of the attempt that repeats it
        outcome = grade.grade(CASE, "unfixed", {**copy.deepcopy(each), "infra_error": None}, CASES)
        assert outcome.outcome == "other_failure" and "cudaErrorAssert" in outcome.reason, (
            outcome.reason
        )
        ids |= {str(item) for item in failure_ids(CASE.slug, outcome)}
    assert len(ids) == 1
    ecc = WATCHDOG.replace("device-side assert triggered", "uncorrectable ECC error encountered")
    assert (
        on_gpus(tmp_path / "e", running, log=ecc, exit_code=-6, signal="SIGABRT")["infra_error"][
            "kind"
        ]
        == "gpu_failure"
    )
    killed = on_gpus(tmp_path / "f", running, log=WATCHDOG, exit_code=-11, signal="SIGSEGV")
    assert killed["infra_error"] is None, "a crash is no watchdog's abort"


def test_error_of_a_peer_never_hides_the_first_ranks(tmp_path: Path) -> None:
    def at(second: float, kind: str, message: str) -> dict[str, Any]:
        record = {**raised(kind, message), "ended": second}
        record["exception"]["frames"][-1].update(
            file="/v/site-packages/torch/x.py", code_location="torch.x"
        )
        return record

    own, closed = (
        ("ValueError", "its own"),
        ("DistBackendError", f"{SYSTEM_ERROR}\nConnection closed by remote peer"),
    )
    system = ("DistBackendError", SYSTEM_ERROR)
    full = ("OutOfMemoryError", "CUDA out of memory.")
    for first, second, kind in (
        (at(105, *own), at(106, *system), None),
        (at(107, *own), at(106, *system), "device"),
        (at(105, *own), at(106, *full), None),
        (at(106, *own), at(105, *full), "memory"),
        (at(105, *own), at(104, *closed), None),
        (at(105, *own), at(106, "RuntimeError", f"CUDA error: {ECC}"), "gpu_failure"),
    ):
        seen = on_gpus(tmp_path / "a", first, second)
        assert (seen["infra_error"] or {}).get("kind") == kind, (
            first["exception"],
            second["exception"],
        )
        if kind is None:
            assert grade.grade(CASE, "unfixed", seen, CASES).primary.type == "ValueError"
