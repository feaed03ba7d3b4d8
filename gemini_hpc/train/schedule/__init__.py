"""Choice of the versions to save, and of the idle spans of the training's traffic in which their chunks travel."""
