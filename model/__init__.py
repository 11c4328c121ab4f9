"""Vision models whose forward returns one loss per sample, so that each sample's gradient can be bounded."""

if not __name__.startswith("murmuration."):
    raise ImportError(f"import murmuration.{__name__}, not {__name__}: a file under two names makes two classes of one")
