"""The command line, one file a command; with ``train.py`` the only place that joins engine and content."""
