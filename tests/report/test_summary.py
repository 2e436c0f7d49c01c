"""The end of a run: what matters stands first, nothing is wider than the page, no text obeys a terminal."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import document, exception, failed, observation, ok
from repro_matrix import text
from repro_matrix.report import summary
from repro_matrix.report.terminal import summary_line
from repro_matrix.results.exit_code import exit_code
from repro_matrix.results.rows import again, arm_rows, by_attention

BOOM = observation(failed(0, exception("RuntimeError", "boom")), ok(1))
BOOM["ranks"][0]["log_tail"] = "an early line\n" * 9 + "Traceback\n\x1b[31mRuntimeError: boom\u202e\x07\n"


def cell(
    verdict: str = "FIX_HOLDS", expected: str = "expected", case: str = "some-case", **changes: Any
) -> dict[str, Any]:
    made = document(
        {"broken": [("fires", BOOM)], "fix": [("other_error", BOOM)]}, {"fix": verdict}, case=case, **changes
    )
    made["verdicts"]["fix"] |= {"expected": expected, "expectation": "FIX_HOLDS"}
    return made


def shown(*documents: dict[str, Any]) -> list[str]:
    return list(summary.lines(documents, by_attention(row for d in documents for row in arm_rows(d))))


def test_what_differs_stands_first_with_its_error_and_the_command_that_shows_it_again() -> None:
    said = shown(cell(case="quiet"), cell("FIX_BROKEN", "unexpected", case="loud", flags={"call": "root"}))
    assert said[1] == "DIFFERS from what is expected: 1 arm"
    assert said[2] == "  loud m/fsdp, arm fix"
    assert said[3] == "    expected FIX_HOLDS, measured FIX_BROKEN: because"
    assert said[4:8] == ["    | an early line", "    | an early line", "    | Traceback", "    | RuntimeError: boom  "]
    assert said[8] == "    $ repro run loud model=m strategy=fsdp 'flags.call=\"root\"' arms=fix"
    cases = said[said.index("CASES measured") + 1 :]
    assert cases == ["! loud     1 cell  fires: 1 fix broken", "  quiet    1 cell  fires: 1 fix holds"]


def test_arms_that_differ_for_one_reason_are_told_once() -> None:
    """Where a broken arm meets something else, all its fixes do: twenty times eight lines that said the same."""
    odd = cell("CHANGED", "unexpected", case="loud")
    for arm, wanted in (("third", "FIX_HOLDS"), ("fourth", "FIX_BROKEN")):
        odd["arms"][arm] = odd["arms"]["fix"]
        odd["verdicts"][arm] = odd["verdicts"]["fix"] | {"expectation": wanted}
    odd["verdicts"]["last"] = odd["verdicts"]["fix"] | {"reason": "another one"}
    odd["arms"]["last"] = odd["arms"]["fix"]
    said = shown(odd)
    assert said[1] == "DIFFERS from what is expected: 4 arms"
    heads = [line for line in said if line.startswith("  loud m/fsdp")]
    assert heads == ["  loud m/fsdp, arms fix, third, fourth", "  loud m/fsdp, arm last"]
    told = "    expected FIX_HOLDS (fix, third), expected FIX_BROKEN (fourth), measured CHANGED: because"
    assert said[3] == told and "    expected FIX_HOLDS, measured CHANGED: another one" in said
    assert [line for line in said if line.startswith("    $")] == [
        "    $ repro run loud model=m strategy=fsdp arms=fix,third,fourth",
        "    $ repro run loud model=m strategy=fsdp arms=last",
    ]


def test_a_broken_arm_alone_is_told_without_loose_ends() -> None:
    alone = cell()
    alone["arms"].pop("fix")
    alone["verdicts"] = {}
    rows = list(arm_rows(alone))
    assert shown(alone)[-1] == "  some-case    1 cell  fires"
    assert summary_line(rows).startswith("nothing unexpected")


def test_the_command_names_the_stack() -> None:
    odd = cell("FIX_BROKEN", "unexpected", case="loud")
    odd["stack"] = {**odd["stack"], "name": "/my locks/now.txt"}
    assert shown(odd)[8] == "    $ repro run loud model=m strategy=fsdp 'stack=/my locks/now.txt' arms=fix"


def test_a_command_that_is_wrapped_can_be_pasted() -> None:
    odd = cell("FIX_BROKEN", "unexpected", flags={"call": "root and more"}, model="a-model-of-many-parameters")
    odd["stack"] = {**odd["stack"], "name": "/my locks/now.txt"}
    said = list(summary.lines([odd], list(by_attention(arm_rows(odd))), 60))
    first = next(number for number, line in enumerate(said) if line.startswith("    $ "))
    command = list(itertools.takewhile(lambda line: line, said[first:]))
    words = shlex.split("\n".join(command).partition("$")[2].replace("\\\n", ""))  # as a shell does
    assert len(command) > 1 and max(map(len, command)) <= 60
    assert words == shlex.split(again(next(row for row in arm_rows(odd) if row["arm"] == "fix")))


def test_a_command_is_the_same_in_every_shell() -> None:
    """bash took a flag's quotes, and zsh the brackets of `arms=[fix]` for a pattern."""
    odd = cell("FIX_BROKEN", "unexpected", flags={"call": "root x", "n": [1, 2], "on": True})
    row = next(row for row in arm_rows(odd) if row["arm"] == "fix")
    assert shlex.split(again(row))[5:] == ['flags.call="root x"', "flags.n=[1, 2]", "flags.on=true", "arms=fix"]
    assert not re.search(r"[\[\]*?{}!$;&|<>()~#]", re.sub(r"'[^']*'", "", again(row)))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    documents = [
        cell("FIX_BROKEN", "unexpected", case="a-case-with-a-name-that-is-long", flags={"call": "root " * 5}),
        cell("CHANGED", "unset", model="a-model-of-many-parameters"),
        cell("CHANGED", "differs from cpu"),
    ]
    rows = by_attention(row for document in documents for row in arm_rows(document))
    said = [line for line in summary.lines(documents, rows, width) if " " in line.strip(" \\") and "'flags" not in line]
    assert max(map(len, said)) <= width  # but for a single word of a command, which is not taken apart


def test_news_is_listed_before_the_cases_and_by_its_verdicts() -> None:
    news = cell("FIX_BROKEN", "differs from cpu", case="other")
    said = shown(cell("CHANGED", "unset"), cell("CHANGED", "unset", model="n"), news)
    titles = [line for line in said if line[:3].isupper()]
    assert titles == [
        "NEWS: differs from what a CPU showed: 1 arm",
        "NEW, nothing is expected of them yet: 2 arms",
        "CASES measured",
    ]
    assert "  some-case m/fsdp, n/fsdp: CHANGED: fix" in said


def test_a_catalogue_that_is_wholly_new_is_told_by_case() -> None:
    """It was a line for each cell: 187 of the catalogue's first night on another machine."""
    verdicts = ["CHANGED", "FIX_HOLDS"] * 20
    wholly = [cell(told, "unset", case=f"c{n}", model=m) for n, told in enumerate(verdicts) for m in "ab"]
    for number, one in enumerate(wholly):
        one["arms"][f"only-{number}"] = one["arms"].pop("fix")  # no two cells say the same
        one["verdicts"][f"only-{number}"] = one["verdicts"].pop("fix")
    in_part = [cell("FIX_BROKEN", "unset", case="known", model="x"), cell(case="known", model="y")]
    said = shown(*wholly, *in_part)
    assert said[1] == "NEW, nothing is expected of them yet: 81 arms"
    assert said[2] == "  all of 40 cases, marked + below; `--all` prints every arm"
    assert said[3:6] == ["  known in 1 cell: 1 fix broken", "", "CASES measured (+: all of it is new)"]
    assert [line[0] for line in said[6:]] == [*"+" * 40, " "] and len(said) == 6 + 41
    assert "+ c0      2 cells  fires: 2 fail otherwise" in said


def test_what_came_in_between_is_read_where_a_launched_arm_gave_no_answer() -> None:
    """It was "NEW: INCONCLUSIVE", and its reason in the documents only."""
    said = shown(cell("INCONCLUSIVE", "unset"), cell("INCONCLUSIVE", "unset", case="other"), cell(case="quiet"))
    assert said[1:3] == ["NO ANSWER: 2 arms", "   2  because [2 cases]"]
    assert not [line for line in said if line.startswith("NEW")]
    assert "NO ANSWER" not in "".join(shown(cell("INCONCLUSIVE", "expected")))


def test_what_was_not_measured_is_grouped_by_its_reason() -> None:
    lacking = [
        document({"broken": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {"fix": "INCONCLUSIVE"}, case=c) for c in "ab"
    ]
    said = shown(*lacking, document({"broken": "needs vllm"}, {}, case="c"))
    assert said[1:] == ["NOT MEASURED: 5 arms", "   4  needs 2 GPUs [2 cases]", "   1  needs vllm [c]"]


def test_a_quiet_run_says_no_more_than_its_cases() -> None:
    assert shown(*(cell(case=f"c{number}") for number in range(30)))[:2] == ["", "CASES measured"]
    assert len(shown(*(cell(case=f"c{number}", model=m) for number in range(30) for m in "abc"))) == 32
    assert shown() == []


@given(st.text(max_size=400), st.sampled_from(["unexpected", "unset", "differs from cpu", "expected"]))
def test_no_text_widens_or_obeys(hostile: str, expected: str) -> None:
    made = cell("FIX_UNMASKS", expected)
    made["verdicts"]["fix"]["reason"] = hostile
    made["arms"]["fix"]["attempts"][0]["observation"]["ranks"][0]["log_tail"] = hostile * 3
    skipped = document({"broken": hostile or "x"}, {}, case="b")
    for line in shown(made, skipped):
        assert len(line) <= text.WIDTH and line.isprintable(), repr(line)


def test_what_a_terminal_would_obey_is_gone_as_a_whole() -> None:
    """Of a title's sequence the title had stayed."""
    assert text.one_line("a\x1b]0;title\x07b\x1b[2Jc\x1b]8;;http://x\x1b\\d\x1bMe\u202ef") == "abcde f"


def test_the_last_line_says_the_exit_code_and_why() -> None:
    rows = arm_rows(cell("FIX_BROKEN", "unexpected"))
    assert summary.ending(1, rows).startswith("exit code 1: 1 arm differ")
    assert summary.ending(0, rows) == "exit code 0: nothing unexpected"
    assert "repro doctor" in summary.ending(3, rows)


def test_a_broken_arm_measured_alone_that_fails_otherwise_is_said_and_is_not_green() -> None:
    """Without a fix beside it there is no verdict: nothing compares it with what is expected."""

    def alone(*kinds: str, verdicts: dict[str, Any] | None = None) -> dict[str, Any]:
        made = document({"broken": [(kind, observation(ok(0))) for kind in kinds]}, verdicts or {})
        made["complete"] = True
        return made

    for kinds, code in ((("fires", "fires"), 0), (("clean",), 0), (("fires", "other_error"), 3), (("hang",), 3)):
        stored = [alone(*kinds)]
        assert exit_code(stored, 1) == code, kinds  # type: ignore[arg-type]
        said = " ".join(summary.lines(stored, arm_rows(stored[0])))  # type: ignore[arg-type]
        assert ("ANOTHER FAILURE THAN THE KNOWN ONE, of 1 broken arm measured alone" in said) == (code == 3)
    judged = document(
        {"broken": [("other_error", observation(ok(0)))], "fix": [("clean", observation(ok(0)))]}, {"fix": "CHANGED"}
    )
    assert exit_code([judged], 1) == 0, "its fix's verdict says it"  # type: ignore[list-item]


def test_a_cell_of_which_every_arm_fails_alike_shows_nothing_and_is_not_green() -> None:
    """As where a script meets an illegal access on a card in each arm: CHANGED throughout was news, exit code 0."""

    def of(expected: str | None = None, **arms: str | None) -> list[Any]:
        """Each arm's error, or None: it was clean."""
        made = document(
            {name: [("clean", observation(ok(0)))] for name in arms}, {a: "CHANGED" for a in arms if a != "broken"}
        )
        for name, error in arms.items():
            if error:
                primary = {
                    "rank": 0,
                    "type": error,
                    "message": f"at {name}",
                    "where": "torch.cuda.x",
                    "kind": "exception",
                }
                outcome = made["arms"][name]["attempts"][0]["outcome"]
                outcome |= {"outcome": "other_error", "reason": f"rank 0: {error} in torch.cuda.x", "primary": primary}
        for said in made["verdicts"].values():
            said["expected"] = expected or "differs from cpu"
        return [made]

    def told(stored: list[Any]) -> bool:
        said = " ".join(summary.lines(stored, arm_rows(stored[0])))
        assert ("EVERY ARM FAILS ALIKE, in 1 cell" in said) == (exit_code(stored, 1) == 3)
        return "rank 0: AcceleratorError in torch.cuda.x" in said and exit_code(stored, 1) == 3

    same = {"broken": "AcceleratorError", "fix": "AcceleratorError", "other": "AcceleratorError"}
    assert told(of(**same)), "by what was met and where, not by the words"
    assert not told(of(**{**same, "other": "ValueError"}))
    assert not told(of(**{**same, "other": None}))
    assert not told(of(**same, expected="expected")), "it is what this case shows there"
    known = of(**same)
    for arm in known[0]["arms"].values():
        arm["attempts"][0]["outcome"]["outcome"] = "fires"
    assert not told(known), "the known failure, which no fix cures"


def test_a_broken_arm_by_itself_is_compared_with_nothing_and_that_is_said() -> None:
    """Clean where it is known to fire, "nothing unexpected" was all that was said."""
    ran: list[Any] = [("clean", observation(ok(0)))]
    told = "1 cell: only the broken arm was measured, so there is no verdict"
    by_itself = arm_rows(document({"broken": ran}, {}))
    assert told in summary_line(by_itself)
    assert "2 cells" in summary_line([*by_itself, *({**row, "stack": "other"} for row in by_itself)])
    beside = arm_rows(document({"broken": ran, "fix": ran}, {"fix": "NOT_FIRING"}))
    assert "only the broken arm" not in summary_line(beside)
    assert "only the broken arm" not in summary_line([{**row, "attempts": 0} for row in by_itself]), (
        "it was not measured"
    )
