"""The stored types, one definition each: attempts, outcomes, documents; validation and JSON Schema.

Pure.
"""
