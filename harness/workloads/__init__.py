"""Loops that are no training: one pattern of communication each, to see what it does to memory."""
