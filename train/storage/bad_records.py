"""The owner's list of unusable records. Private: that a record is unusable is information about it."""

from __future__ import annotations

import json

from murmuration.accounting.strict_json import whole_lines
from murmuration.train.storage.run_dir import RunDir, end_line, open_private


class BadRecordList:
    """One rank's file, in which each record stands once, however often a run is started and killed."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._path = run_dir.private_logs / f"bad-records-rank{rank}.jsonl"
        self._listed: set[tuple[object, object]] | None = None

    def add(self, phase: str, reasons: dict[int, str]) -> None:
        if not reasons:
            return
        if self._listed is None:  # an earlier start met some of them, and may have been killed while it wrote
            end_line(self._path)
            self._listed = {(entry.get("phase"), entry.get("record")) for entry in whole_lines(self._path)}
        new = {record: reason for record, reason in reasons.items() if (phase, record) not in self._listed}
        if not new:
            return
        with open_private(self._path) as file:
            for record, reason in new.items():
                file.write(json.dumps({"phase": phase, "record": record, "reason": reason}) + "\n")
        self._listed |= {(phase, record) for record in new}
