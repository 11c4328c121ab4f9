"""What `--dry-run` and the planner say of a plan that promises less than its config reads as."""

from __future__ import annotations

from accounting.plan import PrivacyPlan


def simulation(plan: PrivacyPlan) -> str | None:
    """Of a TAN simulation: that ε of the config is not the promise, and whose ε is shown."""
    return None if plan.stands_for is None else f"{plan.stands_for}; ε above is that of what will run"
