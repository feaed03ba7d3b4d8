"""The agents of one job among themselves: links, failure detection, recovery rounds."""
