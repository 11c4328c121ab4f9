"""What a trained model can do, measured on public records."""

if not __name__.startswith("murmuration."):
    raise ImportError(f"import murmuration.{__name__}, not {__name__}: a file under two names makes two classes of one")
