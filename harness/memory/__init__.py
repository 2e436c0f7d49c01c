"""How much memory a launch needs, before it is launched.

``facts`` asks the stack, on meta tensors, what a model consists of; ``arithmetic`` (pure) turns that into what each
rank needs under a strategy; ``fit`` (pure) lays it over a plan: what cannot fit is skipped with the numbers.
"""
