"""What ranks have recorded of their checkpoints' traffic, drawn and in words (`gemini-hpc report`, `inspect`). Above
the controller's floor; no agent, controller or trainer imports it."""
