"""``python -m erase_rec``."""

from erase_rec.cli.main import main

if __name__ == "__main__":
    main()
