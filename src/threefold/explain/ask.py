"""The question that settles an explanation, asked on this machine. No torch."""

import subprocess
import sys
from dataclasses import replace

from threefold.explain.explain import Confidence, Explanation

_LIMIT_S = 60


def confirm(explanation: Explanation) -> Explanation:
    """The explanation, confirmed or not by the output of its page's command here. The command only reads."""
    if not (question := explanation.known.question):
        return replace(explanation, asked="no command settles this by itself")
    program, *arguments = question.command
    # -P: no module of the folder that explain is called in, which may be another's.
    command = [*([sys.executable, "-P"] if program == "python" else [program]), *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        why = "it did not end" if late else "it cannot be run here"
        return replace(explanation, asked=f"{program}: {why}")
    output = done.stdout + done.stderr
    for right, sign, text in question.answers:
        if sign.search(output):
            # What only a symptom shows, or two causes compete for, is not settled by one that may be true besides.
            proved = right and explanation.confidence is Confidence.LIKELY
            return replace(
                explanation,
                asked=text,
                confidence=Confidence.SURE if proved else explanation.confidence,
            )
    return replace(explanation, asked=f"{program}: its output does not settle it")
