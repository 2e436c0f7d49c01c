"""The whole exported file: its header, the settings that are left, the case, then what it uses. Pure."""

from __future__ import annotations

import pprint
import re
from collections.abc import Mapping, Sequence
from typing import Any

from repro_matrix.authoring.export.bundle import Bundle
from repro_matrix.authoring.export.merge import GIVEN

_FIRST = ("os", "sys", "tempfile")


def values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `run` is known to have, of a variant's settings (repros/variant_settings.resolve)."""
    known = {key: settings[key] for key in ("case", "variant", "flags", "model", "strategy", "world_size", "tp_size",
             "devices", "seed", "steps", "backend", "process_group", "normal_exit")}  # fmt: skip
    options = settings["strategy"].get("options") or {}
    return {**known, "options": options, "device_kind": settings["device"], "settings": dict(settings)}


def written(
    header: Sequence[str],
    settings: Mapping[str, Any],
    env: Mapping[str, str],
    bundle: Bundle,
    files: Mapping[str, str],
) -> str:
    """One Python file. ``header``: its docstring's lines; ``files``: the model's own code, path -> text."""
    docstring = "\n".join(header).replace("\\", "\\\\").replace('"""', "'''")
    code = "\n".join([*bundle.case, *(text for _, text in bundle.kit)])
    rest = [line for line in _imports(bundle.imports) if line.split()[1].partition(".")[0] not in _FIRST]
    case = "\n\n\n".join(bundle.case)
    kit = "\n\n\n".join(f"# {'-' * 12} {_from(name)}\n\n{text}" for name, text in bundle.kit)
    sections = [
        f'"""{docstring}\n"""\n\nimport os\nimport sys\nimport tempfile\n\n{_environment(settings, env)}\n\n'
        + "\n".join(rest),
        "\n".join(_constants(settings, code)),
        *([kit, case] if bundle.first else [case, kit]),
        _files(files) if "FILES" in code else "",
        'if __name__ == "__main__":\n    main(body)',
    ]
    text = "\n\n\n".join(section for section in sections if section) + "\n"
    return text if "tempfile." in code else text.replace("import tempfile\n", "", 1)


def _from(name: str) -> str:
    return "this rank, and what it checks" if name == "repro_kit.run" else name.rpartition(".")[2].replace("_", " ")


def _environment(settings: Mapping[str, Any], env: Mapping[str, str]) -> str:
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if settings["device"] == "cpu":
        own.update(GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="true")
    pairs = ", ".join(f'"{name}": "{value}"' for name, value in {**own, **env}.items())
    return f"for _name, _value in {{{pairs}}}.items():\n    os.environ.setdefault(_name, _value)".replace(
        '"GLOO', '\n    "GLOO'
    )


def _imports(lines: Sequence[str]) -> list[str]:
    """One line for what comes from one module."""
    found: dict[str, list[str]] = {}
    plain = []
    for line in lines:
        match = re.fullmatch(r"from (\S+) import (.+)", line)
        if match is None:
            plain.append(line)
        else:
            found.setdefault(match[1], []).append(match[2])
    return [*plain, *(f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(found.items()))]


def _constants(settings: Mapping[str, Any], code: str) -> list[str]:
    known = {"config": settings["model"]["config"], **{key: values(settings)[key] for key in GIVEN}}
    return [
        f"{name.upper()} = {pprint.pformat(value, width=100, sort_dicts=False, compact=True)}"
        for name, value in known.items()
        if re.search(rf"\b{name.upper()}\b", code)
    ]


def _files(files: Mapping[str, str]) -> str:
    texts = []
    for name, text in files.items():
        quoted = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        texts.append(f'    "{name}": """\\\n{quoted}""",')
    return (
        "# ------------ the model's own code, as it lies beside its weights\n\nFILES = {\n" + "\n".join(texts) + "\n}"
    )
