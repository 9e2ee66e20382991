"""`python -m syckpt` is the command line."""

from syckpt.cli import main

if __name__ == "__main__":
    main(prog_name="syckpt")
