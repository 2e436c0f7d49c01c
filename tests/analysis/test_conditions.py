"""On what a claim depends, in words: short, true of every measurement, and releases as ranges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from repro_matrix.analysis.claims.conditions import Point, condition, rules


def point(holds: bool, versions: dict[str, str] | None = None, **axes: str) -> Point:
    return Point(holds, axes, versions or {})


def line(*answers: tuple[str, bool], package: str = "colossalai", **axes: str) -> list[Point]:
    return [point(holds, {package: release}, **axes) for release, holds in answers]


def test_releases_are_one_range_and_not_a_list_of_stacks() -> None:
    seen = line(("0.4.0", False), ("0.4.7", False), ("0.4.10", True), ("0.4.8", True), ("0.4.9", True))
    assert condition(seen) == "holds for colossalai >= 0.4.8; not for <= 0.4.7"
    between = line(("4.38.0", False), ("4.40.0", True), ("4.43.1", True), ("4.44.0", False), package="transformers")
    assert condition(between) == "holds for transformers 4.40.0 to 4.43.1; not for <= 4.38.0 and >= 4.44.0"
    assert condition(line(("0.1+cpu", True), ("0.2", False))) == "holds for colossalai <= 0.1; not for >= 0.2"


def test_the_predictions_own_words_come_first() -> None:
    seen = [point(True, {"torch": "2.2"}, when="tied"), point(False, {"torch": "2.6"}, when="")]
    assert condition(seen) == "holds for tied; not for otherwise"


def test_what_differs_within_one_axis_is_said_for_each_of_its_values() -> None:
    seen = [*line(("0.4.7", False), ("0.4.8", True), arm="broken"), *line(("0.4.7", True), ("0.4.8", True), arm="fix")]
    seen += line(("0.4.7", False), ("0.4.8", False), arm="other")
    assert condition(seen) == (
        "arm fix: holds; arm other: does not hold; arm broken: holds for colossalai >= 0.4.8; not for <= 0.4.7"
    )


def test_packages_that_explain_it_equally_well_are_all_said() -> None:
    seen = [point(True, {"torch": "2.2", "peft": "0.1"}), point(False, {"torch": "2.6", "peft": "0.2"})]
    assert condition(seen) == "holds for torch <= 2.2; not for >= 2.6 | or holds for peft <= 0.1; not for >= 0.2"


def test_measurements_that_nothing_tells_apart_are_counted() -> None:
    seen = [point(True, arm="a"), point(False, arm="a"), point(True, arm="a")]
    assert condition(seen) == "measurements of the same cell disagree: 2 bear it out, 1 do not"


def test_sixty_cells_are_no_condition() -> None:
    seen = [*line(*((f"4.{minor}.0", minor % 2 == 0) for minor in range(60)), package="transformers")]
    assert len(condition(seen)) < 120


def test_how_many_ranges_are_still_a_condition() -> None:
    def ranges(count: int, **axes: str) -> list[Point]:
        return line(*((f"4.{n}.0", n % 2 == 0) for n in range(count)), package="transformers", **axes)

    assert condition(ranges(12)).startswith("holds for transformers <= 4.0.0 and 4.2.0 and")
    assert condition(ranges(13)).startswith("measurements of the same cell disagree"), "a list is no condition"
    few = [*ranges(3, arm="a"), *line(("4.0.0", True), ("4.1.0", False), package="transformers", arm="b")]
    assert condition(few) == "holds for transformers <= 4.0.0 and >= 4.2.0; not for 4.1.0"
    within = [*ranges(4, arm="a"), *line(("4.0.0", False), ("4.3.0", False), package="transformers", arm="b")]
    assert condition([*within, point(True, arm="c")]).startswith(
        "arm c: holds; arm b: does not hold; arm a: holds for t"
    )


def test_a_rule_says_nothing_of_what_it_was_not_made_from() -> None:
    (flat,) = rules([point(True, arm="a"), point(False, arm="b")])
    assert [flat.says(point(True, arm=arm)) for arm in "abc"] == [True, False, None]
    seen = line(("1.0", False), ("2.0", True), ("3.0", True), ("4.0", False))
    (ranged,) = rules(seen)
    asked = ["0.5", "1.0", "1.5", "2.5", "3.5", "4.0", "9.0", "what"]
    told = [ranged.says(point(True, {"colossalai": release})) for release in asked]
    assert told == [False, False, None, True, None, False, False, None] and ranged.says(point(True)) is None
    split = [*line(("1.0", True), ("2.0", False), arm="a"), *line(("1.0", False), ("2.0", True), arm="b")]
    (nested,) = rules(split)
    assert nested.says(point(True, {"colossalai": "1.0"}, arm="c")) is None


RELEASES = ["1.0", "1.1", "1.2", "1.10", "2.0+cpu", "2.1"]
POINTS = st.lists(
    st.builds(
        lambda holds, arm, model, release, torch: point(
            holds, {"transformers": release, "torch": torch}, arm=arm, model=model
        ),
        st.booleans(), st.sampled_from("ab"), st.sampled_from("mn"), st.sampled_from(RELEASES),
        st.sampled_from(RELEASES[:2]),
    ),
    min_size=2,
    max_size=10,
).filter(lambda points: len({p.holds for p in points}) == 2)  # fmt: skip


@given(POINTS)
def test_every_rule_is_true_of_every_measurement(points: list[Point]) -> None:
    for rule in rules(points):
        assert [rule.says(each) for each in points] == [each.holds for each in points], rule.text
    assert condition(points)


@given(st.lists(st.sampled_from(RELEASES), min_size=2, unique=True), st.integers(0, 5), st.booleans())
def test_one_change_along_a_line_is_found_and_stands_between_its_neighbours(
    releases: list[str], cut: int, newer: bool
) -> None:
    ordered = sorted(releases, key=Version)
    at = 1 + cut % (len(ordered) - 1)
    seen = line(*((release, (index >= at) == newer) for index, release in enumerate(ordered)))
    below, above = (str(Version(ordered[i]).public) for i in (at - 1, at))
    sides = (f">= {above}", f"<= {below}") if newer else (f"<= {below}", f">= {above}")
    assert condition(seen) == f"holds for colossalai {sides[0]}; not for {sides[1]}"
