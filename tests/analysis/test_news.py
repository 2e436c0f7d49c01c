"""A first night on other hardware: what differs from a CPU is news, and what nothing is known of is not green."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from observations import document, observation, ok
from repro_matrix.results.exit_code import exit_code
from repro_matrix.results.rows import by_attention, figures, variant_rows, without_expectation

SAID = ["expected", "unexpected", "no_expectation", "matches_cpu", "differs_from_cpu"]


def cell(said: list[str], accelerator: str = "cuda", **changes: Any) -> dict[str, Any]:
    variants: Any = {f"fix{n}": [("passed", observation(ok(0)))] for n in range(len(said))}
    made = document(
        {"unfixed": [("reproduced", observation(ok(0)))], **variants},
        {variant: "FIXED" for variant in variants},
        **changes,
    )
    for variant, each in zip(variants, said):
        made["verdicts"][variant]["expected"] = each
    made["hardware"] = {**made["hardware"], "accelerator": accelerator, "profile": "gpu1"}
    return made


def test_what_differs_from_a_cpu_is_never_red() -> None:
    assert exit_code([cell(["differs_from_cpu", "matches_cpu"])], 1) == 0
    assert exit_code([cell(["differs_from_cpu", "unexpected"])], 1) == 1


def test_where_nothing_is_known_of_more_than_half_green_would_say_nothing() -> None:
    assert exit_code([cell(["no_expectation", "matches_cpu"])], 1) == 0, "half is not more than half"
    assert exit_code([cell(["no_expectation", "no_expectation", "expected"])], 1) == 3
    assert exit_code([cell(["no_expectation"]), cell(["expected", "differs_from_cpu"])], 1) == 0, "over the whole run"
    assert exit_code([cell(["no_expectation", "no_expectation"], "cpu")], 1) == 0, (
        "on a CPU a new release is what people come to try"
    )
    unmeasured = cell(["no_expectation", "no_expectation", "expected"])
    unmeasured["verdicts"]["fix0"]["measured"] = unmeasured["verdicts"]["fix1"]["measured"] = False
    assert exit_code([unmeasured], 1) == 0, "a skip by declared need is no missing expectation"


def test_the_news_come_first_and_the_summary_counts_them() -> None:
    cells = [cell(["expected"], model="a"), cell(["matches_cpu", "differs_from_cpu"], model="b"),
             cell(["no_expectation"], model="c"), cell(["unexpected"], model="d")]  # fmt: skip
    rows = [row for each in cells for row in variant_rows(each)]
    ordered = [row["model"] for row in by_attention(rows)]
    assert list(dict.fromkeys(ordered)) == ["d", "b", "a", "c"]
    assert [row["variant"] for row in by_attention(rows) if row["model"] == "b"] == ["unfixed", "fix0", "fix1"]
    assert len(without_expectation(rows)) == 1
    counted = {"simulated": 0, "unexpected": 1, "muted": 0, "differs_from_cpu": 1, "without_expectation": 1}
    assert figures(rows) == counted, "what --json says of a run"


def test_a_note_on_what_was_met_stands_in_the_row() -> None:
    made = cell(["unexpected"])
    made["verdicts"]["fix0"]["failure_note"] = "expected to meet check a, met check b"
    assert variant_rows(made)[1]["reason"] == "because [expected to meet check a, met check b]"


@given(st.lists(st.lists(st.sampled_from(SAID), min_size=1, max_size=3), max_size=4))
def test_nothing_is_lost_by_the_order(cells: list[list[str]]) -> None:
    rows = [row for n, said in enumerate(cells) for row in variant_rows(cell(said, model=str(n)))]
    ordered = by_attention(rows)
    assert sorted(map(repr, ordered)) == sorted(map(repr, rows))
    found = [row["expected"] for row in ordered]
    code = exit_code((cell(said) for said in cells), 0)
    assert (code == 1) == ("unexpected" in found)
