"""When versions are taken and chunks go: in the idle spans of the training's own traffic."""
