"""What a launcher tells a process that it starts: `python who.py FOLDER` writes FOLDER/HOST-PROCESS.json and ends.

Where a launcher passes no arguments of the test's own on, WHO_FOLDER names the folder.

Without torch: only what `threefold.mesh.environment` reads differs between launchers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from threefold.mesh import environment


def main() -> None:
    info = dataclasses.asdict(environment.current())
    defaults = {setting.key: setting.text for setting in environment.defaults()}
    # Ranks of two hosts may have the same process number.
    path = Path(
        os.environ.get("WHO_FOLDER") or sys.argv[1], f"{os.uname().nodename}-{os.getpid()}.json"
    )
    path.write_text(json.dumps({"info": info, "defaults": defaults}))


if __name__ == "__main__":
    main()
