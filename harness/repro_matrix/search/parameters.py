"""The parameters of a failure, made as simple as it allows; then each is asked for the values that it may have. Pure.

A parameter has values from the simplest up. Leaving one out means giving it its simplest value: its default where
nobody sets it, or the least valid number. A parameter without a simpler value (``eval``, ``train``) stays as it is
given; whether it is needed is asked all the same.

1. the numbers first, since small is cheap: all at their least at once, else one after another; then delta debugging of
   the choices that must stay as given; again, until nothing changes
2. every other value of each choice, and the ends of each number, one at a time
3. a parameter is needed when the failure goes away at every other value, all else equal

A probe's answer is True (the failure occurs), False, or None (it cannot be known). Only True makes a configuration
smaller. No configuration is probed twice. ``Spent`` ends a search whose attempts are used up.
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

Answer = bool | None
Q = TypeVar("Q", bound=Hashable)
T = TypeVar("T", bound=Hashable)
Value = Any  # of JSON: a configuration's values are hashable
Config = tuple[Value, ...]  # a value for each parameter, in their order
Settings = Mapping[str, Any]

OUT = "(left out)"  # the value of what is
MAX_RANKS = 2  # times the given ranks: the largest number of them that is asked
MAX_OPTION = 1000  # times a number among the options


class Spent(Exception):
    """No question more: the max_attempts is over."""


@dataclass
class Trail(Generic[Q]):
    """Every answer so far, in the order of asking. ``probe`` gives the answer and what it cost (attempts; 0 where it
    was stored, or where it could be told without one)."""

    probe: Callable[[Q], tuple[Answer, int]]
    max_attempts: int | None = None
    least: int = 1  # what a question may cost: with less left none is asked
    answers: dict[Q, Answer] = field(default_factory=dict)
    cost: int = 0

    def ask(self, question: Q) -> Answer:
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
    bisection. Of an answer that goes back and forth one boundary is found."""
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

    name: str  # as a reader names it: flags.mixed, ranks, --lr
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
    """What one parameter may be, all else as in the minimal configuration."""

    parameter: Parameter
    value: Value  # its value there
    asked: dict[Value, Answer] = field(default_factory=dict)  # value -> what was answered; ``value`` among them
    whole: bool = False  # False: the max_attempts ended before all was asked

    @property
    def reproducing(self) -> list[Value]:
        return [value for value in self.parameter.values if self.asked.get(value) is True]

    @property
    def gone(self) -> list[Value]:
        """Values at which the failure does not reproduce."""
        return [value for value in self.parameter.values if self.asked.get(value) is False]

    @property
    def needed(self) -> bool | None:
        """Leaving it out makes the failure go: its simplest value does not reproduce, or (where it is at its simplest,
        or has none) no other value does. None: that could not be asked, or had no answer."""
        if self.value != self.parameter.simplest:
            answer = self.asked.get(self.parameter.simplest)
            return None if answer is None else not answer
        others = [value for value in self.asked if value != self.value]
        return bool(others) and not self.parameter.ordered and all(self.asked[value] is False for value in others)


@dataclass
class Reduced:
    """``stage``: reduced, ranges or done; where the max_attempts ended the search, the one that it ended in."""

    config: Config
    stage: str = "reduced"
    ranges: list[Range] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.stage == "done"


def reduce(parameters: tuple[Parameter, ...], trail: Trail[Config], found: Reduced | None = None) -> Reduced:
    """The configuration in which all are as given is known to reproduce. ``found``: is filled on the way, so that it is
    there when something else than the max_attempts ends the search."""
    reduced = found or Reduced(tuple(parameter.given for parameter in parameters))
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


def _ask_range(index: int, found: Range, config: Config, trail: Trail[Config]) -> None:
    parameter, now = found.parameter, found.value

    def reproduced(value: Value) -> bool:
        found.asked[value] = trail.ask(_with(config, index, value))
        return found.asked[value] is True

    found.whole = False
    if now != parameter.simplest:
        reproduced(parameter.simplest)  # leaving it out
    if not parameter.ordered:
        for value in parameter.values:
            if value != now:
                reproduced(value)
    else:
        lower = [value for value in parameter.values if value <= now]
        upper = [value for value in reversed(parameter.values) if value >= now]
        if len(lower) > 1 and reproduced(lower[-2]):  # of what was reduced that boundary is asked already
            least(lower[:-1], reproduced)
        if len(upper) > 1:
            least(upper, lambda value: value == now or reproduced(value))  # from above: the largest that reproduces
    found.whole = True


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


# -- of a case: its flags, its strategy's options, the model's size, ranks, steps and variables


@dataclass(frozen=True)
class Candidate:
    """A parameter, what is asked for with each of its values (by key), and the value where nothing is asked for."""

    parameter: Parameter
    asks: Callable[[Value], dict[str, Any]]
    usual: Value


def values_of(varied: Sequence[Candidate], config: Config) -> dict[str, Any]:
    """By key, what a configuration asks for."""
    found = (each.asks(value) for each, value in zip(varied, config) if value != each.usual)
    return {key: value for asked in found for key, value in asked.items()}


def base(case: Case, variant: str, given: Request, cell: Cell) -> Request:
    """What stays: what was given less what varies, and the axes that the variant changes."""
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
    catalogue: Catalogue, case: Case, variant: str, given: Settings, usual: Settings, env: Mapping[str, str]
) -> tuple[Candidate, ...]:
    """``given``: the variant's settings as it is to be reduced (repro_kit/settings.py). ``usual``: those of the unfixed
    variant with nothing but ``base`` written. What a variant sets is a setting like any other here."""
    found = [_flag(name, flag, given["flags"][name], usual["flags"][name]) for name, flag in case.flags.items()]
    strategy = catalogue.strategies[given["strategy"]["slug"]]
    for name, default in strategy.options.items():
        options = given["strategy"]["options"][name], usual["strategy"]["options"][name]
        found.append(_option(name, default, strategy.choices.get(name), *options))
    published = catalogue.raw["model"][given["model"]["slug"]]["config"]
    found += _sizes(given["model"]["config"], usual["model"]["config"], published)
    if case.supports_other_world_sizes:
        ranks = given["world_size"]
        least = min(case.min_ranks, ranks)
        found.append(_number("ranks", ranks, least, usual["world_size"], (ranks * MAX_RANKS,)))
    found.append(_number("steps", given["steps"], 1, usual["steps"]))
    for name, value in {**case.launch.env, **env, **case.variants[variant].env}.items():
        found.append(Candidate(Parameter(f"env.{name}", value, OUT, (OUT, value)), _asks(f"env.{name}"), OUT))
    return tuple(each for each in found if each is not None and len(each.parameter.values) > 1)


def _asks(name: str) -> Callable[[Value], dict[str, Any]]:
    return lambda value: {name: value}


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, given: int, least: int, usual: int, beyond: tuple[int, ...] = ()) -> Candidate:
    values = tuple(sorted({*range(least, given + 1), *beyond}))
    return Candidate(Parameter(name, given, least, values, ordered=True), _asks(name), usual)


def _powers(given: int, most: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to ``most``, and the value that is given."""
    return tuple(sorted({given, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)}))


def _flag(name: str, flag: Flag, given: Value, usual: Value) -> Candidate | None:
    """Simplest: what leaves the thing to others (null), or is off (false); else none is simpler than another."""
    key = f"flags.{name}"
    if flag.choices is not None:
        values = _hashable(flag.choices)
        simplest = next((plain for plain in (None, False) if any(each is plain for each in flag.choices)), given)
        return None if values is None else Candidate(Parameter(key, given, simplest, values), _asks(key), usual)
    if _is_number(given) and given > 1:
        return _number(key, given, 1, usual)
    if given is not None and flag.default is None and isinstance(given, (str, int, float)):
        return Candidate(Parameter(key, given, None, (None, given)), _asks(key), usual)
    return None


def _option(name: str, default: Value, choices: list[Value] | None, given: Value, usual: Value) -> Candidate | None:
    """Simplest: what the strategy has where nobody says anything."""
    key = f"case.options.{name}"  # a case's options win over its strategy's
    if choices is None and isinstance(default, bool):
        choices = [False, True]
    if choices is not None:
        values = _hashable(choices)
        return None if values is None else Candidate(Parameter(key, given, default, values), _asks(key), usual)
    if _is_number(default) and given > 0 and default > 0:
        values = tuple(sorted({default, *_powers(given, max(given, default)), given * 10, given * MAX_OPTION}))
        return Candidate(Parameter(key, given, default, values, ordered=True), _asks(key), usual)
    return None


def _hashable(values: Sequence[Value]) -> tuple[Value, ...] | None:
    plain = all(value is None or isinstance(value, (str, int, float)) for value in values)
    return tuple(values) if plain and len(set(values)) == len(values) else None


# -- the model

LAYERS, HEADS, KV = "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
# With the least value (rotary embeddings turn pairs), in the order in which they are made smaller.
WIDTHS = {"intermediate_size": 1, "hidden_size": 2, "vocab_size": 1}
SIZES = (LAYERS, HEADS, KV, *WIDTHS)


def _sizes(given: Settings, usual: Settings, published: Settings) -> list[Candidate]:
    """Layers one by one; the rest in powers of two, for each value costs an attempt."""
    found = []
    layers, heads = given.get(LAYERS), given.get(HEADS)
    if _is_number(layers):  # first: it costs the most
        whole = max(layers, published.get(LAYERS, layers))
        found.append(_number(f"model.config.{LAYERS}", layers, 1, usual[LAYERS], (whole,)))
    if _is_number(heads) and heads > 1:  # before the width, which they divide
        values = tuple(value for value in range(1, heads + 1) if heads % value == 0)
        parameter = Parameter(f"model.config.{HEADS}", heads, 1, values, ordered=True)
        found.append(Candidate(parameter, _heads(heads, given.get(KV)), usual[HEADS]))
    for key, least in WIDTHS.items():
        if _is_number(given.get(key)) and given[key] > least:
            values = tuple(value for value in _powers(given[key], given[key]) if value >= least)
            parameter = Parameter(f"model.config.{key}", given[key], values[0], values, ordered=True)
            found.append(Candidate(parameter, _asks(parameter.name), usual[key]))
    return found


def _heads(given: int, kv: Any) -> Callable[[Value], dict[str, Any]]:
    """Key-value heads stay the same part of all heads, one at the least."""

    def asks(value: Value) -> dict[str, Any]:
        told = {f"model.config.{HEADS}": value}
        if _is_number(kv) and _is_number(value):
            told[f"model.config.{KV}"] = max(1, kv * value // given)
        return told

    return asks


def wrong_shape(config: Settings) -> str | None:
    """Why a model of such sizes does not exist, or None."""
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
    """An option with what follows it, or a word by itself. ``there``: whether it is given at all. ``number``: its
    value, where that is a whole number; it says nothing while the option is left out."""

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
    """``--lr 1e-4 --layers=24 --bf16 train``: options take the words up to the next option along."""
    groups: list[list[str]] = []
    for word in words:
        if _is_option(word) or not groups or not _is_option(groups[-1][0]) or "=" in groups[-1][0]:
            groups.append([word])
        else:
            groups[-1].append(word)
    seen: dict[str, int] = {}
    return tuple(_argument(group, seen) for group in groups)


def _is_option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def _argument(group: Sequence[str], seen: dict[str, int]) -> Argument:
    name = group[0].partition("=")[0]
    seen[name] = seen.get(name, 0) + 1
    key = name if seen[name] == 1 else f"{name} ({seen[name]})"
    there = Parameter(key, " ".join(group), OUT, (OUT, " ".join(group)))
    found = re.fullmatch(r"(?:--?[A-Za-z][\w.-]*=)?(\d{1,9})", group[-1])
    if not found or len(group) > 2 or not _is_option(group[0]) or int(found[1]) < 2 or found[1].startswith("0"):
        return Argument(tuple(group), there)
    given = int(found[1])
    values = tuple(sorted({given, *(1 << power for power in range(given.bit_length()) if 1 << power < given)}))
    return Argument(tuple(group), there, Parameter(f"value of {key}", given, 1, values, ordered=True))
