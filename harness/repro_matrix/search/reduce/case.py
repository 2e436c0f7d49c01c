"""A case's failure on one stack, asked in ever smaller configurations: each question is a launched, stored attempt.

A question is one cell of the case's first arm, measured through the ordinary engine and judged by
the case's own signature. What is stored is read, not launched again: a search goes on by being started again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, MeasureError, unknown
from repro_matrix.runner import session
from repro_matrix.runner.request import Request
from repro_matrix.runner.session import Session
from repro_matrix.runner.workspace import Workplace
from repro_matrix.search import labels
from repro_matrix.search.labels import Answer as Said
from repro_matrix.search.prober import Say, Stopped, one_case, one_cell
from repro_matrix.search.reduce import candidates as vary
from repro_matrix.search.reduce.candidates import Varied
from repro_matrix.search.reduce.parameters import Config
from repro_matrix.search.reduce.probe import Asked


@dataclass
class CaseAsker:
    case: str
    first: str  # the case's first arm, under whose name everything is launched
    base: Request  # what never varies
    varied: tuple[Varied, ...]
    stack: Stack
    settings: RunSettings
    gpus: list[Gpu]  # of the profiles it may run on
    say: Say
    stop: threading.Event
    at: Workplace | None = None
    asked: dict[Config, Asked] = field(default_factory=dict)

    def overrides(self, config: Config) -> list[str]:
        """To be pasted: what a configuration asks for."""
        return self._request(config).said(without=("case",))

    def _request(self, config: Config) -> Request:
        return self.base.having(vary.values_of(self.varied, config))

    def command(self, config: Config) -> list[str]:
        """What shows it, to be pasted."""
        plain = self.stack.name.replace("==", "@")
        texts = self._request(config).said(without=("case", "results", "jobs", "keep"))
        return ["repro", "run", self.case, *texts, f"stack={plain}", f"arms=[{self.first}]"]

    def ask(self, config: Config, repeat: int) -> Asked:
        """Measure it, or read what is stored. Raises Stopped when nothing can be measured any more."""
        if self.stop.is_set():
            raise Stopped("interrupted", 130)
        found = self.asked[config] = self._measure(config, repeat)
        return found

    def _measure(self, config: Config, repeat: int) -> Asked:
        try:
            prepared = _prepared(self._request(config), self.stack, self.first, repeat)
        except ConfigError as error:  # more ranks than this machine holds, an option that the strategy refuses
            return Asked(Said(None, f"no such cell: {labels.plain(str(error))}"))
        plan = prepared.plans[0].arms[0]
        wrong = plan.skipped or vary.wrong_shape(plan.settings["model"]["config"])
        if wrong:
            return Asked(Said(None, f"no such cell: {wrong}"))
        document, path, summary = one_cell(prepared, self.stop, self.say, self.at)
        said = labels.of_cell(self.case, document["arms"].get(self.first))
        return Asked(said, str(path), summary.attempts)


def _prepared(asked: Request, stack: Stack, arm: str, repeat: int) -> Session:
    return session.prepare(asked.but(stack.name, [arm], repeat), given={stack.name: stack})


def open_case(arm: str | None, asked: Request, stack: Stack, say: Say, stop: threading.Event) -> CaseAsker:
    """What varies in an arm as it is given. Raises ConfigError: no such case or arm, more than one cell, or one that
    cannot run here."""
    name = asked.selections[0].case[0]
    case = one_case(name)
    first = next(iter(case.arms))
    arm = arm or first
    if arm not in case.arms:
        raise unknown("arm", arm, case.arms, f"case {name}")
    if case.arms[arm].stack:
        raise ConfigError(f"arm {arm} of {name} runs on a stack of its own ({case.arms[arm].stack}): stack=... says it")
    given = _prepared(asked, stack, arm, 1)
    if len(given.plans) != 1:
        raise ConfigError(f"{name} has {len(given.plans)} cells here: choose one by model=, strategy=, flags.<name>=")
    plan = next(each for each in given.plans[0].arms if each.arm == arm)
    if plan.skipped:
        raise MeasureError(f"{name}, arm {arm}: {plan.skipped}")
    base = vary.base(given.catalogue.cases[name], arm, asked, plan.cell)
    usual = _prepared(base, stack, first, 1).plans[0].arms[0]
    env = dict(given.settings.env)
    varied = vary.vary(given.catalogue, given.catalogue.cases[name], arm, plan.settings, usual.settings, env)
    gpus = [gpu for profile in given.profiles for gpu in profile.gpus]
    return CaseAsker(name, first, base, varied, stack, given.settings, gpus, say, stop)
