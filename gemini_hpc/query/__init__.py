"""Asking about jobs from outside: the document that `inspect` shows, and where it comes from."""
