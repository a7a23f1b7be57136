"""Diagnoses on disk: a resumed audit does not decode again for what it knows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..paths import writing

if TYPE_CHECKING:
    from ..audit.compare import CandidateRow, Run
    from ..audit.diagnosis import Suspect


class Diagnoses:
    """Suspects of each finished run, kept with a digest of the answers that they are about.

    Args:
        rows: the file that the audit's rows go to, None to keep nothing; the diagnoses go beside it.
        resume: take up those of an earlier audit with the same settings.
    """

    def __init__(self, rows: Path | None, *, resume: bool):
        self._path = rows and diagnosis_path(rows)
        self._known: dict[str, Any] = {}
        if self._path and resume:
            self._known = _read(self._path)
        elif self._path:
            self._path.unlink(missing_ok=True)

    def find(self, run: Run, answers: Sequence[CandidateRow]) -> list[Suspect] | None:
        """A run's diagnosis, kept with these answers."""
        from ..audit.diagnosis import Suspect

        try:
            record = self._known[str(run)]
            return [Suspect(**suspect) for suspect in record["suspects"]] if record["of"] == _digest(answers) else None
        except (KeyError, TypeError):
            return None

    def keep(self, run: Run, answers: Sequence[CandidateRow], suspects: Sequence[Suspect]) -> None:
        """Write the diagnosis of a run."""
        self._known[str(run)] = {"of": _digest(answers), "suspects": [asdict(suspect) for suspect in suspects]}
        if self._path:
            # a file that is cut short counts for nothing when it is read
            with writing(self._path):
                self._path.write_text(json.dumps(self._known))


def diagnosis_path(rows: Path) -> Path:
    """The file of diagnoses of an audit whose rows go to ``rows``."""
    return rows.with_name(f"{rows.name}.diagnosis")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _digest(answers: Sequence[CandidateRow]) -> str:
    return hashlib.sha256(json.dumps([answer.token_ids for answer in answers]).encode()).hexdigest()
