"""Text on disk to packed batches: corpora, tokens, packing, the resumable pipeline, a baseline."""
