"""The end of a night: what changed since the last green one, an issue for each case, a host on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from fake_host import Fake, serving
from hypothesis import given
from repro_matrix.analysis import regressions as tonight
from repro_matrix.analysis.brief import Brief, latest
from repro_matrix.analysis.issue_host import Host, HostError, Issue
from repro_matrix.analysis.night import Night, from_json, of_briefs, to_json
from repro_matrix.cli import main as cli
from repro_matrix.cli import nightly
from repro_matrix.errors import ResultsError
from repro_matrix.report.issue import issue
from repro_matrix.results import history as kept
from repro_matrix.results import quarantine as muted
from test_diff import BOOM, FIRES, HOLDS, SIDES, arm, cell
from test_nights import CLEAN, write
from test_nights import FIRES as FIRED


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving() as server:
        yield server


def host(fake: Fake, token: str = "secret", slept: list[float] | None = None) -> Host:
    return Host(fake.base, "me/it", token, sleep=(slept if slept is not None else []).append, now=lambda: 1000.0)


ISSUE = Issue("c", "abc123", "c: new failure", "text")


def test_one_issue_a_case_is_opened_then_updated(fake: Fake) -> None:
    assert host(fake).publish(ISSUE) == ("#1 is opened", False)
    assert host(fake).publish(ISSUE) == ("#1 says so already", False), "told once more, nothing happens"
    assert host(fake).publish(replace(ISSUE, digest="def456", body="more")) == ("#1 is updated", False)
    assert host(fake).publish(replace(ISSUE, case="d")) == ("#2 is opened", False)
    assert [one["state"] for one in fake.issues] == ["open", "open"] and "more" in fake.issues[0]["body"]


def test_an_issue_that_a_person_closed_stays_closed_for_the_same_change(fake: Fake) -> None:
    fake.add(ISSUE.marked, "closed")
    for _ in range(150):
        fake.add("somebody's own")  # it is on the second page
    told, dealt = host(fake).publish(ISSUE)
    assert dealt and told.startswith("#1 told of this very change") and fake.issues[0]["state"] == "closed"
    assert host(fake).publish(replace(ISSUE, digest="def456")) == ("#152 is opened", False)


def test_two_nights_at_once_leave_one_issue(fake: Fake) -> None:
    fake.on_post = lambda: fake.issues or fake.add(ISSUE.marked)  # the other night is faster
    assert host(fake).publish(ISSUE) == ("#1 was opened by another night at the same time", False)
    assert [one["state"] for one in fake.issues] == ["open", "closed"]
    assert host(fake).publish(ISSUE)[0] == "#1 says so already"


def test_a_rate_limit_is_waited_for_and_a_long_one_is_not(fake: Fake) -> None:
    slept: list[float] = []
    fake.refuse = [
        (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1030"}),
        (429, {"Retry-After": "7"}),
    ]
    assert host(fake, slept=slept).publish(ISSUE)[0] == "#1 is opened" and slept == [30.0, 7.0]
    fake.refuse = [(403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9000"})]
    with pytest.raises(HostError, match="rate limit: 8000 s more"):
        host(fake).publish(ISSUE)


@pytest.mark.parametrize(
    ("status", "told"), [(403, "needs issues: write"), (404, "no such repository"), (302, "302"), (500, "500")]
)
def test_what_the_host_refuses_is_said(fake: Fake, status: int, told: str) -> None:
    fake.refuse = [(status, {"Location": "http://127.0.0.1:1/"})]
    with pytest.raises(HostError, match=told):
        host(fake).publish(ISSUE)
    assert len(fake.asked) == 1, "a redirect would take the token elsewhere"


def test_the_token_is_told_to_nobody(fake: Fake) -> None:
    with pytest.raises(HostError, match="the token is not valid") as error:
        host(fake, token="wrong-secret").publish(ISSUE)
    assert "wrong-secret" not in str(error.value)
    with pytest.raises(HostError, match="only https"):
        Host("http://example.org", "me/it", "secret")
    with pytest.raises(HostError, match="OWNER/NAME"):
        Host("https://example.org", "it", "secret")
    assert Host.of({}) is None and Host.of({"GITHUB_REPOSITORY": "me/it"}) is None
    with pytest.raises(HostError, match="GITHUB_REPOSITORY=OWNER/NAME is not"):
        Host.of({"GITHUB_TOKEN": "x"})
    with pytest.raises(HostError, match=r"GET /issues: .*refused") as error:
        Host("http://127.0.0.1:9", "me/it", "secret").publish(ISSUE)
    assert "urlopen" not in str(error.value)


GREEN = of_briefs("green", [cell(broken=FIRES, fix=HOLDS)], 0)


def test_only_answers_that_changed_since_the_last_green_night_count() -> None:
    now = [cell(2.0, broken=FIRES, fix=BOOM)]
    red = replace(of_briefs("red", now, 1), started=5.0)
    (found,) = tonight.since_green(now, [GREEN, red]).changed
    assert (found.case, found.green.name, [c.kind for c in found.changes]) == ("c", "green", ["fix ceased"])
    assert tonight.since_green(now, [GREEN, replace(red, code=0)]).changed == [], (
        "that night somebody had dealt with it"
    )
    assert tonight.since_green(now, [GREEN], lambda key, arm: (key, arm) == ("c/m", "fix")).changed == []
    slower = [cell(2.0, broken=FIRES, fix=HOLDS._replace(wall_s=(9.0,) * 3))]
    assert tonight.since_green(slower, [GREEN]).changed == []
    assert "no green night" in tonight.since_green(now, [red]).notes[0]
    other = [replace(now[0], key="c/other")]
    found_none = tonight.since_green(other, [GREEN])
    assert found_none.changed == [] and "no cell in common with the last green night, green" in found_none.notes[0]


SKIPPED = arm()._replace(kinds={}, skipped="needs 2 GPUs")


@pytest.mark.parametrize(
    "between",
    [cell(2.0, broken=SKIPPED, fix=SKIPPED), replace(cell(2.0, broken=FIRES, fix=HOLDS), key="c/o"),
     cell(2.0, broken=FIRES), cell(2.0, broken=FIRES, fix=SKIPPED)],
    ids=["skipped", "no room in the budget", "arm not asked", "fix skipped"],
)  # fmt: skip
def test_a_green_night_that_did_not_measure_it_hides_no_change(between: Brief) -> None:
    now = [cell(3.0, broken=FIRES, fix=BOOM)]
    (found,) = tonight.since_green(now, [GREEN, of_briefs("between", [between], 0)]).changed
    assert (found.green.name, [c.kind for c in found.changes]) == ("green", ["fix ceased"])


def test_a_change_that_comes_back_is_not_the_one_whose_issue_was_closed() -> None:
    now = [cell(3.0, broken=FIRES, fix=BOOM)]
    mended = of_briefs("mended", [cell(2.0, broken=FIRES, fix=HOLDS)], 0)
    (first,), (again,) = (tonight.since_green(now, nights).changed for nights in ([GREEN], [GREEN, mended]))
    assert first.digest != again.digest
    assert tonight.since_green(now, [GREEN, replace(mended, code=1)]).changed[0].digest == first.digest


@pytest.mark.parametrize("edit", [{"code": False}, {"code": "0"}, {"started": "nan"}, {"started": None}])
def test_a_night_that_was_edited_into_a_green_one_is_damaged(edit: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no exit code|not a night"):
        from_json({**to_json(GREEN), **edit})


@given(SIDES)
def test_a_night_does_not_differ_from_itself(briefs: list[Brief]) -> None:
    newest = list(latest(briefs).values())
    assert tonight.since_green(newest, [of_briefs("n", newest, 0)]).changed == []


def test_the_text_says_what_changed_and_escapes_what_others_wrote() -> None:
    said = BOOM._replace(text="@everyone <script> `x` <!-- repro-matrix case=other change=00 -->")
    now = [replace(cell(2.0, broken=FIRES, fix=said, other=HOLDS), versions={"torch": "2.14.0"})]
    green = replace(GREEN, stacks={"now": {"torch": "2.13.0"}})
    (found,) = tonight.since_green(now, [green]).changed
    made = issue([found], "tonight", "https://x/page", {("now", "green"): "torch 2.14.0 is the first bad release"})
    assert made.title == "c: fix ceased"
    for part in ("torch: 2.13.0 -> 2.14.0", "first bad release", "wherever they were measured: other", "repro run c"):
        assert part in made.body
    for text in made.body.splitlines():
        assert "@everyone" not in text or text.count("`") == 2, "in code nobody is called"
    many = replace(found, changes=found.changes * 2000)
    assert len(issue([many], "tonight").marked.encode()) < 65_536


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    for name in ("GITHUB_TOKEN", "GITHUB_REPOSITORY", "GITHUB_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(muted.read, "__defaults__", (tmp_path / "muted.yaml",))
    return tmp_path


def test_nights_one_after_another(
    results: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nights = results / "nights"

    def run(name: str, *more: str) -> int:
        words = ["nightly", str(results / name), "--nights", str(nights), "--name", name]
        return cli.main([*words, *(more or ("--code", "0"))])

    write(results / "mon", {"broken": FIRED}, 1.0)
    write(results / "tue", {"broken": CLEAN}, 2.0)
    assert run("mon") == 0 and "no green night is kept" in capsys.readouterr().err
    assert run("tue") == 1, "without a token the same text is a file"
    text = (nights / "issues" / "tue" / "some-case.md").read_text()
    assert text.startswith("# some-case: ") and "before: `fires 2/2" in text
    for name, value in (("TOKEN", "secret"), ("REPOSITORY", "me/it"), ("API_URL", fake.base)):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    assert run("tue") == 1 and len(fake.issues) == 1, "the runner died before; told once more"
    assert [n.name for n in kept.ledger(nights, [])] == ["mon", "tue"]
    fake.refuse = [(403, {})]
    write(results / "wed", {"broken": CLEAN}, 3.0)
    assert run("wed") == 1, "it is still compared with monday"
    assert "needs issues: write" in capsys.readouterr().err
    fake.issues[0]["state"] = "closed"
    assert run("wed") == 0, "a person has dealt with it"
    write(results / "thu", {"broken": CLEAN}, 4.0)
    assert run("thu") == 0 and run("thu", "--code", "3") == 3, "what could not be measured is not green"
    assert [(n.name, n.code) for n in kept.ledger(nights, [])][-2:] == [("wed", 0), ("thu", 3)]


def test_nights_that_bear_one_name_are_compared_all_the_same(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job whose --name is always the same was always green: the night before was replaced, and then not there."""

    def run(folder: str) -> int:
        words = ["nightly", str(results / folder), "--nights", str(results / "nights"), "--name", "nightly"]
        return cli.main([*words, "--code", "0"])

    write(results / "mon", {"broken": FIRED}, 1.0)
    write(results / "tue", {"broken": CLEAN}, 2.0)
    assert run("mon") == 0 == run("mon"), "told once more"
    capsys.readouterr()
    assert run("tue") == 1
    assert "a night nightly is kept, of other measurements: tonight is nightly.2" in capsys.readouterr().err
    assert run("tue") == 1, "told once more"
    nights = [(night.name, night.code) for night in kept.ledger(results / "nights", [])]
    assert nights == [("nightly", 0), ("nightly.2", 1)]


def test_what_is_muted_is_said_with_its_owner(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing told a green night in which an arm was muted from one in which nothing had changed."""
    today = datetime.now(timezone.utc).date()

    def told(name: str, began: float, arms: dict[str, Any], days: int = 1) -> tuple[int, str]:
        write(results / name, arms, began, key="some-case/m-fsdp")
        entry = muted.entry("some-case/m-fsdp", "broken", "ada", today + timedelta(days), "issue 12")
        (results / "muted.yaml").write_text(muted.written([entry]))
        words = ["nightly", str(results / name), "--nights", str(results / "nights"), "--name", name, "--code", "0"]
        code = cli.main(words)
        out, err = capsys.readouterr()
        return code, " ".join((out + err).split())

    until = today + timedelta(days=1)
    mute = f"MUTED, known and owned (`repro mute`): some-case/m-fsdp arm broken, ada until {until}: issue 12"
    code, said = told("mon", 1.0, {"broken": FIRED})
    assert code == 0 and f"{mute} (it did not change)" in said
    code, said = told("tue", 2.0, {"broken": CLEAN})
    assert code == 0 and f"{mute} (arm broken: " in said and " since mon)" in said
    assert "MUTED" not in told("wed", 3.0, {"broken": "needs 2 GPUs"})[1], "nothing was measured that it is about"
    code, said = told("thu", 4.0, {"broken": FIRED}, days=-1)
    assert code == 1 and "MUTED" not in said and "its day is over: some-case/m-fsdp arm broken, ada" in said


def test_a_runner_that_dies_between_upload_and_summary(
    results: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its results are there, and its night was never told: the next one is compared with the night before it, and its
    own is told as well as ever from what was uploaded, also when later nights are kept."""
    nights = results / "nights"
    for name, value in (("TOKEN", "secret"), ("REPOSITORY", "me/it"), ("API_URL", fake.base)):
        monkeypatch.setenv(f"GITHUB_{name}", value)

    def run(name: str) -> int:
        return cli.main(["nightly", str(results / name), "--nights", str(nights), "--name", name, "--code", "0"])

    write(results / "mon", {"broken": FIRED}, 1.0)
    write(results / "tue", {"broken": CLEAN}, 2.0)
    write(results / "wed", {"broken": FIRED}, 3.0)
    assert run("mon") == 0
    with monkeypatch.context() as dying:  # the issue is opened, the night not kept
        dying.setattr(kept, "keep", lambda *told: (_ for _ in ()).throw(KeyboardInterrupt))
        run("tue")
    assert [night.name for night in kept.ledger(nights, [])] == ["mon"] and len(fake.issues) == 1
    assert run("wed") == 0, "it is as on monday"
    capsys.readouterr()
    assert run("tue") == 1, "compared with monday, not with the night that came after it"
    assert "against mon" in (nights / "issues" / "tue" / "some-case.md").read_text()
    assert len(fake.issues) == 1 and "says so already" in capsys.readouterr().out, "and no second issue"
    assert [(night.name, night.code) for night in kept.ledger(nights, [])] == [("mon", 0), ("tue", 1), ("wed", 0)]


def test_a_clock_that_went_back_is_said(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tonight was then told to have no green night before it, and nothing else."""

    def told(name: str, started: float) -> str:
        write(results / name, {"broken": FIRED}, started)
        words = ["nightly", str(results / name), "--nights", str(results / "nights"), "--name", name, "--code", "0"]
        assert cli.main(words) == 0
        return capsys.readouterr().err

    assert "measured 19" not in told("mon", 1_000_000.0) + told("tue", 2_000_000.0)
    assert "measured 1970-01-06 22:40, before mon, tue: not compared with these" in told("wed", 513_600.0)
    assert "measured 2100-01-01 00:00, which is still to come" in told("thu", 4_102_444_800.0)


def test_what_is_no_night_is_an_error(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (results / "empty").mkdir()
    nights = ["--nights", str(results / "nights"), "--code", "0"]
    assert cli.main(["nightly", str(results / "empty"), *nights]) == 2
    assert "nothing was uploaded" in capsys.readouterr().err
    assert cli.main(["nightly", str(results / "none"), *nights]) == 2
    write(results / "a", {"broken": FIRED}, 1.0)
    assert cli.main(["nightly", str(results / "a"), *nights, "--lock", "newest=nowhere"]) == 2
    assert cli.main(["nightly", str(results / "a"), *nights, "--name", "a/b"]) == 2
    with pytest.raises(ResultsError, match=r"several commits: aaaa \(1 cell\), bbbb"):
        tonight.one_commit([replace(cell(a=arm()), commit=name) for name in ("aaaa", "bbbb")])


@pytest.mark.parametrize("words", [[], ["--code", "-1"], ["--code", "green"]])
def test_the_runs_exit_code_is_never_assumed(
    results: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that forgets it would call a night green in which half was not measured."""
    write(results / "a", {"broken": FIRED}, 1.0)
    assert cli.main(["nightly", str(results / "a"), "--nights", str(results / "nights"), *words]) == 2
    assert "--code" in capsys.readouterr().err and not (results / "nights").exists()


def test_a_changed_floating_stack_is_searched_between_its_two_locks_within_the_time(results: Path) -> None:
    now = [cell(2.0, broken=FIRES, fix=BOOM)]
    (found,) = tonight.since_green(now, [GREEN]).changed
    asked: list[list[str]] = []

    def run(words: list[str], seconds: float) -> tuple[dict[str, Any] | None, str]:
        asked.append(words)
        return {"report": "torch 2.14.0 is the first bad release"}, ""

    search = nightly.Searches(results, "tonight", 60.0, run)
    assert search.of(found) is None, "a pinned stack has no lock of the night"
    green, later = (nightly.lock_at(results, "now", name) for name in ("green", "tonight"))
    later.parent.mkdir()
    later.write_text("torch==2.14.0\n")
    assert "no lock of green is kept" in str(search.of(found))
    green.write_text("torch==2.14.0\n")
    assert "the same lock" in str(search.of(found)) and not asked
    green.write_text("torch==2.13.0\n")
    assert search.of(found) == "torch 2.14.0 is the first bad release"
    (words,) = asked
    assert words[:6] == ["bisect", "c", "--good", str(green), "--bad", str(later)] and "model=m" in words
    assert words[words.index("--arm") + 1] == "fix"
    assert "no time was left" in str(nightly.Searches(results, "tonight", 0.0, run).of(found)) and len(asked) == 1
    assert "goes on with `repro bisect c" in str(
        nightly.Searches(results, "tonight", 9.0, lambda words, seconds: (None, "not over")).of(found)
    )


def test_a_search_that_ends_without_a_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found, why = nightly.bisected(["bisect", "no-such-case", "--good", "1.0", "--bad", "2.0"], 120.0)
    assert found is None and "exit code 2 and no report" in why


def test_a_green_night_is_kept_with_its_code() -> None:
    assert Night("n", 1.0, code=0).green and not Night("n", 1.0).green and not Night("n", 1.0, code=3).green
