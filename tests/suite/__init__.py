"""Tests of what the tests themselves are run with."""
