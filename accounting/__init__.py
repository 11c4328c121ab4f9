"""What the privacy claim rests on: plan, keys, accountant, ledger, certificate. Never imports torch."""
