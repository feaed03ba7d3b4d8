"""Speed, measured on real clusters in namespaces, as ratios and against the bars of this project."""
