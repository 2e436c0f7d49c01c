"""What was asked for: a command line's overrides, read once. Catalogue, settings, and the cells they select."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from repro_matrix.config import catalog as catalogues
from repro_matrix.config import project
from repro_matrix.config import selection as overrides
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.selection import Selection
from repro_matrix.config.settings import RunSettings, compose_run
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError, nearest, unknown
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.cells import Cell

_SETTINGS = tuple(each.name for each in fields(RunSettings))


@dataclass(frozen=True)
class Request:
    """``selections``: one of the command line, or one for each block of a named matrix."""

    texts: Sequence[str]
    catalogue: Catalogue
    settings: RunSettings
    selections: Sequence[Selection]

    @property
    def hardware(self) -> list[str]:
        """The profiles that are asked for. Raises ConfigError where blocks are for different ones."""
        asked = {tuple(each.hardware): each for each in self.selections}
        if len(asked) > 1:
            told = ", ".join(f"{each.source}: {','.join(names)}" for names, each in asked.items())
            raise ConfigError(f"the blocks are for different hardware ({told}): name one on the line, hardware=...")
        return list(next(iter(asked)))

    def but(self, stack: str, variants: Sequence[str], repeat: int) -> Request:
        """The same of one stack (by its name) and of these variants: what a search asks for, probe after probe."""
        return replace(
            self,
            settings=replace(self.settings, variants=list(variants), repeat=repeat),
            selections=[replace(each, stack=[stack], given=each.given | {"stack"}) for each in self.selections],
        )

    def having(self, values: Mapping[str, Any]) -> Request:
        """The same with these values, each by the key that an override has: ``model``, ``ranks``, ``flags.<name>``,
        ``case.options.<name>``, ``env.<NAME>``, ``steps``. Raises ConfigError: a file of conf/ does not take one."""
        selections = list(self.selections)
        settings = {}
        env = dict(self.settings.env)
        for key, value in values.items():
            selections = [each.having(key, value) for each in selections]
            if key.startswith("env."):
                env[key.removeprefix("env.")] = value
            elif key in _SETTINGS:
                settings[key] = value
        return self._of(selections, replace(self.settings, **{"env": env, **settings}))

    def less(self, dropped: Callable[[str], bool]) -> Request:
        """The same without what the overrides of these keys say."""
        usual = RunSettings()
        settings = {name: getattr(usual, name) for name in _SETTINGS if dropped(name)}
        env = {name: value for name, value in self.settings.env.items() if not dropped(f"env.{name}")}
        return self._of(
            [each.less(dropped) for each in self.selections], replace(self.settings, **{"env": env, **settings})
        )

    def _of(self, selections: Sequence[Selection], settings: RunSettings) -> Request:
        names = [name for each in selections for name in each.case]
        catalogue = catalogues.load(patches=selections[0].patches, cases=names)
        return replace(self, catalogue=catalogue, settings=settings, selections=selections)

    def said(self, without: Collection[str]) -> list[str]:
        """The overrides as they were written, to be pasted, but for these keys."""
        return [text for key, text in self.selections[0].words if key not in without]

    def check(self) -> None:
        """Raises ConfigError (StackError): there is no such stack, profile or shard (for who prepares nothing)."""
        for name in dict.fromkeys(
            name for each in self.selections for name in each.stack if name != matrix.REPRODUCING
        ):
            stacks.check(name)
        for name in self.hardware:
            if name not in self.catalogue.hardware:
                raise unknown("hardware", name, self.catalogue.hardware, "hardware")
        if self.settings.shard:
            from repro_matrix.runner import shards  # what lists cells needs nothing else of a run

            shards.of(self.settings.shard)  # raises where it is none
            raise ConfigError(
                "shard=: this is the whole selection; `repro matrix --dry-run shard=...` shows a part's cells"
            )

    @property
    def left_out(self) -> list[str]:
        """What is wrong with the files that are left out of what was asked for."""
        found: dict[str, None] = {}
        for each in self.selections:
            for options, asked in (
                (self.catalogue.cases, each.case),
                (self.catalogue.models, each.model or ["*"]),
                (self.catalogue.strategies, each.strategy or ["*"]),
            ):
                wrong = catalogues.left_out(options)
                found |= {str(wrong[name]): None for name in wrong if any(fnmatchcase(name, one) for one in asked)}
        return list(found)

    @cached_property
    def cells(self) -> list[Cell]:
        """Every cell, in the catalogue's order; where each is measured ``placing`` says."""
        changes = matrix.overrides_of(self.settings, self.selections[0].patches)
        wanted = [each for each in self.selections if matrix.REPRODUCING in each.stack]
        names = {name for each in wanted for name in overrides.expand("case", each.case, self.catalogue.cases)}
        return matrix.enumerate_all(self.catalogue, self.selections, changes, reproduces_on(self.catalogue, names))


def ask(texts: Sequence[str]) -> Request:
    """Raises ConfigError that names what cannot be understood."""
    line = overrides.parse(texts)
    catalogue = catalogues.load(patches=line.patches, cases=line.case)
    if "model" in line.patches:
        _check_models(line.patches["model"], set(line.added), catalogues.load())
    settings = compose_run(line.run) if line.run else RunSettings()
    return Request(list(texts), catalogue, settings, overrides.blocks(settings.matrix, line))


def _check_models(changes: Sequence[tuple[list[str], Any]], added: set[str], catalogue: Catalogue) -> None:
    """Raises ConfigError: a configuration key that no model has, or a value of another type than theirs. A key that
    transformers knows and no model here sets is written +model.config.NAME=VALUE."""
    for keys, value in changes:
        if keys[0] != "config" or len(keys) != 2 or f"model.{'.'.join(keys)}" in added:
            continue
        have = {key: type(v) for model in catalogue.models.values() for key, v in model.config.items()}
        where = f"override model.config.{keys[1]}"
        if keys[1] not in have:
            hint = nearest(keys[1], have)
            raise ConfigError(
                f"{where}: no model has that key{hint}; one that transformers knows: +model.config.{keys[1]}="
            )
        kinds = {type(m.config[keys[1]]) for m in catalogue.models.values() if keys[1] in m.config} - {type(None)}
        fits = value is None or type(value) in kinds or (type(value) is int and float in kinds)
        if kinds and not fits:
            told = " or ".join(sorted(kind.__name__ for kind in kinds))
            raise ConfigError(f"{where}: {value!r} is not of type {told}")


def reproduces_on(catalogue: Catalogue, names: set[str]) -> dict[str, list[str]]:
    """Case -> the stacks on which its published measurement reproduces: those that have a name and stay as they are,
    else the replaced packages of a version map. A case that reproduced nowhere: the stack that its file names."""
    from repro_matrix.results.store import Store  # what lists cells reads no document, but for stack=reproducing

    found: dict[str, set[str]] = {name: set() for name in names}
    stored = (document for folder in project.published() for document in Store(folder).documents(cases=names))
    for document in stored if names else ():
        first = next(iter(document["variants"].values()))
        if any(attempt["outcome"]["outcome"] == "reproduced" for attempt in first["attempts"]):
            found[document["case"]].add(document["stack"]["name"])
    lasting = {name for name, stack in catalogue.stacks.items() if not stack.floating}
    return {
        name: sorted(stacks & lasting or stacks) or [catalogue.cases[name].requires.stack or "current"]
        for name, stacks in found.items()
    }


def print_composed(texts: Sequence[str]) -> int:
    """``--cfg``: the composed configuration."""
    asked = ask(texts)
    print(overrides.composed(asked.settings, asked.selections))
    return 0
