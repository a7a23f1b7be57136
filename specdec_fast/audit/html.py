"""An audit as one HTML file that loads nothing: it can be mailed, archived, and read without a network."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from .diagnosis import Suspect
from .divergence_map import Chart
from .probe import Violation
from .results import AuditReport, RowAudit, RunAudit, Verdict, worst
from .side_by_side import pairs

_HEADLINES: dict[Verdict, str] = {
    "equivalent": "Output-equivalent",
    "NOT probed": "Output-equivalent, but not probed",
    "BROKEN invariant": "Output-equivalent, but an invariant is broken",
    "NOT equivalent": "Not output-equivalent",
}
_TONES: dict[Verdict, str] = {
    "equivalent": "good",
    "NOT probed": "warn",
    "BROKEN invariant": "warn",
    "NOT equivalent": "bad",
}
# in escaped text: special tokens, white space that would not be seen, and all that may not be printed as it is
_UNSEEN = re.compile(
    r"&lt;\|[\w.:-]{1,40}\|&gt;|&lt;/?(?:s|unk|pad|bos|eos)&gt;|^ +| +$| {2,}|[^ -~]", flags=re.MULTILINE
)


def write_html(report: AuditReport, path: Path) -> None:
    """Write ``report`` as one self-contained page."""
    path.write_text(render(report), encoding="utf-8", errors="backslashreplace")


def render(report: AuditReport) -> str:
    """The page as text; what models and users wrote is escaped, and its control characters are shown by code."""
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "percent": "{:.1%}".format, "number": "{:,}".format, "kind": kind}
    environment.globals |= {"chart_of": Chart.of, "facts_of": facts, "pairs_of": pairs, "tones": _TONES}
    return environment.get_template("report.html.jinja").render(
        report=report, verdicts=verdicts(report.runs), headline=headline(report)
    )


def headline(report: AuditReport) -> str:
    """The verdict on all runs."""
    if report.failures and report.equivalent:
        return "A candidate failed"
    return _HEADLINES[report.verdict] if report.runs else "Nothing was audited"


def visible(text: object) -> Markup:
    """Escaped text in which special tokens, white space, and control and bidi characters can be seen."""
    return Markup(_UNSEEN.sub(_show, str(escape(str(text)))))


def _show(match: re.Match[str]) -> str:
    found = match[0]
    if found[0] == "&":
        return f'<b class="special">{found}</b>'
    if found[0] == " ":
        return '<i class="space"> </i>' * len(found)
    if found == "\n":
        return '<i class="newline"></i>\n'
    if found == "\t":
        return '<i class="tab">\t</i>'
    return found if found.isprintable() else f'<b class="code">U+{ord(found):04X}</b>'


def kind(row: RowAudit) -> str:
    """A row's outcome: ``match``, ``near-tie`` or ``mismatch``."""
    if row.exact:
        return "match"
    return "near-tie" if row.near_tie else "mismatch"


@dataclass(frozen=True)
class Overall:
    """A candidate at all its batch sizes."""

    candidate: str
    runs: list[RunAudit]

    @property
    def verdict(self) -> Verdict:
        """The worst of all runs."""
        return worst(self.runs)

    @property
    def violation(self) -> Violation | None:
        """The first that a probe found."""
        return next((run.violation for run in self.runs if run.violation), None)

    @property
    def suspect(self) -> Suspect | None:
        """The first of the run with the most mismatches, if no probe found anything."""
        leading = max(self.runs, key=lambda run: run.mismatches)
        return leading.diagnosis[0] if leading.diagnosis and not self.violation else None

    @property
    def rows(self) -> int:
        return sum(len(run.rows) for run in self.runs)

    @property
    def near_ties(self) -> int:
        return sum(run.near_ties for run in self.runs)

    @property
    def mismatches(self) -> int:
        return sum(run.mismatches for run in self.runs)

    @property
    def undecided(self) -> int:
        return sum(run.undecided for run in self.runs)


def verdicts(runs: Iterable[RunAudit]) -> list[Overall]:
    """One per candidate, in the order of ``runs``."""
    by_candidate: dict[str, list[RunAudit]] = {}
    for run in runs:
        by_candidate.setdefault(run.candidate, []).append(run)
    return [Overall(*group) for group in by_candidate.items()]


def facts(run: RunAudit) -> dict[str, str]:
    """Facts about a run's divergences, from its outputs."""
    diverging = [row for row in run.rows if not row.exact]
    if not diverging:
        return {}
    return {
        "rows that diverge": f"{len(diverging)} of {len(run.rows)}",
        "first divergence": _range([row.first_divergence for row in diverging if row.first_divergence is not None]),
        "repeated 3-grams afterwards": f"{mean(row.repetition for row in diverging):.1%}",
        "special tokens afterwards": f"{mean(row.special_rate for row in diverging):.1%}",
        "near-ties are closer than": "unknown" if run.noise is None else f"{2 * run.noise:.2g} logits",
    }


def _range(positions: list[int]) -> str:
    first, last = min(positions), max(positions)
    return f"token {first}" if first == last else f"token {first} to {last}, median {median(positions):g}"
