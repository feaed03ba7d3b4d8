"""Copies from GPU to GPU, enqueued between the training's own collectives. On a GPU it has only sent to itself."""
