"""Operators below their public face, `specdec_fast.ops`: arguments, checks, backends."""
