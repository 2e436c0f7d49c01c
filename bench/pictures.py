"""`make pictures`: what README and docs show of the published results: pictures in docs/images, and
README's answer.

Beside the pictures stands a digest of what each shows; tests compare it, and the answer, with the
report of today.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path

from repro_matrix.paths import BASELINE, ROOT
from repro_matrix.report import load
from repro_matrix.report.formats import to_html
from repro_matrix.report.result_lines import result_lines

from bench.chromium import Chromium

FOLDER = ROOT / "docs" / "images"
DIGESTS = FOLDER / "pictures.json"
CASE = "lora-reentrant-checkpointing"
PICTURES = {"page": ("", 1000, 640), "case": (CASE, 1000, 900)}  # anchor, width, height

README = ROOT / "README.md"
ANSWER = re.compile(r"(?<=with the command's -->\n).*?(?=\n\nIf )", re.DOTALL)


def report() -> str:
    """Return the page of the published results."""
    return to_html(load.load_results([BASELINE]))


def digests(page: str) -> dict[str, str]:
    """Return name -> a hash of what the picture shows: the style, and the text of the head and the
    table or of the case's section, without what is folded."""
    style, head = (
        page[page.index("<style>") : page.index("</style>")],
        page[page.index("<header>") : page.index('<section class="case"')],
    )
    case = re.search(rf'<section class="case" id="{CASE}">.*?</section>', page, re.DOTALL)
    shown = {"": head, CASE: case[0] if case else ""}
    texts = {
        anchor: re.sub(r"<details>.*?</details>|<[^>]*>|\s+", " ", shown[anchor], flags=re.DOTALL)
        for anchor in shown
    }
    return {
        name: hashlib.sha256((style + texts[anchor]).encode()).hexdigest()[:16]
        for name, (anchor, _, _) in PICTURES.items()
    }


def answer() -> str:
    """Return README's block: what a run on the current releases ends with."""
    head = load.load_results([BASELINE], {"stack": ["current"]}).headline
    return "\n".join(f"    {line}".rstrip() for line in result_lines(head, width=116))


def main() -> None:
    page = report()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        with Chromium(Path(folder) / "profile") as browser:
            for name, (anchor, width, height) in PICTURES.items():
                browser.open(f"{path.as_uri()}#{anchor}", width, height)
                (FOLDER / f"{name}.png").write_bytes(browser.picture())
    README.write_text(
        ANSWER.sub(lambda _: answer(), README.read_text(encoding="utf-8")), encoding="utf-8"
    )
    DIGESTS.write_text(json.dumps(digests(page), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
