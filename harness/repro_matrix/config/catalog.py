"""conf/ -> the catalogue: every case, model, strategy, stack and hardware, validated. Reads files, runs nothing."""

from __future__ import annotations

import fnmatch
import functools
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from repro_matrix.config import expectations as expected
from repro_matrix.config import project
from repro_matrix.config.axes import Hardware, Model, Stack, Strategy
from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case, Variant
from repro_matrix.errors import ConfigError, Options, describe_validation, unknown
from repro_matrix.paths import CONF, REPROS, file_state

T = TypeVar("T", bound=BaseModel)
Raw = dict[str, Any]

GROUPS: dict[str, type[BaseModel]] = {
    "case": Case, "model": Model, "strategy": Strategy, "stack": Stack, "hardware": Hardware,
}  # fmt: skip


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML that refuses a key given twice (plain YAML silently keeps the last)."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            text = key_node.tag == "tag:yaml.org,2002:str"  # nearly all are, and constructing them takes a while
            key = key_node.value if text else self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int, float, bool)):
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key!r} given twice", key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)


def parsed(text: str) -> Any:
    """What YAML says. Raises yaml.YAMLError, also for a key that is given twice."""
    return yaml.load(text, Loader=_Loader)


@dataclass(frozen=True)
class Catalogue:
    """All options by slug. ``raw`` keeps each file's plain mapping: that is what crosses to the ranks."""

    cases: dict[str, Case]
    models: dict[str, Model]
    strategies: dict[str, Strategy]
    stacks: dict[str, Stack]
    hardware: dict[str, Hardware]
    raw: dict[str, dict[str, Raw]] = field(repr=False)
    repros: Path = REPROS
    own: dict[str, dict[str, Path]] = field(default_factory=dict, repr=False)  # files that are not shipped (project.py)

    @property
    def left_out(self) -> list[str]:
        """What is wrong with each file that is left out: path, line or key, and the nearest choice."""
        groups = (self.cases, self.models, self.strategies, self.stacks, self.hardware)
        return [str(error) for options in groups for error in left_out(options).values()]

    def script(self, case: Case) -> Path:
        file = self.own.get("case", {}).get(case.slug)
        return project.current().script(case.script_name, file.parent) if file else self.repros / case.script_name

    def files(self, settings: Mapping[str, Any]) -> dict[str, Path]:
        """Group -> the file of a variant's case, model and strategy, for those that are not shipped."""
        names = {"case": settings["case"], **{group: settings[group].get("slug") for group in ("model", "strategy")}}
        return {group: self.own[group][name] for group, name in names.items() if name in self.own.get(group, {})}


def left_out(options: Mapping[str, Any]) -> dict[str, ConfigError]:
    """Of a group's options: those whose file is wrong, with what is wrong."""
    return options.left_out if isinstance(options, Options) else {}


def read_yaml(path: Path) -> Raw:
    """A file's mapping, the caller's own; raises ConfigError that names the file and the line."""
    data: Raw = pickle.loads(_read_yaml(path, file_state(path)))
    return data


@functools.lru_cache(maxsize=1024)
def _read_yaml(path: Path, state: tuple[int, ...]) -> bytes:
    """Pickled. A search prepares a run for each of its probes, and reading YAML was most of what that took."""
    try:
        data = parsed(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping of keys, not {type(data).__name__}")
    return pickle.dumps(data)


def parse(model: type[T], raw: Raw, path: Path | str) -> T:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise describe_validation(error, model, path) from None


def load(
    conf: Path = CONF,
    repros: Path = REPROS,
    patches: dict[str, list[tuple[list[str], Any]]] | None = None,
    strict: bool = False,
    cases: Iterable[str] = ("*",),
) -> Catalogue:
    """Reads and validates every group, and what is expected of its cases (results/expected beside conf/).

    A file that is wrong disables itself only, and the cases that cannot do without it: it is left out, with the reason
    (``Catalogue.left_out``), and whoever asks for it by name gets that reason. ``strict``: it is raised instead.
    ``patches``: group -> [(key path, value)], laid over each option of the group that has the key (the overrides
    ``model.config.num_hidden_layers=4``), those of a case over ``cases`` alone, the names or globs that are selected;
    what these break is raised. Raises ConfigError."""
    selected = list(cases)
    own: dict[str, dict[str, Path]] = {}
    raws: dict[str, dict[str, Raw]] = {}
    parsed: dict[str, Options[Any]] = {}
    for group, model in GROUPS.items():
        raws[group], parsed[group] = {}, Options()
        files = project.files(group, conf)
        if not files:
            raise ConfigError(f"{conf / group}: no *.yaml file here; is {conf} the project's conf/ folder?")
        for path in project.misnamed(group, conf):
            wrong_ending = ConfigError(f"{path}: is not read: its ending must be .yaml")
            if strict:
                raise wrong_ending
            parsed[group].left_out[path.name if path.stem in files else path.stem] = wrong_ending
        own[group] = {name: path for name, path in files.items() if path.parent.parent != conf}
        for path in files.values():
            try:
                raw, option = read_yaml(path), _kept(group, path, file_state(path))
            except ConfigError as error:
                if strict:
                    raise
                parsed[group].left_out[path.stem] = error
                continue
            given = (patches or {}).get(group, [])
            if group == "case" and not any(fnmatch.fnmatchcase(path.stem, each) for each in selected):
                given = []
            laid = [_patch(raw, *change) for change in given if _meant(group, raw, change[0])]
            raws[group][path.stem] = raw
            parsed[group][path.stem] = _option(model, raw, path, group) if laid else option
    known, wrong = _expected(conf, parsed["case"])
    for slug, entries in known.items():
        parsed["case"][slug] = parsed["case"][slug].model_copy(update={"expect": entries})
    for slug, why in wrong.items():
        if strict:
            raise why
        parsed["case"].pop(slug, None)
        parsed["case"].left_out[slug] = why
    catalogue = Catalogue(
        parsed["case"], parsed["model"], parsed["strategy"], parsed["stack"], parsed["hardware"], raws, repros, own
    )
    for keys, _ in (patches or {}).get("strategy", []):
        options = {option for strategy in catalogue.strategies.values() for option in strategy.options}
        if keys[0] == "options" and keys[-1] not in options:
            raise unknown("strategy option", keys[-1], options, f"override strategy.{'.'.join(keys)}")
    wrong = {}
    for slug in parsed["case"]:
        parsed["case"][slug] = _without(parsed["case"][slug], catalogue)
        try:
            _check_references(
                parsed["case"][slug],
                catalogue,
                _short(own["case"].get(slug, conf / "case" / f"{slug}.yaml")),
                bool(patches),
            )
        except ConfigError as error:
            if strict or (patches and slug in load(conf, repros).cases):
                raise
            wrong[slug] = error
    for slug, why in wrong.items():
        del parsed["case"][slug]
        parsed["case"].left_out[slug] = why
    return catalogue


@functools.lru_cache(maxsize=1024)
def _kept(group: str, path: Path, state: tuple[int, ...]) -> BaseModel:
    """An option as its file says. It is frozen, and shared: a search loads the catalogue for each of its probes, and
    validating was half of what that took."""
    return _option(GROUPS[group], read_yaml(path), path, group)


def _option(model: type[BaseModel], raw: Raw, path: Path, group: str) -> BaseModel:
    if group == "case" and "expect" in raw:
        kept = f"results/expected/{path.stem}.yaml, which `repro accept` writes"
        raise ConfigError(f"{_short(path)}: expect: expectations are kept in {kept}")
    option = parse(model, raw, _short(path))
    if option.slug != path.stem:  # type: ignore[attr-defined]
        raise ConfigError(f"{_short(path)}: slug must be the file's name, {path.stem!r}")
    return option


def _meant(group: str, raw: Raw, keys: list[str]) -> bool:
    return group != "strategy" or keys[0] != "options" or keys[-1] in (raw.get("options") or {})


def _without(case: Case, catalogue: Catalogue) -> Case:
    """The case without the models and strategies whose files are left out, while others remain."""
    axes = {}
    for axis, options in (("model", catalogue.models), ("strategy", catalogue.strategies)):
        listed = getattr(case.axes, axis)
        axes[axis] = [name for name in listed if name not in left_out(options)] or listed
    changed = axes != {"model": case.axes.model, "strategy": case.axes.strategy}
    return case.model_copy(update={"axes": case.axes.model_copy(update=axes)}) if changed else case


def _expected(conf: Path, cases: Mapping[str, Case]) -> tuple[dict[str, list[Expectation]], dict[str, ConfigError]]:
    """Case -> its expectations, shipped (results/expected beside conf/) or the user's own; and the files that are
    wrong."""
    shipped = conf.parent / "results" / "expected"
    found, wrong = expected.read(shipped, cases, read_yaml)
    folder = project.current().expected
    if conf == CONF and folder != shipped:
        own, more = expected.read(folder, cases, read_yaml)
        for slug in own.keys() & found.keys():
            told = f"{folder / slug}.yaml: what is expected of {slug} is also in {shipped / slug}.yaml"
            more[slug] = ConfigError(told)
        found |= own
        wrong |= more
    return {slug: entries for slug, entries in found.items() if slug not in wrong}, wrong


def _short(path: Path) -> str:
    return str(Path(*path.parts[-3:]))


def _patch(raw: Raw, keys: list[str], value: Any) -> bool:
    top = raw
    for key in keys[:-1]:
        raw = raw.setdefault(key, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"override {'.'.join(keys)}: {key} is not a mapping")
    raw[keys[-1]] = value
    if len(keys) == 2 and keys[0] == "config":  # what is asked for is no tiny model's to take back
        (top.get("tiny") or {}).pop(keys[1], None)
    return True


def _check_references(case: Case, catalogue: Catalogue, path: str, patched: bool) -> None:
    """Names in a case's file must exist: a typo would otherwise be a cell that never runs."""
    script = catalogue.script(case)
    if not script.is_file():
        have = [p.name for p in script.parent.glob("*.py")]
        raise unknown("script", case.script_name, have, f"{path}: script (in {script.parent})")
    for model in case.axes.model:
        if model not in catalogue.models:
            raise unknown("model", model, catalogue.models, f"{path}: axes.model")
    for strategy in case.axes.strategy:
        if strategy not in catalogue.strategies:
            raise unknown("strategy", strategy, catalogue.strategies, f"{path}: axes.strategy")
    for name in {*case.axes.model, *(variant.model for variant in case.variants.values() if variant.model)} & set(
        catalogue.models
    ):
        for key in case.preserve_config:
            if key not in catalogue.models[name].config:
                raise unknown(
                    f"configuration key of {name}", key, catalogue.models[name].config, f"{path}: preserve_config"
                )
    for name, variant in case.variants.items():
        where = f"{path}: variants.{name}"
        if variant.model and variant.model not in catalogue.models:
            raise unknown("model", variant.model, catalogue.models, where)
        if variant.strategy and variant.strategy not in catalogue.strategies:
            raise unknown("strategy", variant.strategy, catalogue.strategies, where)
        if variant.stack and variant.stack not in catalogue.stacks:
            raise unknown("stack", variant.stack, catalogue.stacks, where)
    check_variants(case, catalogue.strategies, path, patched)
    for other in case.also_matches:
        if other not in catalogue.cases and other not in left_out(catalogue.cases):
            raise unknown("case", other, catalogue.cases, f"{path}: also_matches")
    for claim in case.claims:
        for prediction in claim.predictions:
            target = catalogue.cases.get(prediction.case or case.slug)
            where = f"{path}: claims.{claim.id}"
            if prediction.case in left_out(catalogue.cases):
                continue  # another case's mistake
            if target is None:
                raise unknown("case", str(prediction.case), catalogue.cases, where)
            names = [prediction.variant, *([prediction.relative_to] if prediction.relative_to else [])]
            if prediction.metric:
                names.append(prediction.metric.below or prediction.metric.above or "")
            for name in names:
                if name not in target.variants:
                    raise unknown("variant", name, target.variants, where)
    for claim_id in {c.id for c in case.claims if [o.id for o in case.claims].count(c.id) > 1}:
        raise ConfigError(f"{path}: claims: id {claim_id!r} given twice")


# What a variant says about itself without changing how it runs.
WORDS = {"help", "requires", "invariants"}


def check_variants(case: Case, strategies: Mapping[str, Strategy], path: str, patched: bool = False) -> None:
    """Raises ConfigError: an option that no strategy of the case has, a value it does not take, or two equal variants.

    ``patched``: by the command line, which may well make the unfixed variant what a variant makes of it (the plan says
    so)."""
    _check_options(case.options, case.axes.strategy, strategies, f"{path}: options")
    for name, variant in case.variants.items():
        own = [variant.strategy] if variant.strategy else case.axes.strategy
        _check_options(variant.options, own, strategies, f"{path}: variants.{name}.options")
        inherited = {option: value for option, value in case.options.items() if option not in variant.options}
        if variant.strategy:  # what the case says for its own strategies may mean nothing to another
            taken = {
                option: value for option, value in inherited.items() if option in strategies[variant.strategy].options
            }
            _check_options(taken, own, strategies, f"{path}: variants.{name} inherits options")
    if patched:
        return
    seen: dict[str, str] = {}
    for name, variant in case.variants.items():
        key = json.dumps(changes(case, variant), sort_keys=True, default=str)
        if key in seen:
            raise ConfigError(f"{path}: variants.{name}: its settings are those of {seen[key]!r}: it changes nothing")
        seen[key] = name


def changes(case: Case, variant: Variant) -> dict[str, Any]:
    """What a variant sets that is not as the case has it anyway."""
    found = variant.model_dump(exclude=WORDS, exclude_defaults=True)
    flags = {name: value for name, value in variant.flags.items() if not _same(value, case.flags[name].default)}
    options = {name: value for name, value in variant.options.items() if not _same(value, case.options.get(name))}
    usual: dict[str, Any] = {"tp_size": case.launch.tp_size}  # a number of ranks is a change where the cell has others
    for axis in ("model", "strategy"):
        listed = getattr(case.axes, axis)
        usual[axis] = listed[0] if len(listed) == 1 else None
    usual["env"] = {name: value for name, value in variant.env.items() if case.launch.env.get(name) == value}
    rest = {key: value for key, value in found.items() if key not in ("flags", "options") and value != usual.get(key)}
    return {**rest, **({"flags": flags} if flags else {}), **({"options": options} if options else {})}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _check_options(options: Mapping[str, Any], names: list[str], strategies: Mapping[str, Strategy], path: str) -> None:
    for option, value in options.items():
        having = [strategies[name] for name in names if option in strategies[name].options]
        if not having:
            known = {known for name in names for known in strategies[name].options}
            raise unknown(f"option of {', '.join(dict.fromkeys(names))}", option, known, path)
        problems = [strategy.refuses(option, value) for strategy in having]
        if all(problems):
            raise ConfigError(f"{path}.{option}: {problems[0]}")
