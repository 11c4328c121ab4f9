"""What a trained model can do, measured on public records."""
