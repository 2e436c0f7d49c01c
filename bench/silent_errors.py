"""Compare the two sides of each public report in docs/examples/numbers, and write the table of what was named.

python -m bench.silent_errors              # all; NAME ...: only these
python -m bench.silent_errors --table      # only the table, from results.json
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
FOLDER = EXAMPLES / "numbers"
PAGE = EXAMPLES / "silent-errors.md"
RESULTS = FOLDER / "results.json"
MARK = re.compile(r"(<!-- table -->\n).*?(<!-- end of table -->)", re.S)
Json = dict[str, Any]


def cases() -> dict[str, Json]:
    return dict(yaml.safe_load((FOLDER / "cases.yaml").read_text(encoding="utf-8")))


def words(case: Json) -> list[str]:
    """Return the command of a case, to be run in docs/examples/numbers."""
    found = ["compare", f"./{case['script']}"]
    sides = {side: case.get(side) or {} for side in ("good", "bad")}
    for side, values in sides.items():
        found += [f"--{side}", values["stack"]] if "stack" in values else []
    if sides["good"].get("nproc", 1) == sides["bad"].get("nproc", 1):
        found += ["--nproc", str(sides["good"].get("nproc", 1))]
    else:
        found += [word for side in sides for word in (f"--{side}-nproc", str(sides[side].get("nproc", 1)))]
    found += ["--args", case["args"].strip()] if "args" in case else []
    for side, values in sides.items():
        found += [f"--{side}-args={values['args']}"] if "args" in values else []
    return found


def measure(name: str, case: Json, more: list[str]) -> Json:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "repro_matrix", *words(case), "--json", *more]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = {"location": {"verdict": "inconclusive", "reason": done.stderr.strip().splitlines()[-1:]}}
    location = found["location"]
    keys = ("verdict", "reason", "stage", "step", "ranks", "place", "role", "size", "rounding", "relation", "agreed")
    kept = {key: location[key] for key in keys if location.get(key) not in (None, "", [])}
    sides = {side: found[side]["versions"] for side in ("good", "bad") if side in found}
    kept["packages"] = {side: _packages(versions) for side, versions in sides.items()}
    return {**kept, "sentence": found.get("sentence", ""), "cpu_s": spent, "right": is_right(case, kept)}


def _packages(versions: Json) -> Json:
    return {name: versions[name] for name in ("torch", "transformers", "accelerate", "deepspeed") if name in versions}


def is_right(case: Json, location: Json) -> bool:
    place = case["place"]
    return (
        location["verdict"] == "differs"
        and location.get("stage") in place["stage"]
        and re.search(place.get("name", ""), location.get("place", "")) is not None
    )


def table(all_cases: dict[str, Json], results: dict[str, Json]) -> str:
    lines = ["| report | what happens | good, bad | named | right? |", "|---|---|---|---|---|"]
    for name, case in all_cases.items():
        found = results.get(name)
        if found:
            right = "yes" if found["right"] else "no"
            named = found["sentence"] or str(found.get("reason", ""))
            lines.append(f"| {_link(case['issue'])} | {case['what']} | {_pair(case)} | {named} | {right} |")
    right = sum(results[name]["right"] for name in all_cases if name in results)
    commands = [f"    {_quoted(['repro', *words(case)])}" for name, case in all_cases.items() if name in results]
    count = f"{right} of {len(results)} are right."
    return "\n".join([count, "", *lines, "", "The commands, in `docs/examples/numbers`:", "", *commands, ""])


def _link(issue: str) -> str:
    repository, number = issue.split("#")
    return f"[{issue}](https://github.com/{repository}/issues/{number})"


def _pair(case: Json) -> str:
    def side(values: Json, other: Json) -> str:
        parts = [values["stack"].removeprefix("current+")] if "stack" in values else []
        if values.get("nproc", 1) != other.get("nproc", 1):
            parts.append(f"{values.get('nproc', 1)} rank{'s' * (values.get('nproc', 1) > 1)}")
        return " ".join([*parts, f"`{values['args']}`" if "args" in values else ""]).strip() or "as it is"

    good, bad = case.get("good") or {}, case.get("bad") or {}
    return f"{side(good, bad)}; {side(bad, good)}"


def _quoted(command: list[str]) -> str:
    return " ".join(f"'{word}'" if re.search(r"[^\w@%+=:,./-]", word) else word for word in command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--override", action="append", default=[], help="of repro compare, as results=FOLDER")
    args = parser.parse_args()
    known = cases()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in () if args.table else args.names or known:
        results[name] = measure(name, known[name], args.override)
        print(
            name, "right" if results[name]["right"] else "WRONG", results[name]["sentence"] or results[name], flush=True
        )
        kept = {each: results[each] for each in known if each in results}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARK.sub(lambda found: f"{found[1]}{table(known, results)}{found[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
