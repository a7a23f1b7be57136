"""Decoders, and the steps of a round."""
