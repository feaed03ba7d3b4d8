"""What failures cost a training: the papers' equations, their figures computed anew, and a simulation."""
