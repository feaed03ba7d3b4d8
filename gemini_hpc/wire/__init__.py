"""Typed messages, framing and the MUNGE handshake, without any pickle."""
