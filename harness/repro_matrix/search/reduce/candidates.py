"""What varies in a case: its flags, its strategy's options, the model's size, ranks, steps and variables. Pure.

Each value goes by the key that an override has (``flags.mixed``), so that what is found is a command to paste.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Case, Flag
from repro_matrix.planning.cells import Cell
from repro_matrix.runner.request import Request
from repro_matrix.search.reduce.cli_args import OUT
from repro_matrix.search.reduce.parameters import Config, Knob, Value

Settings = Mapping[str, Any]

MOST_RANKS = 2  # times the ranks that are given: the largest number of them that is asked
MOST_OPTION = 1000  # times a number among the options


@dataclass(frozen=True)
class Varied:
    """A knob, what is asked for with each of its values (by key), and the value where nothing is asked for."""

    knob: Knob
    asks: Callable[[Value], dict[str, Any]]
    usual: Value


def values_of(varied: Sequence[Varied], config: Config) -> dict[str, Any]:
    """By key, what a configuration asks for."""
    found = (each.asks(value) for each, value in zip(varied, config) if value != each.usual)
    return {key: value for asked in found for key, value in asked.items()}


def base(case: Case, arm: str, given: Request, cell: Cell) -> Request:
    """What stays: what was given less what varies, and the axes that the arm changes."""
    spec = case.arms[arm]
    axes: dict[str, Any] = {"model": spec.model or cell.model, "strategy": spec.strategy or cell.strategy}
    if spec.tp_size:
        axes["tp_size"] = spec.tp_size
    if case.launch.env:
        axes["case.launch.env"] = {}  # each is a variable of its own
    return given.less(_varies).having(axes)


def _varies(name: str) -> bool:
    if name.startswith("model.config."):
        return name.rpartition(".")[2] in SIZES
    return name in ("model", "strategy", "arms", "repeat", "ranks", "steps") or name.startswith(
        ("flags.", "case.options.", "strategy.options.", "env.")
    )


def vary(
    catalogue: Catalogue, case: Case, arm: str, given: Settings, usual: Settings, env: Mapping[str, str]
) -> tuple[Varied, ...]:
    """``given``: the arm's settings as it is to be shrunk (repro_kit/settings.py). ``usual``: those of the broken arm
    with nothing but ``base`` written. What an arm sets is a setting like any other here."""
    found = [_flag(name, flag, given["flags"][name], usual["flags"][name]) for name, flag in case.flags.items()]
    strategy = catalogue.strategies[given["strategy"]["slug"]]
    for name, default in strategy.options.items():
        options = given["strategy"]["options"][name], usual["strategy"]["options"][name]
        found.append(_option(name, default, strategy.choices.get(name), *options))
    published = catalogue.raw["model"][given["model"]["slug"]]["config"]
    found += _sizes(given["model"]["config"], usual["model"]["config"], published)
    if case.scales:
        ranks = given["world_size"]
        least = min(case.min_ranks, ranks)
        found.append(_number("ranks", ranks, least, usual["world_size"], (ranks * MOST_RANKS,)))
    found.append(_number("steps", given["steps"], 1, usual["steps"]))
    for name, value in {**case.launch.env, **env, **case.arms[arm].env}.items():
        found.append(Varied(Knob(f"env.{name}", value, OUT, (OUT, value)), _asks(f"env.{name}"), OUT))
    return tuple(each for each in found if each is not None and len(each.knob.values) > 1)


def _asks(name: str) -> Callable[[Value], dict[str, Any]]:
    return lambda value: {name: value}


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, given: int, least: int, usual: int, beyond: tuple[int, ...] = ()) -> Varied:
    values = tuple(sorted({*range(least, given + 1), *beyond}))
    return Varied(Knob(name, given, least, values, ordered=True), _asks(name), usual)


def _powers(given: int, most: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to ``most``, and the value that is given."""
    return tuple(sorted({given, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)}))


def _flag(name: str, flag: Flag, given: Value, usual: Value) -> Varied | None:
    """Simplest: what leaves the thing to others (null), or is off (false); else none is simpler than another."""
    key = f"flags.{name}"
    if flag.choices is not None:
        values = _hashable(flag.choices)
        simplest = next((plain for plain in (None, False) if any(each is plain for each in flag.choices)), given)
        return None if values is None else Varied(Knob(key, given, simplest, values), _asks(key), usual)
    if _is_number(given) and given > 1:
        return _number(key, given, 1, usual)
    if given is not None and flag.default is None and isinstance(given, (str, int, float)):
        return Varied(Knob(key, given, None, (None, given)), _asks(key), usual)
    return None


def _option(name: str, default: Value, choices: list[Value] | None, given: Value, usual: Value) -> Varied | None:
    """Simplest: what the strategy has where nobody says anything."""
    key = f"case.options.{name}"  # a case's options win over its strategy's
    if choices is None and isinstance(default, bool):
        choices = [False, True]
    if choices is not None:
        values = _hashable(choices)
        return None if values is None else Varied(Knob(key, given, default, values), _asks(key), usual)
    if _is_number(default) and given > 0 and default > 0:
        values = tuple(sorted({default, *_powers(given, max(given, default)), given * 10, given * MOST_OPTION}))
        return Varied(Knob(key, given, default, values, ordered=True), _asks(key), usual)
    return None


def _hashable(values: Sequence[Value]) -> tuple[Value, ...] | None:
    plain = all(value is None or isinstance(value, (str, int, float)) for value in values)
    return tuple(values) if plain and len(set(values)) == len(values) else None


# -- the model

LAYERS, HEADS, KV = "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
# With the least value (rotary embeddings turn pairs), in the order in which they are made smaller.
WIDTHS = {"intermediate_size": 1, "hidden_size": 2, "vocab_size": 1}
SIZES = (LAYERS, HEADS, KV, *WIDTHS)


def _sizes(given: Settings, usual: Settings, published: Settings) -> list[Varied]:
    """Layers one by one; the rest in powers of two, for each value costs an attempt."""
    found = []
    layers, heads = given.get(LAYERS), given.get(HEADS)
    if _is_number(layers):  # first: it costs the most
        whole = max(layers, published.get(LAYERS, layers))
        found.append(_number(f"model.config.{LAYERS}", layers, 1, usual[LAYERS], (whole,)))
    if _is_number(heads) and heads > 1:  # before the width, which they divide
        values = tuple(value for value in range(1, heads + 1) if heads % value == 0)
        knob = Knob(f"model.config.{HEADS}", heads, 1, values, ordered=True)
        found.append(Varied(knob, _heads(heads, given.get(KV)), usual[HEADS]))
    for key, least in WIDTHS.items():
        if _is_number(given.get(key)) and given[key] > least:
            values = tuple(value for value in _powers(given[key], given[key]) if value >= least)
            knob = Knob(f"model.config.{key}", given[key], values[0], values, ordered=True)
            found.append(Varied(knob, _asks(knob.name), usual[key]))
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
