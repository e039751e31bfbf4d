"""erase-rec: early-backward training of click-through-rate models.

The engine. Content (``models``, ``data``, ``eval``) is joined to it by the command line only.
"""

__version__ = "0.1.0"
