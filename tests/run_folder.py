"""What a run has left in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TIME_FIELDS = (
    "step_time_s", "tokens_per_s", "tokens_per_s_per_rank", "model_tflops", "mfu", "placement_s",
    "pipeline_s", "bubble_per_rank", "exposed_communication_s_per_rank",
)  # fmt: skip


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, one of each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(run: Path) -> list[dict[str, Any]]:
    """The same without what depends on how fast the machine is."""
    return [{key: value for key, value in line.items() if key not in TIME_FIELDS} for line in metrics(run)]
