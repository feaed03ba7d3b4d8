"""Copies from GPU to GPU, enqueued between the training's own collectives. Nothing in here has run on a GPU."""
