"""The Python API: what notebooks and programs import from ``erase_rec``, and what the command line is made of.

A composition root: here engine and content meet.
"""
