"""`make two-nights`: two runs of a stack that moved between them, by the steps of
.github/workflows/nightly.yml.

In a clean clone, with a real floating stack: the second night's index has a later release of
transformers, with which a known failure no longer reproduces. That night must find that out, search
between the two locks, and write the issue's text, which is printed (docs/examples/two-nights.md
shows one). A stack of torch 2.6 is built twice: minutes, and the index has to be reached.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from repro_matrix.changes.history import load_history
from repro_matrix.paths import ROOT, cache_dir

CASE, MODEL, VARIANT, STACK = "qwen15-fsdp-kv-cache", "qwen1.5-0.5b", "train-mode", "rolling"
BASE = "torch2.6-tf4.51"  # whose packages stay
NIGHTS = {"monday": "4.43.2", "tuesday": "4.44.1"}  # the newest transformers of each
GITHUB = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))[
    "jobs"
]["night"]
GITLAB = yaml.safe_load((ROOT / "docs/guides/nightly.gitlab.yml").read_text(encoding="utf-8"))


def definition(newest: str) -> str:
    base = yaml.safe_load((ROOT / "conf" / "stack" / f"{BASE}.yaml").read_text(encoding="utf-8"))
    pins = [pin for pin in base["pins"] if not pin.startswith("transformers")]
    made = {"slug": STACK, "title": "It moves", "python": base["python"], "floating": True}
    return yaml.safe_dump(
        made | {"pins": [*pins, "transformers"], "constraints": [f"transformers<={newest}"]}
    )


def steps() -> dict[str, str]:
    """Return name -> what a runner gives to a shell; GitLab's are named by number."""
    found = {step["name"]: step["run"] for step in GITHUB["steps"] if "run" in step}
    listed = [*GITLAB[".night"]["script"], *GITLAB[".night"]["after_script"]]
    return found | {f"gitlab {number}": text for number, text in enumerate(listed)}


def clone_project(folder: Path) -> Path:
    """Clone the project where set-up has been done: its own code with this environment's
    packages."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True, timeout=300)
    own = folder / ".venv" / "bin"
    own.mkdir(parents=True)
    (own / "python").symlink_to(sys.executable)
    (own / "repro").write_text(
        f'#!/bin/sh\nPYTHONPATH="{folder}/harness" exec {sys.executable} -m repro_matrix "$@"\n'
    )
    (own / "repro").chmod(0o755)
    (
        folder / ".venv" / ".ready"
    ).touch()  # newer than what it is made from: `make setup` has nothing to do
    return folder


def main() -> None:
    listed = {name: text for name, text in steps().items() if not name.startswith("gitlab")}
    last = next(name for name in listed if name.startswith("Compare with"))
    selection = f"case={CASE} model={MODEL} variants=[{VARIANT}]"
    codes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clone, home = clone_project(folder / "it"), folder / "home"
        home.mkdir()
        (home / "gh").write_text("#!/bin/sh\n")  # accepts every issue
        (home / "gh").chmod(0o755)
        env = {
            "PATH": f"{home}:{os.environ['PATH']}",
            "HOME": str(home),
            "REPRO_CACHE": str(cache_dir()),
            "HARDWARE": "cpu",
            "KEPT": "nightly-kept/cpu",
            "PAGE": "https://ci.example.org/7",
            "CI": "true",
            "REPEAT": "1",
            "SELECTION": selection,
            "FLOATING": STACK,
            "BISECT": "30m",
            "GITHUB_STEP_SUMMARY": str(folder / "sum.md"),
            "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv"),
        }
        env |= {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("PIP_", "UV_", "SSL_"))
        }
        for night, newest in NIGHTS.items():
            (clone / "conf" / "stack" / f"{STACK}.yaml").write_text(
                definition(newest), encoding="utf-8"
            )
            for step, text in listed.items():
                print(f"== {night}: {step}", flush=True)
                command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
                code = subprocess.run(
                    command, cwd=clone, env=env | {"NIGHT": night}, check=False
                ).returncode
                if step == last:
                    codes[night] = code
                elif code:
                    raise SystemExit(f"{night}: {step}: exit code {code}")
        texts = list((home / "nightly-kept/cpu/results/tuesday/issues").glob("*.md"))
        assert [path.stem for path in texts] == [CASE], f"the text is a file: {texts}"
        assert codes == {"monday": 0, "tuesday": 1}, codes
        runs = load_history(home / "nightly-kept/cpu/history")
        assert [each.run_id for each in runs] == list(NIGHTS)
        body = (
            texts[0]
            .read_text(encoding="utf-8")
            .replace(str(folder), "/runner")
            .replace(str(cache_dir()), "/cache")
        )
        assert "transformers 4.44.0" in body, "the search between the two locks names the release"
        print(body)


if __name__ == "__main__":
    main()
