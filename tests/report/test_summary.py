"""The end of a run: what matters stands first, nothing is wider than the page, no text obeys a terminal."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import document, exception, failed, observation, ok
from repro_matrix import text
from repro_matrix.report import summary
from repro_matrix.report.terminal import summary_line
from repro_matrix.results.exit_code import exit_code
from repro_matrix.results.rows import again, by_attention, variant_rows

BOOM = observation(failed(0, exception("RuntimeError", "boom")), ok(1))
BOOM["ranks"][0]["log_tail"] = "an early line\n" * 9 + "Traceback\n\x1b[31mRuntimeError: boom\u202e\x07\n"


def cell(verdict: str = "FIXED", expected: str = "expected", case: str = "some-case", **changes: Any) -> dict[str, Any]:
    made = document(
        {"unfixed": [("reproduced", BOOM)], "fix": [("other_failure", BOOM)]}, {"fix": verdict}, case=case, **changes
    )
    made["verdicts"]["fix"] |= {"expected": expected, "expectation": "FIXED"}
    return made


def shown(*documents: dict[str, Any]) -> list[str]:
    return list(summary.lines(documents, by_attention(row for d in documents for row in variant_rows(d))))


def test_what_differs_stands_first_with_its_error_and_the_command_that_shows_it_again() -> None:
    said = shown(cell(case="quiet"), cell("NOT_FIXED", "unexpected", case="loud", flags={"call": "root"}))
    assert said[1] == "DIFFERS from what is expected: 1 variant"
    assert said[2] == "  loud m/fsdp, variant fix"
    assert said[3] == "    expected FIXED, measured NOT_FIXED: because"
    assert said[4:8] == ["    | an early line", "    | an early line", "    | Traceback", "    | RuntimeError: boom  "]
    assert said[8] == "    $ repro run loud model=m strategy=fsdp 'flags.call=\"root\"' variants=fix"
    cases = said[said.index("CASES measured") + 1 :]
    assert cases == ["! loud     1 cell  reproduced: 1 fix broken", "  quiet    1 cell  reproduced: 1 fix holds"]


def test_variants_that_differ_for_one_reason_are_told_once() -> None:
    """Where a unfixed variant meets something else, all its fixes do: twenty times eight lines that said the same."""
    odd = cell("SIGNATURE_MISMATCH", "unexpected", case="loud")
    for variant, wanted in (("third", "FIXED"), ("fourth", "NOT_FIXED")):
        odd["variants"][variant] = odd["variants"]["fix"]
        odd["verdicts"][variant] = odd["verdicts"]["fix"] | {"expectation": wanted}
    odd["verdicts"]["last"] = odd["verdicts"]["fix"] | {"reason": "another one"}
    odd["variants"]["last"] = odd["variants"]["fix"]
    said = shown(odd)
    assert said[1] == "DIFFERS from what is expected: 4 variants"
    heads = [line for line in said if line.startswith("  loud m/fsdp")]
    assert heads == ["  loud m/fsdp, variants fix, third, fourth", "  loud m/fsdp, variant last"]
    told = "    expected FIXED (fix, third), expected NOT_FIXED (fourth), measured SIGNATURE_MISMATCH: because"
    assert said[3] == told and "    expected FIXED, measured SIGNATURE_MISMATCH: another one" in said
    assert [line for line in said if line.startswith("    $")] == [
        "    $ repro run loud model=m strategy=fsdp variants=fix,third,fourth",
        "    $ repro run loud model=m strategy=fsdp variants=last",
    ]


def test_a_unfixed_variant_alone_is_told_without_loose_ends() -> None:
    alone = cell()
    alone["variants"].pop("fix")
    alone["verdicts"] = {}
    rows = list(variant_rows(alone))
    assert shown(alone)[-1] == "  some-case    1 cell  reproduced"
    assert summary_line(rows).startswith("nothing unexpected")


def test_the_command_names_the_stack() -> None:
    odd = cell("NOT_FIXED", "unexpected", case="loud")
    odd["stack"] = {**odd["stack"], "name": "/my locks/now.txt"}
    assert shown(odd)[8] == "    $ repro run loud model=m strategy=fsdp 'stack=/my locks/now.txt' variants=fix"


def test_a_command_that_is_wrapped_can_be_pasted() -> None:
    odd = cell("NOT_FIXED", "unexpected", flags={"call": "root and more"}, model="a-model-of-many-parameters")
    odd["stack"] = {**odd["stack"], "name": "/my locks/now.txt"}
    said = list(summary.lines([odd], list(by_attention(variant_rows(odd))), 60))
    first = next(number for number, line in enumerate(said) if line.startswith("    $ "))
    command = list(itertools.takewhile(lambda line: line, said[first:]))
    words = shlex.split("\n".join(command).partition("$")[2].replace("\\\n", ""))  # as a shell does
    assert len(command) > 1 and max(map(len, command)) <= 60
    assert words == shlex.split(again(next(row for row in variant_rows(odd) if row["variant"] == "fix")))


def test_a_command_is_the_same_in_every_shell() -> None:
    """bash took a flag's quotes, and zsh the brackets of `variants=[fix]` for a pattern."""
    odd = cell("NOT_FIXED", "unexpected", flags={"call": "root x", "n": [1, 2], "on": True})
    row = next(row for row in variant_rows(odd) if row["variant"] == "fix")
    assert shlex.split(again(row))[5:] == ['flags.call="root x"', "flags.n=[1, 2]", "flags.on=true", "variants=fix"]
    assert not re.search(r"[\[\]*?{}!$;&|<>()~#]", re.sub(r"'[^']*'", "", again(row)))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    documents = [
        cell("NOT_FIXED", "unexpected", case="a-case-with-a-name-that-is-long", flags={"call": "root " * 5}),
        cell("SIGNATURE_MISMATCH", "no_expectation", model="a-model-of-many-parameters"),
        cell("SIGNATURE_MISMATCH", "differs_from_cpu"),
    ]
    rows = by_attention(row for document in documents for row in variant_rows(document))
    said = [line for line in summary.lines(documents, rows, width) if " " in line.strip(" \\") and "'flags" not in line]
    assert max(map(len, said)) <= width  # but for a single word of a command, which is not taken apart


def test_news_is_listed_before_the_cases_and_by_its_verdicts() -> None:
    news = cell("NOT_FIXED", "differs_from_cpu", case="other")
    said = shown(
        cell("SIGNATURE_MISMATCH", "no_expectation"), cell("SIGNATURE_MISMATCH", "no_expectation", model="n"), news
    )
    titles = [line for line in said if line[:3].isupper()]
    assert titles == [
        "NEWS: differs from what a CPU showed: 1 variant",
        "NEW, nothing is expected of them yet: 2 variants",
        "CASES measured",
    ]
    assert "  some-case m/fsdp, n/fsdp: SIGNATURE_MISMATCH: fix" in said


def test_a_catalogue_that_is_wholly_new_is_told_by_case() -> None:
    """It was a line for each cell: 187 of the catalogue's first night on another machine."""
    verdicts = ["SIGNATURE_MISMATCH", "FIXED"] * 20
    wholly = [cell(told, "no_expectation", case=f"c{n}", model=m) for n, told in enumerate(verdicts) for m in "ab"]
    for number, one in enumerate(wholly):
        one["variants"][f"only-{number}"] = one["variants"].pop("fix")  # no two cells say the same
        one["verdicts"][f"only-{number}"] = one["verdicts"].pop("fix")
    in_part = [cell("NOT_FIXED", "no_expectation", case="known", model="x"), cell(case="known", model="y")]
    said = shown(*wholly, *in_part)
    assert said[1] == "NEW, nothing is expected of them yet: 81 variants"
    assert said[2] == "  all of 40 cases, marked + below; `--all` prints every variant"
    assert said[3:6] == ["  known in 1 cell: 1 fix broken", "", "CASES measured (+: all of it is new)"]
    assert [line[0] for line in said[6:]] == [*"+" * 40, " "] and len(said) == 6 + 41
    assert "+ c0      2 cells  reproduced: 2 fail otherwise" in said


def test_what_came_in_between_is_read_where_a_launched_variant_gave_no_answer() -> None:
    """It was "NEW: INCONCLUSIVE", and its reason in the documents only."""
    said = shown(
        cell("INCONCLUSIVE", "no_expectation"), cell("INCONCLUSIVE", "no_expectation", case="other"), cell(case="quiet")
    )
    assert said[1:3] == ["NO ANSWER: 2 variants", "   2  because [2 cases]"]
    assert not [line for line in said if line.startswith("NEW")]
    assert "NO ANSWER" not in "".join(shown(cell("INCONCLUSIVE", "expected")))


def test_what_was_not_measured_is_grouped_by_its_reason() -> None:
    lacking = [
        document({"unfixed": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {"fix": "INCONCLUSIVE"}, case=c) for c in "ab"
    ]
    said = shown(*lacking, document({"unfixed": "needs vllm"}, {}, case="c"))
    assert said[1:] == ["NOT MEASURED: 5 variants", "   4  needs 2 GPUs [2 cases]", "   1  needs vllm [c]"]


def test_a_quiet_run_says_no_more_than_its_cases() -> None:
    assert shown(*(cell(case=f"c{number}") for number in range(30)))[:2] == ["", "CASES measured"]
    assert len(shown(*(cell(case=f"c{number}", model=m) for number in range(30) for m in "abc"))) == 32
    assert shown() == []


@given(st.text(max_size=400), st.sampled_from(["unexpected", "no_expectation", "differs_from_cpu", "expected"]))
def test_no_text_widens_or_obeys(hostile: str, expected: str) -> None:
    made = cell("DIFFERENT_FAILURE", expected)
    made["verdicts"]["fix"]["reason"] = hostile
    made["variants"]["fix"]["attempts"][0]["observation"]["ranks"][0]["log_tail"] = hostile * 3
    skipped = document({"unfixed": hostile or "x"}, {}, case="b")
    for line in shown(made, skipped):
        assert len(line) <= text.WIDTH and line.isprintable(), repr(line)


def test_what_a_terminal_would_obey_is_gone_as_a_whole() -> None:
    """Of a title's sequence the title had stayed."""
    assert text.one_line("a\x1b]0;title\x07b\x1b[2Jc\x1b]8;;http://x\x1b\\d\x1bMe\u202ef") == "abcde f"


def test_the_last_line_says_the_exit_code_and_why() -> None:
    rows = variant_rows(cell("NOT_FIXED", "unexpected"))
    assert summary.ending(1, rows).startswith("exit code 1: 1 variant differ")
    assert summary.ending(0, rows) == "exit code 0: nothing unexpected"
    assert "repro doctor" in summary.ending(3, rows)


def test_a_unfixed_variant_measured_alone_that_fails_otherwise_is_said_and_is_not_green() -> None:
    """Without a fix beside it there is no verdict: nothing compares it with what is expected."""

    def alone(*kinds: str, verdicts: dict[str, Any] | None = None) -> dict[str, Any]:
        made = document({"unfixed": [(kind, observation(ok(0))) for kind in kinds]}, verdicts or {})
        made["complete"] = True
        return made

    for kinds, code in (
        (("reproduced", "reproduced"), 0),
        (("passed",), 0),
        (("reproduced", "other_failure"), 3),
        (("hang",), 3),
    ):
        stored = [alone(*kinds)]
        assert exit_code(stored, 1) == code, kinds  # type: ignore[arg-type]
        said = " ".join(summary.lines(stored, variant_rows(stored[0])))  # type: ignore[arg-type]
        assert ("ANOTHER FAILURE THAN THE KNOWN ONE, of 1 unfixed variant measured alone" in said) == (code == 3)
    judged = document(
        {"unfixed": [("other_failure", observation(ok(0)))], "fix": [("passed", observation(ok(0)))]},
        {"fix": "SIGNATURE_MISMATCH"},
    )
    assert exit_code([judged], 1) == 0, "its fix's verdict says it"  # type: ignore[list-item]


def test_a_cell_of_which_every_variant_fails_alike_shows_nothing_and_is_not_green() -> None:
    """As where a script meets an illegal access on a card in each variant: SIGNATURE_MISMATCH throughout was news, exit
    code 0."""

    def of(expected: str | None = None, **variants: str | None) -> list[Any]:
        """Each variant's error, or None: it was clean."""
        made = document(
            {name: [("passed", observation(ok(0)))] for name in variants},
            {a: "SIGNATURE_MISMATCH" for a in variants if a != "unfixed"},
        )
        for name, error in variants.items():
            if error:
                primary = {
                    "rank": 0,
                    "type": error,
                    "message": f"at {name}",
                    "location": "torch.cuda.x",
                    "kind": "exception",
                }
                outcome = made["variants"][name]["attempts"][0]["outcome"]
                outcome |= {
                    "outcome": "other_failure",
                    "reason": f"rank 0: {error} in torch.cuda.x",
                    "primary": primary,
                }
        for said in made["verdicts"].values():
            said["expected"] = expected or "differs_from_cpu"
        return [made]

    def told(stored: list[Any]) -> bool:
        said = " ".join(summary.lines(stored, variant_rows(stored[0])))
        assert ("EVERY ARM FAILS ALIKE, in 1 cell" in said) == (exit_code(stored, 1) == 3)
        return "rank 0: AcceleratorError in torch.cuda.x" in said and exit_code(stored, 1) == 3

    same = {"unfixed": "AcceleratorError", "fix": "AcceleratorError", "other": "AcceleratorError"}
    assert told(of(**same)), "by what was met and where, not by the words"
    assert not told(of(**{**same, "other": "ValueError"}))
    assert not told(of(**{**same, "other": None}))
    assert not told(of(**same, expected="expected")), "it is what this case shows there"
    known = of(**same)
    for variant in known[0]["variants"].values():
        variant["attempts"][0]["outcome"]["outcome"] = "reproduced"
    assert not told(known), "the known failure, which no fix cures"


def test_a_unfixed_variant_by_itself_is_compared_with_nothing_and_that_is_said() -> None:
    """Clean where it is known to reproduce, "nothing unexpected" was all that was said."""
    ran: list[Any] = [("passed", observation(ok(0)))]
    told = "1 cell: only the unfixed variant was measured, so there is no verdict"
    by_itself = variant_rows(document({"unfixed": ran}, {}))
    assert told in summary_line(by_itself)
    assert "2 cells" in summary_line([*by_itself, *({**row, "stack": "other"} for row in by_itself)])
    beside = variant_rows(document({"unfixed": ran, "fix": ran}, {"fix": "NOT_REPRODUCED"}))
    assert "only the unfixed variant" not in summary_line(beside)
    assert "only the unfixed variant" not in summary_line([{**row, "attempts": 0} for row in by_itself]), (
        "it was not measured"
    )
