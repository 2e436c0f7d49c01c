"""Results as lines: what needs attention first, no line wider than the page, no text that a
terminal would obey."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import report_cells
from hypothesis import given
from hypothesis import strategies as st
from observations import document, exception, failed, observation, ok
from repro_matrix import text
from repro_matrix.baseline.derivation import exit_code
from repro_matrix.report.headline import Headline, headline
from repro_matrix.report.result_lines import MOST_CASES, result_lines
from repro_matrix.report.run_summary import exit_line
from repro_matrix.results.rows import Row
from repro_matrix.runner.engine import RunTotals

BOOM = observation(failed(0, exception("RuntimeError", "boom")), ok(1))
BOOM["ranks"][0]["log_tail"] = (
    "an early line\n" * 9 + "Traceback\n\x1b[31mRuntimeError: boom\u202e\x07\n"
)


def cell(
    verdict: str = "FIXED", state: str = "expected", case: str = "some-case", **changes: Any
) -> dict[str, Any]:
    result = document(
        {"unfixed": [("reproduced", BOOM)], "fix": [("other_failure", BOOM)]},
        {"fix": verdict},
        case=case,
        **changes,
    )
    result["verdicts"]["fix"] |= {"expected": state, "expectation": "FIXED"}
    return identified(result)


def identified(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "cell_id": f"{result['case']}/{result['model']}-{result['strategy']}"}


def rows(*results: dict[str, Any]) -> list[Row]:
    return [row for each in results for row in report_cells.rows(each)]


def of(*results: dict[str, Any]) -> Headline:
    made = rows(*results)
    return headline(made, report_cells.cases_of(made))


def shown(*results: dict[str, Any], width: int = text.WIDTH, everything: bool = False) -> list[str]:
    return list(result_lines(of(*results), width, everything))


def section(results: list[dict[str, Any]], title: str) -> list[str]:
    """Return the lines of one section, its title first; [] where it is missing."""
    lines = shown(*results)
    start = next((index for index, line in enumerate(lines) if line.startswith(title)), None)
    return [] if start is None else lines[start : [*lines, ""].index("", start)]


def test_difference_is_shown_with_its_log_and_command() -> None:
    lines = shown(
        cell(case="quiet"), cell("NOT_FIXED", "unexpected", case="loud", flags={"call": "root"})
    )
    start = lines.index("STOPPED WORKING  loud m/fsdp on current, fix fix")
    assert lines[start + 1] == "    expected: fix works; measured: same failure: because"
    assert lines[start + 2] == "    what works instead: none of the fixes in this run"
    assert [line[:8] for line in lines[start + 3 : start + 7]] == [
        "    | an",
        "    | an",
        "    | Tr",
        "    | Ru",
    ]
    assert (
        lines[start + 7]
        == "    $ repro run loud model=m strategy=fsdp 'flags.call=\"root\"' variants=fix"
    )
    cases = [line.split() for line in lines if line.startswith("  reproduces")]
    assert [case[1] for case in cases] == ["loud", "quiet"] and "works: fix" in " ".join(cases[1])


def test_error_text_is_shown_once_and_log_lines_are_whole() -> None:
    odd = cell("NOT_FIXED", "unexpected", case="loud")
    odd["verdicts"]["fix"]["reason"] = (
        "unfixed reproduced 3/3; fix reproduced 3/3: RuntimeError: boom"
    )
    first = odd["variants"]["fix"]["attempts"][0]["observation"]["ranks"][0]
    odd["variants"]["fix"]["attempts"][0]["observation"]["ranks"][0] = {
        **first,
        "log_tail": (
            "the beginning of a long line " * 40 + "\n  File x, line 3\nRuntimeError: boom\n"
        ),
    }
    assert [line for line in shown(odd) if line.startswith("    |")] == ["    |   File x, line 3"]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_titles_are_shown_at_the_usual_widths(width: int) -> None:
    result = {**cell(case="a-case-with-a-name-that-is-long"), "title": "Every rank waits " * 5}
    (line,) = [line for line in shown(result, width=width) if line.startswith("  reproduces")]
    assert ("Every rank" in line) == (width >= 80) and len(line) <= width
    assert "works: fix" in line


def test_healthy_run_fits_on_a_screen() -> None:
    results = [cell(case=f"case-{index}") for index in range(40)]
    skipped = identified(document({"unfixed": "needs 2 GPUs"}, {}, case="other"))
    lines = shown(*results, skipped)
    assert max(map(len, shown(*results, skipped, width=60))) <= 60
    assert len(lines) <= 18 and sum(line.startswith("  reproduces") for line in lines) == MOST_CASES
    assert "repro show case-0" in next(line for line in lines if line.startswith("What to do"))
    every = shown(*results, everything=True)
    assert "REPRODUCES: 40 cases" in every and sum("works: fix" in line for line in every) == 40


@pytest.mark.parametrize(("cases", "more"), [(MOST_CASES + 1, 0), (MOST_CASES + 2, 2)])
def test_cases_that_are_not_listed_are_counted(cases: int, more: int) -> None:
    lines = shown(*(cell(case=f"case-{index}") for index in range(cases)))
    assert sum(line.startswith("  reproduces") for line in lines) == cases - more
    assert [line.split()[0] for line in lines if line.endswith("--format text")] == [
        str(more)
    ] * bool(more)


def test_summary_has_cases_of_each_state() -> None:
    failing = {
        f"f{n}": observation(failed(0, exception("ValueError", "x")), ok(1)) for n in range(3)
    }
    odd = [
        identified(document({"unfixed": [("other_failure", one)]}, {}, case=name))
        for name, one in failing.items()
    ]
    gone = identified(document({"unfixed": [("passed", observation(ok(0)))]}, {}, case="gone"))
    lines = shown(*odd, gone, *(cell(case=f"case-{index}") for index in range(9)))
    names = [
        line.split("  ")[1] for line in lines if line.startswith("  ") and "..." not in line[:6]
    ]
    assert [names.count(name) for name in ("reproduces", "not reproduced", "another error")] == [
        2,
        1,
        1,
    ]


def test_variants_that_differ_for_one_reason_are_listed_once() -> None:
    odd = cell("SIGNATURE_MISMATCH", "unexpected", case="loud")
    for variant, change in (
        ("third", {}),
        ("fourth", {"expectation": "NOT_FIXED"}),
        ("last", {"reason": "another"}),
    ):
        odd["variants"][variant] = odd["variants"]["fix"]
        odd["verdicts"][variant] = odd["verdicts"]["fix"] | change
    odd["verdicts"]["fix"]["failure_note"] = "measured failure b"
    lines = shown(odd)
    assert any(line.endswith("because [measured failure b]") for line in lines)
    headings = [line for line in lines if line.startswith("NEW FAILURE  loud m/fsdp")]
    assert [line.partition("variant ")[2] for line in headings] == ["fix, third", "fourth", "last"]


def test_command_can_be_pasted() -> None:
    odd = cell(
        "NOT_FIXED",
        "unexpected",
        flags={"call": "root x", "n": [1, 2]},
        model="a-model-of-many-parameters",
    )
    odd["stack"] = {**odd["stack"], "name": "/my locks/now.txt"}
    (command,) = [line for line in shown(odd, width=60) if line.startswith("    $ ")]
    words = shlex.split(command.partition("$")[2])  # as a shell does
    assert words[5:] == [
        'flags.call="root x"',
        "flags.n=[1, 2]",
        "stack=/my locks/now.txt",
        "variants=fix",
    ]


def test_new_results_come_after_differences() -> None:
    news = cell("NOT_FIXED", "differs_from_cpu", case="other")
    new = [cell("SIGNATURE_MISMATCH", "no_expectation", model=model) for model in "mn"]
    lines = shown(*new, news, cell(case="quiet"))
    titles = [line.partition(" ")[0].strip(":") for line in lines if line[:3].isupper()]
    assert titles == ["DIFFERENT", "NO"]
    assert section([*new, news], "NO EXPECTATION: 2 variants")[1:] == [
        "   2  SIGNATURE_MISMATCH [some-case/fix]"
    ]


def test_inconclusive_variants_are_listed_by_reason_and_are_not_new() -> None:
    results = [
        *(cell("INCONCLUSIVE", "no_expectation", case=case) for case in "ab"),
        cell(case="quiet"),
    ]
    assert section(results, "NO VERDICT: 2 variants")[1:] == [
        "   2  because [a/fix, b/fix]"
    ] and not section(results, "NO EXPECTATION")
    assert not section([cell("INCONCLUSIVE", "expected")], "NO VERDICT")


def test_flaky_variants_are_no_news_to_accept() -> None:
    results = [cell("FLAKY", "no_expectation"), cell(case="quiet")]
    assert len(section(results, "FLAKY")) == 2 and not section(results, "NO EXPECTATION")


def test_skipped_variants_are_grouped_by_reason() -> None:
    reason = "needs 2 GPUs"
    skipped = [
        document({"unfixed": reason, "fix": reason}, {"fix": "INCONCLUSIVE"}, case=case)
        for case in "ab"
    ]
    lines = shown(
        *map(identified, (*skipped, document({"unfixed": "needs vllm"}, {}, case="c"))),
        everything=True,
    )
    assert lines[-3:] == [
        "NOT MEASURED: 5 variants",
        "   4  needs 2 GPUs [a, b]",
        "   1  needs vllm [c]",
    ]
    many = [
        identified(document({"unfixed": f"needs {n} GPUs"}, {}, case=f"c{n}")) for n in range(20)
    ]
    assert "      and 12 more reasons" in shown(*many, everything=True)
    assert lines[0].split(maxsplit=1) == ["Results", "Nothing was measured."]


STATES = ["unexpected", "no_expectation", "differs_from_cpu", "expected"]


@given(st.text(max_size=400), st.sampled_from(STATES), st.sampled_from([40, 80, 120]))
def test_hostile_text_neither_widens_nor_controls_the_terminal(
    hostile: str, state: str, width: int
) -> None:
    result = cell(
        "DIFFERENT_FAILURE",
        state,
        case="a-case-with-a-name-that-is-long",
        flags={"call": "root " * 5},
    )
    result["verdicts"]["fix"]["reason"] = hostile
    result["variants"]["fix"]["attempts"][0]["observation"]["ranks"][0]["log_tail"] = hostile * 3
    for line in shown(
        result, identified(document({"unfixed": hostile or "x"}, {}, case="b")), width=width
    ):
        assert line.isprintable() and (len(line) <= width or line.startswith("    $")), repr(line)


@given(st.integers(30, 80))
def test_code_that_is_longer_than_a_line_breaks_after_a_bracket_or_a_comma(width: int) -> None:
    code = "FSDP(model,auto_wrap_policy=partial(transformer_wrap,transformer_layer_cls={Qwen2DecoderLayer}),sync=True)"
    lines = text.wrap(f"use {code} instead", "", 4, width)
    assert code in "".join(line.strip() for line in lines) and max(map(len, lines)) <= width
    assert set(re.findall(r"\w+=?", code)) <= set(re.findall(r"\w+=?", "\n".join(lines)))


def test_one_line_removes_whole_terminal_sequences() -> None:
    assert (
        text.one_line("a\x1b]0;title\x07b\x1b[2Jc\x1b]8;;http://x\x1b\\d\x1bMe\u202ef") == "abcde f"
    )


def test_describe_exit_gives_the_reason() -> None:
    odd = of(cell("NOT_FIXED", "unexpected"))
    assert (
        exit_line(1, odd, RunTotals())
        == "exit code 1: 1 documented fix stopped working: some-case/fix"
    )
    assert exit_line(0, headline([], {}), RunTotals()) == "exit code 0: everything as expected"
    assert "repro doctor" in exit_line(3, odd, RunTotals())


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        (["reproduced", "reproduced"], 0),
        (["passed"], 0),
        (["reproduced", "other_failure"], 3),
        (["hang"], 3),
    ],
)
def test_unfixed_variant_alone_with_another_failure_is_listed_and_exit_3(
    kinds: list[str], code: int
) -> None:
    alone = identified(document({"unfixed": [(kind, observation(ok(0))) for kind in kinds]}, {}))
    assert exit_code(rows(alone), 1) == code
    assert bool(section([alone], "NOT COMPARED: in 1 cell")) == (code == 3)


SAME = {"unfixed": "AcceleratorError", "fix": "AcceleratorError"}


@pytest.mark.parametrize(
    ("errors", "changes", "state", "code"),
    [
        (
            SAME,
            {},
            "no_expectation",
            3,
        ),  # the same exception at the same place, whatever its message
        ({**SAME, "fix": "ValueError"}, {}, "no_expectation", 0),
        (SAME, {}, "expected", 0),
        (SAME, {"outcome": "reproduced"}, "no_expectation", 0),
    ],
)
def test_cell_whose_variants_all_fail_with_the_same_error_is_listed_and_exit_3(
    errors: dict[str, str], changes: dict[str, str], state: str, code: int
) -> None:
    result = cell("SIGNATURE_MISMATCH", state)
    for name, error in errors.items():
        primary = {
            "rank": 0,
            "type": error,
            "message": f"at {name}",
            "location": "torch.x",
            "kind": "exception",
        }
        outcome = {
            "outcome": "other_failure",
            "reason": f"rank 0: {error}",
            "primary": primary,
            **changes,
        }
        result["variants"][name]["attempts"][0]["outcome"] |= outcome
    assert bool(section([result], "NOT COMPARED: in 1 cell")) == (code == 3)
    assert exit_code(rows(result), 1) == code
