"""Drawings and texts of the checkpoint traffic that ranks have recorded (`gemini-hpc report`, `inspect`).

The package lies above the controller's floor: no agent, controller or trainer imports it.
"""
