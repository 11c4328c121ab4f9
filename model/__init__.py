"""Vision models whose forward returns one loss per sample, so that each sample's gradient can be bounded."""
