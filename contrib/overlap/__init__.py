"""Private records that public or evaluation sets hold, too: found by perceptual hashes, and left out."""
