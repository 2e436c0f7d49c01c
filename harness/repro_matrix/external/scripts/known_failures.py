"""Whether what a script of somebody's own met is a failure of the catalogue. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from repro_matrix.config.schema import Case
from repro_matrix.grading.observation import Attempt
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import match_attempt
from repro_matrix.records.document import Made


def cases(attempts: Sequence[Made], among: Iterable[Case]) -> list[str]:
    """The slugs of the cases of which a signature matches the first attempt that is not clean, as it would match one of
    theirs. By exceptions alone: what a check or a log line means a case's own script decides."""
    failed = next((made for made in attempts if made["outcome"]["outcome"] not in ("clean", "infra")), None)
    if failed is None:
        return []
    attempt = Attempt(failed["observation"])
    failures = find_failures(attempt)
    return [
        case.slug
        for case in among
        if any(
            signature.kind == "exception" and match_attempt(signature, attempt, failures)
            for signature in case.signatures
        )
    ]
