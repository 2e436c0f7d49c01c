"""The issues of a code host (GitHub's REST API, which others speak too): one issue for each changed case.

Base address, repository and token come from the environment (GITHUB_API_URL, GITHUB_REPOSITORY, GITHUB_TOKEN). The
token goes nowhere else: redirects are not followed, and only https and this machine itself are spoken to.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LABEL = "repro-nightly"
LONGEST_WAIT_S = 120.0  # for a rate limit; after that the text stays a file
PAGES = 20  # of a hundred issues each


class HostError(Exception):
    """The host did not do it; in words for whoever reads the job's log."""


@dataclass(frozen=True)
class Issue:
    """``case``: by it an issue is found again. ``digest``: of the change that it tells of."""

    case: str
    digest: str
    title: str
    body: str

    @property
    def marked(self) -> str:
        return f"{self.body}\n\n<!-- repro-matrix case={self.case} change={self.digest} -->\n"


_MARK = re.compile(r"<!-- repro-matrix case=(\S+) change=([0-9a-f]+) -->\s*\Z")


class Host:
    def __init__(
        self, base: str, repository: str, token: str, sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """Raises HostError: an address that the token must not be sent to."""
        parts = urllib.parse.urlsplit(base)
        if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
            raise HostError(f"{base}: only https (the token would be sent in the clear)")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            raise HostError(f"GITHUB_REPOSITORY={repository}: OWNER/NAME")
        self.base, self.repository, self._token = base.rstrip("/"), repository, token
        self._sleep, self._now = sleep, now
        self._opener = urllib.request.build_opener(_NoRedirect())

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Host | None:
        """None where no token is given. Raises HostError: a token, and no repository."""
        token, repository = environ.get("GITHUB_TOKEN", ""), environ.get("GITHUB_REPOSITORY", "")
        if token and not repository:
            raise HostError("GITHUB_TOKEN is set and GITHUB_REPOSITORY=OWNER/NAME is not")
        base = environ.get("GITHUB_API_URL") or "https://api.github.com"
        return cls(base, repository, token) if token else None

    def publish(self, issue: Issue) -> tuple[str, bool]:
        """(what was done, whether a person has closed the issue of this very change). Raises HostError.

        An open issue of the case is updated. One that was closed for this change stays closed; for another change a new
        one is opened. Where another night opened one meanwhile, the younger of the two is closed as its duplicate.
        """
        known = self._known(issue.case)
        opened = [one for one in known if one["state"] == "open"]
        if opened:
            number = min(one["number"] for one in opened)
            (same,) = (one for one in opened if one["number"] == number)
            if (same.get("body") or "") == issue.marked:
                return f"#{number} says so already", False
            self._ask("PATCH", f"/issues/{number}", {"title": issue.title, "body": issue.marked})
            return f"#{number} is updated", False
        closed = [one for one in known if _mark(one) == (issue.case, issue.digest)]
        if closed:
            return f"#{closed[0]['number']} told of this very change, and a person closed it: it stays closed", True
        made = self._ask("POST", "/issues", {"title": issue.title, "body": issue.marked, "labels": [LABEL]})
        number = int(made["number"])
        older = [one["number"] for one in self._known(issue.case) if one["state"] == "open" and one["number"] < number]
        if older:  # two nights at once: whoever came second gives way, and is not found by its mark any more
            body = f"Duplicate of #{min(older)}: another night opened it at the same time."
            self._ask("PATCH", f"/issues/{number}", {"state": "closed", "state_reason": "not_planned", "body": body})
            return f"#{min(older)} was opened by another night at the same time", False
        return f"#{number} is opened", False

    def _known(self, case: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for page in range(1, PAGES + 1):
            listed = self._ask("GET", f"/issues?state=all&labels={LABEL}&per_page=100&page={page}")
            found += [one for one in listed if "pull_request" not in one and (_mark(one) or ("",))[0] == case]
            if len(listed) < 100:
                break
        return found

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        address = f"{self.base}/repos/{self.repository}{path}"
        waited = 0.0
        while True:
            request = urllib.request.Request(
                address, None if body is None else json.dumps(body).encode(), method=method,
                headers={"Authorization": f"Bearer {self._token}", "Accept": "application/vnd.github+json",
                         "Content-Type": "application/json", "User-Agent": "repro-matrix"},
            )  # fmt: skip
            try:
                with self._opener.open(request, timeout=30) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                wait = self._wait(error)
                if wait is None or waited + wait > LONGEST_WAIT_S:
                    raise HostError(f"{method} {path.partition('?')[0]}: {_why(error, wait)}") from None
                waited += wait
                self._sleep(wait)
            except (OSError, ValueError) as error:  # urllib's says "<urlopen error ...>" around what happened
                told = getattr(error, "reason", error)
                raise HostError(f"{method} {path.partition('?')[0]}: {told}") from None

    def _wait(self, error: urllib.error.HTTPError) -> float | None:
        """Seconds until a rate limit is over; None where it is none."""
        if error.code not in (403, 429):
            return None
        try:
            if error.headers.get("Retry-After"):
                return max(1.0, float(error.headers["Retry-After"]))
            if error.headers.get("X-RateLimit-Remaining") == "0":
                return max(1.0, float(error.headers.get("X-RateLimit-Reset") or 0) - self._now())
        except ValueError:
            return None
        return 30.0 if error.code == 429 else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _mark(issue: Mapping[str, Any]) -> tuple[str, str] | None:
    found = _MARK.search(issue.get("body") or "")
    return (found[1], found[2]) if found else None


def _why(error: urllib.error.HTTPError, wait: float | None) -> str:
    if wait is not None:
        return f"rate limit: {wait:.0f} s more"
    told = {
        401: "the token is not valid",
        403: "the token has no right to do that (it needs issues: write)",
        404: "no such repository, or the token has no right to see it",
        410: "this repository has no issues",
    }
    return f"{error.code} {told.get(error.code, error.reason)}"
