"""The verbs of the command line `gemini-hpc`, one module each."""
