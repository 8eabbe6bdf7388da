"""Runs a shortened default model under every launcher found here and writes the table in docs/launchers.md.

Run `python docs/generate_launchers.py` in the environment that `make test-launchers` makes. Some launchers need root.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "launchers.md"
BEGIN, END = "<!-- table: docs/generate_launchers.py -->", "<!-- end of table -->"


def main() -> int:
    """Runs all launchers. Returns 1 if a run failed or its losses differ."""
    sys.path.insert(0, str(ROOT / "tests"))
    from launchers.launches import LAUNCHES, SELF, STEPS
    from ranks.runs import curve

    rows, wrong = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        expected: list[tuple[float, float]] = []
        for name, launch in {"no launcher": SELF, **LAUNCHES}.items():
            if (reason := launch.why_not()) is not None:
                rows.append(
                    f"| {name} | `{launch.shown}` | {launch.hosts} | not run: {reason} | | |"
                )
                continue
            run = folder / f"run-{len(rows)}"
            code, printed = launch.train(folder, run)
            found = curve(run) if code == 0 else []
            expected = expected or found
            same = bool(found) and found == expected
            wrong += not same
            first, last = (f"{found[step][0]:.9f}" if found else "" for step in (0, -1))
            said = "equal" if same else f"DIFFERENT (exit code {code})"
            rows.append(
                f"| {name} | `{launch.shown}` | {launch.hosts} | {first} | {last} | {said} |"
            )
            print(rows[-1], flush=True)
            if code:
                print(printed, file=sys.stderr)
    head = f"| launcher | command | hosts | loss of step 1 | of step {STEPS} | all losses and gradient norms |"
    table = "\n".join([head, "|---|---|---|---|---|---|", *rows])
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
