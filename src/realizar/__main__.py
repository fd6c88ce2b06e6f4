"""`python -m realizar` is the command `realizar`."""

from realizar.cli.main import main

if __name__ == "__main__":
    main()
