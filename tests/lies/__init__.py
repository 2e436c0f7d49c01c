"""Lies: what is planted in a copy (scripts, kit, stored documents, environment, stacks), and must not be believed.

``make lies`` plants all of them and prints the table. tests/project/test_lies.py plants those that launch nothing.
"""

from .declared import DECLARED, INHERITED
from .left import LEFT
from .observed import FAILURE, TRAINING
from .stored import HISTORY, PUBLISHED, STORED

PURE = (TRAINING, FAILURE, STORED, HISTORY, PUBLISHED, DECLARED, INHERITED, LEFT)
