"""Turn cases and axes into cells, and decide what fits this hardware, how, and in which order.

Pure.
"""
