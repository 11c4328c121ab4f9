"""A certificate as an entry of the Differential Privacy Deployments Registry (its fields as of 2025).

The registry (of OpenDP and others) has one document per deployment, which its editors review. This module fills in what
the run knows; what only its owner knows (intended use, region, release date) is left out and must be added before
submission.
"""

from __future__ import annotations

from typing import Any

from murmuration.accounting.certificate.limits import delta_of
from murmuration.accounting.epsilon.accountant import show_delta
from murmuration.accounting.unit import noun_of


def registry_entry(certificate: dict[str, Any]) -> dict[str, Any]:
    """Numbers are rounded to the safe side."""
    claim, about = certificate["claim"], certificate.get("about") or {}
    private = bool(claim["private"])
    product: dict[str, Any] = {"name": certificate["run"], "data_product_type": "Machine learning model"}
    if about.get("owner"):
        product["data_curators"] = [about["owner"]]
    flavor: dict[str, Any] = {
        "name": "Approximate DP" if private else "none",
        "input_metric": certificate["adjacency"],
        "bound_on_input_distance": 1,
        "unprotected_quantities": "n, sampling rate, clipping norm, noise, number of steps and δ, as public constants",
    }
    if about.get("data"):
        flavor["data_domain"] = about["data"]
    loss: dict[str, Any] = {
        "privacy_unit": "Record-level" if noun_of(certificate["unit"]) == "record" else "User-level",
        "privacy_unit_description": f"{certificate['unit']}; {certificate['adjacency']}",
    }
    if private:
        loss["privacy_parameters"] = {"epsilon": claim["epsilon_claimed"], "delta": float(show_delta(delta_of(claim)))}
    loss["privacy_parameters_description"] = claim["statement"]
    return {
        "deployment": {
            "product": product,
            "dp_flavor": flavor,
            "privacy_loss": loss,
            "model": {
                "model_name": "Central",
                "actors": "The curator holds the records, the machine and the run's secret folder and is trusted. "
                "Whoever sees what was released is not.",
                "release_type": "One release",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "Any use of the released weights.",
                "composition": f"Privacy loss distributions of {_steps(certificate)}; {claim['claimed_because']}.",
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": "; ".join(
                    each["statement"] for each in certificate["tuned_on_private_data"]
                )
                or "Nothing was declared as chosen by private outputs.",
                "mechanisms": certificate["mechanism"],
            },
            "resources": {"sources": f"Murmuration; ledger head {certificate['ledger']['head']}"},
        }
    }


def _steps(certificate: dict[str, Any]) -> str:
    """The steps that the claim rests on, in words."""
    limits = certificate["limits"]
    return str(limits["holds_for"]) if limits else "every step that the ledger opened"
