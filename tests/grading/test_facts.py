"""Facts of the machine that decide an answer: ranks record them, expectations carry them, elsewhere nothing is red."""

from __future__ import annotations

import importlib
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, document, observation, ok
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import Fact
from repro_matrix.environment import system_checks as around
from repro_matrix.grading import capabilities as facts
from repro_matrix.grading.expectations import expected, predicted
from repro_matrix.grading.regrade import regrade
from repro_matrix.paths import REPROS
from repro_matrix.records import validate as doubt
from repro_matrix.records.document import Hardware
from repro_matrix.results.version_ranges import expectations, measured

NOW = {"torch": "2.13.0", "transformers": "5.23.0"}
FP16 = {"arms": {"broken": {}, "fix": {"flags": {"call": "root"}, "depends_on": ["cpu_fp16"]}, "other-fix": {}}}


def saying(*said: dict[str, Any]) -> dict[str, Any]:
    """An observation whose ranks said these facts of their machine."""
    ranks = [ok(number) for number in range(len(said))]
    for rank, machine in zip(ranks, said):
        rank["record"]["facts"] = {"machine": machine}
    return observation(*ranks)


def test_a_fact_is_what_all_ranks_said() -> None:
    mixed = saying({"cpu_fp16": True, "cpu_bf16": True}, {"cpu_fp16": False, "cpu_bf16": True})
    stored = document({"broken": [("fires", saying({"cpu_bf16": True}, {}))], "fix": [("clean", mixed)]})
    assert facts.seen(stored) == {"cpu_bf16": True}
    assert facts.seen(document({"broken": [("fires", observation(ok(0), ok(1)))]})) == {}


@given(st.dictionaries(st.sampled_from(["cpu_fp16", "cpu_bf16"]), st.booleans()))
def test_a_fact_that_nobody_said_is_the_same_as_no_other(said: dict[str, bool]) -> None:
    wanted = ["cpu_fp16", "cpu_bf16"]
    assert (facts.differs(wanted, said, said) is None) == (len(said) == 2)
    assert facts.differs([], said, {}) is None


def test_what_differs_is_said_with_both_values() -> None:
    assert facts.differs(["a", "b"], {"a": True, "b": "9.0"}, {"a": True, "b": "8.0"}) == "b 9.0 against 8.0"
    assert facts.differs(["a"], {}, {"a": False}) == "a unknown against False"
    assert facts.differs(["a"], {"a": False}, {}) == "a False against unknown"


def test_what_an_arm_depends_on_is_the_cases_and_its_own_each_once() -> None:
    known = case(depends_on=["cpu_bf16", "cpu_fp16"], **FP16)
    assert facts.depends_on(known, "fix") == ["cpu_bf16", "cpu_fp16"]
    assert facts.depends_on(case(**FP16), "fix") == ["cpu_fp16"]
    assert facts.depends_on(known, "gone") == facts.depends_on(known, "broken") == ["cpu_bf16", "cpu_fp16"]


def test_a_rank_without_a_record_says_no_fact() -> None:
    made = saying({"cpu_bf16": True}, {"cpu_bf16": True})
    made["ranks"][1]["record"] = None
    assert facts.seen(document({"broken": [("fires", made)]})) == {"cpu_bf16": True}


def test_where_the_fact_is_another_there_is_no_expectation() -> None:
    entry = {
        "verdicts": {"fix": "FIX_UNMASKS", "other-fix": "FIX_HOLDS"}, "facts": {"cpu_fp16": False},
        "measured": [{}], "reason": "measured",
    }  # fmt: skip
    known = case(expect=[entry], **FP16)
    assert expected(known, "m/fsdp", "fix", NOW, "cpu", {"cpu_fp16": False}) is not None
    for here in ({"cpu_fp16": True}, {}, {"cpu_bf16": False}):
        assert expected(known, "m/fsdp", "fix", NOW, "cpu", here) is None
        assert predicted(known, "m/fsdp", "fix", NOW, "gpu1", here) is None
        assert expected(known, "m/fsdp", "other-fix", NOW, "cpu", here) is not None, "it does not depend on it"
    old = case(expect=[{**entry, "facts": {}}], **FP16)
    assert expected(old, "m/fsdp", "fix", NOW, "cpu", {"cpu_fp16": False}) is None, "nobody knows what it was there"


def test_an_expectation_carries_the_facts_that_its_arms_depend_on_and_no_others() -> None:
    known = case(**FP16)
    machine = {"cpu_fp16": False, "cpu_capability": "AVX2"}
    fires = [("fires", saying(machine, machine))]
    stored = document({"broken": fires, "fix": fires}, {"fix": "FIX_BROKEN"})
    stored |= {"where": "m/fsdp", "hardware": {**stored["hardware"], "facts": facts.seen(stored)}}
    (entry,) = expectations(measured(known, stored, "baseline/x.json"), "why")
    assert entry.facts == {"cpu_fp16": False}
    (plain,) = expectations(measured(case(), stored, "baseline/x.json"), "why")
    assert plain.facts == {}


def test_stored_facts_are_recomputed_from_the_ranks_words() -> None:
    made = saying({"cpu_fp16": False}, {"cpu_fp16": False})
    stored = document({"broken": [("fires", made)]})
    stored["hardware"]["facts"] = {"cpu_fp16": True}
    (again,) = regrade([stored], {"some-case": case()}).documents
    assert again["hardware"]["facts"] == {"cpu_fp16": False}


def test_a_document_says_what_else_of_the_machine_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    around.conditions.cache_clear()
    monkeypatch.setattr(around, "no_ptrace", lambda: "no ptrace here")
    monkeypatch.setattr(around, "shm_mb", lambda: 64)
    monkeypatch.setattr(around.nvml, "without_peers", lambda uuids: [(uuids[0], uuids[1])])
    assert around.conditions(()) == {"shm_mb": 64, "ptrace": False}, "cards are not asked for where there are none"
    two = {"shm_mb": 64, "ptrace": False, "without_peers": [["GPU-a", "GPU-b"]]}
    assert around.conditions(("GPU-a", "GPU-b")) == two
    around.conditions.cache_clear()
    stored = document({"broken": [("fires", observation(ok(0), ok(1)))]})
    doubt.known(Hardware, {**stored["hardware"], **two})
    with pytest.raises(ValueError, match="ptrace"):
        doubt.known(Hardware, {**stored["hardware"], "ptrace": "yes"})


def test_a_fact_that_no_machine_reports_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cpu_fp16"):
        Case.model_validate({**case().model_dump(), "depends_on": ["cpu_fp61"]})


def test_every_fact_that_a_case_may_name_is_one_that_the_kit_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPROS))
    torch, machine_facts = importlib.import_module("torch"), importlib.import_module("repro_kit.machine").machine_facts
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert machine_facts().keys() == set(get_args(Fact))
    assert machine_facts()["gpu_capability"] == "9.0" and isinstance(machine_facts()["cpu_fp16"], bool)


def test_the_catalogues_arms_name_theirs() -> None:
    found = catalogue.load().cases["device-map-distributed"]
    assert facts.depends_on(found, "fp16-zero2-no-map") == ["cpu_fp16"] and facts.depends_on(found, "broken") == []
