"""What no recipe uses: studies and tools that build on everything else and may leave without it."""

if not __name__.startswith("murmuration."):
    raise ImportError(f"import murmuration.{__name__}, not {__name__}: a file under two names makes two classes of one")
