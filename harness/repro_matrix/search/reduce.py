"""Reduce a failure to its smallest trigger: a case's settings, or a script's arguments and ranks.

Every probe is a launched, stored attempt, graded like any other. What is stored is read, not
launched again: a search continues when the same command is given again.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from repro_matrix.config.schema import VARIANT
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.grading.failure_text import comparable_text
from repro_matrix.records.outcome import Outcome
from repro_matrix.runner import session
from repro_matrix.runner.adhoc_case import Script, command_of_script
from repro_matrix.runner.script_failure import learned
from repro_matrix.runner.session import Request
from repro_matrix.search import parameters, prober
from repro_matrix.search.algorithms import NoMoreProbes, Trail, repeats_for
from repro_matrix.search.parameters import OUT, Config, Setting, arguments_of
from repro_matrix.search.prober import CellRunner, ProbeAnswer
from repro_matrix.text import counted, log

Json = dict[str, Any]
CONFIRMED = 3  # attempts of the result: whether it fails every time
# Infrastructure errors that the script causes, not the machine: another attempt would show them
# again.
LASTING = ("script_error", "missing_check", "no_effect", "interrupted")
DEADLINE_FACTOR = 5.0  # an attempt's deadline: times the failure's duration
MIN_DEADLINE_S = 20.0


class Reduction(CellRunner):
    """Find the smallest configuration that still fails.

    ``repeat``: attempts of one configuration. ``max_attempts``: of the whole reduction.
    """

    slug: str
    variant: str  # that is launched
    parameters: tuple[Setting, ...]

    def __init__(self, stack: Stack, repeat: int, max_attempts: int | None) -> None:
        super().__init__()
        self.stack = stack
        self.repeat = repeat
        self.max_attempts = max_attempts
        # By configuration, or by the sizes of a fix; in order.
        self.probes: dict[Hashable, ProbeAnswer] = {}
        self.notes: list[str] = []
        self.unsure: list[str] = []  # the configurations without an answer because of the machine
        self.attempts = 0
        self.ended: NoMoreProbes | None = None

    def request(self, config: Config) -> Request:
        """Return the request for a configuration's one cell, or raise ConfigError."""
        raise NotImplementedError

    def _reduce(self) -> tuple[Config, ProbeAnswer]:
        """Return the minimal configuration, and the probe of the given one."""
        given = tuple(each.given for each in self.parameters)
        first = self._probe(given, self.repeat)
        if first.reproduced is None:
            raise MeasureError(f"The failure cannot be measured as given: {first.detail}")
        if not first.reproduced:
            raise ConfigError(f"The failure does not occur as given: {first}")
        names = [each.name for each in self.parameters]
        log(f"{counted(len(names), 'parameter')} to vary: {', '.join(names)}")
        while True:
            trail: Trail[Config, bool | None] = Trail(self._reproduced)
            config = parameters.reduce(self.parameters, trail)
            self.ended = trail.ended
            if self.ended:
                return config, first
            try:
                answer = self._probe(config, max(CONFIRMED, self.repeat))
            except NoMoreProbes as ended:
                self.ended = ended
                return config, first
            if self._has_enough_attempts(answer):
                return config, first

    def _has_enough_attempts(self, answer: ProbeAnswer) -> bool:
        """Return True if the probes had enough attempts; otherwise increase ``repeat``."""
        wanted = repeats_for(answer.reproductions, answer.counted) if answer.flaky else 1
        if self.repeat >= wanted:
            return True
        self.repeat = wanted  # one passing attempt proves nothing: start again with more
        self.notes.append(
            f"The failure is flaky: {answer.reproductions} of {answer.counted} attempts. "
            f"What passed was launched {wanted} times."
        )
        log(self.notes[-1])
        return False

    def _reproduced(self, config: Config) -> bool | None:
        probe = self.probes.get(config)
        if probe is None or (
            probe.document and not probe.reproduced and probe.counted < self.repeat
        ):
            probe = self._probe(config, self.repeat)
        return probe.reproduced

    def _probe(self, config: Config, repeat: int) -> ProbeAnswer:
        changed = [
            f"{each.name}={value}"
            for each, value in zip(self.parameters, config)
            if value != each.given
        ]
        return self._launch(
            config, " ".join(changed) or "as given", lambda: self.request(config), repeat
        )

    def _launch(
        self,
        key: Hashable,
        what: str,
        request: Callable[[], Request],
        repeat: int,
        variant: str = "",
    ) -> ProbeAnswer:
        """Measure a request, or read its stored result; may raise NoMoreProbes."""
        variant = variant or self.variant
        if self.max_attempts is not None and self.attempts + repeat > self.max_attempts:
            raise NoMoreProbes(f"the limit of {self.max_attempts} attempts is reached")
        began = time.monotonic()
        attempts = 0
        try:
            document, path, attempts = self.measure(request(), self.stack, [variant], repeat)
            found = replace(
                prober.answer_of(self.slug, document["variants"].get(variant)), document=str(path)
            )
        except ConfigError as error:  # such as an option that is refused, or too little memory
            found = ProbeAnswer(None, f"no such cell: {comparable_text(str(error))}")
        self.probes[key] = found
        self.attempts += attempts
        self.unsure += [] if found.infra_error in (None, *LASTING) else [what]
        how = "stored" if found.document else "not launched"
        if attempts:
            how = f"{time.monotonic() - began:.1f} s"
        log(f"{len(self.probes)}: {what}: {found} ({how})")
        return found

    def _result(self, config: Config, first: ProbeAnswer, data: Json) -> Json:
        """Return the result with stable keys."""
        final = self.probes[config]
        varied = [self._varied(config, at) for at in range(len(self.parameters))]
        names = [each.name for each in self.parameters]
        return {
            "kind": "reduced",
            "failure": first.detail,
            **data,
            "stack": {"name": self.stack.name, "versions": dict(self.stack.versions)},
            "error_at": final.error_at,
            "document": final.document,
            "confirmed": f"{final.reproductions} of {final.counted}",
            "needs": [each["name"] for each in varied if each["needed"]],
            "varied": varied,
            "unsure": self.unsure,
            "minimal": dict(zip(names, config)),
            "done": self.ended is None and not self.unsure,
            "notes": self.notes,
            "probes": [
                {
                    "config": dict(zip(names, key)) if isinstance(key, tuple) else None,
                    "answer": str(probe),
                    "document": probe.document,
                }
                for key, probe in self.probes.items()
            ],
            "attempts": self.attempts,
            "repeat": self.repeat,
        }

    def _varied(self, config: Config, at: int) -> Json:
        parameter = self.parameters[at]
        value = config[at]
        probes = {
            other: self.probes.get(parameters.with_value(config, at, other))
            for other in parameter.values
        }
        answers = {other: probe.reproduced for other, probe in probes.items() if probe is not None}
        return {
            "name": parameter.name,
            "given": parameter.given,
            "value": value,
            "number": parameter.number,
            "needed": parameters.needed(parameter, value, answers),
            "answers": [
                {"value": other, "reproduced": probe.reproduced, "answer": str(probe)}
                for other, probe in probes.items()
                if probe is not None and other != value
            ],
        }


class CaseReduction(Reduction):
    """Reduce the settings of a case's variant.

    Every configuration is launched under the name of the first variant. Sizes count only if the
    first fix of the same cell still passes: else every variant fails at them.
    """

    def __init__(
        self, variant: str | None, request: Request, stack: Stack, max_attempts: int | None
    ) -> None:
        """Raise ConfigError where there is no such case or variant, or more than one cell."""
        case, cell = prober.one_cell(request)
        super().__init__(stack, request.settings.repeat or case.repeat, max_attempts)
        self.slug = case.slug
        self.variant = next(iter(case.variants))
        self.reduced_variant = variant = prober.one_variant(case, variant)
        given = self._prepare(request, variant)
        plan = next(each for each in given.plans[0].variants if each.variant == variant)
        if plan.skipped:
            raise MeasureError(f"{case.slug}, variant {variant}: {plan.skipped}")
        self.base = parameters.base_of(case, variant, request, cell)
        self.fix = next(
            (
                name
                for name, each in case.variants.items()
                if each.role == "fix" and not (each.model or each.strategy or each.stack)
            ),
            None,
        )
        usual = self._prepare(self.base, self.variant).plans[0].variants[0]
        env = dict(given.settings.env)
        self.parameters = parameters.of_case(
            given.catalogue, case, variant, plan.settings, usual.settings, env
        )

    def _prepare(self, request: Request, variant: str) -> session.Session:
        return session.prepare(
            request.for_stack(self.stack.name, [variant], 1), given={self.stack.name: self.stack}
        )

    def request(self, config: Config) -> Request:
        return self.base.with_values(parameters.configuration_overrides(self.parameters, config))

    def _probe(self, config: Config, repeat: int) -> ProbeAnswer:
        found = super()._probe(config, repeat)
        if not found.reproduced or self.fix is None:
            return found
        sizes = {
            name: value
            for name, value in parameters.configuration_overrides(self.parameters, config).items()
            if name in ("ranks", "steps") or name.startswith("model.config.")
        }
        key = frozenset(sizes.items())
        first = len(self.probes) == 1
        what = (
            f"{self.fix}"
            f" {' '.join(f'{name}={value}' for name, value in sizes.items()) or 'as given'}"
        )
        fixed = self.probes.get(key) or self._launch(
            key, what, lambda: self.base.with_values(sizes), self.repeat, self.fix
        )
        if fixed.label == prober.PASSED:
            return found
        if first:  # there is no fix to keep
            self.fix = None
            return found
        self.probes[config] = replace(
            found, label=f"other_failure: the fix {self.fix} fails, too: {fixed}"
        )
        return self.probes[config]

    def command(self, config: Config) -> list[str]:
        return prober.run_command(self.slug, self.request(config), self.stack.name, self.variant)

    def run(self) -> Json:
        config, first = self._reduce()
        data = {
            "case": self.slug,
            "variant": self.reduced_variant,
            "what": f"{self.slug} on {self.stack.name}",
            "overrides": self.request(config).texts(without=("case",)),
            "command": self.command(config),
        }
        return self._result(config, first, data)


class ScriptReduction(Reduction):
    """Reduce a user's script: its arguments, variables and ranks.

    ``word``: the script on the command line.
    """

    def __init__(
        self,
        script: Script,
        word: str,
        args: str,
        stack: Stack,
        repeat: int,
        max_attempts: int | None,
    ) -> None:
        super().__init__(stack, repeat, max_attempts)
        self.script = script
        self.word = word
        self.slug = script.slug
        self.variant = VARIANT
        self.arguments = arguments_of(shlex.split(args))
        found = [argument.parameter for argument in self.arguments]
        nproc = script.command.nproc
        if nproc > 1:
            found.append(Setting("nproc", nproc, tuple(range(1, nproc + 1)), number=True))
        found += [Setting(f"env.{name}", value, (OUT, value)) for name, value in script.env]
        self.parameters = tuple(found)

    def _words(self, config: Config) -> list[str]:
        return [word for each, value in zip(self.arguments, config) for word in each.words(value)]

    def configured(self, config: Config) -> Script:
        """Return the script in this configuration."""
        values = dict(zip((each.name for each in self.parameters), config))
        old = self.script.command
        nproc = int(values.get("nproc", old.nproc))
        command = command_of_script(
            self.word, nproc, shlex.join(self._words(config)), module=old.script is None
        )
        env = tuple(pair for pair in self.script.env if values[f"env.{pair[0]}"] != OUT)
        return replace(self.script, command=command, env=env)

    def request(self, config: Config) -> Request:
        return self.configured(config).request(self.stack.name)

    def command(self, config: Config) -> list[str]:
        script = self.configured(config)
        env = [f"env.{name}={value}" for name, value in script.env]
        shown = shlex.split(script.command.shown)
        return [
            "repro",
            "run",
            *env,
            f"stack={self.stack.name}",
            *script.failure.option,
            "--",
            *shown,
        ]

    def run(self) -> Json:
        self._learn()
        config, first = self._reduce()
        data = {
            "what": f"{self.script.command.shown} on {self.stack.name}",
            "script": self.word,
            "nproc": self.configured(config).command.nproc,
            "args": self._words(config),
            "command": self.command(config),
        }
        return self._result(config, first, data)

    def _learn(self) -> None:
        """Take the first attempt's failure if none was given, so that no other error counts."""
        document, _, launched = self.measure(
            self.script.request(self.stack.name), self.stack, [VARIANT], 1
        )
        self.attempts += launched
        variant = document["variants"][VARIANT]
        if not variant["attempts"]:
            raise MeasureError(f"The script cannot be launched: {variant['skipped']}")
        made = variant["attempts"][0]
        if not self.script.failure.text:
            outcome = Outcome.from_json(made["outcome"])
            failure = learned(outcome, made) if outcome.outcome == "other_failure" else None
            if failure is None:
                kind = MeasureError if outcome.outcome == "infra_error" else ConfigError
                raise kind(
                    f"The script does not fail with an exception: {outcome.outcome}:"
                    f" {outcome.reason}. Describe its failure with --exit, --log, --hang or"
                    " --metric."
                )
            self.script = replace(self.script, failure=failure)
            self.notes.append(
                f"No failure was given; it is the one of the first attempt, `{failure.text}`."
            )
            log(self.notes[-1])
        if self.script.failure.hang_s is None:  # a much slower attempt does not show the failure
            limit = max(
                MIN_DEADLINE_S,
                DEADLINE_FACTOR * round(made["observation"]["attempt"]["wall_s"] / 5 + 1) * 5,
            )
            self.script = replace(self.script, deadline_s=min(self.script.deadline_s, limit))
