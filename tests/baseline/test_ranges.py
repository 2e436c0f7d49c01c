"""Expectations from measurements: each for the releases it was measured over, and naming where they
end."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from observations import case
from packaging.specifiers import SpecifierSet
from repro_matrix.baseline.derivation import expectations, is_whole, measured, ranges

KNOWN = case(variants={"unfixed": {}, "fix": {}, "newer": {"stack": "current"}})
RELEASES = [f"4.{minor}.{patch}" for minor in range(36, 44) for patch in range(3)]


def document(
    release: str, fix: str, torch: str = "2.2.2", where: str = "m/fsdp", **more: str
) -> dict[str, Any]:
    verdicts = {"fix": {"name": fix}, **{variant: {"name": name} for variant, name in more.items()}}
    return {
        "params": where,
        "verdicts": verdicts,
        "variants": {"unfixed": {}, **{variant: {} for variant in verdicts}},
        "stack": {"versions": {"torch": torch, "transformers": release}},
        "hardware": {"accelerator": "cpu"},
    }


def said(*documents: dict[str, Any]) -> list[tuple[str, str, str, Any]]:
    found = [
        item
        for d in documents
        for item in measured(KNOWN, d, d["stack"]["versions"]["transformers"])
    ]
    return [
        (
            variant,
            verdict,
            entry.versions["transformers"],
            [end["transformers"] for end in entry.measured_at],
        )
        for entry in expectations(found, "measured")
        for variant, verdict in entry.verdicts.items()
    ]


def test_expectations_of_equal_neighbors_are_one_range() -> None:
    """In whole minor releases; they end at another verdict, and at a release without one."""
    line = {
        "4.37.2": "SIGNATURE_MISMATCH",
        "4.38.0": "FIXED",
        "4.40.1": "FIXED",
        "4.43.1": "FIXED",
        "4.43.2": "NOT_FIXED",
        "4.44.0": "NOT_REPRODUCED",
        "4.45.0": "FIXED_UPSTREAM",
        "4.46.0": "INCONCLUSIVE",
        "5.0.0+cpu": "NOT_REPRODUCED",
    }
    assert said(*(document(release, verdict) for release, verdict in line.items())) == [
        ("fix", "SIGNATURE_MISMATCH", ">=4.37,<4.38", ["4.37.2"]),
        ("fix", "FIXED", ">=4.38,<=4.43.1", ["4.38.0", "4.43.1"]),
        ("fix", "NOT_FIXED", ">=4.43.2,<4.44", ["4.43.2"]),
        ("fix", "NOT_REPRODUCED", ">=4.44,<4.46", ["4.44.0", "4.45.0"]),
        ("fix", "NOT_REPRODUCED", ">=5.0,<5.1", ["5.0.0+cpu"]),
    ]
    found = [
        item
        for r in ("4.38.0", "4.38.1", "4.39.0")
        for item in measured(KNOWN, document(r, "FIXED"), r)
    ]
    assert [[item.place for item in each.members] for each in ranges(found)] == [
        ["4.38.0", "4.38.1", "4.39.0"]
    ]


def test_expectations_with_another_error_of_unfixed_are_another_range() -> None:
    """The verdicts of the fixes are the same: the failure keeps reproducing, with another of its
    signatures."""
    line = {"4.38.0": "norm", "4.39.0": "norm", "4.40.0": "layer-norm"}
    found = []
    for release, signature in line.items():
        made = document(release, "FIXED")
        known = {
            "case": KNOWN.slug,
            "signature": signature,
            "ranks": [0],
            "kind": "exception",
            "message": "m",
        }
        outcome = {"outcome": "reproduced", "reason": "r", "primary": None, "recognized": [known]}
        made["variants"]["unfixed"] = {"attempts": [{"outcome": outcome}] * 3}
        found += measured(KNOWN, made, release)
    entries = expectations(found, "measured")
    assert [(entry.versions["transformers"], entry.failure_ids) for entry in entries] == [
        (">=4.38,<4.40", {"unfixed": f"{KNOWN.slug}/norm"}),
        (">=4.40,<4.41", {"unfixed": f"{KNOWN.slug}/layer-norm"}),
    ]


def test_expectations_of_other_stacks_and_cells_are_separate() -> None:
    assert len(said(document("4.38.0", "FIXED"), document("4.40.0", "FIXED", torch="2.6.0"))) == 2
    cells = [document("4.38.0", "FIXED"), document("4.38.0", "FIXED", where="other/fsdp")]
    found = [item for d in cells for item in measured(KNOWN, d, d["params"])]
    assert [entry.cells for entry in expectations(found, "x")] == [["m/fsdp", "other/fsdp"]]
    cells[1] = document(
        "4.38.1", "FIXED", where="other/fsdp"
    )  # the same range, and measured with another release
    found = [item for d in cells for item in measured(KNOWN, d, d["params"])]
    ends = [
        (e.cells, [end["transformers"] for end in e.measured_at]) for e in expectations(found, "x")
    ]
    assert ends == [(["m/fsdp"], ["4.38.0"]), (["other/fsdp"], ["4.38.1"])]


def test_expectations_of_a_variant_with_its_own_stack_are_separate() -> None:
    line = [document("4.38.0", "FIXED"), document("4.39.3", "FIXED", newer="DIFFERENT_FAILURE")]
    assert said(*line) == [
        ("fix", "FIXED", ">=4.38,<4.40", ["4.38.0", "4.39.3"]),
        ("newer", "DIFFERENT_FAILURE", ">=4.39,<4.40", ["4.39.3"]),
    ]


def test_expectations_unchanged_entry_keeps_its_reason() -> None:
    line = [item for item in measured(KNOWN, document("4.38.0", "FIXED"), "p")]
    old = expectations(line, "first")
    line += measured(KNOWN, document("4.39.0", "NOT_FIXED"), "q")
    assert [entry.reason for entry in expectations(line, "second", old)] == ["first", "second"]


def test_is_whole_false_for_a_search_of_one_variant() -> None:
    assert is_whole(KNOWN, document("4.38.0", "FIXED")), (
        "the variant on a stack of its own may be left out"
    )
    assert not is_whole(KNOWN, {"variants": {"unfixed": {}}})


@given(
    st.lists(
        st.sampled_from(["FIXED", "NOT_FIXED", "SIGNATURE_MISMATCH", "INCONCLUSIVE", None]),
        max_size=len(RELEASES),
    )
)
def test_expectations_cover_each_measured_release_once(history: list[str | None]) -> None:
    probed = {release: verdict for release, verdict in zip(RELEASES, history) if verdict}
    entries = said(*(document(release, verdict) for release, verdict in probed.items()))
    for release, verdict in probed.items():
        inside = [item[1] for item in entries if release in SpecifierSet(item[2])]
        assert inside == ([] if verdict == "INCONCLUSIVE" else [verdict])
