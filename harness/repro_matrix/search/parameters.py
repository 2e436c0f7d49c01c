"""Reduce the parameters of a failure to their simplest values, then find the range of each one. Pure.

A parameter's values ascend from the simplest. Leaving a parameter out means its simplest value: the default, or the
least valid number. A parameter without a simpler value (``eval``, ``train``) keeps its value; whether the failure needs
it is tested all the same.

1. numbers first, since small values are cheap: all at their minimum at once, else one after another; then delta
   debugging of the choices; repeat until nothing changes
2. every other value of each choice, and both ends of each number, one at a time
3. a parameter is needed when the failure does not occur at any other value, all else equal

A probe returns True (the failure occurs), False, or None (unknown). Only True makes a configuration smaller. No
configuration is probed twice. ``Spent`` ends a search that has no attempts left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeGuard, TypeVar

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Case, Flag
from repro_matrix.planning.cells import Cell
from repro_matrix.runner.request import Request
from repro_matrix.search.releases import ddmin

Response = bool | None
Q = TypeVar("Q", bound=Hashable)
T = TypeVar("T", bound=Hashable)
Value = Any  # of JSON: a configuration's values are hashable
Config = tuple[Value, ...]  # a value for each parameter, in their order
Settings = Mapping[str, Any]

OUT = "(left out)"  # the value of an omitted parameter
MAX_RANKS = 2  # the largest tested number of ranks, times the given one
MAX_OPTION = 1000  # the largest tested value of an option, times the given one


class Spent(Exception):
    """No attempts are left."""


@dataclass
class Trail(Generic[Q]):
    """All answers so far, in order. ``probe`` returns the answer and its cost in attempts: 0 for a stored answer or a
    configuration that cannot exist."""

    probe: Callable[[Q], tuple[Response, int]]
    max_attempts: int | None = None
    least: int = 1  # attempts that a probe may need: none is made with fewer left
    answers: dict[Q, Response] = field(default_factory=dict)
    cost: int = 0

    def ask(self, question: Q) -> Response:
        if question not in self.answers:
            if self.max_attempts is not None and self.cost + self.least > self.max_attempts:
                raise Spent
            answer, cost = self.probe(question)
            self.answers[question] = answer
            self.cost += cost
        return self.answers[question]

    def reproduced(self, question: Q) -> bool:
        return self.ask(question) is True


def least(values: Sequence[T], reproduced: Callable[[T], bool]) -> T:
    """Of ascending ``values``, of which the last is known to reproduce: one that reproduces while its lower neighbour
    does not (or the first of all). From below in growing strides, for what is small costs little to ask; then a
    bisection. If answers alternate, this finds one boundary."""
    low, high, stride = -1, len(values) - 1, 1
    while low + stride < high:
        if reproduced(values[low + stride]):
            high = low + stride
            break
        low, stride = low + stride, stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        if reproduced(values[middle]):
            high = middle
        else:
            low = middle
    return values[high]


@dataclass(frozen=True)
class Parameter:
    """``values``: ascending where ``ordered``; ``given`` and ``simplest`` are among them."""

    name: str  # such as flags.mixed, ranks, --lr
    given: Value
    simplest: Value
    values: tuple[Value, ...]
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.given not in self.values or self.simplest not in self.values:
            raise ValueError(f"{self.name}: {self.given!r} and {self.simplest!r} must be among {self.values!r}")
        if self.ordered and any(low >= high for low, high in pairwise(self.values)):
            raise ValueError(f"{self.name}: {self.values!r} do not ascend")


@dataclass
class Range:
    """The values at which the failure occurs, all else as in the minimal configuration."""

    parameter: Parameter
    value: Value  # its value there
    answers: dict[Value, Response] = field(default_factory=dict)  # by value; ``value`` among them
    complete: bool = False  # False: no attempts were left

    @property
    def reproducing(self) -> list[Value]:
        return [value for value in self.parameter.values if self.answers.get(value) is True]

    @property
    def absent(self) -> list[Value]:
        """Values at which the failure does not reproduce."""
        return [value for value in self.parameter.values if self.answers.get(value) is False]

    @property
    def needed(self) -> bool | None:
        """Return whether the failure needs the parameter: its simplest value does not reproduce, or (if it already has
        that value) no other value does. None: not tested, or without an answer."""
        if self.value != self.parameter.simplest:
            answer = self.answers.get(self.parameter.simplest)
            return None if answer is None else not answer
        others = [value for value in self.answers if value != self.value]
        return bool(others) and not self.parameter.ordered and all(self.answers[value] is False for value in others)


@dataclass
class Reduced:
    """``stage``: reduced, ranges or done; of a search without attempts left, the stage in which it ended."""

    config: Config
    stage: str = "reduced"
    ranges: list[Range] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.stage == "done"


def reduce(parameters: tuple[Parameter, ...], trail: Trail[Config], result: Reduced | None = None) -> Reduced:
    """Return the minimal configuration. The given one is known to reproduce.

    ``result`` is filled during the search, so that it survives an exception.
    """
    reduced = result or Reduced(tuple(parameter.given for parameter in parameters))
    try:
        _reduce(parameters, trail, reduced)
        reduced.stage = "ranges"
        for index in range(len(parameters)):
            reduced.ranges.append(Range(parameters[index], reduced.config[index], {reduced.config[index]: True}))
        for index, each in enumerate(reduced.ranges):
            _ask_range(index, each, reduced.config, trail)
        reduced.stage = "done"
    except Spent:
        pass  # the stage says how far it came
    return reduced


def _reduce(parameters: tuple[Parameter, ...], trail: Trail[Config], reduced: Reduced) -> None:
    def reproduced(config: Config) -> bool:
        if trail.reproduced(config):
            reduced.config = config
            return True
        return False

    numbers = [index for index, parameter in enumerate(parameters) if parameter.ordered]
    while True:
        before = reduced.config
        if not reproduced(
            _left_out(parameters, before, {index for index in numbers if before[index] > parameters[index].simplest})
        ):
            for index in numbers:
                parameter, now = parameters[index], reduced.config
                lower = [value for value in parameter.values if parameter.simplest <= value <= now[index]]
                if len(lower) > 1:
                    least(lower, _varied(reproduced, now, index))
                elif now[index] < parameter.simplest:
                    reproduced(_with(now, index, parameter.simplest))
        now = reduced.config
        large = [
            index
            for index, parameter in enumerate(parameters)
            if not parameter.ordered and now[index] != parameter.simplest
        ]
        ddmin(large, _only(reproduced, parameters, now, set(large)))
        if reduced.config == before:
            return


def _ask_range(index: int, result: Range, config: Config, trail: Trail[Config]) -> None:
    parameter, now = result.parameter, result.value

    def reproduced(value: Value) -> bool:
        result.answers[value] = trail.ask(_with(config, index, value))
        return result.answers[value] is True

    result.complete = False
    if now != parameter.simplest:
        reproduced(parameter.simplest)  # leaving it out
    if not parameter.ordered:
        for value in parameter.values:
            if value != now:
                reproduced(value)
    else:
        lower = [value for value in parameter.values if value <= now]
        upper = [value for value in reversed(parameter.values) if value >= now]
        if len(lower) > 1 and reproduced(lower[-2]):  # a reduced number has its answer already
            least(lower[:-1], reproduced)
        if len(upper) > 1:
            least(upper, lambda value: value == now or reproduced(value))  # from above: the largest that reproduces
    result.complete = True


def _only(
    reproduced: Callable[[Config], bool], parameters: tuple[Parameter, ...], config: Config, large: set[int]
) -> Callable[[tuple[int, ...]], bool]:
    return lambda kept: reproduced(_left_out(parameters, config, large - set(kept)))


def _varied(reproduced: Callable[[Config], bool], config: Config, index: int) -> Callable[[Value], bool]:
    return lambda value: reproduced(_with(config, index, value))


def _left_out(parameters: tuple[Parameter, ...], config: Config, out: set[int]) -> Config:
    return tuple(parameter.simplest if index in out else config[index] for index, parameter in enumerate(parameters))


def _with(config: Config, index: int, value: Value) -> Config:
    return (*config[:index], value, *config[index + 1 :])


# -- of a case: flags, the strategy's options, the model's size, ranks, steps, environment variables


@dataclass(frozen=True)
class Candidate:
    """A parameter, the overrides for each of its values, and the value that needs none."""

    parameter: Parameter
    overrides: Callable[[Value], dict[str, Any]]
    reference: Value


def values_of(varied: Sequence[Candidate], config: Config) -> dict[str, Any]:
    """Return the overrides of a configuration, by key."""
    result = (each.overrides(value) for each, value in zip(varied, config) if value != each.reference)
    return {key: value for overrides in result for key, value in overrides.items()}


def base(case: Case, variant: str, given: Request, cell: Cell) -> Request:
    """Return the request without the settings that vary, and with the axes that the variant changes."""
    spec = case.variants[variant]
    axes: dict[str, Any] = {"model": spec.model or cell.model, "strategy": spec.strategy or cell.strategy}
    if spec.tp_size:
        axes["tp_size"] = spec.tp_size
    if case.launch.env:
        axes["case.launch.env"] = {}  # each is a variable of its own
    return given.less(_varies).having(axes)


def _varies(name: str) -> bool:
    if name.startswith("model.config."):
        return name.rpartition(".")[2] in SIZES
    return name in ("model", "strategy", "variants", "repeat", "ranks", "steps") or name.startswith(
        ("flags.", "case.options.", "strategy.options.", "env.")
    )


def vary(
    catalogue: Catalogue, case: Case, variant: str, given: Settings, reference: Settings, env: Mapping[str, str]
) -> tuple[Candidate, ...]:
    """Return what can vary. ``given``: the settings of the variant to reduce (repro_kit/settings.py). ``reference``:
    those of the unfixed variant in the ``base`` request."""
    result = [_flag(name, flag, given["flags"][name], reference["flags"][name]) for name, flag in case.flags.items()]
    strategy = catalogue.strategies[given["strategy"]["slug"]]
    for name, default in strategy.options.items():
        options = given["strategy"]["options"][name], reference["strategy"]["options"][name]
        result.append(_option(name, default, strategy.choices.get(name), *options))
    published = catalogue.raw["model"][given["model"]["slug"]]["config"]
    result += _sizes(given["model"]["config"], reference["model"]["config"], published)
    if case.supports_other_world_sizes:
        ranks = given["world_size"]
        least = min(case.min_ranks, ranks)
        result.append(_number("ranks", ranks, least, reference["world_size"], (ranks * MAX_RANKS,)))
    result.append(_number("steps", given["steps"], 1, reference["steps"]))
    for name, value in {**case.launch.env, **env, **case.variants[variant].env}.items():
        result.append(Candidate(Parameter(f"env.{name}", value, OUT, (OUT, value)), _override(f"env.{name}"), OUT))
    return tuple(each for each in result if each is not None and len(each.parameter.values) > 1)


def _override(name: str) -> Callable[[Value], dict[str, Any]]:
    return lambda value: {name: value}


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, given: int, least: int, reference: int, beyond: tuple[int, ...] = ()) -> Candidate:
    values = tuple(sorted({*range(least, given + 1), *beyond}))
    return Candidate(Parameter(name, given, least, values, ordered=True), _override(name), reference)


def _powers(given: int, most: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to ``most``, and the value that is given."""
    return tuple(sorted({given, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)}))


def _flag(name: str, flag: Flag, given: Value, reference: Value) -> Candidate | None:
    """Simplest: null (unset), then false (off); otherwise no value is simpler than another."""
    key = f"flags.{name}"
    if flag.choices is not None:
        values = _hashable(flag.choices)
        simplest = next((plain for plain in (None, False) if any(each is plain for each in flag.choices)), given)
        return None if values is None else Candidate(Parameter(key, given, simplest, values), _override(key), reference)
    if _is_number(given) and given > 1:
        return _number(key, given, 1, reference)
    if given is not None and flag.default is None and isinstance(given, (str, int, float)):
        return Candidate(Parameter(key, given, None, (None, given)), _override(key), reference)
    return None


def _option(name: str, default: Value, choices: list[Value] | None, given: Value, reference: Value) -> Candidate | None:
    """Simplest: the strategy's default."""
    key = f"case.options.{name}"  # a case's options win over its strategy's
    if choices is None and isinstance(default, bool):
        choices = [False, True]
    if choices is not None:
        values = _hashable(choices)
        return None if values is None else Candidate(Parameter(key, given, default, values), _override(key), reference)
    if _is_number(default) and given > 0 and default > 0:
        values = tuple(sorted({default, *_powers(given, max(given, default)), given * 10, given * MAX_OPTION}))
        return Candidate(Parameter(key, given, default, values, ordered=True), _override(key), reference)
    return None


def _hashable(values: Sequence[Value]) -> tuple[Value, ...] | None:
    plain = all(value is None or isinstance(value, (str, int, float)) for value in values)
    return tuple(values) if plain and len(set(values)) == len(values) else None


# -- the model

LAYERS, HEADS, KV = "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
# With the least value (rotary embeddings turn pairs), in the order in which they are made smaller.
WIDTHS = {"intermediate_size": 1, "hidden_size": 2, "vocab_size": 1}
SIZES = (LAYERS, HEADS, KV, *WIDTHS)


def _sizes(given: Settings, reference: Settings, published: Settings) -> list[Candidate]:
    """Vary layers one by one and the rest in powers of two, since every value costs an attempt."""
    result = []
    layers, heads = given.get(LAYERS), given.get(HEADS)
    if _is_number(layers):  # first: it costs the most
        whole = max(layers, published.get(LAYERS, layers))
        result.append(_number(f"model.config.{LAYERS}", layers, 1, reference[LAYERS], (whole,)))
    if _is_number(heads) and heads > 1:  # before the width, which they divide
        values = tuple(value for value in range(1, heads + 1) if heads % value == 0)
        parameter = Parameter(f"model.config.{HEADS}", heads, 1, values, ordered=True)
        result.append(Candidate(parameter, _heads(heads, given.get(KV)), reference[HEADS]))
    for key, least in WIDTHS.items():
        if _is_number(given.get(key)) and given[key] > least:
            values = tuple(value for value in _powers(given[key], given[key]) if value >= least)
            parameter = Parameter(f"model.config.{key}", given[key], values[0], values, ordered=True)
            result.append(Candidate(parameter, _override(parameter.name), reference[key]))
    return result


def _heads(given: int, kv: Any) -> Callable[[Value], dict[str, Any]]:
    """Keep the share of key-value heads, at least one."""

    def overrides(value: Value) -> dict[str, Any]:
        values = {f"model.config.{HEADS}": value}
        if _is_number(kv) and _is_number(value):
            values[f"model.config.{KV}"] = max(1, kv * value // given)
        return values

    return overrides


def wrong_shape(config: Settings) -> str | None:
    """Return why no model can have these sizes, or None."""
    hidden, heads, kv = config.get("hidden_size"), config.get(HEADS), config.get(KV)
    if not (_is_number(hidden) and _is_number(heads)):
        return None
    if "head_dim" not in config and "kv_channels" not in config:
        if hidden % heads:
            return f"{hidden} hidden units do not divide over {heads} heads"
        if hidden // heads % 2:
            return f"a rotary embedding turns pairs, and a head would have {hidden // heads}"
    if _is_number(kv) and heads % kv:
        return f"{heads} heads do not divide over {kv} key-value heads"
    return None


# -- of a script: its arguments


@dataclass(frozen=True)
class Argument:
    """An option with its values, or a positional argument. ``there``: whether it is given at all. ``number``: its value
    if that is a whole number; without effect while the option is left out."""

    parts: tuple[str, ...]
    there: Parameter
    number: Parameter | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (self.there, self.number) if self.number else (self.there,)

    def to_args(self, values: Mapping[str, Any]) -> list[str]:
        if values.get(self.there.name, self.there.given) == OUT:
            return []
        if self.number is None:
            return list(self.parts)
        value = values.get(self.number.name, self.number.given)
        head, equals, _ = self.parts[-1].rpartition("=")
        return [*self.parts[:-1], f"{head}{equals}{value}"]


def arguments_of(words: Sequence[str]) -> tuple[Argument, ...]:
    """Split ``--lr 1e-4 --layers=24 --bf16 train`` into options, each with the words up to the next option."""
    groups: list[list[str]] = []
    for word in words:
        if _is_option(word) or not groups or not _is_option(groups[-1][0]) or "=" in groups[-1][0]:
            groups.append([word])
        else:
            groups[-1].append(word)
    counts: dict[str, int] = {}
    return tuple(_argument(group, counts) for group in groups)


def _is_option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def _argument(group: Sequence[str], counts: dict[str, int]) -> Argument:
    name = group[0].partition("=")[0]
    counts[name] = counts.get(name, 0) + 1
    key = name if counts[name] == 1 else f"{name} ({counts[name]})"
    there = Parameter(key, " ".join(group), OUT, (OUT, " ".join(group)))
    result = re.fullmatch(r"(?:--?[A-Za-z][\w.-]*=)?(\d{1,9})", group[-1])
    if not result or len(group) > 2 or not _is_option(group[0]) or int(result[1]) < 2 or result[1].startswith("0"):
        return Argument(tuple(group), there)
    given = int(result[1])
    values = tuple(sorted({given, *(1 << power for power in range(given.bit_length()) if 1 << power < given)}))
    return Argument(tuple(group), there, Parameter(f"value of {key}", given, 1, values, ordered=True))
