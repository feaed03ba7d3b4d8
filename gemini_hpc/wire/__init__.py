"""Typed messages, framing and the MUNGE handshake. No pickle anywhere."""
