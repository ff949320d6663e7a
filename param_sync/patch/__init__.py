"""Sparse, lossless weight patches and full anchors. A leaf: numpy, numba, zstandard, xxhash and msgspec only.

Trainer, synchronizer and engines all import it; it imports none of them.
"""
