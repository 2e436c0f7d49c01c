"""What a rank's monitor reads from torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from repro_kit.rank_monitor import nccl_environment, recorded

import pytest

EMPTY, USED = ({"entries": entries} for entries in ([], [{"record_id": 0}]))


@pytest.mark.parametrize(
    ("nccl", "found"), [(EMPTY, 0), (None, 0), ({"entries": [{"record_id": 7}]}, 7)]
)
def test_recorder_of_gloo_is_read_where_nccls_is_empty(
    nccl: object, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA build of torch has both, a CPU build only the one that gloo writes to."""
    recorders = {"_dump_fr_trace_json": lambda: json.dumps(USED).encode()}
    recorders |= {"_dump_nccl_trace_json": lambda: json.dumps(nccl).encode()} if nccl else {}
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**recorders))
    dump = recorded(with_frames=False)
    assert dump and dump["entries"][0]["record_id"] == found


@pytest.mark.parametrize(
    ("minor", "prefix"), [(7, "TORCH_NCCL_"), (8, "TORCH_FR_"), (11, "TORCH_FR_")]
)
def test_recorder_is_configured_by_the_names_that_a_release_prefers(
    minor: int, prefix: str
) -> None:
    given = nccl_environment((2, minor), 60, Path("x"))
    names = [name for name in given if name.endswith(("BUFFER_SIZE", "TEMP_FILE"))]
    assert len(names) == 2 and all(name.startswith(prefix) for name in names)
