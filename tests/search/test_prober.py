"""Labels of answers, a verb's own words, and one probe."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from observations import failed, observation
from probing import CASE, World, world
from repro_matrix.config import selection as overrides
from repro_matrix.config.selection import parse
from repro_matrix.runner.request import ask
from repro_matrix.search.labels import of_cell, plain
from repro_matrix.search.prober import Prober, Stopped, Target, quoted

__all__ = ["world"]


def attempt(name: str, message: str = "", **more: Any) -> dict[str, Any]:
    primary = {"rank": 0, "type": "ValueError", "message": message, "location": ""} if message else None
    outcome = {"outcome": name, "reason": f"reason {message}", "primary": primary, "recognized": [], **more}
    return {"outcome": outcome, "observation": observation(failed(0))}


def variant(*attempts: dict[str, Any], skipped: str | None = None) -> dict[str, Any]:
    kind, needs = ("packages", ["torch>=2.6", "y>=1"]) if "torch>=2.6" in (skipped or "") else ("gpus", ["2 GPUs"])
    skip = {"kind": kind, "requires": needs} if skipped else None
    return {"skipped": skipped, "skip": skip, "attempts": list(attempts)}


# -- labels


@pytest.mark.parametrize(
    ("attempts", "label"),
    [
        ((attempt("reproduced", "x"),), "reproduced"),
        (
            (attempt("passed"), attempt("reproduced", "x"), attempt("infra_error", "x")),
            "reproduced",
        ),  # one reproducing is proof
        ((attempt("passed"), attempt("passed")), "passed"),
        ((attempt("passed"), attempt("hang")), None),
        ((attempt("passed"), attempt("infra_error", "x")), None),
        ((attempt("passed"), attempt("other_failure", "odd")), "other_failure: ValueError"),
        (
            (attempt("other_failure", "a"), attempt("other_failure", "b"), attempt("other_failure", "b")),
            "other_failure: ValueError",
        ),
        ((), None),
    ],
)
def test_labels(attempts: tuple[dict[str, Any], ...], label: str | None) -> None:
    found = of_cell("a", variant(*attempts))
    assert found.label == label
    assert bool(found.error_at) == (label not in (None, "passed")), "where it was raised"


def test_a_skip_says_the_same_on_every_stack() -> None:
    text = "stack base+x @ git+file:///c@{n}: needs torch>=2.6, and it has 2.{n}, y>=1, which it does not have"
    text += "; needs stack other (why not)"
    details = {of_cell("a", variant(skipped=text.format(n=n))).detail for n in (1, 2)}
    assert details == {"skipped: needs torch>=2.6, y>=1"}
    assert of_cell("a", variant(skipped="needs 2 GPUs; hardware cpu has none")).detail.endswith("hardware cpu has none")
    assert of_cell("a", None).label is None


def test_a_silent_failure_is_one_label_whatever_its_numbers() -> None:
    def reason(n: int) -> str:
        return f"silent: check logits failed on rank {n} (got 0.{n}, want 0)"

    labels = {
        of_cell("a", variant({**attempt("other_failure"), "outcome": {
            "outcome": "other_failure", "reason": reason(n), "primary": None, "recognized": [], "ranks": [n],
            "check": "logits", "failed": ["logits"],
        }})).label
        for n in (0, 1)
    }  # fmt: skip
    assert labels == {"other_failure: check logits"}


@pytest.mark.parametrize("first", [0, 1])
def test_a_script_s_failure_is_said_alike_whichever_rank_was_first(first: int) -> None:
    """Its text has the type in it: "AttributeError: AttributeError: ..." where the first rank was one that it named."""
    text = "AttributeError: 'C' object has no attribute 'x'"
    found = {"case": "a", "signature": "failure", "ranks": [0], "kind": "exception", "message": text}
    primary = {"rank": first, "type": "AttributeError", "message": text.partition(": ")[2], "location": "m.f"}
    fired = {"outcome": "reproduced", "reason": text, "recognized": [found], "primary": primary, "ranks": [0]}
    said = of_cell("a", variant({**attempt("reproduced"), "outcome": fired}))
    assert said.whole == f"reproduced: {text}"


def test_a_crash_is_no_other_one_for_what_was_logged_last() -> None:
    crash = attempt("other_failure", "some warning")
    crash["outcome"]["primary"] |= {"type": "SIGSEGV", "kind": "signal"}
    found = of_cell("a", variant(crash))
    assert found.label == "other_failure: SIGSEGV"
    assert of_cell("a", variant(attempt("reproduced", "x"))).label == "reproduced"


def test_another_known_failure_is_named() -> None:
    seen = [
        {"case": "other", "signature": "s", "ranks": [0], "kind": "exception", "message": "m"},
        {"case": "remark", "signature": "s", "ranks": [0], "kind": "log", "message": "m"},
    ]
    found = of_cell("a", variant(attempt("other_failure", "m: b [c] d", recognized=seen)))
    assert found.label == "other_failure: other/s"


def test_what_differs_from_run_to_run_is_left_out_of_a_text() -> None:
    one = plain("\n no <Thing at 0x7f01> in /home/me/site-packages/torch/nn.py, 127.0.0.1:4242 \nmore")
    other = plain("no <Thing at 0x8a2b> in /opt/env/site-packages/torch/nn.py, 127.0.0.1:99")
    assert one == other and "nn.py" in one
    assert plain("OSError: /a/case-model-35277 and /b/tmpab12cd_x") == plain(
        "OSError: /c/case-model-4256 and /d/tmpzz99yy_q"
    )
    assert plain("shape '[2, 8]' is invalid for input of size 12") == "shape '[2, 8]' is invalid for input of size 12"
    assert len(plain("x" * 999)) == 160


# -- text for Hydra


@pytest.mark.parametrize("text", ["plain", "a=1 b", "it's", "back\\slash", "torch==2.13.0+cpu", "x @ git+file:///c@1"])
def test_any_stack_survives_hydras_grammar(text: str) -> None:
    assert parse([f"stack={quoted(text)}"]).stack == [text]


# -- a probe


def test_a_probe_replaces_fields_of_what_was_read_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is parsed when the search begins; no probe writes text to be parsed again."""
    made = prober(world, "repeat=2", "jobs=1", "model=qwen1.5-0.5b")
    monkeypatch.setattr(overrides, "parse", lambda texts: pytest.fail(f"parsed again: {texts}"))
    points = [made.probe(target(release)) for release in ("4.40.0", "4.41.0")]
    assert all(point.attempts for point in points)
    assert made.probe(target("4.41.0"), repeat=3).variants["unfixed"].counted == 3
    assert made.command("base+transformers==4.41.0", "unfixed") == [
        "repro", "run", CASE, "model=qwen1.5-0.5b", "stack=base+transformers@4.41.0", "variants=[unfixed]"
    ]  # fmt: skip
    assert (made.request.settings.repeat, made.request.selections[0].stack) == (2, ["current"]), "it stays as it was"


def prober(world: World, *texts: str, **more: Any) -> Prober:
    said: list[str] = []
    asked = ask([f"case={CASE}", f"results={world.folder / 'r'}", *texts])
    return Prober(asked, said.append, threading.Event(), **more)


def target(release: str) -> Target:
    return Target(release, f"base+transformers=={release}")


def test_a_probe_is_stored_and_never_made_twice(world: World) -> None:
    point = prober(world, "variants=[unfixed]").probe(target("4.41.0"))
    assert point.variants["unfixed"].label == "reproduced" and Path(point.document or "").exists()
    assert point.versions["transformers"] == "4.41.0" and point.attempts == 1
    again = prober(world, "variants=[unfixed]").probe(target("4.41.0"))
    assert again.attempts == 0 and again.variants == point.variants and len(world.launched) == 1


def test_repeating_adds_to_what_is_stored_and_loses_nothing(world: World) -> None:
    made = prober(world, "variants=[unfixed]")
    made.probe(target("4.41.0"))
    assert made.probe(target("4.41.0"), repeat=3).variants["unfixed"].counted == 3
    assert len(world.launched) == 3
    assert prober(world, "variants=[unfixed]").probe(target("4.41.0")).variants["unfixed"].counted == 3
    assert len(world.launched) == 3


def test_what_cannot_be_installed_is_unknown_with_its_reason(world: World) -> None:
    world.uninstallable = {("transformers", "4.41.0")}
    point = prober(world).probe(target("4.41.0"))
    assert {a.label for a in point.variants.values()} == {None}
    assert point.variants["unfixed"].detail.startswith("cannot be installed: transformers==4.41.0 has nothing")
    assert point.document is None and world.launched == []


def test_variants_on_a_stack_of_their_own_are_left_out(world: World) -> None:
    made = Prober(ask(["case=qwen15-fsdp-kv-cache"]), print, threading.Event())
    assert made.own_stack == {"newer-transformers": "current"}
    assert "newer-transformers" not in made.variants and made.variants[0] == "unfixed"


def test_a_stopped_prober_says_so(world: World) -> None:
    made = prober(world, "variants=[unfixed]")
    made.stop.set()
    with pytest.raises(Stopped, match="interrupted"):
        made.probe(target("4.41.0"))


def test_a_set_is_the_same_text_in_whatever_order_it_is_printed() -> None:
    one, other = (plain(f"parameters locate in {{{names}}}.") for names in ("'cpu', 'meta'", "'meta', 'cpu'"))
    assert one == other == "parameters locate in {'cpu', 'meta'}."
    assert plain("got {'a': 'b', 'c': 'd'}") == "got {'a': 'b', 'c': 'd'}", "a dictionary has an order"


def test_which_rank_was_first_does_not_change_the_words() -> None:
    """Of three ranks each says the size of its own shard: the type stood before it only where the first was first."""
    own = {
        "case": "a",
        "signature": "s",
        "kind": "exception",
        "ranks": [0, 1, 2],
        "message": "The size of tensor a (342)",
    }
    told = [
        of_cell(
            "a",
            variant(
                {
                    "observation": observation(failed(0)),
                    "outcome": {
                        "outcome": "reproduced",
                        "reason": "x",
                        "recognized": [own],
                        "primary": {
                            "rank": rank,
                            "type": "RuntimeError",
                            "message": f"The size of tensor a ({size})",
                            "location": "",
                        },
                    },
                }
            ),
        ).detail
        for rank, size in ((0, 342), (2, 340))
    ]
    assert told == ["RuntimeError: The size of tensor a (342)"] * 2
