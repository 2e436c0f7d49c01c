"""Expectations: which one applies, whether a verdict is that, and the writer that may not damage people's files."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from judging import case

from harness.judge.expect import compare, expected, predicted, write_expectations
from harness.judge.verdict import Verdict
from harness.schema import Case, Expectation

NOW = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}


def entry(verdict: str = "FIX_HOLDS", arm: str = "fix", **changes: Any) -> dict[str, Any]:
    return {"verdicts": {arm: verdict}, "measured_in": "baseline/x.json", "reason": "measured", **changes}


def having(*entries: dict[str, Any]) -> Case:
    return case(expect=list(entries))


def found(
    known: Case, where: str = "m/fsdp", arm: str = "fix", versions: Any = NOW, hardware: str = "cpu"
) -> str | None:
    applies = expected(known, where, arm, versions, hardware)
    return next(iter(applies.verdicts.values())) if applies else None


def test_an_expectation_applies_by_arm_hardware_and_versions() -> None:
    known = having(entry(versions={"torch": ">=2.13,<2.14"}))
    assert found(known) == "FIX_HOLDS"
    assert found(known, arm="other-fix") is None
    assert found(known, hardware="gpu1") is None
    assert found(known, versions={"torch": "2.12.1"}) is None
    assert found(known, versions={"transformers": "5.23.0"}) is None, "a package that is not there is in no range"
    assert found(known, versions={"torch": "unknown"}) is None
    assert found(having(entry(hardware="*")), hardware="a100x8") == "FIX_HOLDS"
    nightly = having(entry(versions={"torch": ">=2.13"}))
    assert found(nightly, versions={"torch": "2.14.0.dev20260101+cu130"}) == "FIX_HOLDS"


@pytest.mark.parametrize(
    ("cells", "where", "applies"),
    [
        ([], 'm/fsdp/call="root"', True),
        (["m/fsdp"], "m/fsdp", True),
        ([], "m/fsdp/ranks=4", False),
        (["m/fsdp"], "m/fsdp/ranks=4", False),
        (["m/fsdp/ranks=4"], "m/fsdp/ranks=4", True),
        (["m/fsdp/ranks=4"], "m/fsdp/scale=full", False),
        (["m/fsdp/ranks=4"], 'm/fsdp/ranks=4/call="root"', False),
        (["x/ddp", "m/fsdp"], "m/fsdp", True),
        (["m/ddp"], "m/fsdp", False),
        (["*/fsdp"], "m/fsdp", True),
        (["m/fsdp"], 'm/fsdp/call="root"', False),
        (['m/fsdp/call="root"'], "m/fsdp", False),
        (['m/fsdp/call="root"'], 'm/fsdp/call="root"', True),
        (["m/fsdp/call=root"], 'm/fsdp/call="root"', True),
        (["m/fsdp/call=root"], 'm/fsdp/call="root"/cache=false', False),
        (["m/fsdp/cache=false/call=root"], 'm/fsdp/call="root"/cache=false', True),
        (["m/fsdp"], 'm/fsdp/call="inner"/cache=true', True),
        (["m/fsdp/cache=True"], "m/fsdp", True),
        (['m/fsdp/call="a/b"'], 'm/fsdp/call="a/b"', True),
    ],
)
def test_cells_are_named_by_their_axes_and_the_flags_that_are_not_at_their_default(
    cells: list[str], where: str, applies: bool
) -> None:
    assert (found(having(entry(cells=cells)), where) is not None) == applies


def test_the_most_specific_wins() -> None:
    anywhere, pattern, named = entry("FLAKY"), entry("CHANGED", cells=["*/fsdp"]), entry(cells=["m/fsdp"])
    assert found(having(named, pattern, anywhere)) == "FIX_HOLDS"
    assert found(having(pattern, anywhere)) == "CHANGED"
    narrow = entry("NOT_FIRING", versions={"torch": ">=2.13,<2.14"})
    assert found(having(narrow, anywhere)) == "NOT_FIRING"
    assert found(having(narrow, named)) == "FIX_HOLDS"
    assert found(having(anywhere, entry("CHANGED"))) == "CHANGED", "of two alike the later"
    assert found(having(entry("CHANGED"), entry("FLAKY", hardware="*"))) == "CHANGED"


def test_compare() -> None:
    wanted = Expectation.model_validate(entry())
    assert compare(Verdict("FIX_HOLDS", "x"), wanted) == "expected"
    assert compare(Verdict("FIX_BROKEN", "x"), wanted) == "unexpected"
    assert compare(Verdict("INCONCLUSIVE", "the fix hangs"), wanted) == "unexpected"
    assert compare(Verdict("INCONCLUSIVE", "skipped: no GPU", measured=False), wanted) == "unset"
    assert compare(Verdict("FIX_HOLDS", "x"), None) == "unset"


def test_a_control_that_fails_is_red_without_any_expectation() -> None:
    for name in ("UNHEALTHY", "FLAKY", "INCONCLUSIVE"):  # the last: it hangs
        assert compare(Verdict(name, "x"), None, control=True) == "unexpected"
    assert compare(Verdict("HEALTHY", "x"), None, control=True) == "unset"
    assert compare(Verdict("INCONCLUSIVE", "skipped", measured=False), None, control=True) == "unset"
    known = Expectation.model_validate(entry() | {"verdicts": {"control": "UNHEALTHY"}})
    assert compare(Verdict("UNHEALTHY", "x"), known, control=True) == "expected"
    assert compare(Verdict("UNHEALTHY", "x"), None, known, control=True) == "as predicted"
    healthy = Expectation.model_validate(entry() | {"verdicts": {"control": "HEALTHY"}})
    assert compare(Verdict("UNHEALTHY", "x"), None, healthy, control=True) == "unexpected"


def test_compare_takes_what_expected_returns() -> None:
    known = having(entry() | {"verdicts": {"other-fix": "FIX_BROKEN", "fix": "FIX_HOLDS"}})
    applies = expected(known, "m/fsdp", "fix", NOW, "cpu")
    assert applies is not None and applies.verdicts == {"fix": "FIX_HOLDS"}
    assert compare(Verdict("FIX_BROKEN", "x"), applies) == "unexpected"


# --- the writer

HEAD = """# A case (people write here)
slug: some-case      # trailing
summary: >-
  expect: nothing here is a key
title: "x"

arms:
  broken: {}   # the report's way
"""
RANGE = {"torch": ">=2.13,<2.14"}
NEW = [Expectation.model_validate(entry(cells=["m/fsdp"], versions=RANGE, reason="it: is #1\n'so'"))]


def test_a_new_block_is_appended() -> None:
    written = write_expectations(HEAD, NEW)
    assert written.startswith(HEAD + "expect:\n")
    assert yaml.safe_load(written)["expect"][0]["versions"] == {"torch": ">=2.13,<2.14"}
    assert "hardware: cpu" in written, "what an expectation is for is always said"


def test_a_block_is_replaced_and_what_stands_around_it_stays() -> None:
    once = write_expectations(HEAD, NEW)
    tail = "\n# said at the end\n   # indented\n"
    twice = write_expectations(once.replace("expect:\n", "expect:  # by repro accept\n") + tail, NEW * 2)
    assert twice.startswith(HEAD + "expect: # by repro accept\n") and twice.endswith(tail)
    assert len(yaml.safe_load(twice)["expect"]) == 2
    assert write_expectations(once + tail, []) == HEAD + tail
    assert write_expectations(once, NEW) == once


@pytest.mark.parametrize(
    "block",
    [
        "expect: []\n",
        "expect:\n",
        "expect: ~  # none yet\n",
        "expect:\n- {verdicts: {a: FLAKY}, measured_in: x, reason: y}\n# between\n- {verdicts: {}, measured_in: x,\n"
        "   reason: y}\n",
        "expect: [{verdicts: {a: FLAKY},\n  measured_in: x, reason: y}]",
        'expect:\n  - verdicts: {}\n    measured_in: x\n    reason: "a # b\n      # c"\n',
        "expect:\n  - verdicts: {}\n    measured_in: x\n    reason: |\n      a\n      # b\n",
        "expect:\n  - verdicts: {}\n    measured_in: x\n    reason: plain  # as measured\n",
    ],
)
def test_every_way_to_write_the_old_block_is_understood(block: str) -> None:
    written = write_expectations(HEAD + block, NEW)
    assert [Expectation.model_validate(item) for item in yaml.safe_load(written)["expect"]] == NEW
    assert written.startswith(HEAD + "expect:")
    assert write_expectations(HEAD + block, []) == HEAD


def test_a_block_that_is_not_the_last_key_is_replaced_where_it_is() -> None:
    old = "expect:\n  - {verdicts: {}, measured_in: x, reason: y}\n# about the title\n" + HEAD
    written = write_expectations(old, NEW)
    assert written.endswith("# about the title\n" + HEAD)


def test_line_ends_and_a_missing_last_one() -> None:
    windows = HEAD.replace("\n", "\r\n")
    written = write_expectations(windows, NEW)
    assert written.startswith(windows + "expect:\r\n") and "\n" not in written.replace("\r\n", "")
    assert write_expectations(HEAD.rstrip("\n"), NEW) == write_expectations(HEAD, NEW)


@pytest.mark.parametrize("bad", ["", "- a\n", "{slug: x}\n", "slug: [\n", "slug: x\n...\n"])
def test_what_cannot_be_written_safely_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"case's file|expect block"):
        write_expectations(bad, NEW)


NOT_YAML = "\ufeff\u2028\u2029\x85"
PLAIN = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters=NOT_YAML), max_size=30)
COMMENT = st.builds("{}# {}\n".format, st.sampled_from(["", "  ", "      "]), PLAIN)


@given(st.lists(COMMENT, max_size=3), st.lists(COMMENT, max_size=3), st.lists(PLAIN, min_size=1, max_size=3))
def test_the_writer_keeps_every_comment_and_reads_back(before: list[str], after: list[str], reasons: list[str]) -> None:
    entries = [Expectation.model_validate(entry(reason=reason, cells=[reason or "x"])) for reason in reasons]
    head = "".join(before) + HEAD + "".join(before)
    tail = "".join(after)
    written = write_expectations(write_expectations(head, NEW) + tail, entries)
    assert written.startswith(head + "expect:\n") and written.endswith(tail)
    assert [Expectation.model_validate(item) for item in yaml.safe_load(written)["expect"]] == entries
    assert write_expectations(written, []) == head + tail


def test_fixed_upstream_is_what_an_expectation_of_not_firing_says() -> None:
    """Which of the two it is, other stacks' stored measurements decide: publishing one of those is no difference."""
    wanted = Expectation.model_validate(entry("NOT_FIRING"))
    assert compare(Verdict("UPSTREAM_FIXED", ""), wanted) == "expected"
    assert compare(Verdict("NOT_FIRING", ""), Expectation.model_validate(entry("UPSTREAM_FIXED"))) == "expected"
    assert compare(Verdict("FIX_HARMFUL", ""), wanted) == "unexpected"


def test_on_other_hardware_what_a_cpu_showed_is_a_prediction() -> None:
    known = having(entry("FIX_HOLDS"))
    assert predicted(known, "m/fsdp", "fix", NOW, "cpu") is None, "there it is the expectation"
    guess = predicted(known, "m/fsdp", "fix", NOW, "a100x8")
    assert guess is not None and guess.verdicts == {"fix": "FIX_HOLDS"}
    assert compare(Verdict("FIX_HOLDS", ""), None, guess) == "as predicted"
    assert compare(Verdict("FIX_BROKEN", ""), None, guess) == "differs from cpu"
    assert compare(Verdict("INCONCLUSIVE", "", measured=False), None, guess) == "unset"
    own = having(entry("FIX_HOLDS"), entry("FIX_BROKEN", hardware="a100x8"))
    assert predicted(own, "m/fsdp", "fix", NOW, "a100x8") is None, "it has an expectation of its own"
    assert compare(Verdict("FIX_HOLDS", ""), expected(own, "m/fsdp", "fix", NOW, "a100x8"), guess) == "unexpected"
    assert predicted(known, "m/fsdp", "fix", {"transformers": "5.23.0"}, "gpu1") is not None
    old = having(entry(versions={"torch": "<2.3"}))
    assert predicted(old, "m/fsdp", "fix", NOW, "gpu1") is None, "releases count there, too"
