"""What `repro accept` writes, leaves and drops, and that it can be seen before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, document, failed, observation
from repro_matrix.cli.main import main
from repro_matrix.config.schema import Case
from repro_matrix.grading.regrade import regrade
from repro_matrix.paths import BASELINE, EXPECTED
from repro_matrix.results import store
from repro_matrix.results.accept import Publication, place, publication
from repro_matrix.results.expectations import unsupported
from repro_matrix.results.store import Store

KNOWN = case(expect=[])
Stored = dict[str, Any]


def cell(release: str, verdict: str = "FIXED", where: str = "m/fsdp", **changes: Any) -> Stored:
    made = document(
        {name: [("reproduced", observation(failed(0)))] for name in ("unfixed", "fix", "other-fix")},
        {"fix": verdict, "other-fix": "NOT_FIXED"},
        params=where, cell_id=f"some-case/{where.replace('/', '-')}", **changes,
    )  # fmt: skip
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
LINES = st.dictionaries(st.sampled_from(RELEASES), st.sampled_from(["FIXED", "NOT_FIXED", "INCONCLUSIVE"]), min_size=1)


def after(held: list[Stored], found: Publication) -> list[Stored]:
    kept = {place(d): d for d in held if place(d) not in found.dropped}
    return list({**kept, **found.written}.values())


@given(LINES, LINES)
def test_publication_supports_every_expectation_with_few_documents(old: dict[str, str], new: dict[str, str]) -> None:
    first = decide([], [cell(*item) for item in old.items()])
    published = after([], first)
    second = decide(published, [cell(*item) for item in new.items()])
    stored = after(published, second)
    entries = _entries(second)
    assert unsupported(case(expect=entries), {place(each): each for each in stored}) == []
    merged = {**old, **new}
    runs = [r for i, r in enumerate(sorted(merged)) if i == 0 or merged[r] != merged[sorted(merged)[i - 1]]]
    assert len(stored) <= 2 * len(runs), "of releases that agree the first and the last"
    assert set(second.written) <= {place(cell(release)) for release in new}
    assert not set(second.written) & set(second.inner) and not set(second.dropped) & set(second.written)
    again = decide(stored, stored)
    assert (again.written, again.dropped, again.tables) == ({}, [], second.tables), "nothing new says nothing new"


def _entries(found: Publication) -> list[dict[str, Any]]:
    import yaml
    from repro_matrix.config.expectations import Table

    text = found.tables["some-case"]
    return [] if text is None else [e.model_dump() for e in Table.model_validate(yaml.safe_load(text)).expectations]


def test_publication_skips_equal_results() -> None:
    old, new = cell("4.38.0"), cell("4.38.0")
    new["provenance"] = {**new["provenance"], "started": 5000.0}
    assert decide([old], [new]).same == [place(old)]
    for other in (
        cell("4.38.0", "NOT_FIXED"),
        {**new, "hardware": {**new["hardware"], "cpu": "another"}},
        {**new, "variants": {**new["variants"], "fix": {**new["variants"]["fix"], "fingerprint": "other"}}},
        {
            **new,
            "variants": {
                **new["variants"],
                "fix": {**new["variants"]["fix"], "attempts": new["variants"]["fix"]["attempts"] * 3},
            },
        },
    ):
        assert list(decide([old], [other]).written) == [place(old)]


def test_publication_keeps_an_inner_named_stack() -> None:
    first, inner, last = (cell(f"4.{minor}.0") for minor in (38, 39, 40))
    assert decide([first, last], [inner]).inner == [place(inner)]
    named = {**inner, "stack": {**inner["stack"], "name": "torch2.2-tf4.39"}}
    assert list(decide([first, last], [named]).written) == [place(inner)]
    assert decide([first, named, last], [cell("4.41.0")]).dropped == [place(last)]


def test_publication_drops_documents_that_no_expectation_uses() -> None:
    """No expectation, no end of a range, no signature: also of a stack that has a name."""
    first, inner, last = (cell(f"4.{minor}.0", "NOT_REPRODUCED") for minor in (38, 39, 40))
    named = {**inner, "stack": {**inner["stack"], "name": "torch2.2-tf4.39"}}
    for one in (first, named, last):
        for attempt in one["variants"]["unfixed"]["attempts"]:
            attempt["outcome"] = {**attempt["outcome"], "outcome": "passed"}
    assert decide([first, last], [named]).inner == [place(named)], (
        "where the failure does not reproduce it is no stack=reproducing"
    )
    assert decide([first, named, last], [cell("4.44.0")]).dropped == [place(named)]
    silent = cell("4.39.0", "INCONCLUSIVE")
    silent["verdicts"]["other-fix"]["name"] = "INCONCLUSIVE"
    assert list(decide([], [silent]).written) == [place(silent)], "its failure reproduces"
    silent["variants"]["unfixed"] = named["variants"]["unfixed"]
    found = decide([], [silent])
    assert (found.written, found.unused, found.tables) == ({}, [place(silent)], {"some-case": None})
    assert decide([silent], [cell("4.44.0", where="n/fsdp")]).dropped == [place(silent)]
    beside = decide([silent], [cell("4.40.0")])
    assert beside.dropped == [], "it ends the range of 4.40"
    sick = {**silent, "verdicts": {"fix": {**silent["verdicts"]["fix"], "name": "FAILED"}}}
    assert list(decide([], [sick]).written) == [place(sick)], "a control that fails: what says why nothing is expected"


def test_publication_of_a_rebuilt_stack_replaces_the_older_label() -> None:
    old, other, new = cell("4.38.0"), cell("4.38.0", where="n/fsdp"), cell("4.38.0", "NOT_FIXED")
    new["stack"] = {**new["stack"], "label": "tf4.38.0-other"}
    found = decide([old, other], [new])
    assert (list(found.written), found.dropped) == ([place(new)], [place(old)])
    fewer = {**new, "variants": {name: new["variants"][name] for name in ("unfixed", "fix")}}
    relabelled = {**new, "stack": {**new["stack"], "name": "base+transformers@4.38"}}
    assert [decide([old], [one]).dropped for one in (fewer, relabelled)] == [[], []]


def test_publication_ignores_replaced_documents() -> None:
    """Its table spoke for both, and for a release that no document of it shows."""
    old, new = cell("4.38.0"), cell("4.38.0", "NOT_FIXED")
    new["stack"] = {**new["stack"], "label": "tf4.38.0-other"}
    assert "[FIXED]" not in str(decide([old], [new]).tables["some-case"])


def test_publication_version_map_does_not_replace_a_fuller_document() -> None:
    old, new = cell("4.38.0"), cell("4.38.0", "NOT_FIXED")
    del new["variants"]["other-fix"]
    found = decide([old], [new])
    assert found.written == {} and "FIXED" in str(found.tables["some-case"])


def test_publication_lists_changed_verdicts_with_the_old_ones() -> None:
    expect = {
        "verdicts": {"fix": "FIXED", "other-fix": "NOT_FIXED"}, "failure_ids": {"other-fix": "some-case/norm"},
        "cells": ["m/fsdp"], "measured_at": [{}], "reason": "r",
    }  # fmt: skip
    new = cell("4.38.0", "SIGNATURE_MISMATCH")
    told = [(c.variant, c.old, c.new) for c in decide([], [new], case(expect=[expect])).changes]
    assert told == [("fix", "FIXED", "SIGNATURE_MISMATCH"), ("other-fix", "NOT_FIXED (some-case/norm)", "NOT_FIXED")]
    assert [c.old for c in decide([], [new]).changes] == ["", ""]
    nothing = decide([], [cell("4.38.0", "INCONCLUSIVE")]).changes
    assert [c.variant for c in nothing] == ["other-fix"], "what decided nothing is no change"
    (one, _) = decide([], [new]).changes
    assert (one.case, one.where, one.stack) == ("some-case", "m/fsdp", "base+transformers@4.38.0")
    both = decide([], [cell("4.39.0", where="n/fsdp"), cell("4.38.0")]).changes
    assert both == sorted(both)


@pytest.fixture
def same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published was measured with older kits."""
    monkeypatch.setattr(store, "since", lambda commit, root, paths: None)


@pytest.mark.usefixtures("same_code")
def test_accept_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slug = "fsdp2-mixed-dtensor"
    stored = regrade(Store(BASELINE).documents(cases=[slug]), _cases()).documents[0]
    path = tmp_path / f"{place(stored)}.json"
    path.parent.mkdir(parents=True)
    stored["variants"]["unfixed"]["fingerprint"] = "other"
    for attempt in stored["variants"]["unfixed"]["attempts"]:
        attempt["observation"] = {
            **attempt["observation"], "attempt": {**attempt["observation"]["attempt"], "fingerprint": "other"},
        }  # fmt: skip
    path.write_text(json.dumps({key: value for key, value in stored.items() if key != "path"}))

    def state() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for folder in (BASELINE, EXPECTED) for file in folder.rglob("*.*")}

    before = state()
    assert main(["accept", f"case={slug}", "--dry-run", "--from", str(tmp_path)]) == 0
    assert "1 document to publish" in capsys.readouterr().out
    assert state() == before
    assert main(["accept", f"case={slug}", "--from", str(tmp_path)]) == 2
    assert "--reason" in capsys.readouterr().err and state() == before


@pytest.mark.usefixtures("same_code")
def test_accept_dry_run_groups_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one attempt a variant it was a line of refusal for each variant, and no plan."""
    slug = "fsdp2-mixed-dtensor"
    stored = regrade(Store(BASELINE).documents(cases=[slug]), _cases()).documents[0]
    path = tmp_path / f"{place(stored)}.json"
    path.parent.mkdir(parents=True)
    for variant in stored["variants"].values():
        variant["attempts"] = variant["attempts"][:1]
    path.write_text(json.dumps({key: value for key, value in stored.items() if key != "path"}))
    assert main(["accept", f"case={slug}", "--dry-run", "--from", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "1 document to publish" in told.out
    reasons = told.err[told.err.index("cannot be published:") :].splitlines()[1:]
    assert len(reasons) == 1 and "fewer than 3" in reasons[0]


def _cases() -> dict[str, Case]:
    from repro_matrix.config import catalog as catalogue

    return catalogue.load().cases
