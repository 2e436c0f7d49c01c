"""Which documents `repro accept` publishes, leaves out and drops, and how the tables change."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from observations import case, document, failed, observation
from repro_matrix.baseline.accept import Publication, publication
from repro_matrix.baseline.derivation import published_place, unsupported
from repro_matrix.config.schema import Case
from repro_matrix.grading.regrade import with_expectations
from repro_matrix.records.document import kind_of

KNOWN = case(expect=[])
Stored = dict[str, Any]


def cell(release: str, verdict: str = "FIXED", where: str = "m/fsdp", **changes: Any) -> Stored:
    made = document(
        {
            name: [("reproduced", observation(failed(0)))]
            for name in ("unfixed", "fix", "other-fix")
        },
        {"fix": verdict, "other-fix": "NOT_FIXED"},
        params=where,
        cell_id=f"some-case/{where.replace('/', '-')}",
        **changes,
    )
    made["stack"] = {
        **made["stack"],
        "name": f"base+transformers@{release}",
        "versions": {"torch": "2.6.0", "transformers": release},
        "label": f"tf{release}",
    }
    for variant in made["variants"].values():
        variant["fingerprint"] = "same"
    return made


def decide(held: list[Stored], given: list[Stored], known: Case = KNOWN) -> Publication:
    return publication({known.slug: known}, held, given, "because")


RELEASES = [f"4.{minor}.0" for minor in range(30, 38)]
LINES = st.dictionaries(
    st.sampled_from(RELEASES), st.sampled_from(["FIXED", "NOT_FIXED", "INCONCLUSIVE"]), min_size=1
)


def after(held: list[Stored], found: Publication) -> list[Stored]:
    kept = {published_place(d): d for d in held if published_place(d) not in found.dropped}
    return list({**kept, **found.written}.values())


@given(LINES, LINES)
def test_publication_supports_every_expectation_with_few_documents(
    old: dict[str, str], new: dict[str, str]
) -> None:
    first = decide([], [cell(*item) for item in old.items()])
    published = after([], first)
    second = decide(published, [cell(*item) for item in new.items()])
    stored = after(published, second)
    entries = _entries(second)
    assert unsupported(case(expect=entries), {published_place(each): each for each in stored}) == []
    merged = {**old, **new}
    runs = [
        r
        for i, r in enumerate(sorted(merged))
        if i == 0 or merged[r] != merged[sorted(merged)[i - 1]]
    ]
    assert len(stored) <= 2 * len(runs), "of releases that agree the first and the last"
    assert set(second.written) <= {published_place(cell(release)) for release in new}
    assert not set(second.written) & set(second.left_out) and not set(second.dropped) & set(
        second.written
    )
    again = decide(stored, stored)
    assert (again.written, again.dropped, again.tables) == (
        {},
        [],
        second.tables,
    ), "nothing new says nothing new"


def _entries(found: Publication) -> list[dict[str, Any]]:
    import yaml
    from repro_matrix.config.expectations import Table

    text = found.tables["some-case"]
    return (
        []
        if text is None
        else [e.model_dump() for e in Table.model_validate(yaml.safe_load(text)).expectations]
    )


def with_fix(**changes: Any) -> Stored:
    made = cell("4.38.0")
    made["variants"]["fix"] = {**made["variants"]["fix"], **changes}
    return made


def test_publication_skips_equal_results() -> None:
    old = cell("4.38.0")
    assert decide(
        [old], [{**old, "provenance": {**old["provenance"], "started": 5000.0}}]
    ).same == [published_place(old)]
    machine = {**old, "hardware": {**old["hardware"], "cpu": "another"}}
    attempts = old["variants"]["fix"]["attempts"] * 3
    for other in (
        cell("4.38.0", "NOT_FIXED"),
        machine,
        with_fix(fingerprint="other"),
        with_fix(attempts=attempts),
    ):
        assert list(decide([old], [other]).written) == [published_place(old)]


def test_publication_keeps_a_named_stack_whole() -> None:
    """Also where its result is its neighbors', or shows nothing stable: two stacks are compared by
    their cells."""
    first, inner, last = (cell(f"4.{minor}.0", "NOT_REPRODUCED") for minor in (38, 39, 40))
    assert decide([first, last], [inner]).left_out == [published_place(inner)]
    named = {**inner, "stack": {**inner["stack"], "name": "torch2.2-tf4.39"}}
    silent = {**named, "verdicts": {name: {"name": "INCONCLUSIVE"} for name in named["verdicts"]}}
    for one in (named, silent):
        assert list(decide([first, last], [one]).written) == [published_place(inner)]
        assert (
            published_place(inner)
            not in decide([first, one, last], [cell("4.41.0", "NOT_REPRODUCED")]).dropped
        )


def test_publication_prefers_a_named_stack_to_a_swapped_one_with_its_releases() -> None:
    swapped = cell("4.39.3")
    named = cell("4.39.3")
    named["stack"] = {**named["stack"], "name": "base"}
    assert published_place(named) == published_place(swapped)
    (written,) = decide([swapped], [named]).written.values()
    assert written["stack"]["name"] == "base"
    other = decide([named], [cell("4.39.3", "NOT_FIXED")])
    assert not other.written and not other.dropped, "the named stack keeps its cell"


def test_publication_drops_documents_that_no_expectation_uses() -> None:
    """No expectation, no end of a range, no signature."""
    silent = cell("4.39.0", "INCONCLUSIVE")
    silent["verdicts"]["other-fix"]["name"] = "INCONCLUSIVE"
    assert list(decide([], [silent]).written) == [published_place(silent)], "its failure reproduces"
    for attempt in silent["variants"]["unfixed"]["attempts"]:
        attempt["outcome"] = {**attempt["outcome"], "outcome": "passed"}
    found = decide([], [silent])
    assert (found.written, found.left_out, found.tables) == (
        {},
        [published_place(silent)],
        {"some-case": None},
    )
    assert decide([silent], [cell("4.44.0", where="n/fsdp")]).dropped == [published_place(silent)]
    beside = decide([silent], [cell("4.40.0")])
    assert beside.dropped == [], "it ends the range of 4.40"
    sick = {**silent, "verdicts": {"fix": {**silent["verdicts"]["fix"], "name": "FAILED"}}}
    found = decide([], [sick])
    assert (list(found.written), found.tables) == (
        [published_place(sick)],
        {"some-case": None},
    ), "it says why"
    for ids, expected in (
        ([{"case": "other-case", "signature": "broken"}], True),
        ([{"case": "other-case", "signature": "broken"}, {"type": "ValueError"}], False),
    ):
        known = {**silent, "verdicts": {"fix": {**sick["verdicts"]["fix"], "failure_ids": ids}}}
        assert (decide([], [known]).tables["some-case"] is not None) is expected, (
            "only failures of the catalog"
        )


def test_publication_of_a_rebuilt_stack_replaces_the_older_label() -> None:
    old, other, new = cell("4.38.0"), cell("4.38.0", where="n/fsdp"), cell("4.38.0", "NOT_FIXED")
    new["stack"] = {**new["stack"], "label": "tf4.38.0-other"}
    found = decide([old, other], [new])
    assert (list(found.written), found.dropped) == ([published_place(new)], [published_place(old)])
    fewer = {**new, "variants": {name: new["variants"][name] for name in ("unfixed", "fix")}}
    relabelled = {**new, "stack": {**new["stack"], "name": "base+transformers@4.38"}}
    assert [decide([old], [one]).dropped for one in (fewer, relabelled)] == [[], []]
    assert "[FIXED]" not in str(decide([old], [new]).tables["some-case"]), (
        "the table is of what is published"
    )
    same = {**fewer, "stack": old["stack"]}
    found = decide([old], [same])
    assert found.written == {} and "FIXED" in str(found.tables["some-case"]), (
        "a version map replaces no whole document"
    )


def test_publication_lists_changed_verdicts_with_the_old_ones() -> None:
    expect = {
        "verdicts": {"fix": "FIXED", "other-fix": "NOT_FIXED"},
        "failure_ids": {"other-fix": "some-case/norm"},
        "cells": ["m/fsdp"],
        "measured_at": [{}],
        "reason": "r",
    }
    new = cell("4.38.0", "SIGNATURE_MISMATCH")
    told = [(c.variant, c.old, c.new) for c in decide([], [new], case(expect=[expect])).changes]
    assert told == [
        ("fix", "FIXED", "SIGNATURE_MISMATCH"),
        ("other-fix", "NOT_FIXED (some-case/norm)", "NOT_FIXED"),
    ]
    assert [c.old for c in decide([], [new]).changes] == ["", ""]
    nothing = decide([], [cell("4.38.0", "INCONCLUSIVE")]).changes
    assert [c.variant for c in nothing] == ["other-fix"], "what decided nothing is no change"
    one, _ = decide([], [new]).changes
    assert (one.case, one.where, one.stack) == ("some-case", "m/fsdp", "base+transformers@4.38.0")


def on_gpus(verdict: str, profile: str, capability: str, backend: str = "nccl") -> Stored:
    hardware = {
        **cell("4.30.0")["hardware"],
        "profile": profile,
        "accelerator": "cuda",
        "backend": backend,
        "capabilities": {"gpu_capability": capability},
        "shares_gpu": profile == "gpu1-shared",
    }
    return cell("4.30.0", verdict, hardware=hardware)


def test_evidence_of_gpus_is_kept_by_their_kind_and_not_by_the_name_of_a_profile() -> None:
    """a100x8 and gpu8 may be one machine; gpu2 may be two T4s here and two H200s there."""
    eight, again = on_gpus("FIXED", "a100x8", "8.0"), on_gpus("NOT_FIXED", "gpu8", "8.0")
    t4, h200 = on_gpus("NOT_FIXED", "gpu2", "7.5"), on_gpus("FIXED", "gpu2", "9.0")
    shared = on_gpus("NOT_FIXED", "gpu1-shared", "9.0", "gloo")
    first = after([], decide([], [eight]))
    held = after(first, decide(first, [again]))
    assert len(held) == 1 and held[0]["hardware"]["profile"] == "gpu8", (
        "the newer one of the same GPUs"
    )
    found = decide(held, [t4, h200, shared])
    assert {(each["hardware"], each["verdicts"]["fix"]) for each in _entries(found)} == {
        ("sm_80", "NOT_FIXED"),
        ("sm_75", "NOT_FIXED"),
        ("sm_90", "FIXED"),
        ("sm_90-shared", "NOT_FIXED"),
    }
    known = case(expect=_entries(found))
    verdicts = {
        (document["hardware"]["profile"], kind_of(document["hardware"])): with_expectations(
            document, known
        )["verdicts"]
        for document in (eight, again, t4, h200, shared, on_gpus("FIXED", "gpu4", "10.0"))
    }
    compared = {where: one["fix"]["expected"] for where, one in verdicts.items()}
    assert compared == {
        ("a100x8", "sm_80"): "unexpected",
        ("gpu8", "sm_80"): "expected",
        ("gpu2", "sm_75"): "expected",
        ("gpu2", "sm_90"): "expected",
        ("gpu1-shared", "sm_90-shared"): "expected",
        ("gpu4", "sm_100"): "no_expectation",
    }


def test_kind_of_hardware_is_what_ranks_reported_else_what_was_probed() -> None:
    devices = [{"name": "NVIDIA H200", "capability": "9.0"}]
    gpu: Any = {"accelerator": "cuda", "probe": {"devices": devices}}
    assert (
        kind_of(gpu) == "sm_90"
        and kind_of({**gpu, "capabilities": {"gpu_capability": "8.0"}}) == "sm_80"
    )
    assert kind_of({**gpu, "probe": {"devices": [*devices, {"capability": "8.0"}]}}) == "cuda", (
        "of two kinds"
    )
    assert kind_of({**gpu, "accelerator": "cpu"}) == "cpu"
