"""The command line: `python -m etdyn train --help`."""

import sys

import tyro

from etdyn.tasks.recipes import TrainCommand


def main() -> None:
    """Run a command; each is a dataclass whose fields are its options."""
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            {"train": TrainCommand}, description="The Energy Transformer as a dynamical system."
        )
        command.run()
    except (ValueError, TypeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; --resume continues from the last checkpoint")


if __name__ == "__main__":
    main()
