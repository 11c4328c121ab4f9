"""The data plane: tar shards -> index -> Poisson draw -> padded micro-batches.

The folders, in the order of one logical step: store/ reads shards (tar files, remote stores, a local cache), index/
locates their records, draw/ samples them, decode/ makes pictures in separate processes, text/ tokenizes captions, and
batch/ fills micro-batches. synthetic/ generates public data; overlap/ excludes private records that also occur in
public sets.
"""

if not __name__.startswith("murmuration."):
    raise ImportError(f"import murmuration.{__name__}, not {__name__}: a file under two names makes two classes of one")
