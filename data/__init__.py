"""The data plane: tar shards -> index -> Poisson draw -> padded micro-batches.

Read in the order of one logical step: tar.py, index.py, sampler.py, shards.py, decode.py, augment.py,
text.py, batches.py, loader.py. public.py orders public data; synthetic.py, shapes.py and textures.py draw some;
overlap.py leaves private records out that public sets hold too.
"""
