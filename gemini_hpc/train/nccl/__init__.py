"""Copies from GPU to GPU, enqueued between the training's own collectives; run on one GPU only so far, to itself."""
