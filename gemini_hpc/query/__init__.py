"""Queries about jobs from outside: the document that `inspect` shows, and its sources."""
