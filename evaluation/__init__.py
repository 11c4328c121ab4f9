"""What a trained model can do, measured on public images: zero-shot labels and captions."""
