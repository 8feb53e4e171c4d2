"""The command line: `python -m etdyn train --help`."""

import tyro

from etdyn.tasks.recipes import TrainCommand


def main() -> None:
    """Run a command; each is a dataclass whose fields are its options."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"train": TrainCommand}, description="The Energy Transformer as a dynamical system."
    )
    command.run()


if __name__ == "__main__":
    main()
