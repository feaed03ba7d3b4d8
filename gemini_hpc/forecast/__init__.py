"""The cost of failures to a training: the papers' equations, their figures recomputed, and a simulation."""
