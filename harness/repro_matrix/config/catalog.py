"""Load conf/ into a validated catalogue of cases, models, strategies, stacks and hardware."""

from __future__ import annotations

import ast
import copy
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from repro_matrix.config import project
from repro_matrix.config.expectations import Expectation, Table
from repro_matrix.config.schema import Case, HardwareProfile, Model, StackFile, Strategy, Variant
from repro_matrix.errors import ConfigError, Options, describe_validation, suggestion, unknown
from repro_matrix.paths import CONF, REPROS, file_state

T = TypeVar("T", bound=BaseModel)
CHECK_OF_SCRIPT = re.compile(r'\.check\(\s*"([^"]+)"')
Raw = dict[str, Any]
Patch = tuple[list[str], Any]  # the path of a key and its new value

GROUPS: dict[str, type[BaseModel]] = {
    "case": Case,
    "model": Model,
    "strategy": Strategy,
    "stack": StackFile,
    "hardware": HardwareProfile,
}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML that refuses a key given twice (plain YAML silently keeps the last)."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key.value, str)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Catalogue:
    """Hold all options by slug.

    ``raw`` keeps the plain mapping of each file, which the ranks receive.
    """

    cases: dict[str, Case]
    models: dict[str, Model]
    strategies: dict[str, Strategy]
    stacks: dict[str, StackFile]
    hardware: dict[str, HardwareProfile]
    raw: dict[str, dict[str, Raw]] = field(repr=False)
    repros: Path = REPROS
    # group -> the user's own files
    own: dict[str, dict[str, Path]] = field(default_factory=dict, repr=False)

    @property
    def groups(self) -> dict[str, Mapping[str, Any]]:
        """Return group -> its options."""
        options = (self.cases, self.models, self.strategies, self.stacks, self.hardware)
        return dict(zip(GROUPS, options))

    @property
    def left_out(self) -> list[str]:
        """Describe each file that is left out because it is invalid."""
        groups = self.groups.values()
        return [str(error) for options in groups for error in left_out(options).values()]

    def script(self, case: Case) -> Path:
        file = self.own.get("case", {}).get(case.slug)
        if file is None:
            return self.repros / case.script_name
        return project.current().script(case.script_name, file.parent)

    def files(self, settings: Mapping[str, Any]) -> dict[str, Path]:
        """Return group -> file of a variant's case, model and strategy that are the user's own."""
        names = {group: settings[group].get("slug") for group in ("model", "strategy")}
        names["case"] = settings["case"]
        return {
            group: self.own[group][name]
            for group, name in names.items()
            if name in self.own.get(group, {})
        }


def left_out(options: Mapping[str, Any]) -> dict[str, ConfigError]:
    """Return name -> error for the invalid files of a group."""
    return options.left_out if isinstance(options, Options) else {}


def read_yaml(path: Path) -> Raw:
    """Read the mapping in a file. Raise ConfigError that names the file and the line."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(
            f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if data is None:
        raise ConfigError(f"{path}: is empty")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping of keys, not {type(data).__name__}")
    return data


def check_syntax(path: Path, shown: str = "") -> None:
    """Raise ConfigError, with the line, if a file is not Python.

    ``shown``: the path as written.
    """
    name = shown or str(path)
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigError(f"{name}:{error.lineno}: {error.msg}: {line}") from None
    except ValueError as error:  # null bytes
        raise ConfigError(f"{name}: not a Python script: {error}") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None


def parse_file(model: type[T], raw: Raw, path: Path | str) -> T:
    """Validate a mapping.

    Raises ConfigError with the file, the key and the nearest valid choice.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise describe_validation(error, model, path) from None


def load(
    conf: Path = CONF,
    repros: Path = REPROS,
    patches: Mapping[str, list[Patch]] | None = None,
    cases: Iterable[str] = ("*",),
) -> Catalogue:
    """Read and validate all groups, and the cases' expectations (results/expected beside conf/).

    An invalid file is left out, together with the cases that need it; ``Catalogue.left_out`` has
    the reason. ``patches`` (group -> changes) come from overrides such as
    ``model.config.num_hidden_layers=4``; those of cases apply to ``cases``, names or globs. Raises
    ConfigError for a patch that makes a file invalid.
    """
    patches, selected = dict(patches or {}), list(cases)
    groups: dict[str, Options[Any]] = {}
    raws: dict[str, dict[str, Raw]] = {}
    own: dict[str, dict[str, Path]] = {}
    for group in GROUPS:
        files = project.group_files(group, conf)
        if not files:
            raise ConfigError(
                f"{conf / group}: no *.yaml file here; is {conf} the project's conf/ folder?"
            )
        own[group] = {name: path for name, path in files.items() if path.parent.parent != conf}
        groups[group], raws[group] = options, plain = read_group(group, conf)
        for name, raw in plain.items():
            if changes := [
                each
                for each in patches.get(group, [])
                if _applies(group, name, raw, each, selected)
            ]:
                plain[name] = copy.deepcopy(raw)
                for change in changes:
                    _patch(plain[name], *change)
                options[name] = _validate_option(group, plain[name], files[name])
    _add_expectations(conf, groups["case"])
    known, models, strategies, stacks, hardware = groups.values()
    catalogue = Catalogue(known, models, strategies, stacks, hardware, raws, repros, own)
    _check_patched_options(patches, catalogue)
    _check_cases(groups["case"], catalogue, conf, bool(patches))
    return catalogue


def read_group(group: str, conf: Path) -> tuple[Options[Any], dict[str, Raw]]:
    """Return a group's options by name, with the errors of invalid files, and their mappings."""
    options: Options[Any] = Options()
    raws: dict[str, Raw] = {}
    files = project.group_files(group, conf)
    for path in project.misnamed(group, conf):
        name = path.name if path.stem in files else path.stem
        options.left_out[name] = ConfigError(f"{path}: is not read: its ending must be .yaml")
    for name, path in files.items():
        try:
            raws[name], options[name] = _option(group, path, file_state(path))
        except ConfigError as error:
            options.left_out[name] = error
    return options, raws


@functools.lru_cache(maxsize=1024)
def _option(group: str, path: Path, state: tuple[int, ...]) -> tuple[Raw, Any]:
    """Read one file.

    A search loads the catalogue for each probe, so unchanged files are parsed once.
    """
    raw = read_yaml(path)
    option = _validate_option(group, raw, path)
    if isinstance(option, Case):
        _check_variants_differ(option, shorten(path))
    return raw, option


def _validate_option(group: str, raw: Raw, path: Path) -> Any:
    short = shorten(path)
    if group == "case" and "expect" in raw:
        where = f"results/expected/{path.stem}.yaml, which `repro accept` writes"
        raise ConfigError(f"{short}: expect: expectations are kept in {where}")
    option = parse_file(GROUPS[group], raw, short)
    if option.slug != path.stem:  # type: ignore[attr-defined]
        raise ConfigError(f"{short}: slug must be the file's name, {path.stem!r}")
    return option


def _applies(group: str, name: str, raw: Raw, change: Patch, cases: list[str]) -> bool:
    keys = change[0]
    if group == "case":
        return any(fnmatchcase(name, pattern) for pattern in cases)
    return group != "strategy" or keys[0] != "options" or keys[-1] in (raw.get("options") or {})


def _patch(raw: Raw, keys: list[str], value: Any) -> None:
    parent = raw
    for key in keys[:-1]:
        parent = parent.setdefault(key, {})
        if not isinstance(parent, dict):
            raise ConfigError(f"override {'.'.join(keys)}: {key} is not a mapping")
    parent[keys[-1]] = value
    # an override wins over the model's tiny configuration
    if len(keys) == 2 and keys[0] == "config":
        (raw.get("tiny") or {}).pop(keys[1], None)


def _check_patched_options(patches: Mapping[str, list[Patch]], catalogue: Catalogue) -> None:
    options = {option for strategy in catalogue.strategies.values() for option in strategy.options}
    for keys, _ in patches.get("strategy", []):
        if keys[0] == "options" and keys[-1] not in options:
            raise unknown(
                "strategy option", keys[-1], options, f"override strategy.{'.'.join(keys)}"
            )


def _add_expectations(conf: Path, cases: Options[Case]) -> None:
    """Give each case its expectations, shipped or the user's own.

    Cases whose file of expectations is invalid are left out.
    """
    shipped = conf.parent / "results" / "expected"
    known: dict[str, Path] = {}
    for folder in dict.fromkeys([shipped, *([project.current().expected] if conf == CONF else ())]):
        for path in sorted(folder.glob("*.yaml")):
            slug = path.stem
            if slug in cases.left_out:
                continue
            try:
                if slug not in cases:
                    raise unknown("case", slug, cases, shorten(path))
                if slug in known:
                    raise ConfigError(
                        f"{path}: the expectations of {slug} are also in {known[slug]}"
                    )
                cases[slug] = cases[slug].model_copy(
                    update={"expect": _expectations(path, file_state(path))}
                )
                known[slug] = path
            except ConfigError as error:
                _leave_out(cases, slug, error)


@functools.lru_cache(maxsize=1024)
def _expectations(path: Path, state: tuple[int, ...]) -> list[Expectation]:
    return parse_expectations(read_yaml(path), path)


def parse_expectations(raw: Raw, path: Path) -> list[Expectation]:
    """Parse a file of results/expected. Raise ConfigError."""
    table = parse_file(Table, raw, shorten(path))
    if table.case != path.stem:
        raise ConfigError(f"{shorten(path)}: case must be the file's name, {path.stem!r}")
    return table.expectations


def _leave_out(options: Options[Any], name: str, error: ConfigError) -> None:
    options.pop(name, None)
    options.left_out[name] = error


def shorten(path: Path) -> str:
    """Return conf/case/NAME.yaml for messages."""
    return str(Path(*path.parts[-3:]))


def _check_cases(cases: Options[Case], catalogue: Catalogue, conf: Path, patched: bool) -> None:
    """Leave out the cases that refer to a missing script, model or other option.

    Raises ConfigError if a patch made a case invalid.
    """
    checks = Counter(name for case in cases.values() for name in set(case.pass_criteria.checks))
    for slug, case in list(cases.items()):
        cases[slug] = case = _without_invalid(case, catalogue)
        path = shorten(catalogue.own["case"].get(slug, conf / "case" / f"{slug}.yaml"))
        try:
            _check_references(case, catalogue, path)
            _check_checks(case, catalogue, checks, path)
            _check_variants(case, catalogue.strategies, path)
        except ConfigError as error:
            if patched and slug in load(conf, catalogue.repros).cases:
                raise
            _leave_out(cases, slug, error)


def _without_invalid(case: Case, catalogue: Catalogue) -> Case:
    """Return the case without the models and strategies that are invalid, if others remain."""
    axes = {}
    for axis in ("model", "strategy"):
        names, invalid = getattr(case.axes, axis), left_out(catalogue.groups[axis])
        axes[axis] = [name for name in names if name not in invalid] or names
    return case.model_copy(update={"axes": case.axes.model_copy(update=axes)})


def _check_references(case: Case, catalogue: Catalogue, path: str) -> None:
    """Check the names in a case's file: a typo would otherwise be a cell that never runs."""
    script = catalogue.script(case)
    if not script.is_file():
        scripts = [file.name for file in script.parent.glob("*.py")]
        raise unknown("script", case.script_name, scripts, f"{path}: script (in {script.parent})")
    groups = {**catalogue.groups, "case": {**catalogue.cases, **left_out(catalogue.cases)}}
    names = [("model", name, "axes.model") for name in case.axes.model]
    names += [("strategy", name, "axes.strategy") for name in case.axes.strategy]
    for variant_name, variant in case.variants.items():
        for group in ("model", "strategy", "stack"):
            if name := getattr(variant, group):
                names.append((group, name, f"variants.{variant_name}"))
    names += [("case", name, "also_matches") for name in case.also_matches]
    for group, name, key in names:
        if name not in groups[group]:
            raise unknown(group, name, groups[group], f"{path}: {key}")
    for name in sorted({name for group, name, _ in names if group == "model"}):
        config = catalogue.models[name].config
        for key in case.preserve_config:
            if key not in config:
                raise unknown(
                    f"configuration key of {name}", key, config, f"{path}: preserve_config"
                )
    _check_claims(case, catalogue, path)


def _check_checks(case: Case, catalogue: Catalogue, checks: Mapping[str, int], path: str) -> None:
    """Refuse the name of a check that is probably a typo.

    No code of the case contains it, and it is like a check of the script or of another case.
    ``checks``: the names of all checks, and in how many cases each is.
    """
    own = {name: "pass_criteria.checks" for name in case.pass_criteria.checks}
    own |= {rule.check: f"signatures.{rule.name}" for rule in case.signatures if rule.check}
    script = catalogue.script(case).read_text(errors="replace")
    for name, key in own.items():
        if checks[name] > 1 or f'"{name}"' in script:
            continue
        known = [other for other, count in checks.items() if count > 1 or other not in own]
        known += CHECK_OF_SCRIPT.findall(script)
        kit = (catalogue.repros / "repro_kit").glob("*.py")
        if suggestion(name, known) and not any(f'"{name}"' in file.read_text() for file in kit):
            raise unknown("check", name, known, f"{path}: {key}")


def _check_claims(case: Case, catalogue: Catalogue, path: str) -> None:
    for claim in case.claims:
        where = f"{path}: claims.{claim.id}"
        for prediction in claim.predictions:
            if prediction.case in left_out(catalogue.cases):
                continue  # the error is in the other case's file
            target = catalogue.cases.get(prediction.case or case.slug)
            if target is None:
                raise unknown("case", str(prediction.case), catalogue.cases, where)
            metric = prediction.metric
            for name in (
                prediction.variant,
                prediction.relative_to,
                metric and (metric.below or metric.above),
            ):
                if name and name not in target.variants:
                    raise unknown("variant", name, target.variants, where)
    for claim_id, count in Counter(claim.id for claim in case.claims).items():
        if count > 1:
            raise ConfigError(f"{path}: claims: id {claim_id!r} given twice")


def _check_variants(case: Case, strategies: Mapping[str, Strategy], path: str) -> None:
    """Check the strategy options of a case and of its variants. Raise ConfigError."""
    _check_options(case.options, case.axes.strategy, strategies, f"{path}: options")
    for name, variant in case.variants.items():
        names = [variant.strategy] if variant.strategy else case.axes.strategy
        _check_options(variant.options, names, strategies, f"{path}: variants.{name}.options")
        if variant.strategy:  # options for the case's own strategies may not exist in this one
            known = strategies[variant.strategy].options
            inherited = {
                key: value
                for key, value in case.options.items()
                if key in known.keys() - variant.options
            }
            _check_options(
                inherited, names, strategies, f"{path}: variants.{name} inherits options"
            )


def _check_variants_differ(case: Case, path: str) -> None:
    """Raise ConfigError if two variants of a file are the same.

    Overrides may make a variant equal to the unfixed one; the plan reports that.
    """
    first: dict[str, str] = {}
    for name, variant in case.variants.items():
        changed = json.dumps(_settings(case, variant), sort_keys=True, default=str)
        if changed in first:
            twin = first[changed]
            raise ConfigError(
                f"{path}: variants.{name}: its settings are those of {twin!r}: it changes nothing"
            )
        first[changed] = name


def _settings(case: Case, variant: Variant) -> dict[str, Any]:
    """Return the settings of a variant, as far as the case's file shows them."""
    own = variant.model_dump(
        exclude={"role", "help", "requires", "invariants"}, exclude_defaults=True
    )
    defaults = {name: flag.default for name, flag in case.flags.items()}
    options = {**case.options, **variant.options}
    return {**own, "flags": {**defaults, **variant.flags}, "options": options}


def _check_options(
    options: Mapping[str, Any], names: list[str], strategies: Mapping[str, Strategy], path: str
) -> None:
    for option, value in options.items():
        having = [strategies[name] for name in names if option in strategies[name].options]
        if not having:
            known = {known for name in names for known in strategies[name].options}
            raise unknown(f"option of {', '.join(dict.fromkeys(names))}", option, known, path)
        problems = [strategy.refuses(option, value) for strategy in having]
        if all(problems):
            raise ConfigError(f"{path}.{option}: {problems[0]}")
