"""List what a failure may depend on if a search found no change, with commands that vary it."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from repro_matrix.config.schema import AdhocCase
from repro_matrix.config.vocabulary import RELEVANT
from repro_matrix.results.store import document_at
from repro_matrix.search.prober import Prober

MOST = 2  # packages that are listed
_COUNT = re.compile(r"(--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)[= ])\d+")


def list_causes(
    prober: Prober, searched: Collection[str], search: Sequence[str], versions: Sequence[str]
) -> list[str]:
    """Return a line for each cause that the search did not vary.

    ``searched``: packages. ``search``: its command; ``versions``: `repro versions` for the same
    script or case."""

    def command(package: str) -> str:
        options = {"--package": package, "--range": None, "--max-probes": None}
        return shlex.join(reworded(versions, options))

    return [
        *(f"{why}: {command(name)}" for name, why in _packages(prober, searched)),
        *_ranks(prober, search),
        "the device: the same command on another machine",
    ]


def reworded(
    words: Sequence[str],
    options: Mapping[str, str | None],
    flags: Collection[str] = (),
    more: Sequence[str] = (),
) -> list[str]:
    """Return a command line of this project with some options changed.

    ``options``: by name; None removes the option. ``flags``: options without a value, and
    overrides, that are removed too. ``more``: words that are added.
    """
    cut = words.index("--") if "--" in words else len(words)
    kept = []
    is_value = False
    for word in words[:cut]:
        name, equals, _ = word.partition("=")
        if not is_value and name not in {*options, *flags}:
            kept.append(word)
        is_value = not is_value and name in options and not equals
    values = [
        part for name, value in options.items() if value is not None for part in (name, value)
    ]
    return [*kept, *values, *more, *words[cut:]]


def _packages(prober: Prober, searched: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the packages that the attempts' messages and logs name most often, else torch."""
    named: Counter[str] = Counter()
    versions: dict[str, str] = {}
    for document in (document_at(str(path)) for path in prober.launched if path.exists()):
        versions |= document["stack"]["versions"]
        for variant in document["variants"].values():
            for made in variant["attempts"]:
                texts = [rank["log_tail"] for rank in made["observation"]["ranks"]]
                texts.append(made["outcome"]["reason"])
                named.update(re.findall(r"[a-z_]+", "\n".join(texts).lower()))
    count = {
        name: named[name.replace("-", "_")]
        for name in RELEVANT
        if name in versions and name != "python"
    }
    others = sorted(
        count.keys() - {*searched}, key=lambda name: (-count[name], name != "torch", name)
    )
    for name in [name for name in others if count[name]][:MOST] or others[:1]:
        yield name, f"{name} ({versions[name]} here{', named in the log' if count[name] else ''})"


def _ranks(prober: Prober, search: Sequence[str]) -> Iterator[str]:
    case = prober.case
    ranks = prober.cell.ranks
    other = str(1 if ranks > 1 else 2)
    line = ""
    if not isinstance(case, AdhocCase):
        other = str(2 * ranks)
        if case.supports_other_world_sizes:
            line = shlex.join(reworded(search, {}, ["ranks"], [f"ranks={other}"]))
    elif "--" not in search:
        line = shlex.join(reworded(search, {"--nproc": other}))
    elif _COUNT.search(text := shlex.join(reworded(search, {"--nproc": None}))):
        line = _COUNT.sub(rf"\g<1>{other}", text)
    if line:
        yield f"the number of ranks ({ranks} here): {line}"
