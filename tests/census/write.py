"""Writes the collectives of every case as they are now: python tests/census/write.py [NAME ...]

Without names: all, which takes a quarter of an hour. Look at the difference before it is committed: one collective
more is one message more in every step.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from census import cases


def main(names: list[str]) -> None:
    known = cases.QUICK | cases.SLOW
    if unknown := set(names) - set(known):
        sys.exit(f"there is no {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    for name in names or known:
        with tempfile.TemporaryDirectory() as folder:
            found = cases.census_of(known[name], Path(folder) / "census.json")
        ratio = found["wanted"] / found["sent"]
        lines = ",\n".join(json.dumps(line) for line in found["program"])
        cases.file_of(name).write_text(f'{{"sent": {found["sent"]}, "program": [\n{lines}\n]}}\n')
        print(f"{name}: {found['sent']:,} bytes, by formula {found['wanted']:,} ({ratio:.6f}), {found['seconds']} s")


if __name__ == "__main__":
    main(sys.argv[1:])
