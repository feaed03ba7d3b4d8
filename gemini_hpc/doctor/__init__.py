"""The checks of `gemini-hpc doctor`: one module per possible source of faults, one function per check."""
