"""The process that clients talk to: admits requests, drives target and draft, streams answers.

It holds no weights and imports no torch; what it does each round costs microseconds.
"""
