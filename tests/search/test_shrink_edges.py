"""`repro shrink` on made-up answers: what is written where, what is said, and what is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from judging import NORM, failed
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.errors import ConfigError
from repro_matrix.external.scripts.measure import Script
from repro_matrix.search.labels import Answer as Said
from repro_matrix.search.reduce import case as cases
from repro_matrix.search.reduce import report as reports
from repro_matrix.search.reduce import script as scripts
from repro_matrix.search.reduce.case import CaseAsker
from repro_matrix.search.reduce.cli_args import words_of
from repro_matrix.search.reduce.parameters import Config
from repro_matrix.search.reduce.probe import Asked

FIRES = Asked(Said("fires", "ValueError: no", 1, 1), "x.json", 1)
CLEAN = Asked(Said("clean", "", 0, 1), "y.json", 1)


# -- cases


def answers(monkeypatch: pytest.MonkeyPatch, fires: Any) -> list[dict[str, Any]]:
    """Every configuration that is asked of a case from now on."""
    asked: list[dict[str, Any]] = []

    def measure(self: CaseAsker, config: Config, repeat: int) -> Asked:
        named = {each.knob.name: value for each, value in zip(self.varied, config)}
        asked.append(named)
        fired = fires(named)
        times = fired if isinstance(fired, int) and not isinstance(fired, bool) else repeat if fired else 0
        label = "fires" if times else "clean"
        return Asked(Said(label, "RuntimeError: ready twice", times, repeat), f"{len(asked)}.json", repeat)

    monkeypatch.setattr(CaseAsker, "_measure", measure)
    return asked


def shrink(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    code = cli.main(["shrink", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_a_case_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fires(at: dict[str, Any]) -> bool:
        return bool(at["flags.find_unused"]) and at["model.config.num_hidden_layers"] >= 3 and at.get("steps", 1) >= 1

    asked = answers(monkeypatch, fires)
    words = ["ddp-ready-once", "model.config.num_hidden_layers=24", f"results={tmp_path}"]
    code, data, _ = shrink(capsys, *words)
    assert code == 0 and data["done"] and data["attempts"] == len(asked) + 2  # what is left: three times
    assert set(data["needs"]) == {"flags.find_unused", "model.config.num_hidden_layers"}
    assert data["minimal"]["model.config.num_hidden_layers"] == 3 and data["minimal"]["steps"] == 1
    layers = next(each for each in data["varied"] if each["name"] == "model.config.num_hidden_layers")
    assert layers["fires_at"][0] == 3 and 24 in layers["fires_at"] and 2 in layers["gone_at"]
    assert layers["asked"]["2"]["document"]  # told by a measurement that is named
    assert data["command"][:3] == ["repro", "run", "ddp-ready-once"]
    assert "model.config.num_hidden_layers=3" in data["command"]


def test_what_is_left_is_the_same_cell_when_pasted(tmp_path: Path) -> None:
    """The command's overrides give the settings that were asked."""
    from repro_matrix.environment import stacks
    from repro_matrix.runner import session
    from repro_matrix.runner.request import ask

    asker = cases.open_case(None, ask(["case=ddp-ready-once"]), stacks.resolve("current"), print, threading.Event())
    simplest = tuple(each.knob.simplest for each in asker.varied)
    prepared = session.prepare(["case=ddp-ready-once", *asker.command(simplest)[3:]])
    settings = prepared.plans[0].arms[0].settings
    for each, value in zip(asker.varied, simplest):
        group, _, name = each.knob.name.partition(".")
        if group == "flags":
            assert settings["flags"][name] == value
        elif each.knob.name.startswith("model.config."):
            assert settings["model"]["config"][name.rpartition(".")[2]] == value
        elif group == "case":
            assert settings["strategy"]["options"][name.rpartition(".")[2]] == value
    assert settings["steps"] == 1


def test_a_case_that_needs_nothing_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers(monkeypatch, lambda at: True)
    assert cli.main(["shrink", "ddp-ready-once"]) == 0
    assert "it needs none of the settings that were varied" in capsys.readouterr().out


def test_a_case_that_does_not_fire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers(monkeypatch, lambda at: False)
    assert cli.main(["shrink", "ddp-ready-once"]) == 2
    assert "as it is given it does not fire: clean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ddp-ready-onc"], "did you mean 'ddp-ready-once'"),
        (["ddp-ready-once", "--arm", "brocken"], "did you mean 'broken'"),
        (["ddp-ready-once", "arms=[broken]"], "--arm NAME"),
        (["ddp-ready-once", "--out", "x.py"], "--out is for a script"),
        (["./no_such.py"], "no such script"),
        (["ddp-ready-once", "--error", "X: y"], "for a script of your own"),
    ],
)
def test_bad_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["shrink", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_budget_ends_it_with_what_fires_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answers(monkeypatch, lambda at: at["flags.find_unused"])
    code, data, err = shrink(capsys, "ddp-ready-once", "--budget", "4")
    assert code == 3 and not data["done"] and data["attempts"] == len(asked) == 4
    assert "the same command with a larger one goes on" in err


def test_a_flaky_failure_is_said_and_asked_more_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fires once in three where it can: one clean attempt is no proof."""
    asked = answers(monkeypatch, lambda at: 1 if at["flags.find_unused"] else 0)
    code, data, err = shrink(capsys, "ddp-ready-once")
    assert code == 0 and data["repeat"] > 3
    assert "It is flaky" in err and any("1 of 3" in note for note in data["notes"])
    assert len(asked) > len({tuple(each.items()) for each in asked})  # what did not fire was asked again, more often


@pytest.mark.parametrize("lost", [1, 2])
def test_what_the_machine_kept_from_being_asked_is_asked_again_and_never_called_needed_or_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: int
) -> None:
    """Leaving the variable out would fire; the attempts at that are lost, once or every time."""
    answers(monkeypatch, lambda at: True)
    measure = CaseAsker._measure
    left = {}

    def unlucky(self: CaseAsker, config: Config, repeat: int) -> Asked:
        out = dict(zip((each.knob.name for each in self.varied), config))["env.X"] == "(left out)"
        left[config] = left.get(config, 0) + 1
        if out and left[config] <= lost:
            return Asked(Said(None, "infra: lost: the warm server was killed by SIGKILL"), "z.json", repeat)
        return measure(self, config, repeat)

    monkeypatch.setattr(CaseAsker, "_measure", unlucky)
    code, data, err = shrink(capsys, "ddp-ready-once", "env.X=1")
    found = next(each for each in data["varied"] if each["name"] == "env.X")
    if lost == 1:
        assert code == 0 and found["value"] == "(left out)"
    else:
        assert code == 3 and not data["done"] and found["needed"] is None and found["value"] == "1"
        assert "whether these can be left out is not known: env.X (infra: lost" in err
        said = "\n".join(reports.lines(data))
        assert "do not matter:" not in said.partition("env.X")[0].rpartition("\n\n")[2]


def test_overrides_of_a_case_are_for_the_selected_ones() -> None:
    patches: dict[str, Any] = {
        "case": [(["options", "wrap"], "layer")],
        "model": [(["config", "num_hidden_layers"], 7)],
    }
    found = catalogue.load(patches=patches, cases=["qwen15-fsdp-kv-cache"])  # an arm of it sets the same
    assert found.cases["qwen15-fsdp-kv-cache"].options["wrap"] == "layer"
    assert found.cases["qwen15-fsdp-norm-shard"].options["wrap"] == "size"
    assert "num_hidden_layers" not in found.raw["model"]["qwen1.5-0.5b"]["tiny"]  # what is asked for is what runs
    with pytest.raises(ConfigError):
        catalogue.load(patches=patches)


# -- scripts

SCRIPT = """import sys
import json


def helper(x):
    return json.dumps(x)


data = [1, 2]
helper(data)
if "--boom" in sys.argv:
    print("on the way")
    raise ValueError("no")
"""


class Fake:
    """Stands where a script is measured: an attempt fails where the text and the arguments make it fail."""

    def __init__(self, lends: bool = False) -> None:
        self.stored: dict[str, Any] = {}
        self.launched = 0
        self.lends = lends
        self.how: list[str] = []

    def __call__(
        self, script: Script, stack: Any, repeat: int, stop: Any, fresh: bool = False, forked: Any = None
    ) -> tuple[Any, int]:
        text = script.command.script.read_text() if script.command.script else ""
        key = json.dumps([script.command.argv, text, *(["forked"] if forked else [])])
        if key in self.stored:
            return self.stored[key], 0
        self.launched += 1
        # forked, the import that is left out is there all the same
        imported = "import sys" in text or (forked is not None and self.lends)
        fires = "raise ValueError" in text and imported and "--boom" in script.command.argv
        self.how.append("forked" if forked else "cold")
        primary = {"rank": 0, "type": "ValueError", "message": "no", "where": ""}
        seen = [
            {"case": script.command.name, "signature": "failure", "ranks": [0], "kind": "exception", "message": "no"}
        ]
        outcome = {
            "outcome": "fires" if fires else "clean", "reason": "", "recognised": seen if fires else [],
            "primary": primary if fires else None, "failed": [], "otherwise": None,
        }  # fmt: skip
        attempt = {"outcome": outcome, "observation": {"attempt": {"wall_s": 1.0}, "ranks": [failed(0)]}}
        self.stored[key] = {"attempts": [attempt] * repeat}
        return self.stored[key], 1


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text(SCRIPT)
    return tmp_path


def test_a_script_becomes_a_smaller_file_beside_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake()
    monkeypatch.setattr(scripts, "measure", fake)
    words = ["./s.py", "--args", "--lr 3 --boom", f"results={here}/r"]
    code, data, _ = shrink(capsys, *words)
    assert code == 0 and data["needs"] == ["--boom"]
    assert (here / "s.shrunk.py").read_text() == data["lines"]["text"]
    kept = [line for line in data["lines"]["text"].splitlines() if line.strip()]
    assert kept == ["import sys", 'raise ValueError("no")']
    assert [each["answer"] for each in data["lines"]["alone"]] == ["clean", "clean"]  # leaving out either makes it go
    at = f"{NORM['file']}:1"
    assert data["error_at"] == at and data["document"], "of what is left"
    for asked in (*data["questions"], *data["lines"]["questions"], *data["lines"]["alone"]):
        assert asked["document"] and asked["error_at"] == (at if asked["answer"].startswith("fires") else None)
    assert (here / "s.py").read_text() == SCRIPT
    assert sorted(path.name for path in here.iterdir()) == ["s.py", "s.shrunk.py"]  # nothing else stays
    before = fake.launched
    code, again, _ = shrink(capsys, *words)
    assert code == 0 and fake.launched == before  # stored answers, the same result
    assert again["lines"]["text"] == data["lines"]["text"]
    assert again["lines"]["file"] == "s.shrunk2.py"  # nothing is written over


class Servers:
    """In place of the launcher that forks ranks."""

    name = "warm"

    def __init__(self, begins: tuple[str, ...]) -> None:
        assert begins == ("import torch",)

    def close(self) -> None:
        """Nothing was started."""


def own_torch(here: Path, monkeypatch: pytest.MonkeyPatch, fake: Fake, **outcome: Any) -> list[str]:
    """A script that begins with torch, so that its ranks may be forked."""
    (here / "s.py").write_text(f"import torch\nprint(torch)\n{SCRIPT}")
    observation = {"attempt": {"launcher": "warm"}}
    monkeypatch.setattr(scripts, "measure", fake)
    monkeypatch.setattr(scripts, "Forked", Servers)
    monkeypatch.setattr(scripts, "once", lambda *a: observation)
    monkeypatch.setattr(scripts, "judge", lambda *a: SimpleNamespace(outcome="fires", reason="", **outcome))
    return ["./s.py", "--args", "--lr 3 --boom", f"results={here}/r"]


def test_a_script_is_asked_forked_and_what_is_left_from_cold(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake()
    words = own_torch(here, monkeypatch, fake)
    code, data, _ = shrink(capsys, *words)
    assert code == 0 and "import sys" in data["lines"]["text"] and "torch" not in data["lines"]["text"]
    first, last = fake.how.index("forked"), len(fake.how) - 1 - fake.how[::-1].index("forked")
    assert set(fake.how[first : last + 1]) == {"forked"} and fake.how[last + 1 :] == ["cold"]
    fake = Fake()
    own_torch(here, monkeypatch, fake)
    assert shrink(capsys, *words, "launcher=torchrun")[0] == 0 and set(fake.how) == {"cold"}


def test_what_is_left_by_a_servers_grace_is_no_answer(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forked, the file fires without an import that it needs from cold."""
    words = own_torch(here, monkeypatch, Fake(lends=True))
    assert cli.main(["shrink", *words]) == 3
    assert "not from cold" in capsys.readouterr().err
    assert not (here / "s.shrunk.py").exists()


def test_a_script_with_a_budget(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scripts, "measure", Fake())
    code, data, _ = shrink(capsys, "./s.py", "--args=--boom", "--budget", "9")
    assert code == 3 and not data["done"] and data["attempts"] <= 9


def test_what_is_wrong_with_a_script(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scripts, "measure", Fake())
    assert cli.main(["shrink", "./s.py"]) == 2
    assert "as it is given it does not fail: clean" in capsys.readouterr().err
    (here / "wrong.py").write_text("x = 1\nif x\n")
    assert cli.main(["shrink", "./wrong.py"]) == 2
    assert "wrong.py:2" in capsys.readouterr().err
    (here / "there.py").write_text("")
    assert cli.main(["shrink", "./s.py", "--out", "there.py"]) == 2
    assert "nothing is written over" in capsys.readouterr().err
    with scripts.beside(here / "s.py"):
        assert cli.main(["shrink", "./s.py", "--args=--boom"]) == 2
    assert "being shrunk already" in capsys.readouterr().err
    assert not list(here.glob(".s.*"))


def test_arguments_are_options_with_what_follows_them() -> None:
    words = words_of(["train", "--lr", "1e-4", "--layers=24", "--bf16", "--sizes", "1", "2", "--n", "8"])
    assert [word.parts for word in words] == [
        ("train",), ("--lr", "1e-4"), ("--layers=24",), ("--bf16",), ("--sizes", "1", "2"), ("--n", "8"),
    ]  # fmt: skip
    assert [word.number.values for word in words if word.number] == [(1, 2, 4, 8, 16, 24), (1, 2, 4, 8)]
    layers, last = words[2], words[5]
    assert layers.written({"value of --layers": 2}) == ["--layers=2"] and last.written({"value of --n": 4}) == [
        "--n",
        "4",
    ]
    assert layers.written({"--layers": "(left out)"}) == [] and words[3].written({}) == ["--bf16"]


@pytest.mark.ranks
@pytest.mark.slow
def test_questions_share_one_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Launched: the answers are documents, and every attempt was forked from the same warm server."""
    code, data, _ = shrink(capsys, "ddp-ready-once", "--budget", "3", f"results={tmp_path}")
    assert code == 3 and data["attempts"] == 3
    launched = [each for each in data["questions"] if each["attempts"]]
    assert launched[0]["answer"].startswith("fires: RuntimeError")
    parents = set()
    for each in launched:
        document = json.loads(Path(each["document"]).read_text())
        for attempt in document["arms"]["broken"]["attempts"]:
            parents.add(json.dumps(attempt["observation"]["attempt"]["command"]))
            assert "cold" not in attempt["observation"]["attempt"]
    assert len(parents) == 1
    code, again, _ = shrink(capsys, "ddp-ready-once", "--budget", "3", f"results={tmp_path}")
    assert [q["answer"] for q in again["questions"]][:3] == [q["answer"] for q in data["questions"]][:3]
