"""All comparisons of trained models (quality, components, batch_size, changes) at once, so that the GPU
never waits for the last runs of one of them.

    python benchmarks/evidence/everything.py --photos FOLDER  # continues where it ended
    python benchmarks/evidence/everything.py --write          # tables, plots and paragraphs from the rows there are
    python benchmarks/evidence/everything.py --quick          # tries the code, on a CPU too; nothing is kept

Then, alone on the GPU: step_time.py, why.py, wall_clock.py; and assemble.py, which writes docs/results.md.
"""

import sys
from types import ModuleType

import batch_size
import changes
import components
import quality
from experiment import experiment
from workers import side_by_side


def main() -> None:
    asked = experiment(__doc__)

    def reported(command: ModuleType) -> bool:
        try:
            command.report(asked)
        except SystemExit as error:  # the others go on
            print(f"{command.__name__}: {error}", file=sys.stderr)
            return False
        return True

    if not all(side_by_side(reported, (quality, components, batch_size, changes))):
        sys.exit(1)


if __name__ == "__main__":
    main()
