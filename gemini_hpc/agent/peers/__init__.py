"""The agents of one job among themselves: links, who is dead, recovery rounds."""
