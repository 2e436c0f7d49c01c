"""What a search found, as JSON and as lines to read. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from repro_matrix.search.reduce.cli_args import OUT
from repro_matrix.search.reduce.parameters import Config, Range, Shrunk, Value
from repro_matrix.search.reduce.probe import Asked
from repro_matrix.search.reduce.settings import Search
from repro_matrix.text import counted

Json = dict[str, Any]


def settings(search: Search, shrunk: Shrunk) -> Json:
    """The settings that were varied, what each may be, and every question with its evidence."""
    varied = [_varied(search, shrunk, index) for index in range(len(search.knobs)) if not _void(search, shrunk, index)]
    return {
        "needs": [each["name"] for each in varied if each["needed"]],
        "varied": varied,
        "questions": [
            {
                "changed": {k.name: value for k, value in zip(search.knobs, config) if value != k.given},
                "answer": found.words, "error_at": found.said.error_at, "document": found.document,
                "attempts": found.attempts,
            }
            for config, found in search.asked.items()
        ],
        "repeat": search.repeat,
    }  # fmt: skip


def _void(search: Search, shrunk: Shrunk, index: int) -> bool:
    """The value of an option that is left out says nothing."""
    name = search.knobs[index].name
    there = [i for i, knob in enumerate(search.knobs) if name == f"value of {knob.name}"]
    return bool(there) and shrunk.config[there[0]] == OUT


def _varied(search: Search, shrunk: Shrunk, index: int) -> Json:
    knob, value = search.knobs[index], shrunk.config[index]
    found = shrunk.ranges[index] if index < len(shrunk.ranges) else Range(knob, value, {value: True})
    back = _back(search, shrunk, index)

    def said(other: Value) -> Value:
        return back if back and other != OUT else other

    asked = {}
    for other in knob.values:
        if other in found.asked:
            evidence = search.asked.get((*shrunk.config[:index], other, *shrunk.config[index + 1 :]))
            asked[_name(said(other))] = _evidence(evidence)
    needed = False if back else found.needed  # it is left out, and was asked for again with another value only
    return {
        "name": knob.name, "given": knob.given, "value": value, "simplest": knob.simplest, "number": knob.ordered,
        "needed": needed if found.whole else None, "fires_at": [said(other) for other in found.firing],
        "gone_at": [said(other) for other in found.gone], "asked": asked,
    }  # fmt: skip


def _back(search: Search, shrunk: Shrunk, index: int) -> str:
    """What an option that is left out was asked for with, where that is not the value that was given."""
    name = f"value of {search.knobs[index].name}"
    values = [i for i, knob in enumerate(search.knobs) if knob.name == name]
    if not values or shrunk.config[index] != OUT or shrunk.config[values[0]] == search.knobs[values[0]].given:
        return ""
    return f"{search.knobs[index].name} {_name(shrunk.config[values[0]])}"


def _evidence(found: Asked | None) -> Json:
    if found is None:
        return {"answer": "not asked", "brief": "not asked", "known": None, "error_at": None, "document": None}
    return {
        "answer": found.words, "brief": found.brief, "known": found.answer is not None,
        "error_at": found.said.error_at, "document": found.document,
    }  # fmt: skip


def _name(value: Value) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# -- lines


def lines(data: Mapping[str, Any]) -> Iterator[str]:
    yield f"{data['what']}: {data['failure']}"
    varied: Sequence[Json] = data["varied"]
    needed = [each for each in varied if each["needed"]]
    free = [each for each in varied if each["needed"] is False]
    if needed:
        yield ""
        yield "it needs (anything else than this makes it go):"
        yield from _table(_needed(each) for each in needed)
    elif data["done"] and varied:
        yield ""
        yield "it needs none of the settings that were varied: it fires with all of them left out"
    for told, some in (("it bears only some values of these:", True), ("these do not matter:", False)):
        chosen = [each for each in free if bool(each["gone_at"]) == some]
        if chosen:
            yield ""
            yield told
            yield from _table(_free(each) for each in chosen)
    unknown = [each for each in varied if each["needed"] is None and _unanswered(each)]
    if unknown:
        yield ""
        yield "whether these can be left out is not known:"
        yield from _table((_set(each["name"], each["value"]), _answer(each, each["simplest"])) for each in unknown)
    unsaid = [each["name"] for each in varied if each["needed"] is None and each not in unknown]
    if unsaid:
        yield ""
        yield f"not known, since the search ended before: {', '.join(unsaid)}"
    yield from _script(data.get("lines"))
    yield ""
    yield f"smallest that fires ({data['confirmed']}):" if data["done"] else "smallest so far that fires:"
    yield f"    {shlex.join(data['command'])}"
    yield from data["notes"]
    yield (
        f"{len(data['questions']) + len((data.get('lines') or {}).get('questions', []))} questions, "
        f"{counted(data['attempts'], 'attempt')} launched, {data['wall_s']:.0f} s"
    )


def _unanswered(each: Json) -> bool:
    """It was asked for without it, and that had no answer."""
    return each["value"] != each["simplest"] and _name(each["simplest"]) in each["asked"]


def _table(rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    found = list(rows)
    width = max(len(left) for left, _ in found)
    yield from (f"  {left:<{width}}  {right}" for left, right in found)


def _needed(each: Json) -> tuple[str, str]:
    gone = [f"{_name(value)}: {_answer(each, value)}" for value in each["gone_at"]]
    unknown = [name for name, said in each["asked"].items() if said["known"] is False]
    if each["number"]:
        top = each["fires_at"][-1]
        told = [f"fires up to {top}"] if top != each["value"] else []
        return f"{each['name']} at least {each['value']}", "; ".join([*told, *gone])
    others = [_name(value) for value in each["fires_at"] if value != each["value"]]
    told = [*([f"or {' or '.join(others)}"] if others else []), *gone]
    return _set(each["name"], each["value"]), "; ".join(told + [f"{name}: not known" for name in unknown])


def _set(name: str, value: Value) -> str:
    """An argument's value has its name in it."""
    return str(value) if str(value).startswith(name) else f"{name}={_name(value)}"


def _free(each: Json) -> tuple[str, str]:
    gone = [f"not at {_name(value)} ({_answer(each, value)})" for value in each["gone_at"]]
    if each["number"]:
        low, high = each["fires_at"][0], each["fires_at"][-1]
        told = f"fires at {low}" if low == high else f"fires at {low} to {high}"
    else:
        told = "fires at " + ", ".join(_name(value) for value in each["fires_at"])
    return each["name"], "; ".join([told, *gone])


def _answer(each: Json, value: Value) -> str:
    return str(each["asked"][_name(value)]["brief"])


def _script(found: Mapping[str, Any] | None) -> Iterator[str]:
    if not found:
        return
    yield ""
    whole = "no statement of them can be left out" if found["done"] else "the search ended before that was sure"
    where = f": {found['file']}" if found["file"] else "; no file was written"
    yield f"{found['now']} of {found['before']} lines are left ({whole}){where}"


def config_of(search: Search, config: Config) -> Json:
    return {knob.name: value for knob, value in zip(search.knobs, config)}
