"""Find contradictions in the evidence of a document: it was edited after it was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from repro_matrix.grading.expected import same_release
from repro_matrix.grading.observation import record_error
from repro_matrix.records.document import Document


def inconsistencies(document: Document, variant_name: str = "") -> Iterator[str]:
    """Yield how a document's evidence contradicts itself.

    It was edited, or assembled from several measurements. ``variant_name``: of this variant only.
    """
    seen: set[str] = set()
    for name, variant in document["variants"].items():
        if variant_name not in ("", name):
            continue
        settings = variant["settings"]
        case, own = settings.get("case", document["case"]), settings.get("variant", name)
        if (case, own) != (document["case"], name):
            yield f"variant {name}: its settings are those of {case}, variant {own}"
        for index, made in enumerate(variant["attempts"]):
            attempt, place = made["observation"]["attempt"], f"variant {name}, attempt {index}"
            if attempt["id"] in seen:
                yield f"{place}: a copy of another attempt ({attempt['id']})"
            seen.add(attempt["id"])
            launched, planned = attempt.get("fingerprint"), attempt.get("versions", {})
            if launched and launched != variant.get("fingerprint"):
                yield (
                    f"{place}: launched under fingerprint {launched}, the variant has"
                    f" {variant.get('fingerprint')}"
                )
            for rank in made["observation"]["ranks"]:
                record = rank["record"]
                if record is None:
                    continue
                if error := record_error(rank):
                    yield f"{place}: rank {rank['rank']}: {error}"
                for package, version in record["versions"].items():
                    if version != "unknown" and not same_release(
                        version, planned.get(package, version)
                    ):
                        yield (
                            f"{place}: rank {rank['rank']} had {package} {version}, planned was"
                            f" {planned[package]}"
                        )
