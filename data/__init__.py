"""The data plane: tar shards -> index -> Poisson draw -> padded micro-batches.

Read in the order of one logical step: tar.py, index.py, sampler.py, shards.py, decode.py, augment.py,
picture.py, text.py, batches.py, loader.py. remote.py and cache.py bring shards from afar; decode_pool.py makes
pictures in processes of their own. public.py orders public data; synthetic.py, shapes.py and textures.py draw some;
overlap.py leaves private records out that public sets hold too.
"""
