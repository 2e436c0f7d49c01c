"""Lies that need ranks: none yet."""

from .lie import Bench

LAUNCHED: tuple[Bench, ...] = ()
