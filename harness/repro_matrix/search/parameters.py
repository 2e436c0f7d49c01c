"""List the parameters that a reduction varies, in a case or in a script.

Pure. A parameter's values begin with the simplest: omitted, the default, or the least valid number.
A parameter without a simpler value (``eval``, ``train``) keeps its value, but the search still
tests if the failure needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Case, Flag
from repro_matrix.planning.cells import Cell
from repro_matrix.runner.session import Request
from repro_matrix.search.algorithms import NoMoreProbes, Trail, ddmin, least

Value = Any  # of JSON: a configuration's values are hashable
Config = tuple[Value, ...]  # a value for each parameter, in their order
Settings = Mapping[str, Any]
OUT = "(left out)"  # the value of an omitted parameter


@dataclass(frozen=True)
class Setting:
    """Describe one parameter with its values, the simplest first.

    ``number``: the values ascend, and the smallest that fails is wanted.
    """

    name: str  # such as flags.mixed, ranks, --lr
    given: Value
    values: tuple[Value, ...]
    number: bool = False
    reference: Value = OUT  # of a case: the value that needs no override

    @property
    def simplest(self) -> Value:
        return self.values[0]


def with_value(config: Config, index: int, value: Value) -> Config:
    return (*config[:index], value, *config[index + 1 :])


def reduce(parameters: Sequence[Setting], trail: Trail[Config, bool | None]) -> Config:
    """Return a minimal configuration, or the best one so far if ``trail`` has ended.

    The given configuration is known to fail. Only an answer True makes it smaller. Numbers come
    first, since small values are cheap to probe: all at their simplest at once, else one after
    another; then delta debugging of the choices; repeated until nothing changes. At the end the
    search probes every other value of each choice.
    """
    best: Config = tuple(parameter.given for parameter in parameters)
    numbers = [index for index, parameter in enumerate(parameters) if parameter.number]
    choices = [index for index, parameter in enumerate(parameters) if not parameter.number]

    def reproduced(config: Config) -> bool:
        nonlocal best
        if trail.ask(config) is True:
            best = config
            return True
        return False

    def simplify(config: Config, indexes: set[int]) -> Config:
        return tuple(
            each.simplest if at in indexes else config[at] for at, each in enumerate(parameters)
        )

    def lower(index: int) -> None:
        now = best
        values = parameters[index].values
        smaller = values[: values.index(now[index]) + 1]
        least(smaller, lambda value: reproduced(with_value(now, index, value)))

    def simplify_choices() -> None:
        now = best
        large = [index for index in choices if now[index] != parameters[index].simplest]
        ddmin(large, lambda kept: reproduced(simplify(now, set(large) - set(kept))))

    try:
        before = None
        while best != before:
            before = best
            if not reproduced(simplify(before, set(numbers))):
                for index in numbers:
                    lower(index)
            simplify_choices()
        for index in choices:
            for value in parameters[index].values:
                trail.ask(with_value(best, index, value))
    except NoMoreProbes as ended:
        trail.ended = ended
    return best


def needed(parameter: Setting, value: Value, answers: Mapping[Value, bool | None]) -> bool | None:
    """Return True if the failure needs the parameter at ``value``; None if that is unknown.

    It is needed if the failure does not occur at the simplest value, or (if ``value`` is the
    simplest) at no other one. ``answers``: by value, all else as in the minimal configuration.
    """
    if value != parameter.simplest:
        answer = answers.get(parameter.simplest)
        return None if answer is None else not answer
    if parameter.number:
        return False
    others = [answers.get(other) for other in parameter.values if other != value]
    return False if True in others else None if None in others else True


# -- of a case: flags, the strategy's options, the model's size, ranks, steps, environment variables

LAYERS = "num_hidden_layers"
HEADS = "num_attention_heads"
# In the order in which they are made smaller.
WIDTHS = ("intermediate_size", "hidden_size", "vocab_size")
_SIZES = tuple(f"model.config.{key}" for key in (LAYERS, *WIDTHS))
_REDUCED = ("model", "strategy", "variants", "repeat", "ranks", "steps", *_SIZES)


def base_of(case: Case, variant: str, given: Request, cell: Cell) -> Request:
    """Return the request without the settings that vary, on the axes that the variant changes."""
    spec = case.variants[variant]
    axes: dict[str, Any] = {
        "model": spec.model or cell.model,
        "strategy": spec.strategy or cell.strategy,
    }
    if case.launch.env:
        axes["case.launch.env"] = {}  # each is a parameter
    groups = ("flags.", "case.options.", "strategy.options.", "env.")
    dropped = {key for key, _ in given.words if key in _REDUCED or key.startswith(groups)}
    return given.with_values(axes, without=dropped)


def of_case(
    catalogue: Catalogue,
    case: Case,
    variant: str,
    given: Settings,
    reference: Settings,
    env: Mapping[str, str],
) -> tuple[Setting, ...]:
    """Return the parameters of a case.

    ``given``: the settings of the variant to reduce (repro_kit/settings.py). ``reference``: those
    of the unfixed variant in the ``base_of`` request.
    """
    found = [
        _flag(name, flag, given["flags"][name], reference["flags"][name])
        for name, flag in case.flags.items()
    ]
    strategy = catalogue.strategies[given["strategy"]["slug"]]
    options = given["strategy"]["options"]
    usual = reference["strategy"]["options"]
    for name, default in strategy.options.items():
        values = strategy.choices.get(name) or ([False, True] if isinstance(default, bool) else [])
        # A case's options win over its strategy's.
        found.append(
            _choice(f"case.options.{name}", [default, *values], options[name], usual[name])
        )
    found += _sizes(given["model"]["config"], reference["model"]["config"])
    if case.supports_other_world_sizes:
        ranks = given["world_size"]
        found.append(
            _number("ranks", range(min(case.min_ranks, ranks), ranks + 1), reference["world_size"])
        )
    found.append(_number("steps", range(1, given["steps"] + 1), reference["steps"]))
    for name, value in {**case.launch.env, **env, **case.variants[variant].env}.items():
        found.append(_choice(f"env.{name}", [OUT], value, OUT))
    return tuple(each for each in found if each is not None and len(each.values) > 1)


def configuration_overrides(parameters: Sequence[Setting], config: Config) -> dict[str, Value]:
    """Return the overrides of a configuration, by key."""
    return {each.name: value for each, value in zip(parameters, config) if value != each.reference}


def _is_number(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, values: Sequence[int], reference: Value) -> Setting:
    return Setting(name, values[-1], tuple(values), number=True, reference=reference)


def _choice(name: str, values: Sequence[Value], given: Value, reference: Value) -> Setting | None:
    """Return a parameter with these values, the simplest first; None if a value is a structure."""
    if not all(value is None or isinstance(value, (str, int, float)) for value in (*values, given)):
        return None
    return Setting(name, given, tuple(dict.fromkeys((*values, given))), reference=reference)


def _flag(name: str, flag: Flag, given: Value, reference: Value) -> Setting | None:
    """Simplest: null (unset), then false (off); otherwise no value is simpler than another."""
    key = f"flags.{name}"
    if flag.choices is not None:
        simplest = next(
            (plain for plain in (None, False) if any(each is plain for each in flag.choices)), given
        )
        return _choice(key, [simplest, *flag.choices], given, reference)
    if _is_number(given) and given > 1:
        return _number(key, range(1, given + 1), reference)
    return _choice(key, [None], given, reference) if flag.default is None else None


def _sizes(given: Settings, reference: Settings) -> Iterator[Setting]:
    """Vary layers one by one, and widths in powers of two, since every value costs an attempt."""
    if _is_number(given.get(LAYERS)):  # first: it costs the most
        yield _number(f"model.config.{LAYERS}", range(1, given[LAYERS] + 1), reference[LAYERS])
    for key in WIDTHS:
        if _is_number(given.get(key)):
            # Heads divide the hidden size, and rotary embeddings turn pairs in each.
            unit = 2 * given.get(HEADS, 1) if key == "hidden_size" else 1
            yield _number(f"model.config.{key}", _doubled(unit, given[key]), reference[key])


def _doubled(least_value: int, most: int) -> list[int]:
    """Double ``least_value`` while it is below ``most``; the list ends with ``most``."""
    values = []
    while least_value < most:
        values.append(least_value)
        least_value *= 2
    return [*values, most]


# -- of a script: its arguments


@dataclass(frozen=True)
class Argument:
    """Describe an option with its values, or a positional argument."""

    parts: tuple[str, ...]
    parameter: Setting

    def words(self, value: Value) -> list[str]:
        """Return its words on the command line."""
        if value == OUT:
            return []
        if not self.parameter.number:
            return list(self.parts)
        head, equals, _ = self.parts[-1].rpartition("=")
        return [*self.parts[:-1], f"{head}{equals}{value}"]


def arguments_of(words: Sequence[str]) -> tuple[Argument, ...]:
    """Split ``--lr 1e-4 --bf16 train`` into options, each with the words up to the next one."""
    groups: list[list[str]] = []
    for word in words:
        if _is_option(word) or not groups or not _is_option(groups[-1][0]) or "=" in groups[-1][0]:
            groups.append([word])
        else:
            groups[-1].append(word)
    return tuple(Argument(tuple(group), _argument(group)) for group in groups)


def _is_option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def _argument(group: Sequence[str]) -> Setting:
    key = group[0].partition("=")[0]
    number = re.fullmatch(r"(?:--?[A-Za-z][\w.-]*=)?([1-9]\d{0,8})", group[-1])
    if number and len(group) <= 2 and _is_option(group[0]):
        return Setting(key, int(number[1]), (OUT, *_doubled(1, int(number[1]))), number=True)
    return Setting(key, " ".join(group), (OUT, " ".join(group)))
