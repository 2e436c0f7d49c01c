"""Find contradictions in the evidence of a document: it was edited after it was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from repro_matrix.grading.expected import same_release
from repro_matrix.records.document import Document


def inconsistencies(document: Document, variant_name: str = "") -> Iterator[str]:
    """Yield how a document's evidence contradicts itself.

    It was edited, or assembled from several measurements. ``variant_name``: of this variant only.
    """
    seen: set[str] = set()
    for name, variant in document["variants"].items():
        if variant_name not in ("", name):
            continue
        settings = variant.get("settings") or {}
        if (
            settings.get("variant", name) != name
            or settings.get("case", document["case"]) != document["case"]
        ):
            yield (
                f"variant {name}: its settings are those of {settings['case']}, variant"
                f" {settings['variant']}"
            )
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
                record, pid = rank["record"], rank.get("pid")
                if record is None:
                    continue
                if record["rank"] != rank["rank"] or (
                    pid is not None and record.get("pid") not in (None, pid)
                ):
                    yield (
                        f"{place}: the record of rank {rank['rank']} was written by another process"
                    )
                for package, version in record["versions"].items():
                    if version != "unknown" and not same_release(
                        version, planned.get(package, version)
                    ):
                        yield (
                            f"{place}: rank {rank['rank']} had {package} {version}, planned was"
                            f" {planned[package]}"
                        )
