"""What `gemini-hpc doctor` looks at: one module per thing that can be wrong, each check one function."""
